"""The engine: a request's tokens and bits are its own, and equal the trainer's."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax.errors import GlmError
from glm_jax.head import Shaping
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.presets import preset
from glm_jax.training import backward, pack
from serving.engine import Engine, SamplingParams

# Selection bites from 9 tokens on; every kind of layer, few bodies.
CFG = preset("tiny").with_overrides(
    vocab_size=96,
    num_hidden_layers=2,
    index_topk=8,
    first_k_dense_replace=1,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    num_nextn_predict_layers=0,
)
PAGE = 16
EOS = 3
SIZES = {"n_slots": 8, "capacity": 80, "n_rows": 64, "n_steps": 4}
FILTERS = {"top_p": 0.9, "top_k": 20, "min_p": 0.02, "min_tokens": 2, "stop_ids": (EOS, 5)}


@functools.cache
def contract(mode="pinned"):
    return NumericsContract(mode=mode, key_block=PAGE, token_leaf=32)


@functools.cache
def model(dtype="float32"):
    # A random model's distribution is flat; a larger head makes it one to sample from.
    made = GlmModel.init(CFG.with_overrides(dtype=dtype))
    made.lm_head.set_value(made.lm_head[...] * 30)
    return made


@functools.cache
def engine(dtype="float32", mode="pinned"):
    """One engine for most tests: its history must not matter."""
    return Engine(model(dtype), contract=contract(mode), **SIZES)


def prompt(n, seed=0):
    return np.random.default_rng((seed, n)).integers(0, CFG.vocab_size, n).tolist()


def params(**changes):
    return SamplingParams(**{"max_tokens": 12, "seed": 7, **changes})


def bits(completion):
    arrays = (completion.logprobs, completion.sampling_logprobs)
    return completion.token_ids.tolist(), *(x.view(np.uint32).tolist() for x in arrays)


KINDS = {
    "own": params(),
    "cold": params(temperature=0.6, stop_ids=(EOS,)),
    "filtered": params(temperature=0.8, **FILTERS),
    "greedy": params(temperature=0),
}


@functools.cache
def alone(kind, n, dtype="float32"):
    """What a request gives on an engine that has seen nothing else."""
    return engine(dtype).generate([prompt(n)], KINDS[kind])[0][0]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("filtered", "bfloat16")]
)
def test_neighbours_chunks_and_slots_change_no_bit(kind, dtype):
    others = [prompt(n, 1) for n in (70 - 12, 3, 40, 17, 5, 31, 2, 9)]
    several = [params(seed=i, max_tokens=3 + i, temperature=0.5 + i / 8) for i in range(8)]
    for place in (0, 4):
        prompts, each = others.copy(), several.copy()
        prompts.insert(place, prompt(21))
        each.insert(place, KINDS[kind])
        got = engine(dtype).generate(prompts, each)[place][0]
        assert bits(got) == bits(alone(kind, 21, dtype))


@pytest.mark.parametrize("n", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_a_prefix_hit_changes_no_bit(n):
    fresh = Engine(model(), contract=contract(), **SIZES)
    fresh.programs = engine().programs
    first = fresh.generate([prompt(n)], KINDS["filtered"])[0][0]
    assert fresh.stats.n_reused == 0
    again = fresh.generate([prompt(n)], KINDS["filtered"])[0][0]
    # At least the last prompt token is computed anew.
    assert fresh.stats.n_reused == (n - 1) // PAGE * PAGE
    assert bits(first) == bits(again) == bits(alone("filtered", n))


def test_preemption_changes_no_bit_and_everyone_gets_done():
    # 9 pages of 16 for eight sequences that grow to three pages each.
    small = Engine(model(), contract=contract(), **SIZES, n_pages=9)
    prompts = [prompt(20 + i) for i in range(8)]
    each = [params(max_tokens=20, seed=i) for i in range(8)]
    got = small.generate(prompts, each)
    assert small.stats.n_preempted > 0
    for one, p, q in zip(got, prompts, each, strict=True):
        assert bits(one[0]) == bits(engine().generate([p], q)[0][0])
    assert small._pool.n_held == 0


def scored(completion, start, dtype="float32"):
    """Log-probabilities of a completion by the trainer's forward: own, and as sampled."""
    tokens = np.concatenate([start, completion.token_ids])
    n = len(completion.token_ids)
    targets = np.roll(tokens, -1)
    out = []
    for shaping in (None, completion):
        shapes = None
        if shaping is not None:
            words = -(-CFG.vocab_size // 32)
            temperature = np.ones(len(tokens), np.float32)
            temperature[len(start) - 1 : -1] = completion.temperature
            kept = np.full((len(tokens), words), 0xFFFFFFFF, np.uint32)
            if completion.kept is not None:
                kept[len(start) - 1 : -1] = completion.kept
            shapes = [Shaping(temperature, kept)]
        train, rows = pack.pack(
            CFG, contract(), [tokens], [targets], n_rows=64, max_length=64, shaping=shapes
        )
        logprob_T, _ = FORWARD(model(dtype), train, contract())
        out.append(np.asarray(logprob_T)[rows[0]][len(start) - 1 : -1])
    assert len(out[0]) == n
    return out


FORWARD = jax.jit(backward.train_forward, static_argnums=2)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("filtered", "bfloat16")]
)
def test_the_trainers_log_probabilities_are_the_same_bits(kind, dtype):
    completion = alone(kind, 21, dtype)
    asked = dataclasses.make_dataclass("Sampled", ["token_ids", "temperature", "kept"])(
        completion.token_ids, KINDS[kind].temperature or 1.0, completion.kept
    )
    own, sampled = scored(asked, prompt(21), dtype)
    assert own.view(np.uint32).tolist() == completion.logprobs.view(np.uint32).tolist()
    assert sampled.view(np.uint32).tolist() == (
        completion.sampling_logprobs.view(np.uint32).tolist()
    )
    if kind in ("own", "greedy"):
        assert bits(completion)[1] == bits(completion)[2]
    else:
        assert bits(completion)[1] != bits(completion)[2]


