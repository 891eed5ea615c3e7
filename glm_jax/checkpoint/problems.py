"""What is wrong with a checkpoint's files, gathered so that one error names everything."""

from pathlib import Path

from glm_jax.errors import GlmError

SHOWN = 20
"""Offenders listed of each kind before "and N more"."""

_REMEDIES = {
    "missing file": "copy the checkpoint again, all of it",
    "unreadable file": "copy it again, as a binary file",
    "surplus file": "remove it, or correct model.safetensors.index.json",
    "surplus bytes": "copy the file again",
    "truncated tensor": "copy the file again",
    "malformed entry": "the file was written wrongly: export the checkpoint again",
    "overlapping tensor": "the file was written wrongly: export the checkpoint again",
    "duplicate tensor": "keep one of the copies",
    "tensor not in its file": "correct model.safetensors.index.json or copy the file again",
    "tensor not in the index": "correct model.safetensors.index.json or copy it again",
    "missing tensor": "copy the checkpoint again, or correct config.json",
    "missing indexer": "correct indexer_types in config.json, or copy the checkpoint again",
    "missing MTP layer": "set num_nextn_predict_layers to 0, or pass mtp=False",
    "surplus tensor": "correct config.json (mtp=False declines an MTP layer), or remove the tensor",
    "misshapen tensor": "correct config.json, or take the checkpoint it belongs to",
    "wrong dtype": "export the checkpoint in the config's dtype, or pass dtype= to convert it",
    "wrong router bias": "take the original checkpoint: the values are lost at a lower precision",
    "FP8 weight without scale": "copy the checkpoint again, or export it again with its scales",
    "scale without FP8 weight": "remove the scale, or take the FP8 weight it belongs to",
    "wrong scale": "scales are F32, one for each 128 x 128 block of a matrix",
}


class Problems:
    """Offenders by kind; the kinds and what to do about each are listed above."""

    def __init__(self, source: Path):
        self.source = source
        self._found: dict[str, list[str]] = {}

    def add(self, kind: str, name: str, detail: str = "") -> None:
        """Notes an offender: a tensor or file, and what is wrong with it."""
        assert kind in _REMEDIES, kind
        self._found.setdefault(kind, []).append(f"{name} {detail}".rstrip())

    def raise_if_any(self) -> None:
        """Raises one `GlmError` that lists the offenders of every kind, in the order above."""
        if not self._found:
            return
        lines = [f"{self.source}: the checkpoint cannot be loaded, and nothing was loaded."]
        for kind, remedy in _REMEDIES.items():
            if names := self._found.get(kind):
                lines.append(f"  {kind} ({len(names)}): {remedy}")
                lines += [f"    {name}" for name in names[:SHOWN]]
                if len(names) > SHOWN:
                    lines.append(f"    ... and {len(names) - SHOWN} more")
        raise GlmError("\n".join(lines))
