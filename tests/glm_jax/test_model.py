"""The layers: shared selection, routing, dtypes, initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax.cache import LatentCache
from glm_jax.forward import forward
from glm_jax.model import GlmModel
from glm_jax.model.moe import Moe
from glm_jax.numerics.arithmetic import Arithmetic, native
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves, materialise
from tests.glm_jax.models import PINNED, SMALL, batch_of, ids, model_of, run

E, k, D = SMALL.n_routed_experts, SMALL.num_experts_per_tok, SMALL.hidden_size
OPS = native()


@jax.jit
def apply_moe(moe, x_RD):
    """Output and routes of the whole layer."""
    routes = moe.route(OPS, x_RD)
    expert_RkD = moe.experts(OPS, x_RD, routes.ids_Rk, jnp.ones(x_RD.shape[0], bool))
    return moe.combine(OPS, x_RD, expert_RkD, routes.gates_Rk), routes


def moe(**values) -> Moe:
    """The same drawn layer every time, with some parameters replaced, or fields of its config."""
    params = {name: values.pop(name) for name in ("router", "router_bias") if name in values}
    out = materialise(Moe(SMALL.with_overrides(**values)), 0)
    for name, value in params.items():
        getattr(out, name).set_value(jnp.asarray(value, jnp.float32))
    return out


@pytest.fixture
def x_RD(rng):
    return jnp.asarray(rng.standard_normal((9, D)), jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def test_shared_layers_use_the_selection_of_the_last_full_layer():
    taps = run(model_of(SMALL), batch_of(ids(2, 12))).taps
    selected = [np.asarray(taps[f"layer{i}"]["selected"]) for i in range(SMALL.num_hidden_layers)]
    source = 0
    for i, kind in enumerate(SMALL.indexer_types):
        if kind == "full":
            source = i
        np.testing.assert_array_equal(selected[i], selected[source])
        assert ("idx_scores" in taps[f"layer{i}"]) == (kind == "full")
    assert (selected[0] != selected[1]).any() and (selected[1] != selected[3]).any()


@pytest.mark.parametrize("gathered", [False, True])
def test_a_row_attends_all_keys_up_to_top_k_and_top_k_beyond(gathered):
    out = run(model_of(SMALL), batch_of(ids(2, 12)), gathered=gathered)
    selected = np.asarray(out.taps["layer3"]["selected"])
    count = np.sum(selected < 12 if gathered else selected, axis=-1).reshape(2, 12)
    expected = np.minimum(np.arange(1, 13), SMALL.index_topk)
    np.testing.assert_array_equal(count, np.stack([expected, expected]))


def test_router_ties_go_to_the_lowest_experts(x_RD):
    _, routes = apply_moe(moe(router=np.zeros((D, E))), x_RD)
    np.testing.assert_array_equal(routes.ids_Rk, np.tile(np.arange(k), (9, 1)))
    bias = np.where(np.arange(E) == 5, 1.0, 0.0)  # one ahead, the rest tied
    _, routes = apply_moe(moe(router=np.zeros((D, E)), router_bias=bias), x_RD)
    np.testing.assert_array_equal(routes.ids_Rk, np.tile([0, 1, 5], (9, 1)))


def test_router_bias_selects_but_does_not_weigh(x_RD):
    bias = np.where(np.isin(np.arange(E), [1, 4, 6]), 30.0, 0.0)
    _, plain = apply_moe(moe(), x_RD)
    _, routes = apply_moe(moe(router_bias=bias), x_RD)
    np.testing.assert_array_equal(routes.logits_RE, plain.logits_RE)
    np.testing.assert_array_equal(routes.ids_Rk, np.tile([1, 4, 6], (9, 1)))
    score_RE = sigmoid(routes.logits_RE)
    weight_Rk = score_RE[:, [1, 4, 6]]
    weight_Rk = SMALL.routed_scaling_factor * weight_Rk / weight_Rk.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routes.gates_Rk, weight_Rk, rtol=1e-6)


def test_an_offset_of_all_biases_changes_no_route(x_RD):
    _, plain = apply_moe(moe(), x_RD)
    _, offset = apply_moe(moe(router_bias=np.full(E, 8.0)), x_RD)
    np.testing.assert_array_equal(plain.ids_Rk, offset.ids_Rk)
    np.testing.assert_array_equal(plain.gates_Rk, offset.gates_Rk)


def test_no_gradient_reaches_the_router_bias_but_one_reaches_the_router(x_RD):
    layer = moe()
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params):
        return jnp.sum(apply_moe(nnx.merge(graphdef, params, rest), x_RD)[0] ** 2)

    gradients = dict(leaves(jax.jit(jax.grad(loss))(params)))
    assert "router_bias" not in gradients
    assert np.abs(np.asarray(gradients["router"][...])).max() > 0


def test_scale_multiplies_the_routed_part_only(x_RD):
    once, twice = moe(routed_scaling_factor=2.5), moe(routed_scaling_factor=5.0)
    shared_RD = once.shared(OPS, x_RD)
    one_RD, two_RD = apply_moe(once, x_RD)[0], apply_moe(twice, x_RD)[0]
    np.testing.assert_allclose(two_RD - shared_RD, 2 * (one_RD - shared_RD), atol=1e-5)
    assert np.abs(one_RD - shared_RD).max() > 0.01


def test_experts_are_combined_as_the_formula_says(x_RD):
    layer = moe()
    y_RD, routes = apply_moe(layer, x_RD)
    x, gate_up, down = (
        np.asarray(a, np.float64) for a in (x_RD, layer.gate_up[...], layer.down[...])
    )

    def swiglu(x_D, gate_up_D2F, down_FD):
        gate_F, up_F = np.einsum("d,dgf->gf", x_D, gate_up_D2F)
        return gate_F * sigmoid(gate_F) * up_F @ down_FD

    shared = [np.asarray(a[...], np.float64) for a in (layer.shared.gate_up, layer.shared.down)]
    for r, (chosen_k, gate_k) in enumerate(zip(routes.ids_Rk, routes.gates_Rk, strict=True)):
        parts = [
            float(g) * swiglu(x[r], gate_up[e], down[e])
            for e, g in zip(chosen_k, gate_k, strict=True)
        ]
        np.testing.assert_allclose(y_RD[r], sum(parts) + swiglu(x[r], *shared), atol=1e-5)


def test_unused_rows_reach_no_expert_and_change_no_other_row(x_RD):
    layer = moe()
    routes = layer.route(OPS, x_RD)
    used_R = jnp.arange(9) % 3 != 1
    dirty_RD = jnp.where(used_R[:, None], x_RD, jnp.nan)
    experts = jax.jit(lambda layer, *args: layer.experts(OPS, *args))
    out_RkD = experts(layer, dirty_RD, routes.ids_Rk, used_R)
    expected_RkD = experts(layer, x_RD, routes.ids_Rk, jnp.ones(9, bool))
    np.testing.assert_allclose(out_RkD[used_R], expected_RkD[used_R], atol=1e-6)
    assert not np.asarray(out_RkD[~used_R]).any()


def test_bf16_keeps_its_dtype_and_the_router_stays_f32():
    cfg = SMALL.with_overrides(dtype="bfloat16")
    cache = LatentCache.empty(cfg, 1, 8)
    assert cache.latent_LPsC.dtype == cache.index_MPsJ.dtype == jnp.bfloat16
    assert cache.cos_SW.dtype == cache.sin_SW.dtype == jnp.float32
    out = run(model_of(cfg), batch_of(ids(2, 12)))
    assert out.hidden_TD.dtype == jnp.bfloat16
    assert out.logits_TV.dtype == jnp.float32
    layer = out.taps["layer1"]
    f32 = {name for name, value in layer.items() if value.dtype == jnp.float32}
    assert f32 == {"router_logits", "router_weights", "idx_scores"}
    assert np.isfinite(np.asarray(out.logits_TV)).all()
    pinned = LatentCache.empty(cfg, 2, 12, contract=PINNED)
    taps = run(model_of(cfg), batch_of(ids(2, 12)), pinned).taps["layer1"]
    dtypes = {name: value.dtype for name, value in layer.items() if name != "idx_scores"}
    assert {name: value.dtype for name, value in taps.items()} == dtypes | {"selected": jnp.int32}
    # Rounding flips choices between near-equal keys and experts: compare rows where it did not.
    wide, narrow = run(model_of(SMALL), batch_of(ids(2, 12))).taps["layer0"], out.taps["layer0"]
    same_T = np.all(np.asarray(wide["selected"]) == narrow["selected"], axis=-1).reshape(-1)
    assert np.sum(same_T) > 12
    difference_TD = np.abs(np.asarray(wide["out"]) - np.asarray(narrow["out"], np.float32))
    assert 0 < difference_TD[same_T].max() < 0.03 * np.abs(np.asarray(wide["out"])).max()


@pytest.mark.parametrize("path", ["embed", "lm_head", "segments.1.blocks.0.attention.q_b"])
def test_a_parameter_of_another_dtype_is_an_error(path):
    graphdef, state = nnx.split(GlmModel.abstract(SMALL))
    for name, variable in leaves(state):
        dtype = "bfloat16" if name == path else variable.dtype
        variable.set_value(jax.ShapeDtypeStruct(variable.shape, dtype))
    model = nnx.merge(graphdef, state)

    def logits(model, batch):
        return model.logits(forward(model, batch).hidden_TD)

    with pytest.raises(TypeError, match=r"bfloat16.*cast one of them"):
        jax.eval_shape(logits, model, batch_of(ids(1, 4)))


def test_initial_weights_have_the_configured_width():
    for path, variable in leaves(model_of(SMALL)):
        values = np.asarray(variable[...])
        if path.endswith("norm") or path.endswith("norm_bias") or path.endswith("router_bias"):
            assert (values == (0.0 if path.endswith("bias") else 1.0)).all(), path
        else:
            assert 0.7 < values.std() / SMALL.initializer_range < 1.3, path


def routed(tile, exponential):
    """Routes of 1,024 rows in tiles of one size; 3 of 6 experts always leave a vector's tail."""
    cfg = SMALL.with_overrides(n_routed_experts=6, num_experts_per_tok=3)
    layer = materialise(Moe(cfg), 0)
    rng = np.random.default_rng(0)
    layer.router.set_value(jnp.asarray(rng.standard_normal(layer.router.shape) * 0.3, jnp.float32))
    x_RD = jnp.asarray(rng.standard_normal((1024, cfg.hidden_size)), jnp.float32)
    ops = Arithmetic(NumericsContract(row_tiles=(tile,)))

    @jax.jit
    def run(x_RD, n, n_rows):
        def part(i):
            return jax.lax.dynamic_slice_in_dim(x_RD, i * tile, tile, 0)

        def route(i):
            one = functools.partial(layer.route, ops)
            return ops.rows(one, n_rows, part(i), exponential=exponential)

        def body(i, out):
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
            return jax.tree.map(lambda a, b: put(a, b, i * tile), out, route(i))

        shapes = jax.eval_shape(route, 0)
        empty = jax.tree.map(lambda s: jnp.zeros((1024, *s.shape[1:]), s.dtype), shapes)
        return jax.lax.fori_loop(0, n, body, empty)

    return jax.device_get(run(x_RD, jnp.int32(1024 // tile), jnp.int32(tile)))


def test_routes_are_the_same_bits_in_tiles_of_every_size():
    whole, again = routed(64, True), routed(2, True)
    assert np.array_equal(again.ids_Rk, whole.ids_Rk)
    assert np.array_equal(again.gates_Rk.view(np.uint32), whole.gates_Rk.view(np.uint32))
    # The control: in 2 rows the exponential of the gates is all tail.
    tail = routed(2, False)
    assert not np.array_equal(tail.gates_Rk.view(np.uint32), whole.gates_Rk.view(np.uint32))