def test_stock_arithmetic_does_change_bits_with_the_company():
    # The control: products this narrow change rarely, so it takes some requests to see it.
    other, prompts = engine(mode="native"), [prompt(n, 2) for n in range(5, 53, 4)]
    each = [params(seed=n) for n in range(len(prompts))]
    lone = [other.generate([p], q)[0][0] for p, q in zip(prompts, each, strict=True)]
    among = [completions[0] for completions in other.generate(prompts, each)]
    assert any(bits(a) != bits(b) for a, b in zip(lone, among, strict=True))


def test_samples_differ_and_are_those_of_single_requests():
    four = engine().generate([prompt(21)], params(n=4))[0]
    assert [c.index for c in four] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in four}) == 4
    for i, completion in enumerate(four):
        single = engine().generate([prompt(21)], params(first_sample=i))[0][0]
        assert bits(single) == bits(completion)
    assert bits(engine().generate([prompt(21)], params(seed=8))[0][0]) != bits(four[0])


def test_the_kept_ids_hold_the_token_and_sum_to_one():
    completion = alone("filtered", 21)
    kept = np.unpackbits(completion.kept.view(np.uint8), axis=1, bitorder="little")
    kept = kept[:, : CFG.vocab_size].astype(bool)
    n = len(completion.token_ids)
    assert kept[np.arange(n), completion.token_ids].all()
    assert (kept.sum(axis=1) <= 20).all() and kept.sum(axis=1).min() >= 1
    assert not kept[:2, [EOS, 5]].any()  # min_tokens
    assert alone("cold", 21).kept is None


def test_greedy_takes_the_most_likely_and_top_logprobs_are_listed_by_id():
    completion = engine().generate([prompt(21)], params(temperature=0, top_logprobs=5))[0][0]
    assert bits(completion) == bits(alone("greedy", 21))
    assert (completion.top_ids[:, 0] == completion.token_ids).all()
    assert completion.top_logprobs.shape == (12, 5)
    assert (np.diff(completion.top_logprobs, axis=1) <= 0).all()
    top = completion.top_logprobs[:, 0]
    assert top.view(np.uint32).tolist() == completion.logprobs.view(np.uint32).tolist()


def test_equal_logits_give_the_lowest_id():
    flat = nnx.clone(model())
    flat.lm_head.set_value(jnp.zeros_like(flat.lm_head[...]))
    other = Engine(flat, contract=contract(), **SIZES)
    other.programs = engine().programs
    assert other.generate([prompt(5)], params(temperature=0))[0][0].token_ids.tolist() == [0] * 12


def test_prompt_logprobs_change_nothing_and_are_the_trainers():
    completion = engine().generate([prompt(21)], params(prompt_logprobs=True))[0][0]
    assert bits(completion) == bits(alone("own", 21))
    tokens = np.asarray(prompt(21))
    train, rows = pack.pack(
        CFG, contract(), [tokens], [np.roll(tokens, -1)], n_rows=64, max_length=64
    )
    logprob_T, _ = FORWARD(model(), train, contract())
    expected = np.asarray(logprob_T)[rows[0]][:-1]
    assert completion.prompt_logprobs.view(np.uint32).tolist() == (
        expected.view(np.uint32).tolist()
    )


