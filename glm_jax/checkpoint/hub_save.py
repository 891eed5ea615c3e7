"""Writes a model in the hub's layout, and gives gradients and norms under the hub's names."""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from glm_jax.checkpoint.boxes import read_hub
from glm_jax.checkpoint.directories import replace_directory
from glm_jax.checkpoint.fp8 import SUFFIX, quantise_blocks, scale_shape
from glm_jax.checkpoint.hub_layout import HubTensor, hub_tensors, mtp_prefix, transformers_name
from glm_jax.checkpoint.numerics import write_contract_file
from glm_jax.checkpoint.safetensors_files import INDEX
from glm_jax.config import GlmConfig
from glm_jax.config_quantization import Fp8Quantization
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves


def save_hub(
    model: GlmModel,
    directory: str | Path,
    *,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
    fp8: bool = False,
    contract: NumericsContract | None = None,
) -> Path:
    """Writes config.json, shards of one tensor per expert, and their index.

    Each tensor keeps its dtype, so that a loaded BF16 checkpoint comes out with the same bytes. The
    f32 router goes back to bf16 where that loses nothing, and is stored in F32 where it would.
    One shard at a time is on the host. The directory appears complete or not at all: it is written
    beside its place, under a hidden name, and renamed.

    Args:
        model: arrays that this process can address.
        directory: must be absent or empty, unless `overwrite` (which replaces all of it).
        max_shard_bytes: upper bound of a shard's size; a larger tensor gets its own.
        overwrite: replace an existing checkpoint.
        fp8: quantise the matrices that the FP8 releases quantise.
        contract: the numerics that the weights were trained under; written to numerics.json.

    Raises:
        GlmError: the directory is in the way, or the model's arrays do not fit its config.
    """
    if not max_shard_bytes > 0:
        raise GlmError(f"max_shard_bytes: {max_shard_bytes} must be above 0; 5e9 is usual")
    cfg, values = model.cfg, _arrays(model)
    _check(model, values)
    shards = list(_plan(cfg, max_shard_bytes, fp8))
    config = cfg.with_overrides(quantization_config=Fp8Quantization() if fp8 else None)
    with replace_directory(Path(directory), overwrite=overwrite) as partial:
        weight_map, total = {}, 0
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            arrays = dict(_stored(cfg, shard, values, fp8))
            # Readers of the format ask for this entry; `pt` says matrices are [out, in].
            try:
                save_file(arrays, partial / file, metadata={"format": "pt"})
            except SafetensorError as error:  # what the library makes of a full disk, for one
                raise OSError(str(error)) from error
            weight_map |= dict.fromkeys(arrays, file)
            total += sum(array.nbytes for array in arrays.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config.save_json(partial)
        if contract is not None:
            write_contract_file(partial, contract)
    return Path(directory)


def to_hub(tree: Any, cfg: GlmConfig | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (hub name, array on the host) of a model, or of a state such as its gradient.

    One tensor at a time is built, in the layout `[out, in]`, in the dtype it has in the tree.
    Buffers may be absent, as they are from a gradient.

    Args:
        tree: a `GlmModel`, or an `nnx.State` with its paths.
        cfg: the model's config; needed for a state.
    """
    cfg, values = _config(tree, cfg), _arrays(tree)
    for tensor in _present(cfg, values):
        yield tensor.name, read_hub(tensor, values)


def transformers_norms(tree: Any, cfg: GlmConfig | None = None) -> dict[str, float]:
    """L2 norm of each part of a gradient by transformers' parameter name.

    There, the experts of a layer are fused, `kv_b_proj` joins both halves, and the MTP layer does
    not exist. Squares are summed in f32 on the device; only the sums come to the host.

    Args:
        tree: gradient with the model's paths (`nnx.State`), or a `GlmModel`.
        cfg: the model's config; needed for a state.
    """
    cfg, values = _config(tree, cfg), _arrays(tree)
    tensors = [t for t in _present(cfg, values) if not _is_mtp(cfg, t)]
    places = {piece.leaf: piece.places for tensor in tensors for piece in tensor.pieces}
    given = {leaf: values[leaf] for leaf in places}
    by_place = jax.device_get(_square_sums(given, tuple(places.items())))
    squares: dict[str, float] = {}
    for tensor in tensors:
        name = transformers_name(tensor.name)
        for piece in tensor.pieces:
            place = tuple(piece.box[axis][0] for axis in piece.places)
            squares[name] = squares.get(name, 0.0) + float(by_place[piece.leaf][place])
    return {name: float(np.sqrt(square)) for name, square in squares.items()}


@functools.partial(jax.jit, static_argnums=1)
def _square_sums(values, places):
    """Sum of squares of each leaf over all axes but those of its places."""
    out = {}
    for leaf, kept in places:
        summed = tuple(axis for axis in range(values[leaf].ndim) if axis not in kept)
        out[leaf] = jnp.sum(jnp.square(values[leaf].astype(jnp.float32)), axis=summed)
    return out


def _present(cfg: GlmConfig, values: Mapping[str, Any]) -> Iterator[HubTensor]:
    for tensor in hub_tensors(cfg):
        absent = [piece.leaf for piece in tensor.pieces if piece.leaf not in values]
        if not absent:
            yield tensor
        elif tensor.kind != "bias":
            raise GlmError(f"{tensor.name}: the tree has no leaf {absent[0]}; give the whole tree")


def _config(tree: Any, cfg: GlmConfig | None) -> GlmConfig:
    if cfg is None and not isinstance(tree, GlmModel):
        raise GlmError("cfg: a state does not know its config; pass cfg=model.cfg")
    return cfg or tree.cfg


def _arrays(tree: Any) -> dict[str, jax.Array]:
    return {path: variable.get_value() for path, variable in leaves(tree)}


def _check(model: GlmModel, values: dict[str, jax.Array]) -> None:
    for path, abstract in leaves(GlmModel.abstract(model.cfg)):
        value = values.get(path)
        if value is None or value.shape != abstract.shape or value.dtype != abstract.dtype:
            found = "missing" if value is None else f"{value.dtype} {value.shape}"
            raise GlmError(
                f"{path}: is {found}, the model's config demands {abstract.dtype} "
                f"{abstract.shape}; save the model with the config it was made with"
            )
        if not value.is_fully_addressable:
            remedy = "save with save_orbax, which writes from every process"
            raise GlmError(f"{path}: is spread over several processes; {remedy}")


def _is_mtp(cfg: GlmConfig, tensor: HubTensor) -> bool:
    return tensor.name.startswith(mtp_prefix(cfg))


def _plan(cfg: GlmConfig, limit: float, fp8: bool) -> Iterator[list[HubTensor]]:
    """Cuts the tensors into shards by an upper bound of their size, as names hold the count."""
    width = 2 if cfg.dtype == "bfloat16" else 4
    shard, total = [], 0
    for tensor in hub_tensors(cfg):
        size = math.prod(tensor.shape) * (width if tensor.kind == "weight" else 4)
        if fp8 and tensor.fp8:
            size = math.prod(tensor.shape) + 4 * math.prod(scale_shape(tensor.shape))
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard, total = [*shard, tensor], total + size
    yield shard


def _stored(
    cfg: GlmConfig, shard: list[HubTensor], values: Mapping[str, jax.Array], fp8: bool
) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in shard:
        array = read_hub(tensor, values)
        if fp8 and tensor.fp8:
            array, scale = quantise_blocks(array)
            yield tensor.name + SUFFIX, scale
        elif tensor.kind == "router" and cfg.dtype == "bfloat16":
            narrow = array.astype(ml_dtypes.bfloat16)
            array = narrow if np.array_equal(narrow.astype(np.float32), array) else array
        yield tensor.name, array
