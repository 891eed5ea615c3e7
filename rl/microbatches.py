"""Data in microbatches of one shape, so that one program serves them all."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.head import Shaping
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.training.accumulate import bits
from glm_jax.training.pack import TrainBatch, pack
from rl.datum import KEPT, Datum


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Sizes of the trainer's programs: one serves every batch."""

    rows_per_batch: int = 2048
    """Tokens of one microbatch; whole tiles of rows are made of it."""
    max_length: int = 256
    """Tokens of the longest sequence; gradient bits hold for one length (docs/numerics.md)."""
    max_chunks: int = 4095
    """Chunks of `token_leaf` tokens that one optimiser step may sum."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GlmError(f"{name}: {value!r}; must be a positive integer")
        if self.max_length > self.rows_per_batch:
            raise GlmError(
                f"rows_per_batch: {self.rows_per_batch} is less than max_length = {self.max_length}"
            )

    @property
    def n_slots(self) -> int:
        """Sequences of one microbatch."""
        return max(1, self.rows_per_batch // 8)

    def n_chunks(self, contract: NumericsContract) -> int:
        """Chunks of one microbatch; short sequences, with a chunk each, are the worst case."""
        return self.n_slots + self.rows_per_batch // contract.token_leaf

    def room(self, contract: NumericsContract) -> tuple[int, int]:
        """Bits of the chunks of a sequence, and of the sequences of a step."""
        return bits(-(-self.max_length // contract.token_leaf)), bits(self.max_chunks)


class Microbatch(NamedTuple):
    """Some of the data, packed."""

    numbers: list[int]
    """Their places in the data."""
    rows: list[slice]
    """The rows of each."""
    train: TrainBatch


def check_data(cfg: GlmConfig, config: TrainerConfig, data: Sequence[Datum]) -> None:
    """Refuses data that no microbatch can hold, before anything runs.

    Raises:
        GlmError: names the datum and what is wrong with it.
    """
    if not data:
        raise GlmError("data: is empty; give at least one datum")
    n_words = -(-cfg.vocab_size // 32)
    for i, datum in enumerate(data):
        if not isinstance(datum, Datum):
            raise GlmError(f"data[{i}]: is a {type(datum).__name__}; give a Datum")
        if len(datum.tokens) > config.max_length:
            raise GlmError(
                f"data[{i}]: has {len(datum.tokens)} tokens, max_length is {config.max_length}; "
                "raise it, or cut the sequence"
            )
        for name, ids in (("tokens", datum.tokens), ("target_tokens", datum.targets)):
            if ids.max() >= cfg.vocab_size:
                raise GlmError(
                    f"data[{i}]: {name} has the id {ids.max()}; the vocabulary is 0 to "
                    f"{cfg.vocab_size - 1} (where nothing counts, give any of them and weight 0)"
                )
        temperature = _temperature(datum)
        if not (np.isfinite(temperature) & (temperature > 0)).all():
            raise GlmError(
                f"data[{i}]: temperature is not above 0 and finite wherever a token counts"
            )
        kept = datum.loss_fn_inputs.get(KEPT)
        if kept is not None and kept.shape[1] != n_words:
            raise GlmError(
                f"data[{i}]: kept has {kept.shape[1]} words a token; {cfg.vocab_size} ids need "
                f"{n_words}"
            )


def n_chunks(contract: NumericsContract, data: Sequence[Datum]) -> int:
    """Chunks of all the data together."""
    return sum(-(-len(datum.tokens) // contract.token_leaf) for datum in data)


def microbatches(
    cfg: GlmConfig,
    contract: NumericsContract,
    config: TrainerConfig,
    data: Sequence[Datum],
    order: Sequence[int],
) -> Iterator[Microbatch]:
    """Packs checked data in the given order: as many into each microbatch as it has room for."""
    shaped = any({"temperature", KEPT} & set(datum.loss_fn_inputs) for datum in data)
    kept = any(KEPT in datum.loss_fn_inputs for datum in data)
    first = 0
    for numbers in _cut(contract, config, data, order):
        train, rows = pack(
            cfg,
            contract,
            [data[i].tokens for i in numbers],
            [data[i].targets for i in numbers],
            n_rows=Arithmetic(contract).bucket(config.rows_per_batch),
            max_length=config.max_length,
            numbers=range(first, first + len(numbers)),
            shaping=[_shaping(cfg, data[i], kept) for i in numbers] if shaped else None,
            n_slots=config.n_slots,
            n_chunks=config.n_chunks(contract),
        )
        first += len(numbers)
        yield Microbatch(numbers, rows, train)


def _cut(
    contract: NumericsContract, config: TrainerConfig, data: Sequence[Datum], order: Sequence[int]
) -> Iterator[list[int]]:
    numbers, n_rows = [], 0
    for i in order:
        n = len(data[i].tokens)
        full = n_rows + n > config.rows_per_batch or len(numbers) == config.n_slots
        if numbers and full:
            yield numbers
            numbers, n_rows = [], 0
        numbers.append(i)
        n_rows += n
    if numbers:
        yield numbers


def _temperature(datum: Datum) -> np.ndarray:
    """1 where a token does not count: what the datum has there is not read."""
    temperature = datum.loss_fn_inputs.get("temperature", np.float32(1))
    return np.where(datum.weights != 0, temperature, np.float32(1))


def _shaping(cfg: GlmConfig, datum: Datum, kept: bool) -> Shaping:
    """`kept`: whether any datum of the call has kept sets; then all get them."""
    if not kept:
        return Shaping(_temperature(datum))
    everything = np.full((len(datum.tokens), -(-cfg.vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    counts = (datum.weights != 0)[:, None]
    kept_TW = np.where(counts, datum.loss_fn_inputs.get(KEPT, everything), everything)
    return Shaping(_temperature(datum), kept_TW)
