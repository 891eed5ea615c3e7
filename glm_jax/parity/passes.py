"""Runs the model as the reference was run, and names its values as the reference does.

Every call makes its own jitted function, so that nothing traced earlier is used again: a test that
replaces a piece of the model must see the replacement.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.checkpoint.hub_save import transformers_norms
from glm_jax.forward import draft, forward
from glm_jax.head import token_logprobs
from glm_jax.model import GlmModel
from glm_jax.params import leaves
from glm_jax.parity.measure import boundary_gap
from glm_jax.parity.reference import Reference
from glm_jax.parity.report import Form

Arrays = dict[str, np.ndarray]


def prefill(model: GlmModel, reference: Reference, form: Form) -> Arrays:
    """Values of every layer and logits, all tokens read at once."""
    batch = TokenBatch.from_sequences(model.cfg, reference.ids_BS)

    @jax.jit
    def run(model, batch):
        out = forward(model, batch, taps=True, gathered=form == "gathered")
        return out.taps, model.logits(out.hidden_TD)

    taps, logits_TV = run(model, batch)
    shape = reference.ids_BS.shape
    named = {"logits": _unflatten(logits_TV, shape)}
    named |= {name: _unflatten(value, shape) for name, value in taps.pop("model").items()}
    for layer, values in taps.items():
        named |= _layer(layer, values, shape, model.cfg.index_topk)
    return named


def mtp(model: GlmModel, reference: Reference, form: Form, hidden_BSD: np.ndarray) -> Arrays:
    """Values and logits of the draft layer, on the model's own output.

    Args:
        model: a model with a draft layer.
        reference: gives the tokens.
        form: form of attention.
        hidden_BSD: the model's output after its final norm.
    """
    ids_BS = reference.ids_BS
    batch = TokenBatch.from_sequences(model.cfg, ids_BS[:, :-1])
    next_ids_T = jnp.asarray(ids_BS[:, 1:].reshape(-1), jnp.int32)
    hidden_TD = jnp.asarray(hidden_BSD[:, :-1].reshape(-1, hidden_BSD.shape[-1]))

    @jax.jit
    def run(model, batch, hidden_TD, next_ids_T):
        gathered = form == "gathered"
        out = draft(model, batch, hidden_TD, next_ids_T, taps=True, gathered=gathered)
        return out.taps["mtp"], out.hidden_TD, model.logits(out.hidden_TD)

    values, y_TD, logits_TV = run(model, batch, hidden_TD, next_ids_T)
    shape = (ids_BS.shape[0], ids_BS.shape[1] - 1)
    named = {"mtp.hidden": _unflatten(y_TD, shape), "mtp.logits": _unflatten(logits_TV, shape)}
    return named | _layer("mtp", values, shape, model.cfg.index_topk)


def decode(
    model: GlmModel, reference: Reference, forms: tuple[Form, ...]
) -> Iterator[tuple[Form, Arrays]]:
    """Logits through the cache: the first tokens at once, then one at a time, in each form.

    The cache holds the same rows in both forms, so it is filled once.
    """
    cfg, ids_BS, n_prefill = model.cfg, reference.ids_BS, reference.prefill
    n_sequences, n_tokens = ids_BS.shape

    def step(form):
        def run(model, batch, cache):
            out = forward(model, batch, cache, gathered=form == "gathered")
            return model.logits(out.hidden_TD), out.cache

        return jax.jit(run)

    empty = LatentCache.empty(cfg, n_sequences, n_tokens)
    batch = TokenBatch.from_sequences(cfg, ids_BS[:, :n_prefill])
    logits_TV, filled = step(forms[0])(model, batch, empty)
    first_BSV = _unflatten(logits_TV, (n_sequences, n_prefill))
    for form in forms:
        run, cache, parts = step(form), filled, [first_BSV]
        for t in range(n_prefill, n_tokens):
            start = [t] * n_sequences
            batch = TokenBatch.from_sequences(cfg, ids_BS[:, t : t + 1], start=start)
            logits_TV, cache = run(model, batch, cache)
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

    @jax.jit
    def run(params, rest, batch, targets_T, counts_T):
        def loss(params):
            model = nnx.merge(graphdef, params, rest)
            out = forward(model, batch, gathered=form == "gathered")
            logprob_T = token_logprobs(model, out.hidden_TD, targets_T)
            return -jnp.sum(jnp.where(counts_T, logprob_T, 0.0)) / jnp.sum(
                counts_T, dtype=jnp.float32
            )

        return jax.value_and_grad(loss)(params)

    loss, gradient = run(params, rest, batch, targets_T, counts_T)
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


def _layer(name: str, values: dict[str, jax.Array], shape: tuple[int, int], k: int) -> Arrays:
    named = {f"{name}.{key}": _unflatten(value, shape) for key, value in values.items()}
    selected = named[f"{name}.selected"]
    if selected.dtype != bool:
        named[f"{name}.selected"] = _as_mask(selected, shape[1])
    if f"{name}.idx_scores" in named:
        named[f"{name}.idx_gap"] = boundary_gap(named[f"{name}.idx_scores"], k)
    return named


def _as_mask(ids_BSk: np.ndarray, n_keys: int) -> np.ndarray:
    """`[B, S, n_keys]`, True at the listed keys; entries past the last key are padding."""
    mask = np.zeros((*ids_BSk.shape[:2], n_keys + 1), bool)
    np.put_along_axis(mask, ids_BSk, True, axis=-1)
    return mask[..., :n_keys]


def _unflatten(x: jax.Array, shape: tuple[int, int]) -> np.ndarray:
    return np.asarray(x).reshape(*shape, -1)
