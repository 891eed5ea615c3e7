"""Each mistake often made in this model breaks parity, by about as much as it did elsewhere.

The figures beside the cases are the largest change of a logit that the mistake made in another
implementation, on this same checkpoint. Everything runs op by op (`disable_jit`): compiling thirty
mutants would take minutes, and nothing traced before can hide a replaced function. Loops of the
kernels would be slow that way; `plain_kernels` puts their definitions in NumPy in their place.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax import forward
from glm_jax.checkpoint.hub import load_hub
from glm_jax.config import GlmConfig
from glm_jax.model import GlmModel, attention, indexer, moe, select
from glm_jax.model.attention import Attention
from glm_jax.model.block import Block
from glm_jax.model.moe import Moe
from glm_jax.model.select import select_keys
from glm_jax.numerics import primitives
from glm_jax.params import leaves
from glm_jax.parity import ParityReport, Reference, check_model, passes
from glm_jax.parity.names import Part
from glm_jax.parity.report import MAX_ABS
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.top_k_select.reference import select_ids_reference

DATA = Path(__file__).resolve().parents[1] / "data" / "glm52_tiny"

TOLERANCES = 1000
"""A mistake moves a logit by more than this many tolerances."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A checkpoint and its reference; mistakes are made in copies of `model`."""

    model: GlmModel
    reference: Reference

    def check(self, model: GlmModel | None = None, part: Part = "prefill") -> ParityReport:
        with jax.disable_jit():
            return check_model(
                model or self.model, self.reference, parts=(part,), forms=("masked",)
            )

    def with_config(self, **changes) -> GlmModel:
        """The same arrays under another config."""
        cfg = self.model.cfg.with_overrides(**changes)
        return nnx.merge(nnx.split(GlmModel.abstract(cfg))[0], nnx.split(self.model)[1])

    def with_arrays(self, name: str, change: Callable[[jax.Array], jax.Array]) -> GlmModel:
        """The same model with every parameter of that name changed."""
        graphdef, state = nnx.split(self.model)
        state = jax.tree.map(lambda x: x, state)
        found = [variable for path, variable in leaves(state) if path.split(".")[-1] == name]
        assert found
        for variable in found:
            variable.set_value(change(variable[...]))
        return nnx.merge(graphdef, state)


