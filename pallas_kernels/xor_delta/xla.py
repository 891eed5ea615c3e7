"""What is computed of a tile of blocks: the twin as it stands, and the body of the TPU kernel."""

import jax
import jax.numpy as jnp


def delta(old_RB: jax.Array, new_RB: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exclusive or, and the changed elements of each row; operands are unsigned integers."""
    # 32 bits inside: not every TPU compares packed 16-bit integers.
    wide_RB = old_RB.astype(jnp.uint32) ^ new_RB.astype(jnp.uint32)
    changed_R1 = jnp.sum((wide_RB != 0).astype(jnp.int32), axis=1, keepdims=True)
    return wide_RB.astype(old_RB.dtype), changed_R1
