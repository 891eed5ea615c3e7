"""Feed-forward layers: dense SwiGLU, and the mixture of experts with a sigmoid router.

    l = x W_g (f32);  s = sigmoid(l);  chosen = top-k of (s + bias)
    g_e = scale * s_e / (sum of the chosen s + 1e-20)
    y = sum over chosen e of g_e SwiGLU_e(x)  +  SwiGLU_shared(x)

The bias enters the selection only. The shared expert is neither gated nor scaled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from glm_jax.config import GlmConfig
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.primitives import swiglu
from glm_jax.params import ZEROS, Buffer, Normal, declare
from pallas_kernels.grouped_matmul import GroupPlan, plan_groups
from pallas_kernels.top_k_select import mask_to_ids, select_mask


class Routes(NamedTuple):
    """Where each token goes."""

    logits_RE: Float[Array, "R E"]
    ids_Rk: Int[Array, "R k"]
    """Chosen experts, ascending."""
    gates_Rk: Float[Array, "R k"]
    """Combination weights in the same order, normalised and scaled, f32."""


class Mlp(nnx.Module):
    """`W_down (silu(x W_gate) * (x W_up))`."""

    def __init__(self, cfg: GlmConfig, width: int, *, stack: tuple[int, ...] = ()):
        d, init, dtype = cfg.hidden_size, Normal(cfg.initializer_range), cfg.dtype
        self.gate_up = declare((d, 2, width), ("embed", "gate_up", "mlp"), init, dtype, stack=stack)
        self.down = declare((width, d), ("mlp", "embed"), init, dtype, stack=stack)

    def __call__(self, ops: Arithmetic, x_RD: Float[Array, "R D"]) -> Float[Array, "R D"]:
        """Applies the layer to each row."""
        hidden_RF = swiglu(ops.matmul(x_RD, self.gate_up[...]))
        return ops.matmul(hidden_RF, self.down[...])


class Moe(nnx.Module):
    """Router, routed experts and shared expert of one (stack of) layers."""

    def __init__(self, cfg: GlmConfig, *, stack: tuple[int, ...] = ()):
        self.cfg = cfg
        d, e, f = cfg.hidden_size, cfg.n_routed_experts, cfg.moe_intermediate_size
        init, dtype = Normal(cfg.initializer_range), cfg.dtype
        # f32 whatever the model's dtype: a bf16 bias collapses hundreds of values to a few.
        self.router = declare((d, e), ("embed", "experts"), init, "float32", stack=stack)
        self.router_bias = declare((e,), ("experts",), ZEROS, "float32", stack=stack, kind=Buffer)
        self.gate_up = declare(
            (e, d, 2, f),
            ("experts", "embed", "gate_up", "expert_mlp"),
            init,
            dtype,
            stack=stack,
        )
        self.down = declare((e, f, d), ("experts", "expert_mlp", "embed"), init, dtype, stack=stack)
        self.shared = Mlp(cfg, f * cfg.n_shared_experts, stack=stack)

    def route(self, ops: Arithmetic, x_RD: Float[Array, "R D"]) -> Routes:
        """Chooses experts in f32; ties go to the lower expert."""
        cfg = self.cfg
        logits_RE = ops.matmul(x_RD.astype(jnp.float32), self.router[...])
        score_RE = jax.nn.sigmoid(logits_RE)
        biased_RE = jax.lax.stop_gradient(score_RE) + self.router_bias[...][None, :]
        ids_Rk = mask_to_ids(
            select_mask(biased_RE, cfg.num_experts_per_tok), cfg.num_experts_per_tok
        )
        return Routes(logits_RE, ids_Rk, self._gates(score_RE, ids_Rk))

    def gates(
        self, ops: Arithmetic, x_RD: Float[Array, "R D"], ids_Rk: Int[Array, "R k"]
    ) -> Float[Array, "R k"]:
        """Combination weights of experts already chosen: what of the router has a gradient."""
        logits_RE = ops.matmul(x_RD.astype(jnp.float32), self.router[...])
        return self._gates(jax.nn.sigmoid(logits_RE), ids_Rk)

    def _gates(self, score_RE: Array, ids_Rk: Array) -> Array:
        cfg = self.cfg
        chosen_Rk = jnp.take_along_axis(score_RE, ids_Rk, axis=1)
        # Slot after slot: the order is spelled out, so that no compiler chooses it.
        total_R = chosen_Rk[:, 0]
        for slot in range(1, cfg.num_experts_per_tok):
            total_R = total_R + chosen_Rk[:, slot]
        return chosen_Rk / (total_R + 1e-20)[:, None] * cfg.routed_scaling_factor

    def experts(
        self,
        ops: Arithmetic,
        x_RD: Float[Array, "R D"],
        ids_Rk: Int[Array, "R k"],
        used_R: Bool[Array, "R"],
        in_stack: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "R k D"]:
        """Output of each chosen expert for each used row, unweighted.

        Rows are sorted by expert and pass through tiles of fixed shape: a row's output depends on
        the row and the expert alone. Rows that are not used cost nothing and give zeros.

        Args:
            ops: the arithmetic.
            x_RD: normed inputs.
            ids_Rk: chosen experts.
            used_R: rows that count.
            in_stack: with weights of several layers, `[L, E, ...]`: which layer's to use.
        """
        (n_rows, k), n_experts = ids_Rk.shape, self.cfg.n_routed_experts
        tile = ops.expert_tile(n_rows * k // n_experts)
        order = sort_by_expert(ids_Rk, used_R, n_experts, tile)
        plan, width = order.plan, x_RD.shape[1]
        if in_stack is not None:
            plan = plan.among(in_stack * n_experts)
        # L layers of E experts are L * E groups, of which the plan names one layer's.
        gate_up_EDG = self.gate_up[...].reshape(-1, width, 2 * self.cfg.moe_intermediate_size)
        down_EFD = self.down[...].reshape(-1, self.cfg.moe_intermediate_size, width)
        sorted_MD = dispatch(x_RD, order.order_M, order.place_M, tile)
        pre_MG = ops.grouped_matmul(sorted_MD, gate_up_EDG, plan, tile)
        hidden_MF = swiglu(pre_MG.reshape(pre_MG.shape[0], 2, -1))
        out_MD = ops.grouped_matmul(hidden_MF, down_EFD, plan, tile)
        out_RkD = collect(out_MD, order.order_M, order.place_M).reshape(n_rows, k, -1)
        return jnp.where(used_R[:, None, None], out_RkD, jnp.zeros((), out_RkD.dtype))

    def combine(
        self,
        ops: Arithmetic,
        x_RD: Float[Array, "R D"],
        expert_RkD: Float[Array, "R k D"],
        gates_Rk: Float[Array, "R k"],
    ) -> Float[Array, "R D"]:
        """Weighted sum in slot order, shared expert last, in f32 with one rounding."""
        total_RD = jnp.zeros(x_RD.shape, jnp.float32)
        for slot in range(self.cfg.num_experts_per_tok):
            part_RD = expert_RkD[:, slot].astype(jnp.float32)
            total_RD = total_RD + gates_Rk[:, slot, None] * part_RD
        return (total_RD + self.shared(ops, x_RD).astype(jnp.float32)).astype(x_RD.dtype)


class Sorted(NamedTuple):
    """(Row, slot) pairs by expert; within one in the order of the rows."""

    order_M: Int[Array, "M"]
    """Pair of each place: row * k + slot. Unused rows stand behind every expert."""
    place_M: Int[Array, "M"]
    """Place of each pair."""
    plan: GroupPlan


def sort_by_expert(
    ids_Rk: Int[Array, "R k"], used_R: Bool[Array, "R"], n_experts: int, tile: int
) -> Sorted:
    """Sorts the used rows' pairs by expert and plans their tiles."""
    # Unused rows sort behind every expert, where no tile reaches.
    flat_M = jnp.where(used_R[:, None], ids_Rk, n_experts).reshape(-1)
    order_M = jnp.argsort(flat_M, stable=True)
    counts_E = jnp.sum(
        flat_M[:, None] == jnp.arange(n_experts, dtype=flat_M.dtype)[None, :],
        axis=0,
        dtype=jnp.int32,
    )
    place_M = jnp.zeros_like(order_M)
    place_M = place_M.at[order_M].set(jnp.arange(order_M.shape[0], dtype=order_M.dtype))
    return Sorted(order_M, place_M, plan_groups(counts_E, order_M.shape[0], tile))


