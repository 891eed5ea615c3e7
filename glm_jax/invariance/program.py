"""The compiled forwards of a check: one step function, one executable a shape."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.forward import arithmetic, forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.model.context import Taps
from glm_jax.numerics.contract import NumericsContract
from glm_jax.training.backward import train_forward
from glm_jax.training.pack import TrainBatch

Notice = Callable[[str], None]


class StepOutput(NamedTuple):
    """What one step gives of each row."""

    logprob_T: Float[Array, "T"]
    hidden_TD: Float[Array, "T D"]
    taps: dict[str, Taps]


class Programs:
    """Compiles the step once a shape, for every model of one structure.

    Taps make another program, whose fusions may differ: compare what programs with taps gave among
    themselves only.
    """

    def __init__(
        self, model: GlmModel, contract: NumericsContract, notice: Notice = lambda _: None
    ):
        self.cfg = model.cfg
        self.contract = contract
        self.compile_seconds = 0.0
        self._notice = notice
        self._structure = jax.tree.structure(model)
        self._compiled: dict[Any, Any] = {}
        # A function of this object's own: jax then traces afresh for each.
        self._jitted = jax.jit(
            lambda *args, taps: _step(self._structure, *args, taps=taps),
            static_argnames="taps",
            donate_argnums=3,
        )
        # All that the trainer keeps is returned, so that nothing of its forward is left out.
        self._train = jax.jit(
            lambda leaves, train: train_forward(
                jax.tree.unflatten(self._structure, leaves), train, contract
            )
        )
        self._fill = jax.jit(_fill_pages, donate_argnums=0)

    @property
    def n_programs(self) -> int:
        """Executables compiled so far."""
        return len(self._compiled)

    def leaves_of(self, model: GlmModel) -> list[Array]:
        """The model's arrays, flattened once: flattening a module at each step would cost more."""
        leaves, structure = jax.tree.flatten(model)
        if structure != self._structure:
            raise ValueError("the model's structure is not that of these programs")
        return leaves

    def bucket(self, n_tokens: int) -> int:
        """Rows of the program that a batch of `n_tokens` runs in: few sizes, whole tiles."""
        tiles = self.contract.row_tiles
        sizes = tiles if self.contract.pinned else (1, *tiles)
        for size in sizes:
            if n_tokens <= size:
                return size
        size = tiles[-1]
        while size < n_tokens:
            size *= 2
        return size

    def step(
        self,
        leaves: list[Array],
        batch: TokenBatch,
        targets_T: Int[Array, "T"],
        cache: LatentCache,
        *,
        taps: bool = False,
    ) -> tuple[StepOutput, LatentCache]:
        """Runs a batch; `cache` is consumed."""
        args = (leaves, batch, targets_T, cache)
        key = (batch.n_tokens, batch.rows, cache.latent_LPsC.shape, cache.table_Up.shape, taps)
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = self._jitted.lower(*args, taps=taps).compile()
            seconds = time.perf_counter() - began
            self.compile_seconds += seconds
            what = f"{batch.n_tokens} rows, {cache.latent_LPsC.shape[1]} pages"
            what += ", with intermediate values" if taps else ""
            self._notice(f"compiled {self.contract.mode} forward of {what}: {seconds:.1f} s")
        return self._compiled[key](*args)

    def train(self, leaves: list[Array], train: TrainBatch) -> Float[Array, "T"]:
        """Log-probabilities of the trainer's forward, which also saves what its backward reads."""
        key = ("train", train.batch.n_tokens, train.n_slots, train.max_length, train.start_n.shape)
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = self._train.lower(leaves, train).compile()
            seconds = time.perf_counter() - began
            self.compile_seconds += seconds
            what = f"training forward of {train.batch.n_tokens} rows"
            self._notice(f"compiled {self.contract.mode} {what}: {seconds:.1f} s")
        return self._compiled[key](leaves, train)[0]

    def spoil(self, cache: LatentCache, pages: np.ndarray | list[int] | None) -> LatentCache:
        """Fills pages (None: all) with what must never be read; `cache` is consumed.

        That is NaN in pinned arithmetic. Native arithmetic multiplies masked keys by zero: a
        finite value there.
        """
        n_pages = cache.latent_LPsC.shape[1]
        bad_P = np.zeros(n_pages, bool) if pages is not None else np.ones(n_pages, bool)
        if pages is not None:
            bad_P[np.asarray(pages, np.int64)] = True
        value = np.float32(np.nan if self.contract.pinned else 3.0)
        return self._fill(cache, bad_P, value)


def _step(
    structure: Any,
    leaves: list[Array],
    batch: TokenBatch,
    targets_T: Array,
    cache: LatentCache,
    *,
    taps: bool,
) -> tuple[StepOutput, LatentCache]:
    model = jax.tree.unflatten(structure, leaves)
    out = forward(model, batch, cache, taps=taps)
    assert out.cache is not None
    scores = score(model, arithmetic(cache, None), out.hidden_TD, targets_T, batch.n_used)
    return StepOutput(scores.target_T, out.hidden_TD, out.taps), out.cache


def _fill_pages(cache: LatentCache, bad_P: Array, value: Array) -> LatentCache:
    def fill(store_LPsX):
        return jnp.where(bad_P[None, :, None, None], value.astype(store_LPsX.dtype), store_LPsX)

    return cache.replace(latent_LPsC=fill(cache.latent_LPsC), index_MPsJ=fill(cache.index_MPsJ))
