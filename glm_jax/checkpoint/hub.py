"""Loads a checkpoint in the hub's layout: streaming, straight to the devices that need it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from glm_jax.checkpoint.boxes import LeafBuffers, checked_sharding
from glm_jax.checkpoint.hub_check import Source, match
from glm_jax.checkpoint.hub_save import save_hub
from glm_jax.checkpoint.numerics import compare_contracts, read_contract_file
from glm_jax.checkpoint.problems import Problems
from glm_jax.checkpoint.safetensors_files import open_files
from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves

__all__ = ["Shardings", "load_hub", "save_hub"]

Shardings = Callable[[str, nnx.Variable], jax.sharding.Sharding]
"""(dotted path of a leaf, its abstract variable) to the leaf's sharding."""


def load_hub(
    directory: str | Path,
    cfg: GlmConfig | None = None,
    *,
    shardings: Shardings | None = None,
    dtype: str | None = None,
    mtp: bool = True,
    progress: bool | None = None,
    contract: NumericsContract | None = None,
    **overrides: Any,
) -> GlmModel:
    """Loads a BF16, F32 or FP8 checkpoint; FP8 weights are dequantised on the way.

    Names, shapes and dtypes are checked before anything is allocated. Each tensor is then read,
    transposed on the device and put into its place in the (stacked) leaf; only what the devices of
    this process hold is read. On the host there is never more than a strip of one tensor, beside
    the loaded arrays themselves where the device is the CPU.

    Args:
        directory: holds config.json and model.safetensors, or shards and their index.
        cfg: used in place of the directory's config.json.
        shardings: where each leaf goes; by default all go to the first device.
        dtype: converts weights stored in another dtype; without it they must be in the config's.
        mtp: False leaves the MTP layer out, and sets `num_nextn_predict_layers` to 0.
        progress: shows a bar on stderr; by default only on a terminal.
        contract: the numerics that the weights will be used under; must be those of the
            directory's numerics.json. A directory without one is accepted, which is logged.
        **overrides: config fields to change, such as `latent_norm_eps`.

    Returns:
        The model, whose config has no `quantization_config`: its weights are plain arrays.

    Raises:
        GlmError: one that names every missing, surplus, misshapen, truncated or wrongly typed
            tensor, or what is wrong with the directory, the config or the contract. Nothing is
            returned then.
    """
    directory = Path(directory)
    if directory.is_file():
        raise GlmError(f"{directory}: is a file; give the directory of a checkpoint")
    if not directory.is_dir():
        raise GlmError(f"{directory}: no such directory; give the directory of a checkpoint")
    if contract is not None:
        compare_contracts(contract, read_contract_file(directory), str(directory))
    cfg = cfg or GlmConfig.from_json(directory)
    if dtype is not None:
        overrides["dtype"] = dtype
    if not mtp:
        overrides |= {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False}
    cfg = cfg.with_overrides(**{"quantization_config": None, **overrides})

    problems = Problems(directory)
    files = open_files(directory, problems)
    sources = match(cfg, files, problems, convert=dtype is not None, skip_mtp=not mtp)
    problems.raise_if_any()
    return _load(cfg, sources, shardings, progress)


def _load(
    cfg: GlmConfig, sources: list[Source], shardings: Shardings | None, progress: bool | None
) -> GlmModel:
    model = GlmModel.abstract(cfg)
    # All shardings are checked before the first array is allocated.
    places = place_leaves(model, shardings)
    buffers = {
        path: LeafBuffers(abstract.shape, abstract.dtype, places[path])
        for path, abstract in leaves(model)
    }
    sources = sorted(sources, key=lambda source: (source.stored.file, source.stored.offset))
    for source in _tracked(sources, progress):
        values = source.stored.map()
        scale = None if source.scale is None else np.array(source.scale.map())
        for piece in source.tensor.pieces:
            buffers[piece.leaf].write(piece, values, scale)
    return with_leaves(model, {path: buffer.finish() for path, buffer in buffers.items()})


def place_leaves(
    abstract: GlmModel, shardings: Shardings | None
) -> dict[str, jax.sharding.Sharding]:
    """The sharding of each leaf, by default the first device. Raises `GlmError` if one is unfit."""
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return {
        path: checked_sharding(path, leaf.shape, shardings(path, leaf) if shardings else first)
        for path, leaf in leaves(abstract)
    }


def with_leaves(abstract: GlmModel, arrays: dict[str, jax.Array]) -> GlmModel:
    """An abstract model with an array for each of its leaves, by dotted path."""
    graphdef, state = nnx.split(abstract)
    for path, variable in leaves(state):
        variable.set_value(arrays[path])
    return nnx.merge(graphdef, state)


def _tracked(sources: list[Source], progress: bool | None) -> Iterable[Source]:
    show = sys.stderr.isatty() if progress is None else progress
    return _with_bar(sources) if show else sources


def _with_bar(sources: list[Source]) -> Iterator[Source]:
    columns = (
        TextColumn("loading"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("loading", total=sum(source.stored.n_bytes for source in sources))
        for source in sources:
            yield source
            bar.advance(task, source.stored.n_bytes)
