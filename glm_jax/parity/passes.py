"""Runs the model as the reference was run, and names its values as the reference does.

The pinned form is the engine's path: keys in a paged cache, regions of fixed shape, and the head's
own logits. The native ones read the prompt without a cache.

Every call makes its own jitted function, so that nothing traced earlier is used again: a test that
replaces a piece of the model must see the replacement.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.checkpoint.hub_save import transformers_norms
from glm_jax.config import GlmConfig
from glm_jax.forward import arithmetic, draft, forward
from glm_jax.head import score, token_logprobs
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from glm_jax.params import leaves
from glm_jax.parity.measure import boundary_gap
from glm_jax.parity.reference import Reference
from glm_jax.parity.report import Form

Arrays = dict[str, np.ndarray]


def prefill(model: GlmModel, reference: Reference, form: Form) -> Arrays:
    """Values of every layer and logits, all tokens read at once."""
    batch = TokenBatch.from_sequences(model.cfg, reference.ids_BS)
    shape = reference.ids_BS.shape

    def run(model, batch, cache):
        out = forward(model, batch, cache, taps=True, gathered=form == "gathered")
        return out.taps, _logits(model, batch, cache, out.hidden_TD)

    cache = _cache(model, shape, form) if form == "pinned" else None
    taps, logits_TV = _jit(run, form)(model, batch, cache)
    named = {"logits": _unflatten(logits_TV, shape)}
    named |= {name: _unflatten(value, shape) for name, value in taps.pop("model").items()}
    for layer, values in taps.items():
        named |= _layer(layer, values, shape, model.cfg, cache)
    return named


def mtp(model: GlmModel, reference: Reference, form: Form, hidden_BSD: np.ndarray) -> Arrays:
    """Values and logits of the draft layer, on the model's own output.

    Args:
        model: a model with a draft layer.
        reference: gives the tokens.
        form: how it is computed.
        hidden_BSD: the model's output after its final norm.
    """
    ids_BS = reference.ids_BS
    batch = TokenBatch.from_sequences(model.cfg, ids_BS[:, :-1])
    next_ids_T = jnp.asarray(ids_BS[:, 1:].reshape(-1), jnp.int32)
    hidden_TD = jnp.asarray(hidden_BSD[:, :-1].reshape(-1, hidden_BSD.shape[-1]))
    shape = (ids_BS.shape[0], ids_BS.shape[1] - 1)

    def run(model, batch, hidden_TD, next_ids_T, cache):
        gathered = form == "gathered"
        out = draft(model, batch, hidden_TD, next_ids_T, cache, taps=True, gathered=gathered)
        return out.taps["mtp"], out.hidden_TD, _logits(model, batch, cache, out.hidden_TD)

    cache = _cache(model, shape, form) if form == "pinned" else None
    values, y_TD, logits_TV = _jit(run, form)(model, batch, hidden_TD, next_ids_T, cache)
    named = {"mtp.hidden": _unflatten(y_TD, shape), "mtp.logits": _unflatten(logits_TV, shape)}
    return named | _layer("mtp", values, shape, model.cfg, cache)


def decode(
    model: GlmModel, reference: Reference, forms: tuple[Form, ...]
) -> Iterator[tuple[Form, Arrays]]:
    """Logits through the cache: the first tokens at once, then one at a time, in each form.

    The native forms have a cache in common, which holds the same rows for both; the pinned one has
    its own.
    """
    cfg, ids_BS, n_prefill = model.cfg, reference.ids_BS, reference.prefill
    n_sequences, n_tokens = ids_BS.shape

    def step(form):
        def run(model, batch, cache):
            out = forward(model, batch, cache, gathered=form == "gathered")
            return _logits(model, batch, cache, out.hidden_TD), out.cache

        return _jit(run, form)

    batch = TokenBatch.from_sequences(cfg, ids_BS[:, :n_prefill])
    filled = {}
    for form in forms:
        run, mode = step(form), _contract(form).mode
        if mode not in filled:
            filled[mode] = run(model, batch, _cache(model, ids_BS.shape, form))
        logits_TV, cache = filled[mode]
        parts = [_unflatten(logits_TV, (n_sequences, n_prefill))]
        for t in range(n_prefill, n_tokens):
            start = [t] * n_sequences
            one = TokenBatch.from_sequences(cfg, ids_BS[:, t : t + 1], start=start)
            logits_TV, cache = run(model, one, cache)
            parts.append(_unflatten(logits_TV, (n_sequences, 1)))
        yield form, {"logits_decode": np.concatenate(parts, axis=1)}


def gradients(model: GlmModel, reference: Reference, form: Form) -> Arrays:
    """Mean next-token cross entropy over all tokens but the last, and its gradient."""
    ids_BS = reference.ids_BS
    n_sequences, n_tokens = ids_BS.shape
    batch = TokenBatch.from_sequences(model.cfg, ids_BS)
    # The last token of a sequence predicts nothing here; whatever stands in for its target.
    targets_T = jnp.asarray(np.roll(ids_BS, -1, axis=1).reshape(-1), jnp.int32)
    counts_T = jnp.asarray(np.tile(np.arange(n_tokens) < n_tokens - 1, n_sequences))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, rest, batch, targets_T, counts_T):
        def loss(params):
            model = nnx.merge(graphdef, params, rest)
            out = forward(model, batch, gathered=form == "gathered")
            logprob_T = token_logprobs(model, out.hidden_TD, targets_T)
            return -jnp.sum(jnp.where(counts_T, logprob_T, 0.0)) / jnp.sum(
                counts_T, dtype=jnp.float32
            )

        return jax.value_and_grad(loss)(params)

    loss, gradient = _jit(run, form)(params, rest, batch, targets_T, counts_T)
    named: Arrays = {"loss": np.asarray(loss)}
    for name, norm in transformers_norms(gradient, model.cfg).items():
        named[f"gradnorm.{name}"] = np.asarray(norm)
    by_path = dict(leaves(gradient))
    named["grad.embed"] = np.asarray(by_path["embed"][...])
    attention = "segments.0.blocks.0.attention."
    k_up_NPK, v_up_NKU = (np.asarray(by_path[attention + x][0]) for x in ("k_up", "v_up"))
    kv_NWK = np.concatenate([k_up_NPK, v_up_NKU.transpose(0, 2, 1)], axis=1)
    named["grad.kv_b_proj0"] = kv_NWK.reshape(-1, kv_NWK.shape[-1])
    return named


def _jit(run: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Compiles the pinned form as the engine does, the native ones without optimisation.

    Only the mathematics of the native forms is in question, and they then compile in half the time.
    """
    options = {} if form == "pinned" else {"xla_backend_optimization_level": 0}
    return jax.jit(run, compiler_options=options)


