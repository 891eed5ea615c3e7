"""Everything a bit depends on, in one frozen object with a digest."""

import dataclasses
import functools
import hashlib
import json
from importlib.metadata import version
from typing import Any, Literal

import jax

from glm_jax.errors import GlmError
from pallas_kernels.backend import IMPLEMENTATIONS, Backend, Implementation, describe, described
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul.op import KINDS as GROUPED_MATMUL
from pallas_kernels.pinned_matmul.op import KINDS as PINNED_MATMUL
from pallas_kernels.sparse_attention.op import KINDS as SPARSE_ATTENTION

Mode = Literal["pinned", "native"]

REVISION = 3
"""Raised with every change of code that changes a bit of any pinned result."""

OPERATIONS = {
    "grouped_matmul": GROUPED_MATMUL,
    "pinned_matmul": PINNED_MATMUL,
    "sparse_attention": SPARSE_ATTENTION,
}
"""Operations that the model dispatches by the contract -> their implementations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsContract:
    """Constants of the arithmetic. Two programs agree to the bit only under equal contracts.

    `pinned`: every reduction has a shape and an order that follow from these constants and the
    weight shapes alone. `native`: stock XLA operations whose shapes follow the batch; it is the
    control in comparisons and the yardstick of overheads, and promises nothing.
    """

    mode: Mode = "pinned"
    revision: int = REVISION
    """Of the code behind the constants."""
    row_tiles: tuple[int, ...] = (2, 8, 16, 64, 256, 1024)
    """Rows a region may process at once. All give the same bits: `check invariance` proves it."""
    expert_tiles: tuple[int, ...] = (8, 64, 256)
    """Rows of one expert processed at once."""
    exp_rows: int = 8
    """Regions with an exponential run on at least so many rows: its vector code and the scalar code
    of a tail round differently, and in 2 rows of few columns all is tail."""
    backward_row_tile: int = 256
    """Rows that the backward transposes at once: one size, as a transposed region was seen to give
    a row other bits in another tile."""
    backward_expert_tile: int = 64
    """The same for the rows of one expert."""
    k_leaf: int = 256
    """Contractions are cut in leaves of this width, added in a balanced binary tree in f32."""
    column_block: int = 128
    """f32 products of fewer than `block_below` rows are computed in column blocks of this width."""
    block_below: int = 64
    """From this many rows on the whole product gives the same bits, and is faster."""
    column_pad: int = 64
    """Columns are padded with zeros to a multiple of this."""
    sum_width: int = 8
    """Columns of the ones that rows are summed with..."""
    sum_pad: int = 64
    """...after padding the rows with zeros to a multiple of this."""
    key_block: int = 64
    """Index scores are computed for this many keys at once; also the cache's page size."""
    vocab_block: int = 512
    """Log-sum-exp runs over the vocabulary in blocks of this width, ascending."""
    token_leaf: int = 128
    """Gradients are summed in a tree over chunks of this many tokens of one sequence."""
    kernels: str = "auto"
    """What computes each operation of `pallas_kernels`: given as `auto`, `xla` or `pallas`, held as
    the choice it comes to on this machine, with the digest of a kernel's tiles."""
    accumulation: str = "float32"
    selection: str = "score descending, index ascending; -0 = +0; NaN last"
    combine: str = "experts ascending, shared expert last, float32, one rounding"
    residual: str = "norm reads the unrounded float32 sum, the stream stores it rounded"
    jax: str = dataclasses.field(default_factory=lambda: version("jax"))
    jaxlib: str = dataclasses.field(default_factory=lambda: version("jaxlib"))
    device_kind: str = dataclasses.field(default_factory=lambda: _device_kind())

    def __post_init__(self):
        for asked in IMPLEMENTATIONS:
            if self.kernels == asked:
                # A frozen field may be set while the object is made.
                object.__setattr__(self, "kernels", _resolved(asked))
        if self.mode not in ("pinned", "native"):
            raise GlmError(f"numerics: {self.mode!r} is no mode; use 'pinned' or 'native'")
        for name in ("row_tiles", "expert_tiles"):
            tiles = getattr(self, name)
            if not tiles or list(tiles) != sorted(set(tiles)) or tiles[0] < 2:
                raise GlmError(f"{name}: {tiles}; need ascending, different sizes of at least 2")
            if any(tile % tiles[0] for tile in tiles):
                raise GlmError(f"{name}: {tiles}; each must be a multiple of the smallest")
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise GlmError(f"{name}: {value}; must be positive")

    @property
    def pinned(self) -> bool:
        """Whether the mode is `pinned`."""
        return self.mode == "pinned"

    def backend(self, op: str) -> Backend:
        """What computes an operation of `pallas_kernels`.

        Raises:
            GlmError: the contract does not name it, or was made with other tiles.
        """
        try:
            return described(op, self.kernels)
        except KernelError as error:
            raise GlmError(f"kernels: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @functools.cached_property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of the fields."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "NumericsContract":
        """Reads what `to_dict` wrote.

        Raises:
            GlmError: an unknown or missing field; a contract is never guessed.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != names:
            odd = sorted(set(fields) ^ names)
            raise GlmError(
                f"numerics contract: fields {odd} are unknown or missing; it was written by "
                "another version of glm-jax"
            )
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**plain)


def require_same(ours: NumericsContract, theirs: NumericsContract, what: str) -> None:
    """Refuses to pair two parties whose bits would differ.

    Raises:
        GlmError: names every differing field with both values.
    """
    a, b = ours.to_dict(), theirs.to_dict()
    differing = [f"{name}: {a[name]} here, {b[name]} there" for name in a if a[name] != b[name]]
    if differing:
        raise GlmError(
            f"{what}: numerics contract {theirs.digest} is not ours ({ours.digest}): "
            + "; ".join(differing)
        )


def _resolved(asked: Implementation) -> str:
    try:
        return describe(asked, OPERATIONS)
    except KernelError as error:
        raise GlmError(f"kernels: {error}") from None


def _device_kind() -> str:
    return jax.devices()[0].device_kind
