"""A switch of weights: which request goes on with which, and which kept pages go."""

import pytest

from glm_jax.errors import GlmError
from tests.serving.engine.models import changed, model, new_engine, params, prompt, run_dry


def other():
    return changed(model(), embed=lambda x: x * 1.5)


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


def test_unknown_modes_are_refused_by_name():
    engine = new_engine()
    with pytest.raises(GlmError, match="mode: 'later' is unknown; give one of finish, recompute"):
        engine.set_weights(other(), 1, mode="later")
    with pytest.raises(GlmError, match="reset_prompt_cache: 'some' is unknown"):
        engine.set_weights(other(), 1, reset_prompt_cache="some")
    assert engine.version == 0
