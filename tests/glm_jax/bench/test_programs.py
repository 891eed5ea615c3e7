"""What the benchmarks measure is the work they name, under the numerics they name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm_jax.bench.decode as decode
import glm_jax.bench.forward as forward
import glm_jax.bench.score as score
import glm_jax.bench.train as train
from glm_jax.bench.program import MODES, Program
from glm_jax.errors import GlmError
from glm_jax.params import leaves
from tests.glm_jax.models import SMALL, model_of

CFG = SMALL.with_overrides(
    num_hidden_layers=2,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    num_nextn_predict_layers=0,
)
SIZE = {"cfg": CFG, "length": 9}
SCORE = score.ScoreBench(batch=3, micro_batch=3, **SIZE)
TRAIN = train.TrainBench(batch=3, **SIZE)
DECODE = decode.DecodeBench(cfg=CFG, context=70, capacity=100, steps=1)


@functools.cache
def scoring(mode: str, micro_batch: int):
    """A scoring program's results, and the contract of every cache it was traced with."""
    contracts = []

    def spy(model, batch, cache=None, **options):
        contracts.append((cache.contract, batch.rows))
        return real(model, batch, cache, **options)

    with pytest.MonkeyPatch.context() as patch:
        real = score.forward
        patch.setattr(score, "forward", spy)
        program = score.scoring_program(SCORE, model_of(CFG), MODES[mode](), micro_batch)
    return program, np.asarray(program.run()[0]), contracts


@pytest.mark.parametrize("mode", MODES)
def test_scoring_runs_the_forward_under_its_contract(mode):
    program, logprob_T, contracts = scoring(mode, 3)
    assert {contract.mode for contract, _ in contracts} == {mode} == {program.contract.mode}
    assert {contract for contract, _ in contracts} == {program.contract}
    assert logprob_T.shape == (27,) and logprob_T.dtype == np.float32
    assert (logprob_T < 0).all() and program.compile_s > 0
    if mode == "native":
        assert {rows for _, rows in contracts} == {9}


def test_pinned_scores_have_the_same_bits_in_any_micro_batch_and_native_ones_are_others():
    _, pinned_T, _ = scoring("pinned", 3)
    _, again_T, _ = scoring("pinned", 1)
    _, native_T, _ = scoring("native", 3)
    assert np.array_equal(pinned_T.view(np.uint32), again_T.view(np.uint32))
    np.testing.assert_allclose(native_T, pinned_T, atol=1e-4)
    assert not np.array_equal(native_T, pinned_T)


def test_native_scores_are_those_of_the_logits_program():
    program = forward.logits_program(SCORE, model_of(CFG))
    logits_TV = program.run()[0]
    targets_T = score.successors(SCORE.ids_BS).reshape(-1)
    logprob_TV = jax.nn.log_softmax(logits_TV, axis=-1)
    expected = np.asarray(logprob_TV)[np.arange(27), targets_T]
    np.testing.assert_allclose(scoring("native", 3)[1], expected, atol=1e-4)
    assert program.contract.mode == "native"


@pytest.mark.slow
def test_training_programs_give_the_same_loss_and_gradients_to_rounding(monkeypatch):
    seen = {"pinned": [], "cache": [], "remat": 0}
    real = train.backward.train_forward, train.forward, jax.checkpoint

    def train_forward(model, batch, contract):
        seen["pinned"].append(contract.mode)
        return real[0](model, batch, contract)

    def native_forward(model, batch, cache=None):
        seen["cache"].append(cache)
        return real[1](model, batch, cache)

    def checkpoint(function, *args, **options):
        seen["remat"] += 1
        return real[2](function, *args, **options)

    monkeypatch.setattr(train.backward, "train_forward", train_forward)
    monkeypatch.setattr(train, "forward", native_forward)
    monkeypatch.setattr(jax, "checkpoint", checkpoint)
    programs = train.programs(TRAIN, CFG)
    assert set(seen["pinned"]) == {"pinned"} and set(seen["cache"]) == {None}
    assert seen["remat"] == 1
    assert [x.contract.mode for x in programs.values()] == ["pinned", "native", "native"]

    (loss, gradients), *native = [program.run() for program in programs.values()]
    for native_loss, native_gradients in native:
        np.testing.assert_allclose(native_loss, loss, rtol=1e-5)
        for path, variable in leaves(native_gradients):
            expected = np.asarray(variable[...])
            if "indexer" not in path:
                error = np.linalg.norm(gradients[path] - expected) / np.linalg.norm(expected)
                assert error < 1e-4, (path, error)


@pytest.mark.parametrize("mode", MODES)
def test_a_decode_step_adds_one_row_a_sequence(mode, monkeypatch):
    caches, real = [], decode.random_cache

    def keep(cache):
        made = real(cache)
        caches.append(jax.tree.map(jnp.copy, made))  # the program consumes it
        return made

    monkeypatch.setattr(decode, "random_cache", keep)
    program = decode.decode_program(DECODE, model_of(CFG), MODES[mode](), 3)
    logits_TV, (_, after) = program.run()
    (before,) = caches
    assert before.contract == after.contract == program.contract
    assert program.contract.mode == mode
    assert logits_TV.shape == (3, CFG.vocab_size)
    changed_LPs = np.asarray(jnp.any(before.latent_LPsC != after.latent_LPsC, axis=-1))
    # Position 69 of each: row 5 of its second page.
    assert {tuple(x) for x in np.argwhere(changed_LPs)[:, 1:]} == {(1, 5), (3, 5), (5, 5)}


def program(values, n_runs=1):
    runs = []

    def run():
        runs.append(1)
        return jnp.asarray(values), None

    return Program(contract=MODES["native"](), compile_s=0.0, run=run, n_runs=n_runs), runs


def test_a_sample_is_the_mean_of_its_runs():
    measured, runs = program([1.0], n_runs=5)
    sample = measured.task()
    assert len(runs) == 5 and sample.wall_s > 0


def test_values_that_are_not_finite_are_an_error():
    with pytest.raises(GlmError, match="native numerics gave values that are not finite"):
        program([1.0, np.nan])[0].task()
