"""`run`: a recipe from start to report."""

import contextlib
import dataclasses
from typing import Any

from glm_jax.checkpoint.hub_save import save_hub
from glm_jax.config import GlmConfig
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from rl.display import Display
from rl.envs import Environment
from rl.loop import Loop, Trainer
from rl.memory import require_memory
from rl.recipe import Recipe
from rl.report import write_report
from rl.run_directory import EVALUATION, METRICS, RunDirectory
from rl.trainer import Trainer as GlmTrainer
from rl.trainer import TrainerConfig
from rl.weight_sync import MemorySync, StoreSync, Sync
from serving.engine import Engine as GlmEngine


def run(recipe: Recipe, *, environment: Environment | None = None) -> dict[str, Any]:
    """Trains, or takes up a run that was killed, and writes its report.

    Args:
        recipe: what to do, and where (`recipe.out`).
        environment: another task than the recipe's Countdown.

    Returns:
        The summary: digests, rewards before and after, the place of the report.

    Raises:
        GlmError: the place belongs to another run, a value is not finite, or the environment fails.
    """
    environment = environment or recipe.environment()
    contract = contract_of(recipe)
    require_memory(recipe, GlmModel.abstract(config_of(recipe, environment)), contract)
    with (
        Display() as display,
        contextlib.closing(RunDirectory(recipe, contract, display.note)) as directory,
    ):
        display.note(f"{directory.path}: numerics {contract.mode}, contract {contract.digest}")
        if directory.summary is None:
            trainer = make_trainer(recipe, environment, contract)
            engine = make_engine(recipe, environment, trainer, contract, display)
            sync = make_sync(recipe, trainer, engine, directory)
            Loop(recipe, environment, trainer, engine, directory, display, sync).run()
            save_hub(trainer.model, directory.path / "model", overwrite=True, contract=contract)
            environment.tokenizer.save(directory.path / "model")
            directory.write_summary(summarise(directory, trainer, contract))
        else:
            display.note("the run is complete; only its report is written again")
        report = write_report(directory.path)
    return {**(directory.summary or {}), "out": str(directory.path), "report": str(report)}


def contract_of(recipe: Recipe) -> NumericsContract:
    """The numerics of trainer and engine."""
    return NumericsContract(**dataclasses.asdict(recipe.numerics))


def config_of(recipe: Recipe, environment: Environment) -> GlmConfig:
    """The model's config; its vocabulary is the environment's tokenizer's."""
    return recipe.config(environment.tokenizer.vocab_size, environment.stop_ids)


def make_trainer(
    recipe: Recipe, environment: Environment, contract: NumericsContract
) -> GlmTrainer:
    """A trainer of random weights that follow from the seed."""
    most_data = max(recipe.sft.batch_size, recipe.rl.problems * recipe.rl.group_size)
    sizes = TrainerConfig(
        rows_per_batch=recipe.trainer.rows_per_batch,
        max_length=recipe.engine.capacity,
        max_chunks=most_data * -(-recipe.engine.capacity // contract.token_leaf),
    )
    model = GlmModel.init(config_of(recipe, environment), seed=recipe.seed)
    return GlmTrainer(model, contract=contract, config=sizes)


def make_engine(
    recipe: Recipe,
    environment: Environment,
    trainer: Trainer,
    contract: NumericsContract,
    display: Display,
) -> GlmEngine:
    """An engine that starts with the trainer's weights."""
    return GlmEngine(
        trainer.model,
        contract=contract,
        tokenizer=environment.tokenizer,
        version=trainer.version,
        on_compile=display.note,
        **dataclasses.asdict(recipe.engine),
    )


def make_sync(
    recipe: Recipe, trainer: GlmTrainer, engine: GlmEngine, directory: RunDirectory
) -> Sync:
    """How the engine comes by the trainer's weights, which it has already at the start."""
    if recipe.sync == "memory":
        return MemorySync(engine)
    return StoreSync(engine, trainer.model, directory.path / "weights")


def summarise(
    directory: RunDirectory, trainer: Trainer, contract: NumericsContract
) -> dict[str, Any]:
    """What a reader wants to know first."""
    evaluations, steps = directory.records(EVALUATION), directory.records(METRICS)
    summary: dict[str, Any] = {
        "weights/digest": trainer.digest(),
        "numerics/mode": contract.mode,
        "numerics/digest": contract.digest,
        "steps": len(steps),
        "unequal_tokens": sum(step.get("kl/unequal_tokens", 0) for step in steps),
        "tokens": sum(step["tokens/generated"] for step in steps),
        "evaluation": evaluations,
    }
    if steps:
        summary["reward/first"], summary["reward/last"] = (
            steps[0]["reward/mean"],
            steps[-1]["reward/mean"],
        )
    return summary
