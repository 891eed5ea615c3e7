"""No bit of a request depends on its company, its chunks, its pages or its steps."""

import numpy as np
import pytest

from tests.serving.engine.models import (
    KINDS,
    PAGE,
    alone,
    bits,
    engine,
    held_pages,
    model,
    new_engine,
    params,
    prompt,
    words,
)

OTHERS = [58, 3, 40, 17, 5, 31, 2, 9]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "float32") for kind in KINDS), ("filtered", "bfloat16")]
)
def test_neighbours_chunks_and_slots_change_no_bit(kind, dtype):
    several = [params(seed=i, max_tokens=3 + i, temperature=0.5 + i / 8) for i in range(8)]
    for place in (0, 4):
        prompts, each = [prompt(n, 1) for n in OTHERS], several.copy()
        prompts.insert(place, prompt(21))
        each.insert(place, KINDS[kind])
        got = engine(dtype).generate(prompts, each)[place][0]
        assert bits(got) == bits(alone(kind, 21, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drawing_one_token_a_dispatch_changes_no_bit(dtype):
    stepwise = new_engine(model(dtype))
    stepwise._scheduler.n_steps = 1
    before = stepwise.stats.n_steps
    got = stepwise.generate([prompt(21)], KINDS["filtered"])[0][0]
    assert stepwise.stats.n_steps - before == len(got.token_ids)
    assert bits(got) == bits(alone("filtered", 21, dtype))


def test_a_longer_capacity_changes_no_bit():
    # Two pages a slot while that suffices, then eight.
    roomy = new_engine(capacity=8 * PAGE)
    assert roomy._runner._widths == [2, 8]
    got = roomy.generate([prompt(30)], KINDS["own"])[0][0]
    assert roomy._runner._cache.capacity == 8 * PAGE
    assert bits(got) == bits(alone("own", 30))


@pytest.mark.parametrize("n", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1])
def test_kept_pages_change_no_bit_at_any_border(n):
    fresh = new_engine()
    first = fresh.generate([prompt(n)], KINDS["filtered"])[0][0]
    assert fresh.stats.n_reused == 0
    again = fresh.generate([prompt(n)], KINDS["filtered"])[0][0]
    # At least the last prompt token is computed anew.
    assert fresh.stats.n_reused == (n - 1) // PAGE * PAGE
    assert bits(first) == bits(again) == bits(alone("filtered", n))


def test_a_page_serves_its_own_prefix_only():
    fresh = new_engine()
    fresh.generate([prompt(40)], params())
    other = prompt(40)
    other[3] ^= 1
    got = fresh.generate([other], params())[0][0]
    assert fresh.stats.n_reused == 0
    assert bits(got) == bits(engine().generate([other], params())[0][0])


def test_samples_of_one_prompt_compute_its_whole_pages_once():
    fresh = new_engine()
    got = fresh.generate([prompt(2 * PAGE + 3)], params(n=4))[0]
    assert fresh.stats.n_reused == 3 * 2 * PAGE
    for i, one in enumerate(got):
        single = engine().generate([prompt(2 * PAGE + 3)], params(first_sample=i))[0][0]
        assert bits(one) == bits(single)


def test_preemption_changes_no_bit_and_leaks_no_page():
    crowded = new_engine()
    prompts = [prompt(20 + i) for i in range(8)]
    each = [params(max_tokens=30, seed=i, stop_ids=(3,)) for i in range(8)]
    got = crowded.generate(prompts, each)
    assert crowded.stats.n_preempted > 0
    for (one,), p, q in zip(got, prompts, each, strict=True):
        assert bits(one) == bits(engine().generate([p], q)[0][0])
    assert held_pages(crowded) == 0


def test_more_settings_in_one_batch_change_no_bit():
    # The second pass over the head runs for all rows if one of them needs it.
    got = engine().generate([prompt(21)] * 4, list(KINDS.values()))
    for (one,), kind in zip(got, KINDS, strict=True):
        assert bits(one) == bits(alone(kind, 21))


def test_stock_arithmetic_does_change_bits_with_the_company():
    other = engine(mode="native")
    lone = other.generate([prompt(21)], KINDS["own"])[0][0]
    among = other.generate([prompt(n, 1) for n in (3, 40, 17)] + [prompt(21)], KINDS["own"])[3][0]
    n = min(len(lone.logprobs), len(among.logprobs))
    assert words(lone.logprobs[:n]) != words(among.logprobs[:n])


def test_no_program_is_compiled_after_warm_up():
    warm = new_engine()
    warm.warm_up()
    rng = np.random.default_rng(0)
    before = warm.stats.n_compiled
    for n in (1, 8, 12, 2, 5, 20):
        prompts = [prompt(int(rng.integers(1, 60)), i) for i in range(n)]
        kinds = [
            params(
                max_tokens=int(rng.integers(1, 20)),
                temperature=float(rng.choice([0, 0.7, 1])),
                top_p=float(rng.choice([0.5, 1])),
                stop_ids=tuple(rng.integers(0, 60, rng.integers(0, 5)).tolist()),
                prompt_logprobs=bool(rng.integers(2)),
            )
            for _ in range(n)
        ]
        warm.generate(prompts, kinds)
    assert warm.stats.n_compiled == before and held_pages(warm) == 0
