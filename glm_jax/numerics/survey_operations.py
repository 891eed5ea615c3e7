"""The model's operations one by one, at the shapes of the `small` config, stock and pinned.

The pinned form is the model's own code. The stock form is what one would write without a contract;
where the model's code in native arithmetic is that, it is used.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.model.attention import attend_gathered, attend_masked
from glm_jax.model.indexer import index_scores
from glm_jax.model.moe import Moe
from glm_jax.numerics.arithmetic import Arithmetic, native
from glm_jax.numerics.primitives import layer_norm, rms_norm, rope, swiglu
from glm_jax.params import materialise
from glm_jax.presets import preset
from pallas_kernels.indexer_scores.xla import paged_scores
from pallas_kernels.top_k_select import mask_to_ids, select_mask

PRODUCTS = (
    ("attention output", 256, 256),
    ("head", 256, 512),
    ("gate and up", 256, 1024),
    ("q_b", 128, 384),
    ("kv_a", 256, 80),
    ("down", 512, 256),
    ("expert down", 128, 256),
    ("index head weights", 256, 4),
)
N_KEYS = 512
"""Keys of the context in operations that read keys; eight pages."""
SPREAD = 4
"""Operands are normal numbers times 2^-SPREAD to 2^SPREAD, so that the order of a sum shows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation on rows: the same rows, and the same weights, in two forms."""

    name: str
    rows: tuple[Array, ...]
    """Arrays `[M, ...]`."""
    shared: Any
    """Weights and keys, as arguments: a constant operand may compile to other code."""
    stock: Callable[..., Any]
    """`(shared, *rows)` to a pytree of `[M, ...]`."""
    pinned: Callable[..., Any]
    """`(ops, n_used, shared, *rows)`, likewise."""


def operations(dtype: str, n_rows: int) -> Iterator[Operation]:
    """All operations with `n_rows` rows; operands of `dtype` where the model's are."""
    draw = _Draw(dtype, n_rows)
    for name, k, n in PRODUCTS:
        yield _region(f"matmul {k}x{n} ({name})", (draw(k),), draw.shared(k, n), _matmul)
    router = draw.shared(256, 16, dtype="float32")
    rows = (draw(256, dtype="float32"),)
    yield _region("matmul 256x16 (router, f32)", rows, router, _matmul)
    for k, n in ((32, 64), (64, 32)):
        by_head = (draw(8, k),), draw.shared(8, k, n)
        yield _region(f"by head 8x {k}->{n}", *by_head, lambda ops, w, x: ops.matmul_by_head(x, w))
    yield from _vectors(draw)
    yield from _attention(draw)
    yield from _experts(draw)


class _Draw:
    """Random operands from one seeded stream."""

    def __init__(self, dtype: str, n_rows: int):
        self.dtype, self.n_rows, self.rng = dtype, n_rows, np.random.default_rng(0)

    def __call__(self, *shape: int, dtype: str | None = None) -> Array:
        """One entry a row."""
        return self.shared(self.n_rows, *shape, dtype=dtype)

    def shared(self, *shape: int, dtype: str | None = None) -> Array:
        scale = np.exp2(self.rng.integers(-SPREAD, SPREAD + 1, shape))
        return jnp.asarray(self.rng.standard_normal(shape) * scale, dtype or self.dtype)


def _region(
    name: str,
    rows: tuple[Array, ...],
    shared: Any,
    region: Callable,
    *,
    exponential: bool = False,
) -> Operation:
    """A region `(ops, shared, *rows)` of the model: stock is the same in native arithmetic."""

    def pinned(ops, n_used, shared, *rows):
        def part(*rows):
            return region(ops, shared, *rows)

        return ops.rows(part, n_used, *rows, exponential=exponential)

    return Operation(
        name=name,
        rows=rows,
        shared=shared,
        stock=lambda shared, *rows: region(native(), shared, *rows),
        pinned=pinned,
    )


def _matmul(ops: Arithmetic, w: Array, x: Array) -> Array:
    return ops.matmul(x, w)


