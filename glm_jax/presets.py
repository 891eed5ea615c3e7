"""Named configs: the published models, and two small ones for benchmarks and tests."""

from types import MappingProxyType

from glm_jax.config import GlmConfig
from glm_jax.config_fields import dense_first, nearest
from glm_jax.config_hf import indexer_types_by_frequency
from glm_jax.errors import GlmError

# GLM-5.1 has the architecture and the config of GLM-5; only its training differs.
_GLM_5 = GlmConfig(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    num_hidden_layers=78,
    max_position_embeddings=202752,
    num_attention_heads=64,
    num_key_value_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    rope_theta=1e6,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    indexer_types=("full",) * 78,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    num_experts_per_tok=8,
    n_shared_experts=1,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
    mlp_layer_types=dense_first(3, 78),
    rms_norm_eps=1e-5,
    num_nextn_predict_layers=1,
    eos_token_id=(154820, 154827, 154829),
    pad_token_id=154820,
    head_dim=64,
)

# Index sets are shared by up to four layers, and the context grows to a million tokens.
_GLM_5_2 = _GLM_5.with_overrides(
    max_position_embeddings=1048576,
    rope_theta=8e6,
    indexer_types=indexer_types_by_frequency(78, 4, 3),
    index_topk_freq=4,
    index_skip_topk_offset=3,
    index_share_for_mtp_iteration=True,
    head_dim=192,
)

# For speed measurements on a CPU; no MTP layer, and its own pattern of shared layers.
_SMALL = _GLM_5_2.with_overrides(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    head_dim=16,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=64,
    index_share_for_mtp_iteration=False,
    n_routed_experts=16,
    num_experts_per_tok=4,
    first_k_dense_replace=1,
    mlp_layer_types=dense_first(1, 6),
    indexer_types=("full", "full", "shared", "shared", "full", "shared"),
    max_position_embeddings=2048,
    num_nextn_predict_layers=0,
    eos_token_id=(),
    pad_token_id=0,
)

# For tests: every kind of layer, an MTP layer, and selection that bites from 13 tokens on.
_TINY = _GLM_5_2.with_overrides(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,  # differs from the nope width, as in the published models
    head_dim=24,
    index_n_heads=8,
    index_head_dim=32,
    index_topk=12,
    n_routed_experts=16,
    num_experts_per_tok=4,
    mlp_layer_types=dense_first(3, 8),
    indexer_types=indexer_types_by_frequency(8, 4, 3),
    dtype="float32",
    eos_token_id=(0, 1, 2),
    pad_token_id=0,
)

# Two layers at the published widths of every product (heads, ranks, hidden, experts), with few
# heads and experts: what the arithmetic does at those widths can be checked on a laptop.
_WIDE = _GLM_5_2.with_overrides(
    vocab_size=2048,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    index_topk=64,
    n_routed_experts=4,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    mlp_layer_types=dense_first(1, 2),
    indexer_types=("full", "full"),
    max_position_embeddings=2048,
    num_nextn_predict_layers=0,
    index_share_for_mtp_iteration=False,
    eos_token_id=(),
    pad_token_id=0,
)

PRESETS = MappingProxyType(
    {
        "glm-5": _GLM_5,
        "glm-5.1": _GLM_5,
        "glm-5.2": _GLM_5_2,
        "wide": _WIDE,
        "small": _SMALL,
        "tiny": _TINY,
    }
)


def preset(name: str) -> GlmConfig:
    """The config called `name`. Raises `GlmError` that lists the names for an unknown one."""
    if name in PRESETS:
        return PRESETS[name]
    hint = nearest(name, PRESETS)
    raise GlmError(f"preset {name!r} is unknown: {hint}use one of {', '.join(PRESETS)}")
