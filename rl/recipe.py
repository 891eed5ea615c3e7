"""A run as data: frozen dataclasses, read from TOML, checked before any work."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from glm_jax.config import GlmConfig
from glm_jax.config_check import check
from glm_jax.config_fields import Problems, dense_first, describe, report
from glm_jax.errors import GlmError
from glm_jax.presets import preset
from rl.envs.countdown import Countdown
from rl.recipe_fields import bounded, build, flatten, read_overrides, read_toml, to_toml

Schedule = Literal["constant", "linear", "cosine"]

MANY = 2**20
"""More of anything in one step, or tokens in one sequence, is a mistake in the recipe."""
LAST_DEMONSTRATION = 2**30
"""Training problems from here on are for RL, those before it for the supervised start."""


@dataclasses.dataclass(frozen=True)
class ModelRecipe:
    """A GLM-5.2-shaped model; field names are those of config.json.

    The vocabulary is that of the environment.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    moe_intermediate_size: int = 32
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    q_lora_rank: int = 48
    kv_lora_rank: int = 32
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 16
    rope_theta: float = 10000.0
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 12
    indexer_types: tuple[str, ...] = ("full", "full", "shared")
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    initializer_range: float = 0.02
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class NumericsRecipe:
    """The constants of the contract that short sequences want smaller."""

    mode: Literal["pinned", "native"] = "pinned"
    key_block: int = bounded(16, least=1)
    """Tokens of a cache page."""
    token_leaf: int = bounded(32, least=1)
    """Tokens of a chunk in the tree that sums gradients."""


@dataclasses.dataclass(frozen=True)
class EnvRecipe:
    """Settings of Countdown."""

    numbers: int = 3
    largest: int = 9
    largest_target: int = 30
    operators: str = "+-*/"
    partial: float = 0.1


@dataclasses.dataclass(frozen=True)
class SftRecipe:
    """The supervised start on generated solutions."""

    steps: int = bounded(200, least=0)
    batch_size: int = bounded(64, least=1, most=MANY)
    learning_rate: float = bounded(3e-3, above=0)
    schedule: Schedule = "cosine"
    warmup_steps: int = bounded(10, least=0)
    grad_clip_norm: float = bounded(1.0, least=0)
    """0 does not clip."""


@dataclasses.dataclass(frozen=True)
class RlRecipe:
    """Policy gradients on rollouts, one optimiser step a rollout."""

    steps: int = bounded(25, least=0)
    problems: int = bounded(16, least=1, most=MANY)
    """Of a step."""
    group_size: int = bounded(8, least=2, most=MANY)
    """Samples of a problem."""
    advantage: Literal["grpo", "rloo", "dr_grpo"] = "grpo"
    loss: Literal["ppo", "importance_sampling", "cispo", "gspo", "dro"] = "ppo"
    clip_low_threshold: float = bounded(0.8, least=0)
    clip_high_threshold: float = bounded(1.2, least=1)
    """Absolute ratios."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over samples of their token means; sum over samples and max_tokens."""
    learning_rate: float = bounded(1e-3, above=0)
    schedule: Schedule = "constant"
    warmup_steps: int = bounded(0, least=0)
    grad_clip_norm: float = bounded(1.0, least=0)
    temperature: float = bounded(1.0, least=1e-3)
    top_p: float = bounded(1.0, above=0)
    top_k: int = bounded(0, least=0)
    min_p: float = bounded(0.0, least=0)
    max_tokens: int = bounded(12, least=1, most=MANY)
    """Of one action."""


@dataclasses.dataclass(frozen=True)
class EngineRecipe:
    """Sizes of the rollout engine."""

    n_slots: int = bounded(64, least=1, most=MANY)
    """Sequences at once."""
    capacity: int = bounded(32, least=1, most=MANY)
    """Tokens of a sequence, prompt included; the trainer's longest too."""
    n_rows: int = bounded(256, least=2, most=2 * MANY)
    """Tokens of a step with prompts."""
    n_steps: int = bounded(16, least=1, most=MANY)
    """Tokens drawn a sequence in one dispatch."""


@dataclasses.dataclass(frozen=True)
class TrainerRecipe:
    """Sizes of the trainer's programs."""

    rows_per_batch: int = bounded(1024, least=1, most=2 * MANY)
    """Tokens of a microbatch."""


@dataclasses.dataclass(frozen=True)
class EvalRecipe:
    """Greedy answers to held-out problems, before and after RL."""

    problems: int = bounded(128, least=1, most=MANY)


@dataclasses.dataclass(frozen=True)
class CheckpointRecipe:
    """When states are saved."""

    every: int = bounded(5, least=1)
    """RL steps; the supervised start saves ten times as rarely."""
    keep: int = bounded(2, least=1)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All of a run. Every bit of it follows from this, the machine and the versions."""

    seed: int = bounded(0, least=0)
    out: str = ""
    """The run's directory; by default `runs/NAME`, after the recipe's file, mode and seed."""
    sync: Literal["memory", "store"] = "memory"
    """How weights reach the engine: by reference, or as versions of a store in `out`."""
    model: ModelRecipe = ModelRecipe()
    numerics: NumericsRecipe = NumericsRecipe()
    env: EnvRecipe = EnvRecipe()
    sft: SftRecipe = SftRecipe()
    rl: RlRecipe = RlRecipe()
    engine: EngineRecipe = EngineRecipe()
    trainer: TrainerRecipe = TrainerRecipe()
    eval: EvalRecipe = EvalRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    def to_toml(self) -> str:
        """Every key with its value."""
        return to_toml(self)

    def environment(self) -> Countdown:
        """The environment. Raises `GlmError` for settings under which no problem exists."""
        return Countdown(seed=self.seed, **flatten(self.env))

    def config(self, vocab_size: int, eos: Sequence[int]) -> GlmConfig:
        """The model's config. Raises `GlmError` that names the fields that cannot be."""
        return preset("tiny").with_overrides(**_config_fields(self, vocab_size, eos))