@pytest.fixture(scope="module")
def subject() -> Subject:
    reference = Reference.load(DATA / "reference.npz")
    model = load_hub(DATA, dtype="float32", latent_norm_eps=reference.latent_norm_eps)
    return Subject(model, reference)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch) -> None:
    """Selection and experts without loops."""

    def select_mask(scores_TS, k):
        mask_TS = np.zeros(scores_TS.shape, bool)
        np.put_along_axis(mask_TS, select_ids_reference(np.asarray(scores_TS), k), True, axis=1)
        return jnp.asarray(mask_TS)

    def mask_to_ids(mask_TS, k):
        return jnp.asarray(np.nonzero(np.asarray(mask_TS))[1].reshape(-1, k).astype(np.int32))

    def experts(self, ops, x_RD, ids_Rk, used_R, in_stack=None):
        assert in_stack is None and np.asarray(used_R).all()
        ids_M = np.asarray(ids_Rk).reshape(-1)
        order_M, counts_E = np.argsort(ids_M), np.bincount(ids_M, minlength=self.router.shape[-1])
        gate_up_EDG = np.asarray(self.gate_up[...]).reshape(len(counts_E), x_RD.shape[1], -1)
        x_MD = np.asarray(x_RD)[order_M // ids_Rk.shape[1]]
        pre_MG = grouped_matmul_reference(x_MD, gate_up_EDG, counts_E).astype(np.float32)
        hidden_MF = np.asarray(primitives.swiglu(jnp.asarray(pre_MG).reshape(len(ids_M), 2, -1)))
        y_MD = np.empty(x_MD.shape, np.float32)
        y_MD[order_M] = grouped_matmul_reference(hidden_MF, np.asarray(self.down[...]), counts_E)
        return jnp.asarray(y_MD).reshape(*ids_Rk.shape, -1)

    monkeypatch.setattr(select, "select_mask", select_mask)
    monkeypatch.setattr(moe, "select_mask", select_mask)
    monkeypatch.setattr(moe, "mask_to_ids", mask_to_ids)
    monkeypatch.setattr(Moe, "experts", experts)


def assert_broken(measured: float | None, elsewhere: float) -> None:
    assert measured is not None and measured > TOLERANCES * MAX_ABS
    # Looser than what is seen (0.05): a mutant has no margin between its k-th and next score.
    assert measured == pytest.approx(elsewhere, abs=0.5), "another mistake than the one meant"


def half_split_rope(x, cos, sin):
    """Pairs (i, i + half) in place of (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    interleaved = jnp.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
    return primitives.rope(interleaved, cos, sin)


def test_unchanged_model_passes_op_by_op(subject):
    report = subject.check()
    assert report.ok and report.max_abs_logit_diff < 5e-5
    assert subject.check(part="mtp").ok


def test_1_main_rope_of_half_split_pairs(subject, monkeypatch):
    monkeypatch.setattr(attention, "rope", half_split_rope)
    assert_broken(subject.check().max_abs_logit_diff, 4.2)


@pytest.mark.parametrize("variant, elsewhere", [("half split", 5.0), ("last", 5.2), ("none", 6.0)])
def test_2_indexer_rope(subject, monkeypatch, variant, elsewhere):
    def last(x, width, angles):
        return jnp.concatenate(
            [x[..., :-width], primitives.rope(x[..., -width:], *angles)], axis=-1
        )

    if variant == "half split":
        monkeypatch.setattr(indexer, "rope", half_split_rope)
    else:
        wrong = {"last": last, "none": lambda x, width, angles: x}[variant]
        monkeypatch.setattr(indexer, "_rotate_first", wrong)
    report = subject.check()
    assert not report.index_sets_equal
    assert_broken(report.max_abs_logit_diff, elsewhere)


def test_3_no_relu_before_the_head_sum(subject, monkeypatch):
    monkeypatch.setattr(jax.nn, "relu", lambda x: x)
    report = subject.check()
    assert not report.index_sets_equal
    assert_broken(report.max_abs_logit_diff, 5.0)


def test_4_index_queries_of_the_latent_before_its_norm(subject, monkeypatch):
    project = Attention.project

    def wrong(self, ops, x_RD, angles):
        latent_RQ = ops.matmul(x_RD, self.q_a[...])
        return project(self, ops, x_RD, angles)._replace(query_latent_RQ=latent_RQ)

    monkeypatch.setattr(Attention, "project", wrong)
    report = subject.check()
    assert not report.index_sets_equal
    assert_broken(report.max_abs_logit_diff, 5.0)


def test_5_index_key_norm_as_rms_norm(subject, monkeypatch):
    wrong = lambda ops, x, gain, bias, eps: primitives.rms_norm(ops, x, gain, eps)
    monkeypatch.setattr(indexer, "layer_norm", wrong)
    report = subject.check()
    assert not report.index_sets_equal
    assert_broken(report.max_abs_logit_diff, 5.1)


def test_5_index_key_norm_with_the_eps_of_the_other_norms(subject):
    report = subject.check(subject.with_config(index_norm_eps=1e-5))
    assert not report.index_sets_equal
    assert_broken(report.max_abs_logit_diff, 3.5)


def test_6_latent_eps_of_serving_engines_against_transformers(subject):
    report = subject.check(subject.with_config(latent_norm_eps=1e-5))
    assert_broken(report.max_abs_logit_diff, 2.6)


@pytest.mark.parametrize("variant, elsewhere", [("nope", 3.9), ("cache", 2.8)])
def test_7_softmax_scale(subject, monkeypatch, variant, elsewhere):
    width = {"nope": lambda cfg: cfg.qk_nope_head_dim, "cache": lambda cfg: cfg.cache_width}
    wrong = property(lambda cfg: width[variant](cfg) ** -0.5)
    monkeypatch.setattr(GlmConfig, "softmax_scale", wrong)
    assert_broken(subject.check().max_abs_logit_diff, elsewhere)


def change_gates(monkeypatch, change) -> None:
    """Makes the router use `change(self, routes, scores of the chosen)` as combination weights."""
    route = Moe.route

    def wrong(self, ops, x_RD):
        routes = route(self, ops, x_RD)
        score_RE = jax.nn.sigmoid(routes.logits_RE)
        chosen_Rk = jnp.take_along_axis(score_RE, routes.ids_Rk, axis=1)
        return routes._replace(gates_Rk=change(self, routes, chosen_Rk))

    monkeypatch.setattr(Moe, "route", wrong)


def test_8_router_bias_in_the_weights(subject, monkeypatch):
    def with_bias(self, routes, chosen_Rk):
        chosen_Rk = chosen_Rk + self.router_bias[...][routes.ids_Rk]
        total_R1 = jnp.sum(chosen_Rk, axis=1, keepdims=True)
        return chosen_Rk / total_R1 * self.cfg.routed_scaling_factor

    change_gates(monkeypatch, with_bias)
    assert_broken(subject.check().max_abs_logit_diff, 2.0)


def test_8_no_router_bias(subject):
    report = subject.check(subject.with_arrays("router_bias", jnp.zeros_like))
    assert not report.routes_equal
    assert_broken(report.max_abs_logit_diff, 2.8)


def test_8_router_bias_in_bf16(subject):
    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    report = subject.check(subject.with_arrays("router_bias", rounded))
    assert not report.routes_equal
    assert_broken(report.max_abs_logit_diff, 1.7)


def test_9_shared_expert_scaled_like_the_routed_ones(subject, monkeypatch):
    combine = Moe.combine

    def wrong(self, ops, x_RD, expert_RkD, gates_Rk):
        surplus = self.cfg.routed_scaling_factor - 1.0
        return combine(self, ops, x_RD, expert_RkD, gates_Rk) + surplus * self.shared(ops, x_RD)

    monkeypatch.setattr(Moe, "combine", wrong)
    assert_broken(subject.check().max_abs_logit_diff, 3.8)


def test_9_router_weights_not_normalised(subject, monkeypatch):
    change_gates(monkeypatch, lambda self, _, chosen: chosen * self.cfg.routed_scaling_factor)
    assert_broken(subject.check().max_abs_logit_diff, 4.7)


def test_9_router_weights_not_scaled(subject):
    report = subject.check(subject.with_config(routed_scaling_factor=1.0))
    assert_broken(report.max_abs_logit_diff, 2.3)


def test_10_head_dim_as_rotated_width_does_not_fit(subject, monkeypatch):
    head_dim = subject.model.cfg.head_dim
    angles = primitives.rope_angles
    wrong = lambda positions, width, theta: angles(positions, head_dim, theta)
    monkeypatch.setattr(forward, "rope_angles", wrong)
    with pytest.raises(TypeError, match="incompatible shapes"):
        subject.check()


def test_10_frequencies_of_head_dim(subject, monkeypatch):
    head_dim = subject.model.cfg.head_dim
    angles = primitives.rope_angles

    def wrong(positions, width, theta):
        cos, sin = angles(positions, head_dim, theta)
        return cos[:, : width // 2], sin[:, : width // 2]

    monkeypatch.setattr(forward, "rope_angles", wrong)
    assert subject.check().max_abs_logit_diff > TOLERANCES * MAX_ABS


def mtp_logit_diff(report: ParityReport) -> float:
    return next(x.value for x in report.comparisons if x.name == "mtp.logits")


def test_11_mtp_takes_hidden_half_first(subject):
    report = subject.check(subject.with_arrays("join", lambda x: x[::-1]), part="mtp")
    assert_broken(mtp_logit_diff(report), 6.6)


def test_11_mtp_takes_hidden_before_the_final_norm(subject, monkeypatch):
    run, before_norm = passes.mtp, subject.reference.arrays["layer7.out"]
    wrong = lambda model, reference, form, hidden: run(model, reference, form, before_norm)
    monkeypatch.setattr(passes, "mtp", wrong)
    assert_broken(mtp_logit_diff(subject.check(part="mtp")), 2.1)


def patch_shared_layers(monkeypatch, wrong) -> None:
    """Makes shared layers attend the selection `wrong(block, full, stream, context, place)`.

    `full` lists (block, selection) of the full layers before it.
    """
    run, full = Block.__call__, []

    def replacement(self, stream, cache, context, place):
        if self.indexer is None:
            stream = stream._replace(selection=wrong(self, full, stream, context, place))
            return run(self, stream, cache, context, place)
        out = run(self, stream, cache, context, place)
        full.append((self, out[0].selection))
        return out

    monkeypatch.setattr(Block, "__call__", replacement)


def set_of_the_full_layer_before(block, full, stream, context, place):
    return full[-2][1]


def set_of_the_first_layer(block, full, stream, context, place):
    return full[0][1]


def every_key(block, full, stream, context, place):
    return context.causal_GRS


def own_set_of_the_source_indexer(block, full, stream, context, place):
    """The last full layer's indexer, run anew on the shared layer's input."""
    x_TD, _, projected, _ = block._project(stream, context)
    source, angles = full[-1][0].indexer, context.angles
    query = source.project(context.ops, x_TD, projected.query_latent_RQ, angles)
    return select_keys(block.cfg, context, query, query.key_RJ, place.index)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        set_of_the_full_layer_before,
        set_of_the_first_layer,
        every_key,
        own_set_of_the_source_indexer,
    ],
)
def test_12_shared_layers_with_another_index_set(subject, monkeypatch, wrong):
    patch_shared_layers(monkeypatch, wrong)
    report = subject.check()
    shared = {f"layer{i}.selected" for i in (3, 4, 5, 7)}
    assert shared <= {x.name for x in report.failures}
    assert not report.index_sets_equal
    assert report.max_abs_logit_diff > TOLERANCES * MAX_ABS


def test_12_shared_layers_share_attention_and_not_only_its_keys(subject, monkeypatch):
    output, of_full_layer = Block._output, []

    def wrong(self, mixed_TNK, residual_TD, context):
        y_TD, sum_TD, attended_TD = output(self, mixed_TNK, residual_TD, context)
        if self.indexer is not None:
            of_full_layer.append(attended_TD)
            return y_TD, sum_TD, attended_TD
        attended_TD, eps = of_full_layer[-1], self.cfg.rms_norm_eps
        gain_D = self.post_norm[...]
        pair = primitives.add_rms_norm(context.ops, residual_TD, attended_TD, gain_D, eps)
        return *pair, attended_TD

    monkeypatch.setattr(Block, "_output", wrong)
    report = subject.check()
    assert report.max_abs_logit_diff > TOLERANCES * MAX_ABS
