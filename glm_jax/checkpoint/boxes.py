"""Moves boxes between hub tensors on the host and the shards of a leaf on the devices."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from glm_jax.checkpoint.fp8 import BLOCK
from glm_jax.checkpoint.hub_layout import HubTensor, Piece, Region
from glm_jax.checkpoint.safetensors_files import drop_pages
from glm_jax.errors import GlmError

STRIP_BYTES = 32 * 2**20
"""A larger piece goes to the device in strips: a transfer and a transposition each need a copy."""

SMALL_BYTES = 2**20
"""Shards up to this size are filled on the host: compiling the update would take longer."""


def checked_sharding(
    path: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.sharding.Sharding:
    """The sharding. Raises `GlmError` if it does not fit the leaf's shape."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        remedy = "give axes that divide it"
        raise GlmError(f"{path}: {sharding} does not fit {shape} ({error}); {remedy}") from error
    return sharding


class LeafBuffers:
    """One leaf's shards on this process's devices, filled piece by piece.

    Args:
        shape: the leaf's.
        dtype: the leaf's; all that is written is converted to it.
        sharding: as `checked_sharding` returned it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding):
        self.shape, self.sharding = shape, sharding
        size = sharding.shard_shape(shape)
        self._on_host = math.prod(size) * jnp.dtype(dtype).itemsize <= SMALL_BYTES
        # Devices with a copy of the same shard share what is read for it.
        self._copies: dict[Region, dict[Any, Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            copies = self._copies.setdefault(_region(index, shape), {})
            if not self._on_host:
                copies[device] = jnp.zeros(size, dtype, device=device)
            else:
                copies[device] = next(iter(copies.values())) if copies else np.zeros(size, dtype)

    def write(self, piece: Piece, hub: np.ndarray, scale: np.ndarray | None = None) -> None:
        """Stores a piece of a hub tensor, or what of it lies in the local shards.

        Args:
            piece: the map.
            hub: the whole tensor, memory-mapped: only what is needed is read.
            scale: for FP8 weights, fp32 `[ceil(out/128), ceil(in/128)]`.
        """
        view = hub.reshape(piece.view)
        for shard, copies in self._copies.items():
            common = _common(piece.box, shard)
            if common is None:
                continue
            for strip in _strips(piece, common, hub.dtype.itemsize):
                part = piece.to_view(strip)
                raw = np.asarray(view[_slices(part)])
                scales = None if scale is None else (scale, *_scale_blocks(piece, part))
                at = _shifted(strip, shard)
                if self._on_host:
                    buffer = next(iter(copies.values()))
                    buffer[_slices(at)] = _block(np, raw, scales, piece.order, buffer.dtype)
                    continue
                starts = np.array([start for start, _ in at], np.int32)
                for device, buffer in copies.items():
                    sent = jax.device_put((raw, scales), device)
                    copies[device] = _write(buffer, starts, *sent, order=piece.order)
                # Without this, transfers queue up and the host holds all their sources at once.
                jax.block_until_ready(list(copies.values()))
                drop_pages(hub)

    def finish(self) -> jax.Array:
        """The filled leaf."""
        buffers = [
            jax.device_put(buffer, device) if self._on_host else buffer
            for copies in self._copies.values()
            for device, buffer in copies.items()
        ]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, buffers)


def read_hub(tensor: HubTensor, leaves: Mapping[str, jax.Array]) -> np.ndarray:
    """A hub tensor, put together on the host from leaves that this process can address."""
    dtype = leaves[tensor.pieces[0].leaf].dtype
    out = np.empty(tensor.shape, dtype)
    for piece in tensor.pieces:
        leaf, view = leaves[piece.leaf], out.reshape(piece.view)
        order = tuple(np.argsort(piece.order).tolist())
        for shard in leaf.addressable_shards:
            common = _common(piece.box, own := _region(shard.index, leaf.shape))
            if shard.replica_id != 0 or common is None:
                continue
            at = _shifted(common, own)
            if shard.data.nbytes <= SMALL_BYTES:
                block = np.asarray(shard.data)[_slices(at)].transpose(order)
            else:
                starts = np.array([start for start, _ in at], np.int32)
                sizes = tuple(stop - start for start, stop in at)
                block = np.asarray(_read(shard.data, starts, sizes=sizes, order=order))
            view[_slices(piece.to_view(common))] = block
    return out


@functools.partial(jax.jit, static_argnames="order", donate_argnums=0)
def _write(buffer, starts, raw, scales, *, order):
    block = _block(jnp, raw, scales, order, buffer.dtype)
    return lax.dynamic_update_slice(buffer, block, tuple(starts))


def _block(xp: Any, raw: Any, scales: Any, order: tuple[int, ...], dtype: Any) -> Any:
    """What goes into the leaf, from a part of the view; `xp` is numpy or jax.numpy."""
    if scales is not None:
        scale, rows, columns = scales
        factor = scale[rows][:, columns]
        raw = raw.astype(xp.float32) * factor.reshape(raw.shape)
    return raw.transpose(order).astype(dtype)


@functools.partial(jax.jit, static_argnames=("sizes", "order"))
def _read(buffer, starts, *, sizes, order):
    return lax.dynamic_slice(buffer, tuple(starts), sizes).transpose(order)


def _scale_blocks(piece: Piece, part: Region) -> tuple[np.ndarray, np.ndarray]:
    """Block number of each row and column of a part of the view."""

    def blocks(first: int, last: int) -> np.ndarray:
        widths, slices = piece.view[first:last], _slices(part[first:last])
        number = np.arange(np.prod(widths, dtype=np.int64), dtype=np.int32).reshape(widths)
        return number[slices].reshape(-1) // BLOCK

    return blocks(0, piece.rows), blocks(piece.rows, len(piece.view))


def _strips(piece: Piece, region: Region, itemsize: int) -> Iterator[Region]:
    """Cuts a region of the leaf along the outermost axis of the hub tensor that can be cut."""
    sizes = [stop - start for start, stop in region]
    wide = [axis for axis in range(len(piece.order)) if sizes[piece.order.index(axis)] > 1]
    axis = piece.order.index(wide[0]) if wide else 0
    start, stop = region[axis]
    step = max(1, STRIP_BYTES * sizes[axis] // (itemsize * int(np.prod(sizes, dtype=np.int64))))
    for first in range(start, stop, step):
        yield (*region[:axis], (first, min(first + step, stop)), *region[axis + 1 :])


def _common(a: Region, b: Region) -> Region | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _shifted(region: Region, origin: Region) -> Region:
    pairs = zip(region, origin, strict=True)
    return tuple((start - shift, stop - shift) for (start, stop), (shift, _) in pairs)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def _region(index: Any, shape: tuple[int, ...]) -> Region:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