def _vectors(draw: _Draw) -> Iterator[Operation]:
    """Sums of rows, what is made of them, and functions of single numbers."""
    gain, bias = draw.shared(256), draw.shared(256)
    wide = draw(256, dtype="float32")
    yield _region("sum of a row of 256", (wide,), (), lambda ops, _, x: ops.row_sum(x))
    yield _region("RMSNorm 256", (draw(256),), gain, lambda ops, g, x: rms_norm(ops, x, g, 1e-5))
    norm = (gain[:32], bias[:32])
    yield _region(
        "LayerNorm 32", (draw(32),), norm, lambda ops, s, x: layer_norm(ops, x, s[0], s[1], 1e-6)
    )
    scores = (draw(64, dtype="float32"),)
    softmax = _region("softmax of 64", scores, (), _softmax, exponential=True)
    yield dataclasses.replace(softmax, stock=lambda _, x: jax.nn.softmax(x, axis=-1))
    # Equal columns, as in the head, so that every vector is full.
    column = jnp.abs(draw(1, dtype="float32"))
    column = jnp.broadcast_to(column, (draw.n_rows, 8))
    for name, function in (("exp", jnp.exp), ("log", jnp.log)):
        first = _first_column(function)
        one = _region(f"{name} of a number a row", (column,), (), first, exponential=True)
        yield dataclasses.replace(one, stock=lambda _, x, f=function: f(x[:, 0]))
    angles = (draw(8, dtype="float32"), draw(8, dtype="float32"))
    yield _region("rope 8x16", (draw(8, 16), *angles), (), lambda ops, _, *args: rope(*args))
    gate_up = (draw(2, 128),)
    yield _region("SwiGLU 128", gate_up, (), lambda ops, _, x: swiglu(x), exponential=True)
    model = materialise(GlmModel(_two_layers(draw.dtype)), 0)
    targets = jnp.asarray(draw.rng.integers(0, 512, draw.n_rows), jnp.int32)
    yield Operation(
        name="log-probability of 512",
        rows=(draw(256), targets),
        shared=model,
        stock=_stock_logprob,
        pinned=lambda ops, n, model, x, t: score(model, ops, x, t, n).target_T,
    )


def _first_column(function: Callable) -> Callable:
    return lambda ops, _, x: function(x)[:, 0]


def _softmax(ops: Arithmetic, _: Any, x_RS: Array) -> Array:
    """As in `attend_gathered`."""
    peak_R1 = jnp.max(x_RS, axis=-1, keepdims=True)
    # Without a select between maximum and exp, XLA fuses them with the sum into one call of the
    # matrix library, whose exp is another and whose sum can be wrong (docs/numerics.md).
    weight_RS = jnp.exp(x_RS - jnp.where(jnp.isfinite(peak_R1), peak_R1, 0.0))
    return weight_RS / ops.row_sum(weight_RS)


def _stock_logprob(model: GlmModel, x_MD: Array, target_M: Array) -> Array:
    logprob_MV = jax.nn.log_softmax(model.logits(x_MD), axis=-1)
    return jnp.take_along_axis(logprob_MV, target_M[:, None], axis=1)[:, 0]


def _attention(draw: _Draw) -> Iterator[Operation]:
    """What reads keys. All rows are of one sequence, and after its `N_KEYS` keys."""
    n_rows, k, rng = draw.n_rows, 64, draw.rng
    ids = np.argsort(rng.random((n_rows, N_KEYS)), axis=1)[:, :k]
    ids_Mk = jnp.asarray(np.sort(ids, axis=1), jnp.int32)
    sizes = {"scale": 0.05, "rank": 64}

    def masked(keys_SC, query_MNC, ids_Mk):
        mask_MS = jnp.any(ids_Mk[:, :, None] == jnp.arange(N_KEYS)[None, None, :], axis=1)
        return attend_masked(query_MNC[None], keys_SC[None], mask_MS[None], **sizes)[0]

    def gathered(ops, keys_SC, query_RNC, ids_Rk):
        listed = jnp.ones(ids_Rk.shape, bool)
        return attend_gathered(ops, query_RNC, keys_SC[ids_Rk], listed, **sizes)

    rows = (draw(8, 80), ids_Mk)
    attend = _region(f"attention, {k} of {N_KEYS} keys", rows, draw.shared(N_KEYS, 80), gathered)
    yield dataclasses.replace(attend, stock=masked)

    n_pages = N_KEYS // 64
    pages = jnp.broadcast_to(jnp.arange(n_pages, dtype=jnp.int32), (n_rows, n_pages))
    last = jnp.full(n_rows, N_KEYS - 1, jnp.int32)
    index = _region(
        f"index scores of {N_KEYS} keys",
        (draw(4, 32), draw(4, dtype="float32"), pages, last),
        draw.shared(N_KEYS, 32),
        lambda ops, keys, q, w, pages, last: paged_scores(
            q, w, keys.reshape(1, n_pages, 64, 32), 0, pages, last
        ),
    )
    yield dataclasses.replace(index, stock=_stock_index)
    for what, width, chosen in (("keys", N_KEYS, k), ("experts", 16, 4)):
        scores = draw(width, dtype="float32")
        yield _top_k(f"top {chosen} of {width} {what}", scores, chosen)


