"""Losses: their values by hand, their derivatives by differences, and what must not matter."""

import numpy as np
import pytest

from glm_jax.errors import GlmError
from rl.advantages import advantages
from rl.datum import Datum
from rl.kl import kl_metrics
from rl.losses import LOSSES, LossConfig, LossSum, token_loss

N = 6
CONFIG = LossConfig(dual_clip=3.0, kl_beta=0.1)


def datum(rng, **changes):
    logprobs = rng.normal(-1, 0.5, N)
    inputs = {
        "target_tokens": rng.integers(0, 9, N),
        "weights": np.asarray([0, 1, 1, 0.5, 2, 0]),
        "logprobs": logprobs,
        "advantages": rng.normal(0, 1, N),
        "ref_logprobs": logprobs + rng.normal(0, 0.1, N),
    }
    return Datum(rng.integers(0, 9, N), inputs | changes)


@pytest.mark.parametrize("config", [LossConfig(), CONFIG], ids=["plain", "dual clip and KL"])
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_are_those_of_the_loss(name, config, rng):
    for _ in range(5):
        one = datum(rng)
        p = one.loss_fn_inputs["logprobs"].astype(np.float64) + rng.normal(0, 0.3, N)
        p = p.astype(np.float32)
        d_logp = token_loss(name, one, p, config).d_logp
        for i in range(N):
            h = np.zeros(N, np.float32)
            h[i] = 2**-10
            up, down = (token_loss(name, one, p + s * h, config) for s in (1, -1))
            if name == "cispo":  # the ratio is held
                continue
            assert (up.loss - down.loss) / 2**-9 == pytest.approx(d_logp[i], abs=2e-3)


def test_values_by_hand():
    inputs = {"target_tokens": [1, 2], "logprobs": [-1.0, -1.0], "advantages": [2.0, -1.0]}
    one, p = Datum([0, 1], inputs), np.asarray([-0.5, -0.5], np.float32)
    r = np.exp(0.5)
    plain = LossConfig()
    assert token_loss("cross_entropy", one, p, plain).loss == pytest.approx(1.0)
    assert token_loss("importance_sampling", one, p, plain).loss == pytest.approx(-2 * r + r)
    ppo = token_loss("ppo", one, p, plain)
    assert ppo.loss == pytest.approx(-(1.2 * 2) + r)
    assert ppo.d_logp == pytest.approx([0.0, r]) and ppo.clipped.tolist() == [True, False]
    dual = token_loss("ppo", one, p, LossConfig(dual_clip=1.5))
    assert dual.loss == pytest.approx(-(1.2 * 2) + 1.5) and dual.d_logp[1] == 0.0
    cispo = token_loss("cispo", one, p, plain)
    assert cispo.loss == pytest.approx(-(1.2 * 2 - 1.2) * -0.5)
    dro = token_loss("dro", one, p, plain)
    assert dro.loss == pytest.approx(0.5 * (2 - 1) + 0.05 / 2 * 0.25 * 2)
    kl = token_loss(
        "cross_entropy", Datum([0, 1], inputs | {"ref_logprobs": [-1.0, -0.5]}), p,
        LossConfig(kl_beta=1.0),
    )  # fmt: skip
    assert kl.loss == pytest.approx(1.0 + np.exp(-0.5) + 0.5 - 1)
    assert kl.d_logp[0] > -1  # pulls towards the reference


def test_a_ratio_of_equal_bits_is_exactly_one_and_nothing_is_clipped(rng):
    for name in LOSSES[1:]:
        one = datum(rng)
        out = token_loss(name, one, one.loss_fn_inputs["logprobs"], LossConfig())
        assert (out.ratio == 1.0).all() and not out.clipped.any()


