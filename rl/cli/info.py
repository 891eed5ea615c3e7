"""`glm-jax info`: what a model consists of and what it costs, without making an array of it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from glm_jax.config import GlmConfig
from glm_jax.config_fields import nearest
from glm_jax.errors import GlmError
from glm_jax.presets import PRESETS

if TYPE_CHECKING:  # importing it would import jax
    from glm_jax.sizes import CacheLayout, Sizes, Work

DEFAULT_CONTEXT = 131072
"""Tokens at which FLOPs are given, where the model takes as many."""

app = typer.Typer()


@app.command()
def info(
    model: Annotated[
        str,
        typer.Argument(help=f"{', '.join(PRESETS)}, a checkpoint's directory, or a config.json."),
    ],
    context: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens for FLOPs and cache; default {DEFAULT_CONTEXT}, or the model's maximum."
        ),
    ] = None,
    tree: Annotated[
        bool, typer.Option("--tree", help="List every parameter: shape, dtype, axes, bytes.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the same figures and every parameter.")
    ] = False,
) -> None:
    """Show a model's layers, parameters, bytes, cache and FLOPs. Nothing is allocated or loaded."""
    cfg = load_config(model)
    context = min(DEFAULT_CONTEXT, cfg.max_position_embeddings) if context is None else context

    from glm_jax.sizes import Sizes
    from rl.cli.info_text import print_info

    sizes = Sizes.of(cfg)
    figures = describe(sizes, model, context)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print_info(sizes, figures, tree)


def load_config(model: str) -> GlmConfig:
    """The config of a preset, of a checkpoint's directory, or in a config.json.

    A preset's name comes first; write `./tiny` for a directory of that name.

    Raises:
        GlmError: no such preset or path, or the config is unusable.
    """
    if model in PRESETS:
        return PRESETS[model]
    path = Path(model)
    if (model and path.exists()) or len(path.parts) > 1 or path.suffix == ".json":
        return GlmConfig.from_json(path)
    raise GlmError(
        f"model {model!r} is neither a preset nor a path: {nearest(model, PRESETS)}"
        f"give one of {', '.join(PRESETS)}, a checkpoint's directory or a config.json"
    )


def describe(sizes: "Sizes", model: str, context: int) -> dict[str, Any]:
    """All figures as JSON with stable keys: exact whole numbers, means rounded down.

    Raises:
        GlmError: `context` is not 1 to the model's maximum.
    """
    from glm_jax.model.layout import segments
    from glm_jax.sizes import cache_layout, fp8_cache_layout

    cfg = sizes.cfg
    layers = [
        {
            "pattern": [list(kind) for kind in x.pattern],
            "repeats": x.repeats,
            "first": x.first_layer,
        }
        for x in segments(cfg.layer_kinds)
    ]
    weights = sizes.bytes_by_dtype
    prefill = _flops(sizes.work(0, context))
    return {
        "model": model,
        "config": cfg.to_hf(),
        "segments": layers,
        "parameters": {
            "parts": [x._asdict() for x in sizes.parts],
            "main": sizes.main,
            "mtp": sizes.mtp,
            "stored": sizes.stored,
            "active_per_token": sizes.active,
            "router_bias_buffers": sizes.buffers,
        },
        "weight_bytes": {"by_dtype": weights, "total": sum(weights.values())},
        "cache": {
            "context": context,
            "max_context": cfg.max_position_embeddings,
            "model": {"dtype": cfg.dtype, **_cache(cfg, cache_layout(cfg), context)},
            "fp8": {"dtype": "float8_e4m3fn", **_cache(cfg, fp8_cache_layout(cfg), context)},
        },
        "flops": {
            "context": context,
            "decode_token": _flops(sizes.work(context - 1, 1)),
            "prefill": prefill,
            "prefill_mean_token": {key: total // context for key, total in prefill.items()},
        },
        "tensors": [
            {
                "name": x.name,
                "shape": list(x.shape),
                "dtype": x.dtype,
                "axes": list(x.axes),
                "trained": x.trained,
                "part": x.part,
                "elements": x.n_elements,
                "bytes": x.n_bytes,
            }
            for x in sizes.tensors
        ],
    }


def _cache(cfg: GlmConfig, layout: "CacheLayout", context: int) -> dict[str, int]:
    from glm_jax.sizes import cache_bytes

    token = cache_bytes(cfg, layout)
    return {
        "latent_bytes_per_layer": layout.latent,
        "index_bytes_per_full_layer": layout.index_key,
        "bytes_per_token": token,
        "bytes_at_context": token * context,
        "bytes_at_max_context": token * cfg.max_position_embeddings,
        "mtp_bytes_per_token": cfg.num_nextn_predict_layers * sum(layout),
    }


def _flops(work: "Work") -> dict[str, int]:
    return {
        "projections": work.projections,
        "absorption": work.absorption,
        "attention": work.attention,
        "indexer": work.indexer,
        "forward": work.forward,
        "training": work.training,
    }