def _stock_index(keys_SJ: Array, q_MIJ: Array, w_MI: Array, *_: Array) -> Array:
    all_MS = jnp.ones((1, q_MIJ.shape[0], keys_SJ.shape[0]), bool)
    return index_scores(q_MIJ[None], w_MI[None], keys_SJ[None], all_MS)[0]


def _top_k(name: str, scores_MS: Array, k: int) -> Operation:
    def stock(_, x):
        return jnp.sort(lax.top_k(x, k)[1], axis=1)

    both = _region(name, (scores_MS,), (), lambda ops, _, x: mask_to_ids(select_mask(x, k), k))
    return dataclasses.replace(both, stock=stock)


def _experts(draw: _Draw) -> Iterator[Operation]:
    """The mixture: 16 experts, 4 a row."""
    layer = materialise(Moe(_two_layers(draw.dtype)), 0)
    x = draw(256)
    n_rows, rng = draw.n_rows, draw.rng
    ids = np.sort(np.argsort(rng.random((n_rows, 16)), axis=1)[:, :4], axis=1)
    ids_Mk = jnp.asarray(ids, jnp.int32)
    gates_Mk = jnp.asarray(rng.random((n_rows, 4)), jnp.float32)

    def pinned(ops, n_used, layer, x_MD, ids_Mk):
        used_M = jnp.arange(x_MD.shape[0]) < n_used
        return layer.experts(ops, x_MD, ids_Mk, used_M)

    yield Operation(
        name="expert products, 4 a row",
        rows=(x, ids_Mk),
        shared=layer,
        stock=_stock_experts,
        pinned=pinned,
    )
    combine = _region(
        "combining the experts",
        (x, draw(4, 256), gates_Mk, ids_Mk),
        layer,
        lambda ops, layer, x, y, gates, ids: layer.combine(ops, x, y, gates),
    )
    yield dataclasses.replace(combine, stock=_stock_combine)
    name = "combining, stock by scatter-add"
    yield dataclasses.replace(combine, name=name, stock=_stock_scatter)


def _by_expert(ids_Mk: Array) -> tuple[Array, Array]:
    flat = ids_Mk.reshape(-1)
    counts_E = jnp.sum(flat[:, None] == jnp.arange(16)[None, :], axis=0, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True), counts_E


def _stock_experts(layer: Moe, x_MD: Array, ids_Mk: Array) -> Array:
    order, counts_E = _by_expert(ids_Mk)
    up = layer.gate_up[...].reshape(16, x_MD.shape[1], -1)
    rows = lax.ragged_dot(x_MD[order // 4], up, counts_E, preferred_element_type=jnp.float32)
    rows = swiglu(rows.astype(x_MD.dtype).reshape(rows.shape[0], 2, -1))
    rows = lax.ragged_dot(rows, layer.down[...], counts_E, preferred_element_type=jnp.float32)
    back = jnp.zeros(rows.shape, x_MD.dtype).at[order].set(rows.astype(x_MD.dtype))
    return back.reshape(x_MD.shape[0], 4, -1)


def _stock_combine(layer: Moe, x_MD: Array, y_MkD: Array, gates_Mk: Array, _: Array) -> Array:
    routed = jnp.einsum("mk,mkd->md", gates_Mk, y_MkD.astype(jnp.float32))
    return (routed + layer.shared(native(), x_MD).astype(jnp.float32)).astype(x_MD.dtype)


def _stock_scatter(layer: Moe, x_MD: Array, y_MkD: Array, gates_Mk: Array, ids_Mk: Array) -> Array:
    order, _ = _by_expert(ids_Mk)
    weighted = gates_Mk[:, :, None] * y_MkD.astype(jnp.float32)
    sorted_rows = weighted.reshape(-1, x_MD.shape[1])[order]
    routed = jax.ops.segment_sum(sorted_rows, order // 4, num_segments=x_MD.shape[0])
    return (routed + layer.shared(native(), x_MD).astype(jnp.float32)).astype(x_MD.dtype)


def _two_layers(dtype: str):
    return preset("small").with_overrides(
        num_hidden_layers=2,
        mlp_layer_types=("dense", "sparse"),
        indexer_types=("full", "full"),
        dtype=dtype,
    )
