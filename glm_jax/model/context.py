"""What every layer of one forward shares."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.numerics.arithmetic import Arithmetic

Taps = dict[str, Array]
"""Named intermediate values of one layer, for comparison with a reference."""


class Place(NamedTuple):
    """A layer's numbers in the cache, and in the stack of its experts."""

    latent: Any
    index: Any
    in_stack: Any = None
    """Which of the stacked layers' experts are this layer's; None: it was given its own alone."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Batch, rotation, masks and arithmetic."""

    batch: TokenBatch
    angles: tuple[Float[Array, "T W"], Float[Array, "T W"]]
    """Cosine and sine of the main and indexer rotation."""
    n_used: Int[Array, ""]
    """Tokens up to the last valid one."""
    rows_T: Int[Array, "T"] | None
    """With a cache: where the tokens' own rows go in its pages seen as one list."""
    pages_Tp: Int[Array, "T p"] | None
    """With a cache: pages of each token's slot."""
    causal_GRS: Bool[Array, "G R S"] | None
    """Native arithmetic: which keys a row may attend."""
    n_keys: int = dataclasses.field(metadata={"static": True})
    """Keys a row can have at most."""
    ops: Arithmetic = dataclasses.field(metadata={"static": True})
    gathered: bool = dataclasses.field(metadata={"static": True})
    """Attend a gathered list of keys, or all keys under a mask (native, short contexts)."""
    taps: bool = dataclasses.field(metadata={"static": True})
    """Also return intermediate values."""

    def rows(self, region: Callable[..., Any], *args: Any, exponential: bool = False) -> Any:
        """Applies a region to the used rows; `exponential`: it has an `exp`."""
        return self.ops.rows(region, self.n_used, *args, exponential=exponential)