def read_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, numerics: str | None = None
) -> Recipe:
    """Reads a recipe and checks all of it.

    Args:
        path: TOML file; keys that it lacks have the defaults above.
        overrides: `KEY=VALUE` words with dotted keys.
        numerics: `numerics.mode`, if given.

    Raises:
        GlmError: lists every key that is unknown, mistyped or impossible.
    """
    path = Path(path)
    flat = read_toml(path) | read_overrides(overrides)
    if numerics is not None:
        flat["numerics.mode"] = numerics
    problems: Problems = {}
    recipe = build(Recipe, flat, problems)
    if recipe is not None:
        _check(recipe, problems)
    if recipe is None or problems:
        raise GlmError(report(str(path), problems))
    return recipe if recipe.out else dataclasses.replace(recipe, out=_default_out(path, recipe))


FREE_KEYS = ("out", "sync", "checkpoint.every", "checkpoint.keep")
"""Keys that no number of a run depends on."""


def differing_keys(ours: Recipe, theirs: dict[str, Any]) -> list[str]:
    """What stands against going on with a stored run under this recipe, by keys.

    Places and checkpoints may differ, and a run may be made longer where the learning rate of its
    steps does not follow from their number.
    """
    a, b = flatten(ours), dict(theirs)
    names = [name for name in (a | b) if name not in FREE_KEYS and a.get(name) != b.get(name)]
    if a["rl.schedule"] == "constant" and a["rl.steps"] > b.get("rl.steps", a["rl.steps"]):
        names.remove("rl.steps")
    return [f"{name}: {a.get(name)!r} here, {b.get(name)!r} there" for name in names]


def _default_out(path: Path, recipe: Recipe) -> str:
    mode = "" if recipe.numerics.mode == "pinned" else f"-{recipe.numerics.mode}"
    seed = f"-seed{recipe.seed}" if recipe.seed else ""
    return f"runs/{path.stem}{mode}{seed}"


def _config_fields(recipe: Recipe, vocab_size: int, eos: Sequence[int]) -> dict[str, Any]:
    fields = vars(recipe.model).copy()
    n_layers, n_dense = fields["num_hidden_layers"], fields["first_k_dense_replace"]
    return fields | {
        "vocab_size": vocab_size,
        "eos_token_id": tuple(eos),
        "num_key_value_heads": fields["num_attention_heads"],
        "mlp_layer_types": dense_first(n_dense, n_layers),
        "max_position_embeddings": max(recipe.engine.capacity, fields["index_topk"]),
        "num_nextn_predict_layers": 0,
        "index_share_for_mtp_iteration": False,
        "index_topk_freq": None,
        "index_skip_topk_offset": None,
        "head_dim": None,
    }


def _check(recipe: Recipe, problems: Problems) -> None:
    """Adds what cannot work together, by the key to change."""

    def bad(key: str, reason: str, remedy: str) -> None:
        problems.setdefault(key, describe(key, flatten(recipe)[key], reason, remedy))

    engine, rl, sft = recipe.engine, recipe.rl, recipe.sft
    if rl.top_p > 1:
        bad("rl.top_p", "is above 1", "give at most 1 (1 keeps all)")
    if rl.min_p >= 1:
        bad("rl.min_p", "is not below 1", "give less than 1 (0 keeps all)")
    if rl.clip_low_threshold > 1:
        bad("rl.clip_low_threshold", "is above 1", "give an absolute ratio of at most 1")
    if recipe.seed >= 2**32:
        bad("seed", "is too large", "give less than 2^32")
    if engine.n_rows <= engine.n_slots:
        bad("engine.n_rows", f"is not above engine.n_slots = {engine.n_slots}", "raise it")
    if recipe.trainer.rows_per_batch < engine.capacity:
        remedy = "raise it, or lower the capacity"
        bad("trainer.rows_per_batch", f"is below engine.capacity = {engine.capacity}", remedy)
    if sft.steps * sft.batch_size > LAST_DEMONSTRATION:
        bad("sft.steps", f"are more than {LAST_DEMONSTRATION} demonstrations", "lower it")
    if rl.problems * rl.group_size > MANY:
        bad("rl.group_size", f"makes more than {MANY} samples a step", "lower it or rl.problems")
    for name, stage in (("sft", sft), ("rl", rl)):
        if stage.warmup_steps > stage.steps:
            bad(f"{name}.warmup_steps", f"is more than {name}.steps = {stage.steps}", "lower it")
    try:
        environment = recipe.environment()
    except GlmError as error:
        problems["env"] = f"env.{error}"
        return
    vocab_size = environment.tokenizer.vocab_size
    fields = vars(preset("tiny")) | _config_fields(recipe, vocab_size, environment.stop_ids)
    of_model: Problems = {}
    check(fields, of_model)
    problems |= {f"model.{name}": f"model.{text}" for name, text in of_model.items()}
    if rl.top_k > vocab_size:
        bad("rl.top_k", f"is more than the vocabulary, {vocab_size}", "lower it (0 keeps all)")
    if rl.max_tokens < (answer := environment.longest_answer):
        bad("rl.max_tokens", f"is below the longest solution, {answer}", "raise it")
    longest = environment.longest_prompt + max(rl.max_tokens, answer)
    if engine.capacity < longest:
        bad("engine.capacity", f"is below the {longest} tokens of a problem and answer", "raise it")