@pytest.mark.parametrize("name", LOSSES)
def test_values_at_masked_positions_are_never_read(name, rng):
    one = datum(rng)
    p = one.loss_fn_inputs["logprobs"] + np.float32(0.1)
    expected = token_loss(name, one, p, CONFIG)
    dirty = {k: v.copy() for k, v in one.loss_fn_inputs.items()}
    for key in ("logprobs", "advantages", "ref_logprobs"):
        dirty[key][one.weights == 0] = np.nan
    p[one.weights == 0] = np.nan
    got = token_loss(name, Datum(one.tokens, dirty), p, CONFIG)
    assert got.loss == expected.loss
    assert got.d_logp.tobytes() == expected.d_logp.tobytes()
    p[1] = np.nan
    with pytest.raises(GlmError, match="logp of token 1 is nan"):
        token_loss(name, one, p, CONFIG)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("did you mean 'ppo'", lambda: token_loss("pop", None, None, None)),
        ("did you mean 'dual_clip'", lambda: LossConfig.of({"dual_clp": 1})),
        ("absolute ratios", lambda: LossConfig(clip_low_threshold=1.2)),
        ("did you mean 'advantages'", lambda: Datum([1], {"advantage": [1]})),
        ("lacks target_tokens", lambda: Datum([1], {})),
        ("advantages has shape", lambda: Datum([1], {"target_tokens": [1], "advantages": [1, 2]})),
        ("needs logprobs", lambda: token_loss(
            "ppo", Datum([1], {"target_tokens": [1]}), np.zeros(1, np.float32), LossConfig())),
        ("kl_beta True; must be a number", lambda: LossConfig(kl_beta=True)),
        ("dual_clip nan; must be a number", lambda: LossConfig(dual_clip=float("nan"))),
        ("clip_low_threshold '1'; must", lambda: LossConfig(clip_low_threshold="1")),
        ("beta inf; must be finite", lambda: LossConfig(beta=float("inf"))),
        ("tokens .*: give integers from 0", lambda: Datum([1.7], {"target_tokens": [1]})),
        ("tokens .*: give integers from 0", lambda: Datum([[1], [1, 2]], {})),
        ("tokens have shape", lambda: Datum(np.zeros(0, int), {})),
        ("tokens .*to 2147483647", lambda: Datum([2**32 + 1], {"target_tokens": [1]})),
        ("target_tokens .*: give int", lambda: Datum([1], {"target_tokens": [-100]})),
        ("kept .*: give int", lambda: Datum([1], {"target_tokens": [1], "kept": [[-1]]})),
        ("logprobs: .*one number", lambda: Datum([1], {"target_tokens": [1], "logprobs": ["x"]})),
        ("weights are not all", lambda: Datum([1], {"target_tokens": [1], "weights": [1e39]})),
        ("a weight is negative", lambda: token_loss("gspo", Datum([1], {
            "target_tokens": [1], "weights": [-1], "logprobs": [0], "advantages": [1]}),
            np.zeros(1, np.float32), LossConfig())),
        ("have no advantages in 32 bits", lambda: advantages([0, 1e-200], [0, 0])),
        ("have no advantages in 32 bits", lambda: advantages([0, 1e300], [0, 0], "rloo")),
        ("did you mean 'grpo'.*one of grpo", lambda: advantages([1, 2], [0, 0], "gpro")),
        ("group 1 has one sample", lambda: advantages([1, 2, 3], [0, 0, 1])),
        ("reward of sample 1 is nan", lambda: advantages([1, np.nan], [0, 0])),
    ],
)  # fmt: skip
def test_mistakes_are_named(message, call):
    with pytest.raises(GlmError, match=message):
        call()


def test_advantages_by_hand_and_in_any_order(rng):
    rewards, groups = [1, 0, 0, 1, 5, 5, 0, 3], [0, 0, 0, 0, 7, 7, 2, 2]
    assert advantages(rewards, groups).tolist() == [1, -1, -1, 1, 0, 0, -1, 1]
    assert advantages(rewards, groups, "dr_grpo")[:2].tolist() == [0.5, -0.5]
    assert advantages(rewards, groups, "rloo")[:2] == pytest.approx([2 / 3, -2 / 3])
    rewards, groups = rng.normal(size=64), rng.integers(0, 6, 64)
    order = rng.permutation(64)
    for kind in ("grpo", "rloo", "dr_grpo"):
        straight = advantages(rewards, groups, kind)
        assert (
            straight[order].tobytes() == advantages(rewards[order], groups[order], kind).tobytes()
        )