def take_rows(
    x_RD: Float[Array, "R D"], order_M: Int[Array, "M"], k: int, spare: int
) -> Float[Array, "M2 D"]:
    """Rows in expert order, each once a slot, and `spare` more of no meaning."""
    return x_RD[jnp.concatenate([order_M // k, jnp.zeros(spare, order_M.dtype)])]


def add_slots(
    d_MD: Float[Array, "M2 D"], place_M: Int[Array, "M"], n_rows: int
) -> Float[Array, "R D"]:
    """Sum of each row's slots, in slot order, in f32 with one rounding."""
    d_RkD = d_MD[place_M].reshape(n_rows, -1, d_MD.shape[1]).astype(jnp.float32)
    total_RD = d_RkD[:, 0]
    for slot in range(1, d_RkD.shape[1]):
        total_RD = total_RD + d_RkD[:, slot]
    return total_RD.astype(d_MD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch(
    x_RD: Float[Array, "R D"], order_M: Int[Array, "M"], place_M: Int[Array, "M"], spare: int
) -> Float[Array, "M2 D"]:
    """Rows in expert order, each once a slot, and `spare` more of no meaning.

    `order_M` lists (row, slot) pairs by expert; `place_M` is its inverse. The transpose adds a
    row's slots in slot order: a gather and k - 1 additions, no scatter.
    """
    return take_rows(x_RD, order_M, order_M.shape[0] // x_RD.shape[0], spare)


def _dispatch_fwd(x_RD, order_M, place_M, spare):
    return dispatch(x_RD, order_M, place_M, spare), (place_M, x_RD.shape[0])


def _dispatch_bwd(spare, saved, d_MD):
    place_M, n_rows = saved
    d_RD = add_slots(d_MD, place_M, n_rows)
    return d_RD, _no_gradient(place_M), _no_gradient(place_M)


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def collect(
    y_MD: Float[Array, "M2 D"], order_M: Int[Array, "M"], place_M: Int[Array, "M"]
) -> Float[Array, "M D"]:
    """Rows back in (row, slot) order. A permutation: its transpose is the inverse gather."""
    return y_MD[place_M]


def _collect_fwd(y_MD, order_M, place_M):
    return collect(y_MD, order_M, place_M), (order_M, y_MD.shape[0])


def _collect_bwd(saved, d_MD):
    order_M, total = saved
    spare = jnp.zeros((total - order_M.shape[0], d_MD.shape[1]), d_MD.dtype)
    d_sorted = jnp.concatenate([d_MD[order_M], spare])
    return d_sorted, _no_gradient(order_M), _no_gradient(order_M)


collect.defvjp(_collect_fwd, _collect_bwd)


def _no_gradient(integers: Array) -> np.ndarray:
    return np.zeros(integers.shape, jax.dtypes.float0)