def test_stop_ids_end_a_sample_and_are_part_of_it():
    free = alone("own", 21).token_ids.tolist()
    stop = free[5]
    completion = engine().generate([prompt(21)], params(stop_ids=(stop,)))[0][0]
    end = free.index(stop) + 1
    assert completion.token_ids.tolist() == free[:end]
    assert completion.finish_reason == "stop" and alone("own", 21).finish_reason == "length"


def test_new_weights_are_used_at_once_and_each_token_bears_its_version():
    graphdef, state = nnx.split(model())
    other_state = jax.tree.map(lambda x: x * 1.5 if x.dtype == jnp.float32 else x, state)
    other = nnx.merge(graphdef, other_state)
    running = Engine(model(), contract=contract(), **SIZES)
    running.programs = engine().programs
    request = running.submit(prompt(21), params())
    running.step()
    running.step()
    running.set_weights(other, version=9)
    while running.busy:
        done = running.step()
    ((number, (completion,)),) = done
    assert number == request
    versions = completion.weight_versions.tolist()
    assert versions == sorted(versions) and set(versions) == {0, 9}
    first = versions.index(9)
    assert completion.token_ids[:first].tolist() == alone("own", 21).token_ids[:first].tolist()
    # From there on: what the new weights give after those tokens.
    fresh = Engine(other, contract=contract(), **SIZES)
    fresh.programs = engine().programs
    start = [*prompt(21), *completion.token_ids[:first].tolist()]
    rest = fresh.generate([start], params(max_tokens=12 - first))[0][0]
    assert completion.logprobs[first:].view(np.uint32).tolist() == (
        rest.logprobs.view(np.uint32).tolist()
    )


def test_weights_of_another_model_are_refused():
    small = GlmModel.init(CFG.with_overrides(vocab_size=64))
    with pytest.raises(GlmError, match="another config or structure"):
        engine().set_weights(small, 1)
    with pytest.raises(GlmError, match="another config or structure"):
        engine().set_weights(model("bfloat16"), 1)


def test_logits_that_are_not_finite_end_that_request_only():
    broken = nnx.clone(model())
    broken.embed.set_value(broken.embed[...].at[50].set(jnp.nan))
    other = Engine(broken, contract=contract(), **SIZES)
    other.programs = engine().programs
    good = [t for t in prompt(21) if t != 50]
    first = other.submit(good, params(max_tokens=3))
    second = other.submit([1, 50, 2], params(max_tokens=3))
    done = {}
    while other.busy:
        done |= dict(other.step())
    assert done[second][0].finish_reason == "error" and "position 3" in done[second][0].error
    assert done[first][0].finish_reason == "length"
    with pytest.raises(GlmError, match="prompt 0, sample 0: the log-probability at position 3"):
        other.generate([[1, 50, 2]], params())


def test_cancelled_requests_give_what_they_have_and_free_their_pages():
    one = Engine(model(), contract=contract(), **SIZES)
    one.programs = engine().programs
    request = one.submit(prompt(21), params(n=2))
    other = one.submit(prompt(5), params(max_tokens=2))
    one.step()
    completions = one.cancel(request)
    assert [c.finish_reason for c in completions] == ["cancelled"] * 2
    assert len(completions[0].token_ids) == 1
    with pytest.raises(GlmError, match=f"request {request}: is not open"):
        one.cancel(request)
    done = {}
    while one.busy:
        done |= dict(one.step())
    assert list(done) == [other] and one._pool.n_held == 0


def test_no_program_is_compiled_after_warm_up():
    warm = engine()
    rng = np.random.default_rng(0)

    def some(n):
        prompts = [prompt(int(rng.integers(1, 60)), i) for i in range(n)]
        return warm.generate(prompts, params(max_tokens=int(rng.integers(1, 20))))

    for n in (1, 8, 12):
        some(n)
    before = warm.stats.n_compiled
    for n in (2, 5, 9, 20, 1, 13):
        some(n)
    assert warm.stats.n_compiled == before


@pytest.mark.parametrize(
    ("message", "ids", "changes"),
    [
        ("is no list of token ids; give at least one", [], {}),
        ("id 96 at index 2 is outside the vocabulary, 0 to 95", [1, 2, 96], {}),
        ("id -1 at index 0", [-1], {}),
        ("exceed the engine's capacity of 80", [1] * 70, {}),
        ("stop_ids: 96 is outside", [1], {"stop_ids": (96,)}),
        ("top_k: 97 is more than the vocabulary", [1], {"top_k": 97}),
        ("stop strings need an engine with a tokenizer", [1], {"stop": ("x",)}),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(message, ids, changes):
    steps = engine().stats.n_steps
    with pytest.raises(GlmError, match=message):
        engine().generate([prompt(4), ids], [params(), params(**changes)])
    assert engine().stats.n_steps == steps and not engine().busy