def test_kl_is_zero_for_equal_bits_and_absent_where_it_cannot_be_known(rng):
    p = rng.normal(-1, 1, 50).astype(np.float32)
    same = kl_metrics([p[:20], p[20:]], [p[:20], p[20:]])
    assert same == {
        "kl/coverage": 1.0, "kl/k1": 0.0, "kl/k2": 0.0, "kl/k3": 0.0, "kl/reverse_k1": 0.0,
        "kl/reverse_k3": 0.0, "kl/max_abs": 0.0, "kl/unequal_tokens": 0,
    }  # fmt: skip
    q = np.nextafter(p, np.float32(0))
    assert kl_metrics([p], [q])["kl/unequal_tokens"] == 50
    assert kl_metrics([], []) == {}
    assert kl_metrics([np.full(3, np.nan)], [p[:3]]) == {"kl/coverage": 0.0}
    q = (p + 0.1).astype(np.float32)
    assert kl_metrics([p], [q])["kl/k1"] == pytest.approx(-0.1, abs=1e-6)
    assert kl_metrics([p], [q])["kl/reverse_k3"] == pytest.approx(np.exp(-0.1) - 0.9, abs=1e-6)


def test_kl_is_of_the_same_tokens_and_holds_no_infinity():
    with pytest.raises(ValueError, match="sequences differ"):
        kl_metrics([np.zeros(2), np.zeros(3)], [np.zeros(3), np.zeros(2)])
    far = kl_metrics([np.full(2, -2e3)], [np.zeros(2)])
    assert "kl/k3" not in far and far["kl/k1"] == -2000.0 and far["kl/unequal_tokens"] == 2


def test_metrics_of_a_loss_do_not_depend_on_order(rng):
    data = [datum(rng) for _ in range(99)]
    logps = [d.loss_fn_inputs["logprobs"] + rng.normal(0, 0.3, N).astype(np.float32) for d in data]
    found = []
    for order in (range(99), range(98, -1, -1)):
        losses = LossSum("ppo", None, data)
        for i in order:
            losses.d_logp(i, logps[i])
        found.append(losses.metrics())
    assert found[0] == found[1] and found[0]["ppo/ratio_max"] > 1


def test_a_sequences_values_do_not_depend_on_where_its_arrays_lie(rng):
    one = datum(rng)
    p = one.loss_fn_inputs["logprobs"] + np.float32(0.1)
    expected = token_loss("ppo", one, p, LossConfig())
    for offset in range(16):
        shifted = np.concatenate([np.zeros(offset, np.float32), p])[offset:]
        again = token_loss("ppo", one, shifted, LossConfig())
        assert again.d_logp.tobytes() == expected.d_logp.tobytes()
        assert again.ratio.tobytes() == expected.ratio.tobytes()


def test_what_is_never_read_does_not_sort_data_either(rng):
    one = datum(rng)
    for name in ("logprobs", "advantages", "ref_logprobs", "target_tokens"):
        for at, same in ((0, True), (1, False)):
            other = one.loss_fn_inputs[name].copy()
            other[at] += 1
            key = Datum(one.tokens, {**one.loss_fn_inputs, name: other}).key()
            assert (key == one.key()) == same


def test_a_datum_keeps_its_own_copy():
    tokens, targets, weights = np.arange(3), np.arange(3), np.ones(3, np.float32)
    one = Datum(tokens, {"target_tokens": targets, "weights": weights})
    tokens[:], targets[:], weights[:] = 7, 7, 7
    assert one.tokens.tolist() == one.targets.tolist() == [0, 1, 2]
    assert one.weights.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        one.weights[0] = 5
