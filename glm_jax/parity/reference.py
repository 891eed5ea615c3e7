"""A reference file: the arrays another implementation computed for a checkpoint."""

import dataclasses
import json
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.parity.names import dtype_kinds, expected_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference:
    """Arrays by name, and what the `meta.json` beside them says about how they were made."""

    path: Path
    arrays: Mapping[str, np.ndarray]
    """All but `input_ids`."""
    ids_BS: Int[np.ndarray, "B S"]
    """Token ids; positions are 0 to S - 1 in every row."""
    latent_norm_eps: float | None
    """eps of the latent norms the reference ran with; None if `meta.json` does not say."""
    prefill: int
    """Tokens read at once before `logits_decode` goes on one by one (default: half of them)."""

    @classmethod
    def load(cls, path: str | Path) -> "Reference":
        """Reads `reference.npz` and the `meta.json` beside it, if there is one.

        Raises:
            GlmError: a file that is missing or is not what it should be.
        """
        path = Path(path)
        arrays = _read_arrays(path)
        ids = arrays.pop("input_ids", None)
        if ids is None or "logits" not in arrays:
            lacking = "input_ids" if ids is None else "logits"
            raise GlmError(f"{path}: has no array {lacking!r}; give the reference of a checkpoint")
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.shape[0] < 1 or ids.shape[1] < 2:
            raise GlmError(
                f"{path}: input_ids is {ids.dtype} {ids.shape}; it must be integers, "
                "[sequences, tokens], with at least one sequence of two tokens"
            )
        eps, prefill = _read_meta(path.parent / "meta.json", ids.shape[1])
        return cls(path=path, arrays=arrays, ids_BS=ids, latent_norm_eps=eps, prefill=prefill)

    def check_fits(self, cfg: GlmConfig) -> None:
        """Raises `GlmError` that lists every array that cannot belong to the checkpoint."""
        known = expected_shapes(cfg, *self.ids_BS.shape)
        problems = []
        largest = self.ids_BS.max()
        if largest >= cfg.vocab_size or self.ids_BS.min() < 0:
            problems.append(f"input_ids: {largest} is outside the vocabulary of {cfg.vocab_size}")
        for name, array in self.arrays.items():
            shape = () if name.startswith("gradnorm.") else known.get(name)
            if shape is None:
                problems.append(f"{name}: the checkpoint has nothing to compare with it")
            elif array.shape != shape:
                problems.append(f"{name}: shape {array.shape}, the checkpoint's is {shape}")
            elif array.dtype.kind not in dtype_kinds(name):
                problems.append(f"{name}: dtype {array.dtype}")
        layers = {name.partition(".")[0] for name in known if name.startswith("layer")}
        present = {name.partition(".")[0] for name in self.arrays}
        if present & layers and not layers <= present:
            lacking = ", ".join(sorted(layers - present, key=lambda x: int(x[len("layer") :])))
            problems.append(f"{lacking}: in the checkpoint, but not in the reference")
        if problems:
            raise GlmError(
                f"{self.path}: does not belong to the checkpoint ({len(problems)} problems); "
                "give the reference that was made from it:\n  " + "\n  ".join(problems)
            )


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if path.is_dir():
        raise GlmError(
            f"{path}: is a directory; give the reference.npz in it (the checkpoint's directory is "
            "--checkpoint)"
        )
    if not path.is_file():
        raise GlmError(f"{path}: no such file; give the reference.npz of the checkpoint")
    if path.read_bytes()[:2] not in (b"PK", b"\x93N"):
        raise GlmError(f"{path}: is no .npz file; give the reference.npz of the checkpoint")
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.lib.npyio.NpzFile):
                return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise GlmError(f"{path}: is not a readable .npz file ({error}); copy it again") from error
    raise GlmError(f"{path}: holds one array, not named ones; give a reference.npz")


def _read_meta(path: Path, n_tokens: int) -> tuple[float | None, int]:
    """Eps of the latent norms and length of the prefill, from `meta.json`."""
    if not path.is_file():
        return None, n_tokens // 2
    try:
        meta: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GlmError(f"{path}: is not valid JSON ({error}); copy it again") from error
    meta = meta if isinstance(meta, dict) else {}
    eps = meta.get("latent_norm_eps")
    if eps is not None and not (_is_number(eps) and 0 < eps < math.inf):
        raise GlmError(f"{path}: latent_norm_eps: {eps!r} is not a positive number; correct it")
    options = meta.get("options")
    prefill = options.get("prefill") if isinstance(options, dict) else None
    prefill = n_tokens // 2 if prefill is None else prefill
    if not (_is_number(prefill) and prefill == int(prefill) and 1 <= prefill < n_tokens):
        raise GlmError(
            f"{path}: options.prefill: {prefill!r} is not a number of tokens from 1 to "
            f"{n_tokens - 1} (the sequences have {n_tokens}); correct it"
        )
    return None if eps is None else float(eps), int(prefill)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