def _contract(form: Form) -> NumericsContract:
    return NumericsContract(mode="pinned" if form == "pinned" else "native")


def _cache(model: GlmModel, shape: tuple[int, int], form: Form) -> LatentCache:
    """An empty cache for `shape[0]` sequences of `shape[1]` tokens."""
    return LatentCache.empty(model.cfg, *shape, contract=_contract(form))


def _logits(
    model: GlmModel, batch: TokenBatch, cache: LatentCache | None, hidden_TD: jax.Array
) -> jax.Array:
    """Logits of every token in the arithmetic of the cache; pinned: by the engine's own head."""
    ops = arithmetic(cache, None)
    if not ops.contract.pinned:
        return model.logits(hidden_TD)
    n = batch.n_tokens
    padded = batch.padded(ops.bucket(n))
    hidden_TD = jnp.pad(hidden_TD, ((0, padded.n_tokens - n), (0, 0)))
    scores = score(model, ops, hidden_TD, padded.ids_T, padded.n_used, logits=True)
    assert scores.logits_TV is not None
    return scores.logits_TV[:n]


def _layer(
    name: str,
    values: dict[str, jax.Array],
    shape: tuple[int, int],
    cfg: GlmConfig,
    cache: LatentCache | None,
) -> Arrays:
    named = {f"{name}.{key}": _unflatten(value, shape) for key, value in values.items()}
    selected = named[f"{name}.selected"]
    if selected.dtype != bool:
        n_keys = shape[1] if cache is None else cache.capacity
        named[f"{name}.selected"] = _as_mask(selected, cfg.index_topk, n_keys)
    if f"{name}.idx_scores" in named:
        named[f"{name}.idx_gap"] = boundary_gap(named[f"{name}.idx_scores"], cfg.index_topk)
    return named


def _as_mask(ids_BSk: np.ndarray, k: int, n_keys: int) -> np.ndarray:
    """`[B, S, S]`, True at the listed keys. A list that is no selection gives a row of False.

    A token lists `min(position + 1, k)` keys, then padding: the number of keys there can be.
    """
    n_tokens = ids_BSk.shape[1]
    count_S1 = np.minimum(np.arange(n_tokens) + 1, k)[:, None]
    listed_Sk = np.arange(ids_BSk.shape[2])[None, :] < count_S1
    mask = np.zeros((*ids_BSk.shape[:2], n_keys + 1), bool)
    np.put_along_axis(mask, ids_BSk, True, axis=-1)
    # Past the prompt lies the unused part of a cache.
    sound_BS = ((ids_BSk < n_keys) == listed_Sk).all(-1) & ~mask[..., n_tokens:n_keys].any(-1)
    return mask[..., :n_tokens] & sound_BS[..., None]


def _unflatten(x: jax.Array, shape: tuple[int, int]) -> np.ndarray:
    return np.asarray(x).reshape(*shape, -1)
