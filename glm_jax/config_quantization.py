"""The `quantization_config` block of an FP8 checkpoint's config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from glm_jax.config_fields import Problems, describe, nearest

_BLOCK = "quantization_config"

# The one layout that can be read. The last two keys are always written; the others may be absent.
_WANTED: dict[str, object] = {
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_REQUIRED = ("quant_method", "weight_block_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Quantization:
    """How an FP8 checkpoint is stored: e4m3 weights with one fp32 scale per 128 x 128 block.

    `modules_to_not_convert` is kept for the round trip only. The published list names a tensor
    that does not exist, so a loader goes by the presence of a scale tensor instead.
    """

    modules_to_not_convert: tuple[str, ...] = ()

    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Rows and columns that share one scale."""
        return (128, 128)

    def to_hf(self) -> dict[str, Any]:
        """The block as config.json holds it."""
        return {**_WANTED, "modules_to_not_convert": list(self.modules_to_not_convert)}


def read_quantization(raw: object, problems: Problems) -> Fp8Quantization | None:
    """Reads the block; None when the checkpoint is not quantised or the block is unusable."""

    def bad(key: str, value: object, reason: str, remedy: str) -> None:
        field = f"{_BLOCK}.{key}" if key else _BLOCK
        problems[field] = describe(field, value, reason, remedy)

    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        bad("", raw, "must be an object", "give the object of an FP8 release, or null")
        return None
    method = raw.get("quant_method")
    if method != "fp8":  # the other keys belong to that method and are not worth a line each
        remedy = "only 'fp8' can be read: use the BF16 or the FP8 release of the model"
        bad("quant_method", method, "is not supported", remedy)
        return None
    valid = (*_WANTED, "modules_to_not_convert")
    for key in raw.keys() - set(valid):
        bad(key, raw[key], "is unknown", f"{nearest(str(key), valid)}correct or remove it")
    for key, wanted in _WANTED.items():
        found = raw.get(key)
        if found != wanted and (found is not None or key in _REQUIRED):
            remedy = f"only {wanted!r} can be read: use the BF16 or the FP8 release of the model"
            bad(key, found, "is not supported", remedy)
    names = raw.get("modules_to_not_convert")
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        bad("modules_to_not_convert", names, "must be a list of names", "correct or remove it")
        return None
    return Fp8Quantization(modules_to_not_convert=tuple(names))
