"""The multi-token-prediction layer: drafts token i + 2 from the hidden state of i and token i + 1.

    u_i = W_eh [RMS(E[t_{i+1}]; enorm) ; RMS(h_i; hnorm)]       h after the model's final norm
    y_i = RMS(block(u)_i; norm);   logits_i = y_i W_head

`y` is what the next draft step takes as `h`.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.cache import LatentCache
from glm_jax.config import GlmConfig
from glm_jax.model.block import Block, first_stream
from glm_jax.model.context import Context, Place, Taps
from glm_jax.numerics.primitives import add_rms_norm, rms_norm
from glm_jax.params import ONES, Normal, declare


class Mtp(nnx.Module):
    """Parameters of the draft layer. Embedding and head are the model's."""

    def __init__(self, cfg: GlmConfig):
        self.cfg = cfg
        d, dtype = cfg.hidden_size, cfg.dtype
        self.embed_norm = declare((d,), ("embed",), ONES, dtype)
        self.hidden_norm = declare((d,), ("embed",), ONES, dtype)
        # [2 D, D]: the embedding's half first.
        self.join = declare(
            (2, d, d), ("pair", "embed_in", "embed"), Normal(cfg.initializer_range), dtype
        )
        self.block = Block(cfg, ("sparse", "full"))
        self.norm = declare((d,), ("embed",), ONES, dtype)

    def __call__(
        self,
        next_TD: Float[Array, "T D"],
        hidden_TD: Float[Array, "T D"],
        cache: LatentCache | None,
        context: Context,
    ) -> tuple[Float[Array, "T D"], LatentCache | None, Taps]:
        """Runs one draft step.

        Args:
            next_TD: embedding of the token after each row's.
            hidden_TD: the model's output (after its final norm), or the last draft step's.
            cache: the model's cache; the layer's own rows are its last.
            context: as for the model: the position of a row stays that of its hidden state.
        """
        eps = self.cfg.rms_norm_eps

        def join(next_RD, hidden_RD):
            pair_RpD = jnp.stack(
                [
                    rms_norm(context.ops, next_RD, self.embed_norm[...], eps),
                    rms_norm(context.ops, hidden_RD, self.hidden_norm[...], eps),
                ],
                axis=1,
            )
            return context.ops.matmul(pair_RpD, self.join[...])

        stream = first_stream(self.cfg, context.rows(join, next_TD, hidden_TD), context)
        place = Place(self.cfg.num_hidden_layers, self.cfg.indexer_types.count("full"))
        stream, cache, taps = self.block(stream, cache, context, place)
        y_TD = context.rows(
            lambda residual_RD, branch_RD: add_rms_norm(
                context.ops, residual_RD, branch_RD, self.norm[...], eps
            )[0],
            stream.residual_TD,
            stream.branch_TD,
        )
        return y_TD, cache, taps
