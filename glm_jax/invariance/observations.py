"""What a phase gave for each token: log-probability bits and hashes of intermediate values."""

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from glm_jax.invariance.program import StepOutput

REGIONS = {
    "project": ("attn_in", "q_latent", "kv_latent"),
    "select": ("selected",),
    "mix": ("mixed",),
    "output": ("attn_out", "residual", "mlp_in"),
    "route": ("router_logits", "router_experts", "router_weights"),
    "feed_forward": ("mlp_out",),
}
"""Regions of a layer in the order of computation, and the taps that show what each gave."""

ALL_TAPS = tuple(name for names in REGIONS.values() for name in names)
LAYER_OUT = ("out",)


class Key(NamedTuple):
    """Where a value stands in the model; layer None is after the last one."""

    layer: int | None
    tap: str


HIDDEN, LOGPROB = Key(None, "final_norm"), Key(None, "logprob")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observations:
    """One row for each time that a token was computed."""

    sequence_n: np.ndarray
    position_n: np.ndarray
    columns: dict[Key, np.ndarray]
    """uint64 of each value: equal if the values' bits are (hashes of 64 bits). Key order is the
    order of computation."""
    finite: bool
    """Whether every log-probability was a number."""

    @property
    def n_tokens(self) -> int:
        """Number of rows."""
        return len(self.sequence_n)

    def unequal(self, reference: "Observations") -> dict[Key, np.ndarray]:
        """For every key that both have, which rows differ from the reference's first of the token.

        Raises:
            ValueError: the reference lacks a token.
        """
        width = 1 + max(int(self.position_n.max()), int(reference.position_n.max()))
        theirs, first = np.unique(
            reference.sequence_n * width + reference.position_n, return_index=True
        )
        mine = self.sequence_n * width + self.position_n
        at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
        if (theirs[at] != mine).any():
            raise ValueError("the reference phase did not compute every token")
        row_n = first[at]
        return {
            key: column != reference.columns[key][row_n]
            for key, column in self.columns.items()
            if key in reference.columns
        }


class Recorder:
    """Collects the rows of one session."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._tokens: list[np.ndarray] = []
        self._columns: dict[Key, list[np.ndarray]] = {}
        self._finite = True

    def add(
        self, tokens: np.ndarray, row_n: np.ndarray, out: StepOutput, keep: tuple[str, ...]
    ) -> None:
        """Records the rows `row_n` of a step's output, which are these (sequence, position)."""
        self._tokens.append(tokens)
        for i in range(len(out.taps) - 1):
            for name in keep:
                value = out.taps[f"layer{i}"].get(name)
                if value is not None:
                    rows = np.asarray(value)
                    self._put(
                        Key(i, name),
                        self._listed(rows, row_n) if name == "selected" else hashes(rows[row_n]),
                    )
        self._put(HIDDEN, hashes(np.asarray(out.hidden_TD)[row_n]))
        logprob_n = np.asarray(out.logprob_T)[row_n]
        self._finite = self._finite and bool(np.isfinite(logprob_n).all())
        self._put(LOGPROB, logprob_n.view(np.uint32).astype(np.uint64))

    def done(self) -> Observations:
        """What was recorded."""
        tokens = np.concatenate(self._tokens)
        columns = {key: np.concatenate(parts) for key, parts in self._columns.items()}
        return Observations(
            sequence_n=tokens[:, 0], position_n=tokens[:, 1], columns=columns, finite=self._finite
        )

    def _put(self, key: Key, values: np.ndarray) -> None:
        self._columns.setdefault(key, []).append(values)

    def _listed(self, selection: np.ndarray, row_n: np.ndarray) -> np.ndarray:
        """Hashes of the selected positions, whatever form and padding the selection has."""
        if selection.dtype == bool:
            mask_TS = selection.reshape(-1, selection.shape[-1])
            lists = [np.flatnonzero(mask_TS[row]) for row in row_n]
        else:
            lists = [ids[ids < self._capacity] for ids in selection[row_n]]
        return np.asarray([_hash(ids.astype(np.int32)) for ids in lists], np.uint64)


def hashes(rows: np.ndarray) -> np.ndarray:
    """A hash of 64 bits of each row."""
    return np.asarray([_hash(row) for row in np.ascontiguousarray(rows)], np.uint64)


def _hash(row: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest())
