"""The trainer: gradients accumulate over calls, one step applies them."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves
from glm_jax.training.backward import GradientState, trained
from rl import trainer_state
from rl.datum import Datum
from rl.losses import LossSum
from rl.microbatches import TrainerConfig, check_data, microbatches, n_chunks
from rl.optimizer import AdamParams, OptState, initial_state, update
from rl.trainer_programs import Programs

type Derivative = Callable[[int, np.ndarray], np.ndarray]
"""From the number of a datum and the log-probabilities of its targets to their derivatives."""


@dataclasses.dataclass(frozen=True)
class TrainOutput:
    """Result of `forward` and `forward_backward`."""

    loss_fn_outputs: list[dict[str, np.ndarray]]
    """Of each datum, in the given order: `logprobs` of its targets `[N]`."""
    metrics: dict[str, float]

    @property
    def logprobs(self) -> list[np.ndarray]:
        """Log-probabilities of the targets of each datum."""
        return [output["logprobs"] for output in self.loss_fn_outputs]


class Trainer:
    """Trains every parameter but the indexer, the router's bias and the draft layer.

    The log-probabilities come from the engine's forward. All data of a step are sorted by content
    and summed in a fixed tree, so that neither their order nor their cut in calls or microbatches
    changes a bit of a gradient. Masters and moments are f32; the model's arrays are the masters,
    rounded.
    """

    def __init__(
        self,
        model: GlmModel,
        *,
        contract: NumericsContract | None = None,
        config: TrainerConfig | None = None,
    ):
        """Makes a trainer that starts from `model` (which is not changed)."""
        self.contract = contract or NumericsContract()
        self.config = config or TrainerConfig()
        self.cfg, self.version, self.step = model.cfg, 0, 0
        self.model = model
        self._programs = Programs(model, self.contract, self.config.room(self.contract))
        self._opt = initial_state({p: x.astype(jnp.float32) for p, x in trained(model).items()})
        self._pending: list[tuple[Datum, np.ndarray]] = []
        self._sum: GradientState | None = None

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
    ) -> TrainOutput:
        """Log-probabilities of the targets, and the metrics of a loss if one is named.

        Raises:
            GlmError: bad data or settings.
        """
        losses = None if loss_fn is None else LossSum(loss_fn, loss_fn_config, data)
        derivative = losses.d_logp if losses else lambda i, logp: np.zeros_like(logp)
        logprobs, _, _ = self._pass(data, _by_content(data), derivative, backward=False)
        return _output(logprobs, losses.metrics() if losses else {})

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
    ) -> TrainOutput:
        """Adds the gradient of the loss, summed over tokens, to what has accumulated.

        Only the first call of a step goes backward at once. When another follows, `optim_step` goes
        over the data of all of them, in one order: a forward more, for bits that no cut changes.

        Raises:
            GlmError: bad data or settings, or a value that is not finite (named). What accumulated
                before stays.
        """
        losses = LossSum(loss_fn, loss_fn_config, data)
        self._require_room(data)
        first = not self._pending
        logprobs, d_logps, total = self._pass(
            data, _by_content(data), losses.d_logp, backward=first
        )
        self._add(data, d_logps, total)
        return _output(logprobs, losses.metrics())

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: Callable[[list[Array]], tuple[Array, dict[str, float]]],
    ) -> TrainOutput:
        """As `forward_backward`, with any JAX function of all log-probabilities.

        Args:
            data: sequences. Of their inputs, the targets and the distribution they were sampled
                from are read; weights only tell where the latter holds.
            loss_fn: from each datum's log-probabilities `[N]` to the loss and metrics.

        Raises:
            GlmError: bad data, or a loss or derivative that is not finite. What accumulated before
                stays.
        """
        self._require_room(data)
        logprobs = self.forward(data).logprobs
        (loss, metrics), d_logps = jax.value_and_grad(loss_fn, has_aux=True)(
            [jnp.asarray(x) for x in logprobs]
        )
        d_logps = [np.asarray(d, np.float32) for d in d_logps]
        if not np.isfinite(loss):
            raise GlmError(f"loss: is {loss}; nothing was added")
        for i, d_logp in enumerate(d_logps):
            if not np.isfinite(d_logp).all():
                at = np.flatnonzero(~np.isfinite(d_logp))[0]
                raise GlmError(
                    f"data[{i}]: the loss has the derivative {d_logp[at]} by the log-probability "
                    f"of token {at}; nothing was added"
                )
        self._add(data, d_logps, None)
        return _output(logprobs, {"loss:sum": float(loss), **metrics})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Applies the accumulated gradients and clears them.

        Raises:
            GlmError: there are none, or one is not finite or would make a weight so: named, and
                nothing is changed but that the gradients are dropped.
        """
        if not self._pending:
            raise GlmError("optim_step: no gradient has accumulated; call forward_backward first")
        total = self._sum if self._sum is not None else self._sum_of_all()
        self._pending, self._sum = [], None
        result = update(self._opt, self._programs.gradients(total), params)
        result.check()
        self._take(result.state)
        self.step, self.version = self.step + 1, self.version + 1
        return {"optim/grad_norm": float(result.norm), "optim/lr": params.learning_rate}

    def digest(self) -> str:
        """Hash of all weights, trained (the masters) and frozen: equal digests, equal weights."""
        weights = self._opt.masters | self._frozen()
        return trainer_state.digest({path: np.asarray(x) for path, x in weights.items()})

    def save_state(self, directory: str | Path, more: dict[str, Any] | None = None) -> Path:
        """Writes weights, moments and counters; the directory appears whole or not at all.

        Gradients that have accumulated are not kept: save after a step.

        Args:
            directory: a new or empty one, or a state to be replaced.
            more: JSON to keep with it, such as the position in the data.
        """
        counters = {"step": self.step, "version": self.version, "more": more or {}}
        return trainer_state.save(
            Path(directory), self.cfg, self.contract, (self._opt, self._frozen()), counters
        )

    def load_state(self, directory: str | Path) -> dict[str, Any]:
        """Restores what `save_state` wrote; gradients that have accumulated are dropped.

        Returns:
            What was kept with it as `more`.

        Raises:
            GlmError: no whole state, another model, or another contract, named. Nothing is changed.
        """
        (opt, frozen), counters = trainer_state.load(
            Path(directory), self.cfg, self.contract, (self._opt, self._frozen())
        )
        self._take(opt, frozen)
        self.step, self.version = counters["step"], counters["version"]
        self._pending, self._sum = [], None
        return counters["more"]

    def _frozen(self) -> dict[str, Array]:
        return {
            path: variable[...]
            for path, variable in leaves(self.model)
            if path not in self._opt.masters
        }

    def _take(self, opt: OptState, frozen: dict[str, Array] | None = None) -> None:
        self._opt = opt
        # A copy: an engine may still hold the old model, whose variables would change with it.
        self.model = nnx.clone(self.model)
        new = {**opt.masters, **(frozen or {})}
        for path, variable in leaves(self.model):
            if path in new:
                variable.set_value(new[path].astype(variable.dtype))
        self._programs.set_model(self.model)

    def _require_room(self, data: Sequence[Datum]) -> None:
        check_data(self.cfg, self.config, data)
        waiting = [datum for datum, _ in self._pending]
        chunks = n_chunks(self.contract, [*waiting, *data])
        if chunks > self.config.max_chunks:
            raise GlmError(
                f"max_chunks: {chunks} chunks of {self.contract.token_leaf} tokens in one step, "
                f"room for {self.config.max_chunks}; raise max_chunks or token_leaf"
            )

    def _add(
        self, data: Sequence[Datum], d_logps: list[np.ndarray], total: GradientState | None
    ) -> None:
        self._pending += zip(data, d_logps, strict=True)
        self._sum = total

    def _sum_of_all(self) -> GradientState:
        """The gradient of what all calls gave, in the order that one call would take."""

        def key(entry: tuple[Datum, np.ndarray]) -> Any:
            datum, d_logp = entry
            return *datum.key(), datum.targets.tobytes(), d_logp.tobytes()

        entries = sorted(self._pending, key=key)
        data = [datum for datum, _ in entries]
        _, _, total = self._pass(
            data, range(len(data)), lambda i, logp: entries[i][1], backward=True
        )
        assert total is not None
        return total

    def _pass(
        self, data: Sequence[Datum], order: Sequence[int], derivative: Derivative, *, backward: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray], GradientState | None]:
        """Log-probabilities, their derivatives and, if asked for, the gradient."""
        check_data(self.cfg, self.config, data)
        logprobs: list[np.ndarray] = [np.zeros(0)] * len(data)
        d_logps = logprobs.copy()
        total = self._programs.initial() if backward else None
        for numbers, rows, train in microbatches(self.cfg, self.contract, self.config, data, order):
            logprob_T, saved = self._programs.forward(train)
            logprob_T = np.asarray(logprob_T)
            d_T = np.zeros(logprob_T.shape, np.float32)
            for i, row in zip(numbers, rows, strict=True):
                logprobs[i] = logprob_T[row]
                d_T[row] = d_logps[i] = derivative(i, logprobs[i])
            if total is not None:
                total = self._programs.backward(train, saved, jnp.asarray(d_T), total)
        return logprobs, d_logps, total


def _by_content(data: Sequence[Datum]) -> list[int]:
    return sorted(range(len(data)), key=[d.key() for d in data].__getitem__)


def _output(logprobs: list[np.ndarray], metrics: dict[str, float]) -> TrainOutput:
    return TrainOutput([{"logprobs": x} for x in logprobs], metrics)
