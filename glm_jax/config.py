"""`GlmConfig`: the sizes and constants of one GLM-5, GLM-5.1 or GLM-5.2 model."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from glm_jax.config_check import check
from glm_jax.config_fields import (
    FLOATS,
    IndexerType,
    MlpType,
    Problems,
    describe,
    nearest,
    report,
)
from glm_jax.config_hf import as_hf, foreign_model_type, resolve
from glm_jax.config_quantization import Fp8Quantization
from glm_jax.errors import GlmError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmConfig:
    """A checked, hashable config; the field names are those of the published config.json.

    Every field is resolved: layer kinds are spelt out per layer, whatever way the file gave them.
    Raises `GlmError` that lists every missing, mistyped or contradictory field.
    """

    # Widths and depth.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int

    # Latent attention (MLA).
    num_attention_heads: int
    num_key_value_heads: int  # nominal: every head has its own keys and values
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float

    # Indexer.
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[IndexerType, ...]
    index_share_for_mtp_iteration: bool = False

    # Mixture of experts.
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    mlp_layer_types: tuple[MlpType, ...]

    # Norms. Training and the serving engines use 1e-5 for the latent norms, transformers 1e-6.
    rms_norm_eps: float
    latent_norm_eps: float = 1e-5
    index_norm_eps: float = 1e-6

    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None

    # How the checkpoint stores its weights; None for plain BF16 or FP32 tensors.
    quantization_config: Fp8Quantization | None = None

    # Kept for the round trip, never used: `head_dim` is a decoy, and `indexer_types` above is
    # already what the next three say.
    head_dim: int | None = None
    index_topk_freq: int | None = None
    index_skip_topk_offset: int | None = None
    index_topk_pattern: str | None = None

    def __post_init__(self) -> None:
        values = _values(self)
        problems: Problems = {}
        check(values, problems)
        if problems:
            raise GlmError(report("GlmConfig", problems))
        for field in FLOATS:  # 8000000 and 8000000.0 are one value in JSON, and so here
            object.__setattr__(self, field, float(values[field]))

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the plain part and the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Cached values per token and layer (C): the latent and the one rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Scale of the attention scores, the same in absorbed form; there is no mscale."""
        return self.qk_head_dim**-0.5

    @property
    def layer_kinds(self) -> tuple[tuple[MlpType, IndexerType], ...]:
        """(mlp type, indexer type) of each layer, without the MTP layer (sparse and full)."""
        return tuple(zip(self.mlp_layer_types, self.indexer_types, strict=True))

    def with_overrides(self, **changes: Any) -> "GlmConfig":
        """A copy with some fields changed, checked anew. Raises `GlmError`, also on a bad name."""
        names = tuple(field.name for field in dataclasses.fields(self))
        problems = {
            name: describe(name, value, "is unknown", f"{nearest(name, names)}correct the name")
            for name, value in changes.items()
            if name not in names
        }
        values = {name: changes.get(name, getattr(self, name)) for name in names}
        return _build(values, problems, "GlmConfig")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> "GlmConfig":
        """Reads the keys of a config.json. `source` names the origin in errors.

        Raises `GlmError` for a foreign `model_type` (alone: the rest would be noise), else one
        that lists every unknown, missing, mistyped or contradictory key.
        """
        if foreign := foreign_model_type(raw):
            raise GlmError(f"{source}: {foreign}")
        problems: Problems = {}
        values = resolve(raw, problems)
        return _build(values, problems, source)

    @classmethod
    def from_json(cls, path: str | Path) -> "GlmConfig":
        """Reads a config.json, or the one in a checkpoint directory. Raises `GlmError`."""
        path = Path(path)
        if not path.exists():
            raise GlmError(f"{path}: no such file or directory; give a checkpoint's directory")
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise GlmError(
                f"{path}: the directory has no config.json; give the directory of a checkpoint"
            )
        try:
            raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_no_repeats)
        except OSError as error:
            raise GlmError(f"{file}: cannot be read ({error}); check its permissions") from error
        except (ValueError, RecursionError) as error:
            remedy = "copy the file again, correct it, or give a checkpoint's directory"
            raise GlmError(f"{file}: is not valid JSON ({error}); {remedy}") from error
        if not isinstance(raw, dict):
            kind = type(raw).__name__
            raise GlmError(f"{file}: holds a {kind}, not an object; give a model's config.json")
        return cls.from_hf(raw, source=str(file))

    def to_hf(self) -> dict[str, Any]:
        """A full config.json; `from_hf` of it gives this config back."""
        return as_hf(_values(self))

    def save_json(self, path: str | Path) -> Path:
        """Writes config.json to a file, or into an existing directory; returns the file."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        try:
            file.write_text(json.dumps(self.to_hf(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            remedy = "give a writable file or an existing directory"
            raise GlmError(f"{file}: cannot be written ({error}); {remedy}") from error
        return file


def _build(values: dict[str, Any], problems: Problems, source: str) -> GlmConfig:
    """The config of `values`, or a `GlmError` with what `problems` holds and what is wrong here."""
    check(values, problems)
    if problems:
        raise GlmError(report(source, problems))
    floats: dict[str, Any] = {field: float(values[field]) for field in FLOATS}
    return GlmConfig(**values | floats)


def _values(config: GlmConfig) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _no_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Python's reader keeps the last of two equal keys without a word; this one refuses."""
    out: dict[str, object] = {}
    for key, value in pairs:
        if key in out:
            raise GlmError(f"the key {key!r} is given twice: {out[key]!r} and {value!r}")
        out[key] = value
    return out
