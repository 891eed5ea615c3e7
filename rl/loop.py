"""A run: a supervised start on demonstrations, then policy gradients on rollouts."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from glm_jax.errors import GlmError
from rl.batches import counted, demonstration_data, rollout_data, rollout_metrics
from rl.datum import Datum
from rl.display import Display
from rl.envs import Demonstration, Environment
from rl.kl import kl_metrics
from rl.optimizer import AdamParams
from rl.recipe import LAST_DEMONSTRATION, Recipe
from rl.rollout import Generator, Rollout, roll_out
from rl.run_directory import DROPPED, EVALUATION, METRICS, SAMPLES, WARM_START, RunDirectory
from rl.schedule import learning_rate
from rl.weight_sync import MemorySync, Sync
from serving.engine import EngineStats, SamplingParams

FIRST_PROBLEM = LAST_DEMONSTRATION
"""Of RL, among the training problems."""

SFT_PHASE, RL_PHASE, EVAL_PHASE = range(3)
"""First numbers of the sampling seeds' keys."""

SHOWN_GROUPS, SHOWN_SAMPLES = 2, 2
"""Rollouts of each step that samples.jsonl keeps."""


class Engine(Generator, Protocol):
    """What a run needs of an engine."""

    def set_weights(self, model: Any, version: int) -> None:
        """Takes other weights, by reference."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Sums since the start."""
        ...


class Trainer(Protocol):
    """What a run needs of a trainer."""

    model: Any
    version: int

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: dict[str, Any] | None = None
    ) -> Any:
        """Adds gradients; returns log-probabilities and metrics."""
        ...

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Applies and clears them."""
        ...

    def digest(self) -> str:
        """Hash of the weights."""
        ...

    def save_state(self, directory: Any, more: dict[str, Any] | None = None) -> Any:
        """Writes a state that appears whole or not at all."""
        ...

    def load_state(self, directory: Any) -> dict[str, Any]:
        """Restores a state; returns `more`."""
        ...


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is: optimiser steps taken. All else follows from the recipe."""

    sft: int = 0
    rl: int = 0


