"""Tokens are drawn from the distribution that the request asks for, by randomness of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from serving.engine.sampler import Rows, _draw_rows, _filter, _gumbel
from tests.serving.engine.models import (
    CFG,
    EOS,
    alone,
    bits,
    contract,
    engine,
    flat_model,
    new_engine,
    params,
    prompt,
    words,
)


def kept_ids(completion):
    kept = np.unpackbits(completion.kept.view(np.uint8), axis=1, bitorder="little")
    assert not kept[:, CFG.vocab_size :].any()
    return kept[:, : CFG.vocab_size].astype(bool)


def test_samples_differ_and_are_those_of_single_requests():
    four = engine().generate([prompt(21)], params(n=4))[0]
    assert [c.index for c in four] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in four}) == 4
    for i, completion in enumerate(four):
        single = engine().generate([prompt(21)], params(first_sample=i))[0][0]
        assert bits(single) == bits(completion)
    assert bits(engine().generate([prompt(21)], params(seed=8))[0][0]) != bits(four[0])


def test_the_kept_ids_hold_the_token_and_their_chances_sum_to_one():
    completion = engine().generate(
        [prompt(21)],
        params(temperature=0.8, top_p=0.9, top_k=6, min_tokens=2, stop_ids=(EOS, 5), max_tokens=4),
    )[0][0]
    kept = kept_ids(completion)
    n = len(completion.token_ids)
    assert kept[np.arange(n), completion.token_ids].all()
    assert (kept.sum(axis=1) <= 6).all() and (kept.sum(axis=1) >= 1).all()
    assert not kept[:2, [EOS, 5]].any()
    # By hand, from the raw distribution of the first token.
    raw = engine().generate([prompt(21)], params(max_tokens=1, top_logprobs=8))[0][0]
    chance = np.zeros(CFG.vocab_size)
    chance[raw.top_ids[0]] = np.exp(raw.top_logprobs[0].astype(np.float64) / 0.8)
    chance = np.where(kept[0], chance, 0) / chance[kept[0]].sum()
    assert np.isclose(np.log(chance[completion.token_ids[0]]), completion.sampling_logprobs[0])
    assert alone("cold", 21).kept is None


def test_draws_follow_the_distribution():
    # 61 equal chances: 8 x 40 draws hit about 60.7 ids; and none twice as often as it may.
    got = new_engine(flat_model()).generate([prompt(5)], params(n=8, max_tokens=40))[0]
    counts = np.bincount(np.concatenate([c.token_ids for c in got]), minlength=CFG.vocab_size)
    assert (counts > 0).sum() > 55 and counts.max() < 18
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 35 < chi2 < 95  # 60 degrees of freedom


def test_greedy_takes_the_most_likely_and_ignores_filters():
    got = engine().generate([prompt(21)], params(temperature=0, top_logprobs=5, top_p=0.1))[0][0]
    assert bits(got) == bits(alone("greedy", 21))
    assert (got.top_ids[:, 0] == got.token_ids).all()
    assert got.top_logprobs.shape == (12, 5)
    assert (np.diff(got.top_logprobs, axis=1) <= 0).all()
    assert words(got.top_logprobs[:, 0]) == words(got.logprobs)


def test_equal_logits_give_the_lowest_id_that_may_be_drawn():
    flat = new_engine(flat_model())
    assert flat.generate([prompt(5)], params(temperature=0))[0][0].token_ids.tolist() == [0] * 12
    one_by_one = flat.generate([prompt(5)], params(top_k=1, max_tokens=5))[0][0]
    assert one_by_one.token_ids.tolist() == [0] * 5
    early = params(temperature=0, min_tokens=2, stop_ids=(0, 1))
    assert flat.generate([prompt(5)], early)[0][0].token_ids.tolist() == [2, 2, 0]


def reference_filter(z_V, top_k, top_p, min_p):
    """The rules as they are written, in f64."""
    order = np.lexsort((np.arange(z_V.size), -z_V))
    kept = np.zeros(z_V.size, bool)
    kept[order[:top_k]] = True
    weight = np.where(kept, np.exp(z_V.astype(np.float64) - z_V.max()), 0.0)
    above = np.asarray([weight[weight > w].sum() for w in weight])
    return kept & (above < top_p * weight.sum()) & (weight >= min_p)


@pytest.mark.parametrize("seed", range(4))
def test_filters_are_the_rules_as_they_are_written(seed):
    rng = np.random.default_rng(seed)
    z_RV = rng.normal(size=(8, 64)).astype(np.float32) * 2
    z_RV[:, 7] = z_RV[:, 30]  # a tie
    z_RV[2] = np.round(z_RV[2])
    top_k = rng.integers(1, 65, 8).astype(np.int32)
    top_p = rng.choice([0.1, 0.5, 0.9, 1.0], 8).astype(np.float32)
    min_p = rng.choice([0.0, 0.05, 0.5], 8).astype(np.float32)
    none = jnp.zeros(8, jnp.int32)
    rows = Rows(
        temperature_R=jnp.ones(8),
        top_k_R=jnp.asarray(top_k),
        top_p_R=jnp.asarray(top_p),
        min_p_R=jnp.asarray(min_p),
        min_tokens_R=none,
        stop_Rs=jnp.zeros((8, 1), jnp.int32),
        seed_R=none.astype(jnp.uint32),
        sample_R=none,
    )
    kept_RV = np.asarray(_filter(Arithmetic(contract()), jnp.asarray(z_RV), rows))
    for row in range(8):
        expected = reference_filter(z_RV[row], top_k[row], top_p[row], min_p[row])
        assert kept_RV[row].tolist() == expected.tolist()


@pytest.mark.parametrize("width", [37, 96, 512])
def test_a_row_is_drawn_alike_in_tiles_of_every_size(width, rng):
    # The engines of these tests draw in tiles of 8 rows only.
    n, ops = 256, Arithmetic(NumericsContract())
    logits_RV = jnp.asarray(rng.standard_normal((n, width)) * 3, jnp.float32)
    position_R, none_R = jnp.arange(n, dtype=jnp.int32), jnp.zeros(n, jnp.int32)

    def drawn(n_rows, first_seed=0):
        rows = Rows(
            temperature_R=jnp.full(n, 0.8, jnp.float32),
            top_k_R=jnp.full(n, width // 2, jnp.int32),
            top_p_R=jnp.full(n, 0.9, jnp.float32),
            min_p_R=jnp.full(n, 0.01, jnp.float32),
            min_tokens_R=none_R,
            stop_Rs=jnp.full((n, 8), -1, jnp.int32),
            seed_R=jnp.arange(first_seed, first_seed + n, dtype=jnp.uint32),
            sample_R=none_R,
        )

        def region(z, rows, position_R, none_R):
            ids = _draw_rows(ops, z, rows.temperature_R, rows, position_R, none_R)
            return (*ids, _gumbel(rows, position_R, 512))

        args = jax.tree.map(lambda x: x[:n_rows], (logits_RV, rows, position_R, none_R))
        out = jax.jit(lambda *args: ops.rows(region, jnp.int32(n_rows), *args))(*args)
        return [np.asarray(x).view(np.uint32) for x in out]

    whole = drawn(n)
    for n_rows in (2, 8, 16, 64):
        for part, all_rows in zip(drawn(n_rows), whole, strict=True):
            assert np.array_equal(part, all_rows[:n_rows])
    assert not np.array_equal(drawn(n, first_seed=1)[0], whole[0])  # the control: other noise
