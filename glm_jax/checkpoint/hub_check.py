"""Compares the tensors of a checkpoint's files with what its config demands."""

import dataclasses
import logging
import re

from glm_jax.checkpoint.fp8 import SUFFIX, scale_shape
from glm_jax.checkpoint.hub_layout import HubTensor, hub_tensors, mtp_prefix
from glm_jax.checkpoint.problems import Problems
from glm_jax.checkpoint.safetensors_files import HubFiles, StoredTensor
from glm_jax.config import GlmConfig

_LOG = logging.getLogger(__name__)

CODES = {"bfloat16": "BF16", "float32": "F32"}
"""The file's name of each dtype a config may have."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A tensor to load and where it is stored."""

    tensor: HubTensor
    stored: StoredTensor
    scale: StoredTensor | None
    """Given for FP8 weights."""


def match(
    cfg: GlmConfig, files: HubFiles, problems: Problems, *, convert: bool, skip_mtp: bool
) -> list[Source]:
    """Finds every tensor of the model; what is wrong goes into `problems`.

    Args:
        cfg: the config, with the dtype that the model will have.
        files: the tensors found.
        problems: gathers every offender by name.
        convert: accept weights stored in the other of BF16 and F32.
        skip_mtp: the MTP layer was declined, so its tensors are ignored.
    """
    wanted = {tensor.name: tensor for tensor in hub_tensors(cfg)}
    lacks_mtp = cfg.num_nextn_predict_layers > 0 and not _stores_mtp(cfg, files)
    if lacks_mtp:
        detail = f"is not stored, but num_nextn_predict_layers = {cfg.num_nextn_predict_layers}"
        problems.add("missing MTP layer", mtp_prefix(cfg) + "*", detail)
    codes = set(CODES.values()) if convert else {CODES[cfg.dtype]}
    _check_indexers(cfg, files, problems)
    sources = []
    for name, tensor in wanted.items():
        stored, scale = files.tensors.get(name), files.tensors.get(name + SUFFIX)
        if stored is None:
            # A layer or file that is reported as a whole needs no line for each tensor.
            told = name in files.reported or (lacks_mtp and name.startswith(mtp_prefix(cfg)))
            if not told:
                problems.add("missing tensor", name, f"{list(tensor.shape)}")
            continue
        if stored.shape != tensor.shape:
            detail = f"has shape {list(stored.shape)}, the config demands {list(tensor.shape)}"
            problems.add("misshapen tensor", name, detail)
        _check_dtype(tensor, stored, scale, codes, problems)
        sources.append(Source(tensor=tensor, stored=stored, scale=scale))
    _check_scales(wanted, files, problems)
    _check_surplus(cfg, wanted, files, problems, skip_mtp)
    return sources


def _check_dtype(
    tensor: HubTensor,
    stored: StoredTensor,
    scale: StoredTensor | None,
    codes: set[str],
    problems: Problems,
) -> None:
    name, code = tensor.name, stored.code
    if tensor.kind == "bias":
        if code != "F32":
            problems.add("wrong router bias", name, f"is {code}, must be F32")
    elif code == "F8_E4M3":
        if scale is None:
            problems.add("FP8 weight without scale", name, f"needs {name}{SUFFIX}")
    elif code not in (allowed := set(CODES.values()) if tensor.kind == "router" else codes):
        problems.add("wrong dtype", name, f"is {code}, expected {' or '.join(sorted(allowed))}")


def _check_scales(wanted: dict[str, HubTensor], files: HubFiles, problems: Problems) -> None:
    for name, scale in files.tensors.items():
        weight = name.removesuffix(SUFFIX)
        if weight == name or weight not in wanted:
            continue  # of no tensor of ours: surplus, if anything
        stored = files.tensors.get(weight)
        if stored is None or stored.code != "F8_E4M3":
            found = "is missing" if stored is None else f"is {stored.code}"
            problems.add("scale without FP8 weight", name, f"({weight} {found})")
        elif len(stored.shape) != 2:
            problems.add("wrong scale", name, f"{weight} is no matrix: {list(stored.shape)}")
        elif scale.code != "F32" or scale.shape != scale_shape(stored.shape):
            detail = f"is {scale.code} {list(scale.shape)}, expected F32"
            problems.add("wrong scale", name, f"{detail} {list(scale_shape(stored.shape))}")


def _check_surplus(
    cfg: GlmConfig,
    wanted: dict[str, HubTensor],
    files: HubFiles,
    problems: Problems,
    skip_mtp: bool,
) -> None:
    # Third-party conversions keep indexers on shared layers and the rotary tables; none is read.
    ignored = {"indexer tensors of shared layers": 0, "rotary tables": 0, "MTP tensors": 0}
    for name in files.tensors:
        if name.removesuffix(SUFFIX) in wanted or name in files.reported:
            continue
        if name.endswith("rotary_emb.inv_freq"):
            ignored["rotary tables"] += 1
        elif _on_shared_layer(cfg, name):
            ignored["indexer tensors of shared layers"] += 1
        elif skip_mtp and name.startswith(mtp_prefix(cfg)):
            ignored["MTP tensors"] += 1
        else:
            problems.add("surplus tensor", name, f"({files.tensors[name].file.name})")
    for what, count in ignored.items():
        if count:
            _LOG.warning("%s: ignored %d %s", problems.source, count, what)


def _on_shared_layer(cfg: GlmConfig, name: str) -> bool:
    found = _INDEXER.match(name)
    if found is None or (layer := int(found[1])) >= cfg.num_hidden_layers:
        return False
    return cfg.indexer_types[layer] == "shared"


def _check_indexers(cfg: GlmConfig, files: HubFiles, problems: Problems) -> None:
    """The full layers that are stored must have indexers."""
    names = files.tensors.keys() | files.reported
    stored = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    found = {int(match[1]) for name in names if (match := _INDEXER.match(name))}
    full = {layer for layer, kind in enumerate(cfg.indexer_types) if kind == "full"}
    if cfg.num_nextn_predict_layers:
        full.add(cfg.num_hidden_layers)
    for layer in sorted((full & stored) - found):
        problems.add("missing indexer", f"layer {layer}", "is a full layer")


def _stores_mtp(cfg: GlmConfig, files: HubFiles) -> bool:
    names = files.tensors.keys() | files.reported
    return any(name.startswith(mtp_prefix(cfg)) for name in names)