class Loop:
    """The steps of a run. What it needs is handed in, so that any part can be another."""

    def __init__(
        self,
        recipe: Recipe,
        environment: Environment,
        trainer: Trainer,
        engine: Engine,
        directory: RunDirectory,
        display: Display,
        sync: Sync | None = None,
    ):
        """`sync` hands weights over; by reference if None."""
        self.sync: Sync = sync or MemorySync(engine)
        self.recipe, self.environment = recipe, environment
        self.trainer, self.engine = trainer, engine
        self.directory, self.display = directory, display
        self.progress = Progress()

    def run(self) -> None:
        """Runs to the end from the last whole checkpoint, or from the start.

        Raises:
            GlmError: a value that is not finite, or an environment that fails; the state of the
                last checkpoint stays.
        """
        self._restore()
        while self.progress.sft < self.recipe.sft.steps:
            self._named("supervised", self.progress.sft, self._sft_step)
        self.sync(self.trainer.model, self.trainer.version)
        if self.progress.rl == 0:
            self._evaluate_once()
        while self.progress.rl < self.recipe.rl.steps:
            self._named("RL", self.progress.rl, self._rl_step)
        self._evaluate_once()

    def _named(self, stage: str, step: int, take: Any) -> None:
        try:
            take()
        except GlmError as error:
            last = next(iter(self.directory.checkpoints()), None)
            kept = f"the last checkpoint is {last}" if last else "there is no checkpoint yet"
            raise GlmError(f"{stage} step {step + 1}: {error}; {kept}") from error

    def _restore(self) -> None:
        if (found := self.directory.restore(self.trainer.load_state)) is not None:
            self.progress = Progress(**found)
            self.display.note(
                f"resumed after {self.progress.sft} supervised and {self.progress.rl} RL steps"
            )
        sft, rl = self.progress.sft, self.progress.rl
        self.directory.keep(WARM_START, lambda record: record["step"] <= sft)
        for file in (METRICS, SAMPLES, DROPPED):
            self.directory.keep(file, lambda record: record["step"] <= rl)
        # What is measured before the first RL step is measured again unless that step is done.
        self.directory.keep(EVALUATION, lambda record: record["step"] <= rl and rl > 0)

    def _save(self) -> None:
        path = self.directory.checkpoint(self.progress.sft + self.progress.rl)
        self.trainer.save_state(path, dataclasses.asdict(self.progress))
        self.directory.prune(self.recipe.checkpoint.keep)

    def _sft_step(self) -> None:
        sft, step = self.recipe.sft, self.progress.sft
        began = time.perf_counter()
        first = step * sft.batch_size
        shown = [self._demonstration(first + i) for i in range(sft.batch_size)]
        output = self.trainer.forward_backward(demonstration_data(shown), "cross_entropy")
        rate = learning_rate(step, sft.steps, sft.learning_rate, sft.schedule, sft.warmup_steps)
        optim = self.trainer.optim_step(AdamParams(rate, grad_clip_norm=sft.grad_clip_norm))
        self.progress = Progress(step + 1, 0)
        record = {
            "step": step + 1,
            "loss": output.metrics["loss:sum"],
            **optim,
            "time/step": time.perf_counter() - began,
        }
        self.directory.append(WARM_START, record)
        self.display.warm_start(record, sft.steps)
        if step + 1 == sft.steps or (step + 1) % (10 * self.recipe.checkpoint.every) == 0:
            self._save()

    def _demonstration(self, index: int) -> Demonstration:
        try:
            return self.environment.demonstration(index)
        except Exception as error:  # a researcher's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise GlmError(f"environment: demonstration {index} raised {reason}") from error

    def _rl_step(self) -> None:
        rl, step = self.recipe.rl, self.progress.rl
        began, before = time.perf_counter(), self.engine.stats
        first = FIRST_PROBLEM + step * rl.problems
        rollout = roll_out(
            self.engine,
            self.environment,
            "train",
            range(first, first + rl.problems),
            self._sampling(rl.temperature),
            group_size=rl.group_size,
            seed=(self.recipe.seed, RL_PHASE, step),
        )
        for problem, reason in rollout.dropped.items():
            self.directory.append(DROPPED, {"step": step + 1, "problem": problem, "error": reason})
        if rollout.dropped:
            problem, reason = next(iter(rollout.dropped.items()))
            self.display.note(
                f"step {step + 1}: dropped {len(rollout.dropped)} of {rl.problems} groups; "
                f"problem {problem}: {reason}"
            )
        metrics = rollout_metrics(rollout)
        generated = time.perf_counter()
        metrics |= self._update(rollout, step)
        updated = time.perf_counter()
        stages = self.sync(self.trainer.model, self.trainer.version)
        synced = time.perf_counter()
        self.progress = Progress(self.progress.sft, step + 1)
        record = {
            "step": step + 1,
            **metrics,
            **_engine_metrics(self.engine.stats - before),
            "weights/version": self.trainer.version,
            "weights/digest": self.trainer.digest(),
            "time/generate": generated - began,
            "time/update": updated - generated,
            "time/sync": synced - updated,
            **{f"time/{stage}": seconds for stage, seconds in stages.items()},
            "time/step": time.perf_counter() - began,
        }
        self.directory.append(METRICS, record)
        for sample in self._shown(rollout):
            self.directory.append(SAMPLES, {"step": step + 1, **sample})
        self.display.step(record)
        if step + 1 == rl.steps or (step + 1) % self.recipe.checkpoint.every == 0:
            self._save()

    def _update(self, rollout: Rollout, step: int) -> dict[str, float]:
        """One optimiser step on a rollout; how the trainer's log-probabilities compare with it."""
        rl = self.recipe.rl
        data = rollout_data(
            rollout,
            advantage=rl.advantage,
            aggregation=rl.aggregation,
            max_tokens=rl.max_tokens,
            temperature=rl.temperature,
        )
        clips = {name: getattr(rl, name) for name in ("clip_low_threshold", "clip_high_threshold")}
        output = self.trainer.forward_backward(data, rl.loss, clips)
        sampled = counted(data, [datum.loss_fn_inputs["logprobs"] for datum in data])
        metrics = {"loss": output.metrics.pop("loss:sum"), **output.metrics}
        metrics |= kl_metrics(sampled, counted(data, output.logprobs))
        oldest = min(min(t.versions) for group in rollout.groups for t in group.trajectories)
        metrics["policy/versions_behind"] = self.trainer.version - oldest
        rate = learning_rate(step, rl.steps, rl.learning_rate, rl.schedule, rl.warmup_steps)
        return metrics | self.trainer.optim_step(AdamParams(rate, grad_clip_norm=rl.grad_clip_norm))

    def _evaluate_once(self) -> None:
        """Greedy answers to the held-out problems, unless this step has been evaluated."""
        step = self.progress.rl
        if any(record["step"] == step for record in self.directory.records(EVALUATION)):
            return
        began = time.perf_counter()
        rollout = roll_out(
            self.engine,
            self.environment,
            "eval",
            range(self.recipe.eval.problems),
            self._sampling(temperature=0.0),
            group_size=1,
            seed=(self.recipe.seed, EVAL_PHASE),
        )
        metrics = rollout_metrics(rollout)
        names = [name for name in metrics if name.startswith(("reward/", "env/", "length/"))]
        record = {"step": step, "problems": len(rollout.groups)}
        record |= {name: metrics[name] for name in names}
        record["time/evaluate"] = time.perf_counter() - began
        self.directory.append(EVALUATION, record)
        self.display.evaluation(record)

    def _sampling(self, temperature: float) -> SamplingParams:
        rl = self.recipe.rl
        filters = {"top_p": rl.top_p, "top_k": rl.top_k, "min_p": rl.min_p}
        return SamplingParams(
            max_tokens=rl.max_tokens,
            temperature=temperature,
            stop_ids=tuple(self.environment.stop_ids),
            **(filters if temperature > 0 else {}),
        )

    def _shown(self, rollout: Rollout) -> list[dict[str, Any]]:
        decode = self.environment.tokenizer.decode
        return [
            {
                "problem": group.problem,
                "prompt": decode(t.tokens[: t.n_prompt].tolist(), special=True),
                "completion": decode(t.tokens[t.n_prompt :].tolist(), special=True),
                "reward": t.reward,
            }
            for group in rollout.groups[:SHOWN_GROUPS]
            for t in group.trajectories[:SHOWN_SAMPLES]
        ]


def _engine_metrics(spent: EngineStats) -> dict[str, float]:
    return {f"engine/{name.removeprefix('n_')}": value for name, value in vars(spent).items()}
