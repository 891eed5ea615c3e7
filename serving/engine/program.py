"""The engine's jitted steps: any tokens once, or one token a row several times over."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.forward import arithmetic, forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from serving.engine.sampler import Drawn, Rows, draw


class Draws(NamedTuple):
    """Samples that draw tokens, one a row. What padding rows hold is in range and means nothing."""

    token_R: Int[Array, "R"]
    """Last known token."""
    position_R: Int[Array, "R"]
    """Its position."""
    slot_R: Int[Array, "R"]
    active_R: Bool[Array, "R"]
    generated_R: Int[Array, "R"]
    left_R: Int[Array, "R"]
    """Tokens that may still be drawn."""
    rows: Rows


class Mixed(NamedTuple):
    """A step that computes any tokens and draws after some of them."""

    batch: TokenBatch
    targets_T: Int[Array, "T"]
    """The token after each, for the prompt's log-probabilities..."""
    scores_prompt: Bool[Array, ""]
    """...which are computed if this says so."""
    last_R: Int[Array, "R"]
    """Row of the batch after which each sample draws."""
    draws: Draws


class MixedOutput(NamedTuple):
    """What a mixed step gives."""

    drawn: Drawn
    prompt_T: Float[Array, "T"]


class DecodeOutput(NamedTuple):
    """What a decoding step gives, draw by draw."""

    drawn: Drawn
    """Each field with a leading axis of draws."""
    counts_nR: Bool[Array, "n R"]
    """Which of it was drawn by an active row."""


class Programs:
    """Executables for one structure of weights, by shape, and the seconds that they took to make.

    Engines of one structure share them: `programs_of`.
    """

    def __init__(self, structure: Any):
        self.n_compiled, self.seconds = 0, 0.0
        self._compiled: dict[Any, Any] = {}
        self._jitted: dict[Callable[..., Any], Any] = {
            mixed: jax.jit(functools.partial(mixed, structure), static_argnums=0, donate_argnums=2),
            decode: jax.jit(
                functools.partial(decode, structure), static_argnums=(0, 1), donate_argnums=3
            ),
            clear: jax.jit(clear, donate_argnums=0),
        }

    def compiled(self, function: Callable[..., Any], static: tuple[Any, ...], *args: Any) -> Any:
        """The executable of `function(*static, *args)`, made at the first use of these shapes.

        It takes `args` and consumes the cache among them.
        """
        shapes = tuple((np.shape(x), x.dtype) for x in jax.tree.leaves(args))
        contracts = tuple(x.contract for x in args if isinstance(x, LatentCache))
        key = (function, static, contracts, shapes)
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = self._jitted[function].lower(*static, *args).compile()
            self.n_compiled += 1
            self.seconds += time.perf_counter() - began
        return self._compiled[key]


@functools.lru_cache(maxsize=8)
def programs_of(structure: Any) -> Programs:
    """The programs for weights of one structure (what `jax.tree.structure` gives)."""
    return Programs(structure)


def mixed(
    structure: Any, top: int, leaves: list[Array], cache: LatentCache, step: Mixed
) -> tuple[LatentCache, MixedOutput]:
    """Computes a batch and draws a token after some of its rows."""
    model: GlmModel = jax.tree.unflatten(structure, leaves)
    ops, draws = arithmetic(cache, None), step.draws
    out = forward(model, step.batch, cache)
    assert out.cache is not None
    drawn = draw(
        model,
        ops,
        out.hidden_TD[step.last_R],
        draws.rows,
        draws.position_R + 1,
        draws.generated_R,
        jnp.sum(draws.active_R, dtype=jnp.int32),
        top=top,
    )
    prompt_T = lax.cond(
        step.scores_prompt,
        lambda _: score(model, ops, out.hidden_TD, step.targets_T, step.batch.n_used).target_T,
        lambda _: jnp.zeros(step.batch.n_tokens, jnp.float32),
        None,
    )
    return out.cache, MixedOutput(drawn, prompt_T)


def decode(
    structure: Any,
    top: int,
    most_steps: int,
    leaves: list[Array],
    cache: LatentCache,
    draws: Draws,
    n_steps: Int[Array, ""],
) -> tuple[LatentCache, DecodeOutput]:
    """Draws up to `n_steps` (at most `most_steps`) tokens a row, each fed into the next step.

    A row ends with a stop id, with its last token, or with a value that is not finite; the loop
    ends with its last row.
    """
    model: GlmModel = jax.tree.unflatten(structure, leaves)
    ops = arithmetic(cache, None)

    def one(cache: LatentCache, now: Draws) -> tuple[LatentCache, Drawn]:
        batch = TokenBatch(now.token_R, now.position_R, now.slot_R, now.active_R)
        out = forward(model, batch, cache)
        assert out.cache is not None
        place = (now.position_R + 1, now.generated_R, batch.n_used)
        return out.cache, draw(model, ops, out.hidden_TD, now.rows, *place, top=top)

    def more(carry):
        i, _, now, _ = carry
        return (i < n_steps) & jnp.any(now.active_R)

    def body(carry):
        i, cache, now, output = carry
        cache, drawn = one(cache, now)
        output = jax.tree.map(
            lambda whole, new: lax.dynamic_update_index_in_dim(whole, new, i, 0),
            output,
            DecodeOutput(drawn, now.active_R),
        )
        return i + 1, cache, _advance(now, drawn), output

    shapes = jax.eval_shape(lambda: DecodeOutput(one(cache, draws)[1], draws.active_R))
    empty = jax.tree.map(lambda s: jnp.zeros((most_steps, *s.shape), s.dtype), shapes)
    _, cache, _, output = lax.while_loop(more, body, (jnp.int32(0), cache, draws, empty))
    return cache, output


def clear(cache: LatentCache, pages_P: Bool[Array, "P"]) -> LatentCache:
    """Sets pages to zero. Native arithmetic multiplies masked keys by zero: none may be NaN."""

    def fill(store_LPsX: Array) -> Array:
        return jnp.where(pages_P[None, :, None, None], 0, store_LPsX).astype(store_LPsX.dtype)

    return cache.replace(latent_LPsC=fill(cache.latent_LPsC), index_MPsJ=fill(cache.index_MPsJ))


def _advance(now: Draws, drawn: Drawn) -> Draws:
    """The state after a step; rows that are done stay as they are."""
    stopped_R = jnp.any(now.rows.stop_Rs == drawn.token_R[:, None], axis=1)
    sound_R = jnp.isfinite(drawn.logprob_R) & jnp.isfinite(drawn.sampling_logprob_R)
    step_R = now.active_R.astype(jnp.int32)
    return now._replace(
        token_R=jnp.where(now.active_R, drawn.token_R, now.token_R),
        position_R=now.position_R + step_R,
        active_R=now.active_R & ~stopped_R & (now.left_R > 1) & sound_R,
        generated_R=now.generated_R + step_R,
        left_R=now.left_R - step_R,
    )
