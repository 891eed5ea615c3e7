"""Endings, cancellation, new weights and refusals: each request by itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from tests.serving.engine.models import (
    CFG,
    alone,
    bits,
    changed,
    contract,
    engine,
    held_pages,
    model,
    new_engine,
    params,
    prompt,
    run_dry,
    words,
)


def test_a_stop_id_ends_a_sample_and_is_its_last_token():
    free = alone("own", 21).token_ids.tolist()
    stop = free[5]
    got = engine().generate([prompt(21)], params(stop_ids=(stop,)))[0][0]
    assert got.token_ids.tolist() == free[: free.index(stop) + 1]
    assert got.finish_reason == "stop" and alone("own", 21).finish_reason == "length"


def test_each_sample_has_a_finish_reason_of_its_own():
    free = engine().generate([prompt(21)], params(n=4))[0]
    stop = int(free[2].token_ids[3])
    got = engine().generate([prompt(21)], params(n=4, stop_ids=(stop,)))[0]
    expected = ["stop" if stop in c.token_ids else "length" for c in free]
    assert [c.finish_reason for c in got] == expected
    assert {"stop", "length"} == set(expected)


def test_cancelled_requests_give_what_they_have_and_free_their_pages():
    one = new_engine()
    request = one.submit(prompt(21), params(n=2))
    other = one.submit(prompt(5), params(max_tokens=2))
    one.step()
    completions = one.cancel(request)
    assert [c.finish_reason for c in completions] == ["cancelled"] * 2
    assert completions[0].token_ids.tolist() == alone("own", 21).token_ids[:1].tolist()
    with pytest.raises(GlmError, match=f"request {request}: is not open"):
        one.cancel(request)
    assert list(run_dry(one)) == [other] and held_pages(one) == 0


def test_generate_and_submitted_requests_do_not_disturb_each_other():
    one = new_engine()
    request = one.submit(prompt(21), params())
    (got,) = one.generate([prompt(5)], params(max_tokens=30))[0]
    assert len(got.token_ids) == 30
    (other,) = run_dry(one)[request]
    assert bits(other) == bits(alone("own", 21))


def test_events_tell_each_token_once():
    one = new_engine()
    request = one.submit(prompt(21), params())
    told = []
    while one.busy:
        for event in one.step():
            assert event.request == request
            told += event.token_ids.tolist()
    assert told == alone("own", 21).token_ids.tolist()


def test_an_old_request_is_not_starved_by_new_ones():
    one = new_engine()
    first = one.submit(prompt(58), params(max_tokens=20))
    done, submitted = [], 0
    while first not in done:
        if submitted < 200:
            one.submit(prompt(30, submitted), params(max_tokens=20, seed=submitted))
            submitted += 1
        done += [e.request for e in one.step() if e.completion is not None]
        assert submitted < 30, "the first of all requests is still not done"
    for request in list(one._requests):
        one.cancel(request)
    assert held_pages(one) == 0 and not one.busy


def test_new_weights_are_used_at_once_and_each_token_bears_its_version():
    other = changed(model(), embed=lambda x: x * 1.5)
    running = new_engine()
    running.submit(prompt(21), params())
    events = [*running.step(), *running.step()]
    running.set_weights(other, version=9)
    while running.busy:
        events += running.step()
    got, versions = events[-1].completion, events[-1].completion.weight_versions.tolist()
    assert versions == [event.version for event in events for _ in event.token_ids]
    assert versions == sorted(versions) and set(versions) == {0, 9}
    first = versions.index(9)
    assert got.token_ids[:first].tolist() == alone("own", 21).token_ids[:first].tolist()
    # From there on: what the new weights give after those tokens.
    start = [*prompt(21), *got.token_ids[:first].tolist()]
    rest = new_engine(other).generate([start], params(max_tokens=12 - first))[0][0]
    assert words(got.logprobs[first:]) == words(rest.logprobs)


def test_kept_keys_of_old_weights_serve_their_own_sample_only():
    other = changed(model(), embed=lambda x: x * 1.5)
    running = new_engine()
    running.submit(prompt(40), params())
    running.step()
    running.step()
    running.set_weights(other, version=9, mode="continue")
    ((got,),) = run_dry(running).values()
    assert running.stats.n_preempted == 0 and set(got.weight_versions.tolist()) == {0, 9}
    after = running.generate([prompt(40)], params())[0][0]
    assert running.stats.n_reused == 0
    assert bits(after) == bits(new_engine(other).generate([prompt(40)], params())[0][0])


def test_weights_that_do_not_fit_are_refused_by_name():
    with pytest.raises(GlmError, match="vocab_size is 64, the engine's is 61"):
        engine().set_weights(GlmModel.init(CFG.with_overrides(vocab_size=64)), 1)
    with pytest.raises(GlmError, match="dtype is 'bfloat16', the engine's is 'float32'"):
        engine().set_weights(model("bfloat16"), 1)
    narrow = changed(model(), final_norm=lambda x: x.astype(jnp.bfloat16))
    with pytest.raises(GlmError, match=r"final_norm is bfloat16\[32\], the engine's is float32"):
        engine().set_weights(narrow, 1)
    with pytest.raises(GlmError, match=r"weights: numerics contract .* mode: pinned here, native"):
        engine().set_weights(model(), 1, contract=contract("native"))
    assert engine().version == 0


@pytest.mark.parametrize("mode", ["pinned", "native"])
def test_values_that_are_not_finite_end_that_request_only(mode):
    broken = new_engine(changed(model(), embed=lambda x: x.at[50].set(jnp.nan)), mode)
    clean = [t for t in prompt(21) if t != 50]
    bad, good = [1, 50, 2], [params(max_tokens=6, top_k=3, seed=i) for i in range(3)]
    requests = [broken.submit(clean, good[0]), broken.submit(bad, good[1])]
    done = run_dry(broken)
    assert done[requests[1]][0].finish_reason == "error"
    assert "position 3 is not finite" in done[requests[1]][0].error
    assert done[requests[0]][0].finish_reason == "length"
    with pytest.raises(GlmError, match="prompt 0, sample 0: the log-probability at position 3"):
        broken.generate([bad], params())
    # The pages it leaves behind poison nobody.
    again = broken.generate([clean], good[0])[0][0]
    assert np.isfinite(again.logprobs).all() and len(again.token_ids) == 6
    if mode == "pinned":
        assert bits(again) == bits(done[requests[0]][0])
    with pytest.raises(GlmError, match="the log-probability at position 2 is not finite"):
        broken.generate([bad], params(prompt_logprobs=True))
    assert held_pages(broken) == 0 and not broken.busy


def test_an_interrupted_step_leaves_a_working_engine(monkeypatch):
    one = new_engine()
    real, calls = one._runner._executable, []

    def interrupted(*args):
        def run(*_):
            raise KeyboardInterrupt

        calls.append(args)
        return run if len(calls) == 3 else real(*args)

    monkeypatch.setattr(one._runner, "_executable", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.generate([prompt(21)], params())
    assert not one.busy and held_pages(one) == 0
    assert bits(one.generate([prompt(21)], params())[0][0]) == bits(alone("own", 21))


@pytest.mark.parametrize(
    ("message", "ids", "changes"),
    [
        ("prompt 1: .* is no list of token ids; give at least one", [], {}),
        (r"prompt 1\[2\]: token id 61 is outside the vocabulary \(0 to 60\)", [1, 2, 61], {}),
        (r"prompt 1\[0\]: token id -1", [-1], {}),
        ("exceed the engine's capacity of 80", [1] * 70, {}),
        ("stop_ids: 61 is outside", [1], {"stop_ids": (61,)}),
        ("min_tokens cannot be reached", [1], {"stop_ids": tuple(range(61)), "min_tokens": 1}),
        ("top_k: 62 is more than the vocabulary", [1], {"top_k": 62}),
        ("stop: 'x' needs an engine with a tokenizer", [1], {"stop": ("x",)}),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(message, ids, changes):
    steps = engine().stats.n_steps
    with pytest.raises(GlmError, match=message):
        engine().generate([prompt(4), ids], [params(), params(**changes)])
    assert engine().stats.n_steps == steps and not engine().busy


def test_a_request_that_can_never_fit_in_the_pool_is_refused():
    with pytest.raises(GlmError, match="can never fit in the page pool of 32 tokens"):
        new_engine(n_pages=2).submit(prompt(21), params())


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(GlmError, match="n_rows: 8 leaves no room for prompts"):
        new_engine(n_rows=8)
    with pytest.raises(GlmError, match="n_steps: 0; must be at least 1"):
        new_engine(n_steps=0)
    with pytest.raises(GlmError, match="params: 1 for 2 prompts; give one a prompt"):
        engine().generate([prompt(4)] * 2, [params()])


def test_the_counts_of_the_engine_add_up():
    one = new_engine()
    one.generate([prompt(40), prompt(21)], params(max_tokens=6))
    stats = one.stats
    assert stats.n_generated == 12 and stats.n_prefilled == 61
    assert stats.n_steps > 0 and stats.device_seconds > 0 and stats.host_seconds > 0
    assert (stats - stats).n_steps == 0
    assert np.isclose(one.stats.compile_seconds, stats.compile_seconds)
