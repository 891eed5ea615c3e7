"""Whenever weights switch, a token's log-probability is the trainer's under its version."""

import functools

import jax
import numpy as np
import pytest

from glm_jax.checkpoint.delta.host_arrays import HostArrays
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.training import backward, pack
from serving.hotload import Subscriber
from tests.serving.engine.models import (
    CFG,
    changed,
    contract,
    model,
    new_engine,
    params,
    prompt,
)

FORWARD = jax.jit(backward.train_forward, static_argnums=2)
N_VERSIONS = 5


@functools.cache
def weights(version):
    if version == 0:
        return model()
    return changed(weights(version - 1), embed=lambda x: x * 1.05, lm_head=lambda x: x * 0.99)


def scores(version, start, completion):
    """Log-probabilities of a completion's tokens by the trainer's forward under one version."""
    tokens = np.concatenate([start, completion.token_ids])
    train, rows = pack.pack(
        CFG, contract(), [tokens], [np.roll(tokens, -1)], n_rows=64, max_length=64
    )
    logprob_T, _ = FORWARD(weights(version), train, contract())
    return np.asarray(logprob_T)[rows[0]][len(start) - 1 : len(tokens) - 1]


def run(mode, directory, reset="all", seed=0):
    """Requests with a common prefix, a pool too small for them, and a switch now and then.

    Returns (prompt, completion) pairs, preemptions by want of pages, and tokens that were reused.
    """
    rng = np.random.default_rng(seed)
    store = DeltaStore(directory / "store", contract=contract().digest, full_every=3)
    engine = new_engine(n_pages=6)
    follower = Subscriber(engine, model(), store.places.root, directory / "cache", mode=mode)
    common, prompts, done, kinds, version = prompt(20), {}, [], set(), 0
    n_preempted = 0
    while engine.busy or version < N_VERSIONS - 1:
        if len(prompts) < 10 and rng.random() < 0.7:
            start = [*common, *prompt(int(rng.integers(1, 14)), seed=len(prompts))]
            prompts[engine.submit(start, params(max_tokens=24, seed=len(prompts)))] = start
        if version < N_VERSIONS - 1 and rng.random() < 0.3 and follower.status.stage != "switch":
            version += 1
            manifest = store.save(HostArrays.of(weights(version)), step=version)
            kinds.add(manifest.kind)
            follower.request(manifest.version, reset)
            follower.wait()
        follower.switch()
        before = engine.stats.n_preempted  # a switch preempts too
        done += [(e.request, e.completion) for e in engine.step() if e.completion is not None]
        n_preempted += engine.stats.n_preempted - before
    assert kinds == {"full", "delta"} and len(done) == len(prompts) == 10
    pairs = [(prompts[number], completion) for number, completion in done]
    return pairs, n_preempted, engine.stats.n_reused


def unequal(pairs, shift=0):
    """Tokens whose bits are not the trainer's under their version (or another one)."""
    count = 0
    for start, completion in pairs:
        for version in np.unique(completion.weight_versions):
            own = completion.weight_versions == version
            scored = scores((int(version) + shift) % N_VERSIONS, start, completion)[own]
            count += int((scored.view(np.uint32) != completion.logprobs[own].view(np.uint32)).sum())
    return count


def mixed(pairs):
    return sum(len(set(completion.weight_versions.tolist())) > 1 for _, completion in pairs)


@pytest.mark.parametrize("mode", ["recompute", "finish"])
def test_no_token_differs_where_keys_are_of_one_version(mode, tmp_path):
    pairs, n_preempted, n_reused = run(mode, tmp_path, "none")
    assert n_preempted > 0 and n_reused > 0
    assert (mixed(pairs) > 0) == (mode == "recompute")
    assert not any(completion.stale.any() for _, completion in pairs)
    assert unequal(pairs) == 0
    assert unequal(pairs, shift=1) > 0  # scored by another version


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("reset", ["all", "new_session", "none"])
@pytest.mark.parametrize("mode", ["recompute", "finish"])
def test_no_token_differs_in_many_runs(mode, reset, tmp_path):
    n_preempted = n_mixed = 0
    for seed in range(1, 9):
        pairs, preempted, _ = run(mode, tmp_path / str(seed), reset, seed)
        assert unequal(pairs) == 0
        n_preempted, n_mixed = n_preempted + preempted, n_mixed + mixed(pairs)
    assert n_preempted > 0 and (n_mixed > 0) == (mode == "recompute")


def test_old_keys_are_marked_and_differ(tmp_path):
    pairs, _, _ = run("continue", tmp_path)
    stale = [completion.stale for _, completion in pairs]
    assert mixed(pairs) > 0 and any(x.any() for x in stale)
    assert unequal(pairs) > 0
