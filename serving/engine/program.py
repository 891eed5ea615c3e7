"""The engine's jitted steps: any tokens once, or one token a row several times."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.forward import arithmetic, forward
from glm_jax.head import score
from glm_jax.model import GlmModel
from glm_jax.params import leaves as named_leaves
from serving.engine.sampler import Drawn, Rows, draw


class Variant(NamedTuple):
    """What is compiled in."""

    shaped: bool
    filtered: bool
    top: int
    prompt: bool = False
    """Prompt tokens are scored too."""


class Decoding(NamedTuple):
    """Sequences that draw one token a step."""

    token_R: Int[Array, "R"]
    """Last token, whose keys are not in the cache yet."""
    position_R: Int[Array, "R"]
    """Its position."""
    slot_R: Int[Array, "R"]
    active_R: Bool[Array, "R"]
    generated_R: Int[Array, "R"]
    left_R: Int[Array, "R"]
    """Tokens that may still be drawn."""
    rows: Rows


class Programs:
    """Executables by shape and variant, and the seconds that compiling them took."""

    def __init__(self, model: GlmModel, on_compile: Callable[[str], None] = lambda _: None):
        self.cfg = model.cfg
        self.n_compiled, self.compile_seconds = 0, 0.0
        self._on_compile = on_compile
        self._structure = jax.tree.structure(model)
        self._shapes = {path: (x.shape, x.dtype) for path, x in named_leaves(model)}
        self._compiled: dict[Any, Any] = {}
        self._step = jax.jit(
            functools.partial(_step, self._structure), static_argnums=0, donate_argnums=2
        )
        self._decode = jax.jit(
            functools.partial(_decode, self._structure), static_argnums=(0, 1), donate_argnums=3
        )

    def leaves_of(self, model: GlmModel) -> list[Array]:
        """The arrays of a model of the same structure.

        Raises:
            GlmError: names the first leaf that differs.
        """
        leaves, structure = jax.tree.flatten(model)
        if structure != self._structure:
            raise GlmError("weights: the model has another config or structure than the engine's")
        for path, leaf in named_leaves(model):
            if (leaf.shape, leaf.dtype) != self._shapes[path]:
                shape, dtype = self._shapes[path]
                raise GlmError(
                    f"weights: {path} is {leaf.dtype} {leaf.shape}, the engine's is {dtype} {shape}"
                )
        return leaves

    def step(self, variant: Variant, *args: Any) -> Any:
        """`_step`; the cache (argument 2) is consumed."""
        return self._run("step", self._step, (variant,), args)

    def decode(self, variant: Variant, n_steps: int, *args: Any) -> Any:
        """`_decode`; the cache (argument 3) is consumed."""
        return self._run("decode", self._decode, (variant, n_steps), args)

    def _run(self, name: str, jitted: Any, static: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        shapes = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(args[1:]))
        key = (name, static, shapes)
        if key not in self._compiled:
            began = time.perf_counter()
            self._compiled[key] = jitted.lower(*static, *args).compile()
            seconds = time.perf_counter() - began
            self.n_compiled += 1
            self.compile_seconds += seconds
            self._on_compile(f"compiled {name} {static}: {seconds:.1f} s")
        return self._compiled[key](*args)


def _step(
    structure: Any,
    variant: Variant,
    leaves: list[Array],
    cache: LatentCache,
    batch: TokenBatch,
    targets_T: Int[Array, "T"],
    last_R: Int[Array, "R"],
    decoding: Decoding,
    n_draws: Int[Array, ""],
) -> tuple[LatentCache, Drawn, Array | None]:
    """Computes a batch and draws after the rows `last_R`.

    Returns the cache, what was drawn, and the log-probabilities of `targets_T` if the variant asks.
    """
    model = jax.tree.unflatten(structure, leaves)
    ops = arithmetic(cache, None)
    out = forward(model, batch, cache)
    assert out.cache is not None
    drawn = draw(
        model,
        ops,
        out.hidden_TD[last_R],
        decoding.rows,
        decoding.position_R + 1,
        decoding.generated_R,
        n_draws,
        shaped=variant.shaped,
        filtered=variant.filtered,
        top=variant.top,
    )
    prompt_T = None
    if variant.prompt:
        prompt_T = score(model, ops, out.hidden_TD, targets_T, batch.n_used).target_T
    return out.cache, drawn, prompt_T


def _decode(
    structure: Any,
    variant: Variant,
    n_steps: int,
    leaves: list[Array],
    cache: LatentCache,
    decoding: Decoding,
) -> tuple[LatentCache, Drawn, Int[Array, "n R"]]:
    """Draws up to `n_steps` tokens a row, each from the one before.

    Returns the cache, what was drawn (`[n_steps, R]`), and which of it counts.
    """
    model = jax.tree.unflatten(structure, leaves)
    ops = arithmetic(cache, None)

    def one(cache, now: Decoding):
        batch = TokenBatch(now.token_R, now.position_R, now.slot_R, now.active_R)
        out = forward(model, batch, cache)
        assert out.cache is not None
        drawn = draw(
            model,
            ops,
            out.hidden_TD,
            now.rows,
            now.position_R + 1,
            now.generated_R,
            batch.n_used,
            shaped=variant.shaped,
            filtered=variant.filtered,
            top=variant.top,
        )
        return out.cache, drawn

    def more(carry):
        i, _, now, _, _ = carry
        return (i < n_steps) & jnp.any(now.active_R)

    def body(carry):
        i, cache, now, all_drawn, counts_nR = carry
        cache, drawn = one(cache, now)
        all_drawn = jax.tree.map(
            lambda whole, x: lax.dynamic_update_index_in_dim(whole, x, i, 0), all_drawn, drawn
        )
        counts_nR = lax.dynamic_update_index_in_dim(counts_nR, now.active_R, i, 0)
        return i + 1, cache, _advance(now, drawn), all_drawn, counts_nR

    shapes = jax.eval_shape(lambda: one(cache, decoding)[1])
    empty = jax.tree.map(lambda s: jnp.zeros((n_steps, *s.shape), s.dtype), shapes)
    counts_nR = jnp.zeros((n_steps, decoding.token_R.shape[0]), bool)
    start = (jnp.int32(0), cache, decoding, empty, counts_nR)
    _, cache, _, all_drawn, counts_nR = lax.while_loop(more, body, start)
    return cache, all_drawn, counts_nR


def _advance(now: Decoding, drawn: Drawn) -> Decoding:
    """The state after a step; rows that are done stay as they are."""
    stopped_R = jnp.any(now.rows.stop_Rs == drawn.token_R[:, None], axis=1)
    # A value that is not finite ends the row; the host reports it.
    sound_R = jnp.isfinite(drawn.logprob_R)
    on_R = now.active_R & ~stopped_R & (now.left_R > 1) & sound_R
    step_R = now.active_R.astype(jnp.int32)
    return now._replace(
        token_R=jnp.where(now.active_R, drawn.token_R, now.token_R),
        position_R=now.position_R + step_R,
        active_R=on_R,
        generated_R=now.generated_R + step_R,
        left_R=now.left_R - step_R,
    )
