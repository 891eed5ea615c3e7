"""The trainer: gradients accumulate over calls, one step applies them."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from glm_jax.errors import GlmError
from glm_jax.head import Shaping
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves
from glm_jax.training import backward
from glm_jax.training.pack import TrainBatch, pack
from rl import trainer_state
from rl.datum import KEPT, Datum
from rl.losses import LossConfig, check_loss, token_loss
from rl.optimizer import AdamParams, OptState, initial_state, update


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Sizes of the trainer's programs: one serves every batch."""

    rows_per_batch: int = 2048
    """Tokens of one microbatch."""
    max_length: int = 256
    """Tokens of the longest sequence."""
    max_chunks: int = 4095
    """Chunks of `token_leaf` tokens that one optimiser step may sum."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if value < 1:
                raise GlmError(f"{name}: {value}; must be positive")
        if self.max_length > self.rows_per_batch:
            raise GlmError(
                f"rows_per_batch: {self.rows_per_batch} is less than max_length = {self.max_length}"
            )


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

    The log-probabilities come from the engine's forward. Data are sorted by content and summed in
    a fixed tree, so that neither their order nor the cut in calls' microbatches changes a bit of a
    gradient. Masters and moments are f32; the model's arrays are the masters, rounded.
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
        self._set_sizes()
        self._n_levels = self.config.max_chunks.bit_length()
        trained = backward.trained(model)
        self._opt = initial_state({path: x.astype(jnp.float32) for path, x in trained.items()})
        self._gradients: backward.GradientState | None = None
        self._n_chunks = 0

    def forward(self, data: Sequence[Datum]) -> TrainOutput:
        """Log-probabilities of the targets; no gradient."""
        logprobs: list[np.ndarray] = [np.zeros(0)] * len(data)
        for numbers, train, rows in self._batches(data):
            logprob_T = np.asarray(self._run(train)[0])
            for i, row in zip(numbers, rows, strict=True):
                logprobs[i] = logprob_T[row]
        return TrainOutput([{"logprobs": x} for x in logprobs], {})

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: dict[str, Any] | None = None,
    ) -> TrainOutput:
        """Adds the gradient of the loss, summed over tokens, to what has accumulated.

        Raises:
            GlmError: bad data or settings, or a value that is not finite (named): the gradients
                that have accumulated so far are then dropped.
        """
        check_loss(loss_fn)
        config = LossConfig.of(loss_fn_config)
        losses = {}

        def derivative(i: int, datum: Datum, logp: np.ndarray) -> np.ndarray:
            losses[i] = token_loss(loss_fn, datum, logp, config)
            return losses[i].d_logp

        logprobs = self._accumulate(data, derivative)
        ordered = [losses[i] for i in range(len(data))]
        metrics = {"loss:sum": float(sum(x.loss for x in ordered))}
        ratios = [x.ratio for x in ordered if x.ratio is not None]
        if ratios:
            ratio = np.concatenate(ratios)
            clipped = np.concatenate([x.clipped for x in ordered if x.clipped is not None])
            metrics |= {
                "ppo/ratio_mean": float(ratio.mean()),
                "ppo/ratio_max": float(ratio.max()),
                "ppo/clip_frac": float(clipped.mean()),
            }
        return TrainOutput([{"logprobs": x} for x in logprobs], metrics)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: Callable[[list[Array]], tuple[Array, dict[str, float]]],
    ) -> TrainOutput:
        """As `forward_backward`, with any JAX function of all log-probabilities.

        Args:
            data: sequences; only tokens and targets are read.
            loss_fn: from each datum's log-probabilities `[N]` to the loss and metrics. It sees all
                data at once, so one more forward is run.
        """
        logprobs = [jnp.asarray(x) for x in self.forward(data).logprobs]
        (loss, metrics), d_logps = jax.value_and_grad(loss_fn, has_aux=True)(logprobs)
        if not np.isfinite(loss):
            raise GlmError(f"loss: is {loss}; nothing was added")
        self._accumulate(data, lambda i, datum, logp: np.asarray(d_logps[i], np.float32))
        outputs = [{"logprobs": np.asarray(x)} for x in logprobs]
        return TrainOutput(outputs, {"loss:sum": float(loss), **metrics})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """Applies the accumulated gradients and clears them.

        Raises:
            GlmError: there are none, or one is not finite: named, and nothing is changed but that
                the gradients are dropped.
        """
        if self._gradients is None:
            raise GlmError("optim_step: no gradient has accumulated; call forward_backward first")
        gradients = _gradients(self._structure, self._leaves, self._gradients)
        self._gradients, self._n_chunks = None, 0
        result = update(self._opt, gradients, params)
        bad = [path for path, flag in sorted(jax.device_get(result.unsound).items()) if flag]
        if bad:
            raise GlmError(
                f"gradient of {bad[0]} ({len(bad)} arrays) is not finite; the step was not taken"
            )
        self._take(result.state)
        self.step, self.version = self.step + 1, self.version + 1
        return {"optim/grad_norm": float(result.norm), "optim/lr": params.learning_rate}

    def digest(self) -> str:
        """Hash of the masters: equal digests are equal weights."""
        hashed = hashlib.sha256()
        for path, array in sorted(self._opt.masters.items()):
            hashed.update(path.encode())
            hashed.update(np.asarray(array).tobytes())
        return hashed.hexdigest()[:16]

    def save_state(self, directory: str | Path, more: dict[str, Any] | None = None) -> Path:
        """Writes weights, moments and counters; the directory appears whole or not at all.

        Args:
            directory: a new or empty one, or a state to be replaced.
            more: JSON to keep with it, such as the position in the data.
        """
        counters = {"step": self.step, "version": self.version, "digest": self.digest()}
        return trainer_state.save(
            Path(directory), self.model, self.contract, self._opt, counters | {"more": more or {}}
        )

    def load_state(self, directory: str | Path) -> dict[str, Any]:
        """Restores what `save_state` wrote; gradients that have accumulated are dropped.

        Returns:
            What was kept with it as `more`.

        Raises:
            GlmError: no whole state, another model, or another contract, named.
        """
        opt, counters = trainer_state.load(Path(directory), self.model, self.contract, self._opt)
        self._take(opt)
        if self.digest() != counters["digest"]:
            raise GlmError(
                f"{directory}: the weights have digest {self.digest()}, recorded is "
                f"{counters['digest']}; the files were changed"
            )
        self.step, self.version = counters["step"], counters["version"]
        self._gradients, self._n_chunks = None, 0
        return counters["more"]

    def _set_sizes(self) -> None:
        self._leaves, self._structure = jax.tree.flatten(self.model)
        chunk = self.contract.token_leaf
        # Short sequences are the worst case: each has a slot and a chunk of its own.
        self._n_slots = max(1, self.config.rows_per_batch // 8)
        self._chunks_per_batch = self._n_slots + self.config.rows_per_batch // chunk

    def _take(self, opt: OptState) -> None:
        self._opt = opt
        # A copy: an engine may still hold the old model, whose variables would change with it.
        self.model = nnx.clone(self.model)
        for path, variable in leaves(self.model):
            if path in opt.masters:
                variable.set_value(opt.masters[path].astype(variable.dtype))
        self._leaves = jax.tree.leaves(self.model)

    def _accumulate(
        self, data: Sequence[Datum], derivative: Callable[[int, Datum, np.ndarray], np.ndarray]
    ) -> list[np.ndarray]:
        logprobs: list[np.ndarray] = [np.zeros(0)] * len(data)
        try:
            for numbers, train, rows in self._batches(data):
                self._count(int(train.n_chunks))
                logprob_T, saved = self._run(train)
                logprob_T = np.asarray(logprob_T)
                d_T = np.zeros(logprob_T.shape, np.float32)
                for i, row in zip(numbers, rows, strict=True):
                    logprobs[i] = logprob_T[row]
                    d_T[row] = derivative(i, data[i], logprob_T[row])
                if self._gradients is None:
                    self._gradients = _initial(self._structure, self._n_levels, self._leaves)
                self._gradients = _backward(
                    self._structure,
                    self.contract,
                    self._leaves,
                    train,
                    saved,
                    jnp.asarray(d_T),
                    self._gradients,
                )
        except GlmError:
            self._gradients, self._n_chunks = None, 0
            raise
        return logprobs

    def _run(self, train: TrainBatch) -> Any:
        return _forward(self._structure, self.contract, self._leaves, train)

    def _count(self, n_chunks: int) -> None:
        self._n_chunks += n_chunks
        if self._n_chunks >= 1 << self._n_levels:
            raise GlmError(
                f"max_chunks: more than {(1 << self._n_levels) - 1} chunks of "
                f"{self.contract.token_leaf} tokens in one step; raise max_chunks or token_leaf"
            )

    def _batches(self, data: Sequence[Datum]):
        """Packs the data in canonical order; yields their numbers, the batch and their rows."""
        if not data:
            raise GlmError("data: is empty; give at least one datum")
        order = sorted(range(len(data)), key=lambda i: data[i].key())
        shaped = any({"temperature", KEPT} & set(datum.loss_fn_inputs) for datum in data)
        kept = any(KEPT in datum.loss_fn_inputs for datum in data)
        while order:
            numbers, n_rows, n_chunks = [], 0, 0
            while order and len(numbers) < self._n_slots:
                n = len(data[order[0]].tokens)
                chunks = -(-n // self.contract.token_leaf)
                full = n_rows + n > self.config.rows_per_batch
                if numbers and (full or n_chunks + chunks > self._chunks_per_batch):
                    break
                numbers.append(order.pop(0))
                n_rows, n_chunks = n_rows + n, n_chunks + chunks
            train, rows = pack(
                self.cfg,
                self.contract,
                [data[i].tokens for i in numbers],
                [data[i].targets for i in numbers],
                n_rows=self.config.rows_per_batch,
                max_length=self.config.max_length,
                shaping=[self._shaping(data[i], kept) for i in numbers] if shaped else None,
                n_slots=self._n_slots,
                n_chunks=self._chunks_per_batch,
            )
            yield numbers, train, rows

    def _shaping(self, datum: Datum, kept: bool) -> Shaping:
        n = len(datum.tokens)
        temperature = datum.loss_fn_inputs.get("temperature", np.ones(n, np.float32))
        if not kept:
            return Shaping(temperature)
        everything = np.full((n, -(-self.cfg.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
        return Shaping(temperature, datum.loss_fn_inputs.get(KEPT, everything))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(structure: Any, contract: NumericsContract, arrays: list[Array], train: TrainBatch):
    return backward.train_forward(jax.tree.unflatten(structure, arrays), train, contract)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=6)
def _backward(structure, contract, arrays, train, saved, d_logprob_T, state):
    model = jax.tree.unflatten(structure, arrays)
    return backward.backward(model, train, saved, d_logprob_T, state, contract)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _initial(structure: Any, n_levels: int, arrays: list[Array]):
    return backward.initial(jax.tree.unflatten(structure, arrays), n_levels)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(structure: Any, arrays: list[Array], state: backward.GradientState):
    return backward.gradients(jax.tree.unflatten(structure, arrays), state)
