"""A switch of weights: which request goes on with which, and which kept pages go."""

import jax
import numpy as np
import pytest

from glm_jax.errors import GlmError
from serving.engine.pages import PagePool
from serving.engine.sample import Sample
from serving.engine.scheduler import Scheduler
from serving.engine.weights import Weights
from tests.serving.engine.models import bits, changed, model, new_engine, params, prompt, run_dry


def other():
    return changed(model(), embed=lambda x: x * 1.5)


def queued(number, root):
    """A sample of 3 tokens on weights of its own."""
    start, weights = np.arange(3, dtype=np.int32) + number, Weights([], number, root)
    more = {"index": 0, "params": params(), "prompt": start, "stream": None, "weights": weights}
    return Sample(request=number, arrival=number, **more)


def test_a_request_ends_on_the_weights_it_started_with_and_frees_them():
    engine = new_engine(n_slots=2, n_rows=64)
    started = engine.submit(prompt(9), params(n=3))  # its third sample has no slot yet
    engine.step()
    waiting = engine.submit(prompt(9, seed=1), params())
    engine.set_weights(other(), 9, mode="finish")
    fresh = engine.submit(prompt(9, seed=2), params())
    assert engine.versions == [0, 9] and engine.version == 9
    done = run_dry(engine)
    assert {v for c in done[started] for v in c.weight_versions.tolist()} == {0}
    for number in (waiting, fresh):
        assert set(done[number][0].weight_versions.tolist()) == {9}
    assert engine.versions == [9]


@pytest.mark.parametrize(("reset", "n_reused"), [("all", 0), ("new_session", 0), ("none", 16)])
def test_kept_pages_serve_again_only_where_they_were_left_and_only_their_weights(reset, n_reused):
    engine = new_engine()
    engine.set_weights(model(), 0, identity="first")
    engine.generate([prompt(21)], params(max_tokens=1))
    for weights, version, name in ((other(), 1, "second"), (model(), 0, "first")):
        engine.set_weights(weights, version, identity=name, reset_prompt_cache=reset)
        before = engine.stats.n_reused
        engine.generate([prompt(21)], params(max_tokens=1))
        assert engine.stats.n_reused - before == (n_reused if name == "first" else 0)


def test_without_an_identity_pages_never_serve_again():
    engine = new_engine()
    for _ in range(2):
        engine.generate([prompt(21)], params(max_tokens=1))
        engine.set_weights(model(), 0, reset_prompt_cache="none")
    assert engine.stats.n_reused == 0


def test_new_session_keeps_the_pages_of_requests_that_go_on():
    engine = new_engine()
    engine.generate([prompt(21)], params(max_tokens=1))
    engine.submit(prompt(21), params())
    engine.step()
    engine.set_weights(other(), 1, mode="finish", reset_prompt_cache="new_session")
    assert engine._scheduler.pool._key_of
    engine.set_weights(model(), 2, mode="recompute", reset_prompt_cache="all")
    assert not engine._scheduler.pool._key_of


def test_weights_come_by_reference_or_from_another_device():
    engine, weights = new_engine(), other()
    engine.set_weights(weights, 1)
    pairs = list(zip(engine._weights.arrays, jax.tree.leaves(weights), strict=True))
    assert all(ours is theirs for ours, theirs in pairs)
    expected = engine.generate([prompt(9)], params())[0][0]
    elsewhere = jax.device_put(weights, jax.devices()[1])
    engine.set_weights(elsewhere, 2)
    assert {x.sharding for x in engine._weights.arrays} == {x.sharding for x, _ in pairs}
    assert {x.sharding for x in jax.tree.leaves(elsewhere)}.isdisjoint({pairs[0][0].sharding})
    assert bits(engine.generate([prompt(9)], params())[0][0]) == bits(expected)


def test_where_the_last_of_some_weights_gives_up_its_pages_the_others_go_on():
    pool = PagePool(3, 4)
    scheduler = Scheduler(pool, n_slots=2, n_rows=16, n_steps=1)
    samples = [queued(i, weights) for i, weights in enumerate((b"old", b"new"))]
    scheduler.add(samples[0])
    scheduler.plan()
    scheduler.computed(samples[0], 3)
    scheduler.add(samples[1])
    samples[0].tokens.append(1)
    moved = []
    for _ in range(8):
        plan = scheduler.plan()
        moved.append([span.sample.arrival for span in plan.spans])
        for sample, _, last in plan.spans:
            scheduler.computed(sample, last)
            sample.tokens.append(1)
    assert scheduler.n_preempted == 1
    assert moved == [[1], [0], [1], [0], [0], [0], [0], [0]]


def test_unknown_modes_are_refused_by_name():
    engine = new_engine()
    with pytest.raises(GlmError, match="mode: 'later' is unknown; give one of finish, recompute"):
        engine.set_weights(other(), 1, mode="later")
    with pytest.raises(GlmError, match="reset_prompt_cache: 'some' is unknown"):
        engine.set_weights(other(), 1, reset_prompt_cache="some")
    assert engine.version == 0
