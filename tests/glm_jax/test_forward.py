"""The forward: causal, blind to padding, the same through the cache and over gathered keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from glm_jax.cache import LatentCache
from glm_jax.errors import GlmError
from glm_jax.forward import draft, forward
from glm_jax.head import token_logprobs
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.models import NATIVE, PINNED, SMALL, batch_of, ids, model_of, run, slot_rows

B, T = 2, 12

WAYS = pytest.mark.parametrize(
    ("contract", "gathered"),
    [(NATIVE, False), (NATIVE, True), (PINNED, None)],
    ids=["masked", "gathered", "pinned"],
)
"""How attention through a cache reads its keys."""


@functools.partial(jax.jit, static_argnames="gathered")
def run_draft(model, batch, hidden_TD, next_ids_T, cache=None, gathered=None):
    out = draft(model, batch, hidden_TD, next_ids_T, cache, taps=True, gathered=gathered)
    return out.hidden_TD, out.cache, out.taps


@pytest.fixture(scope="module")
def model():
    return model_of(SMALL)


@pytest.fixture(scope="module")
def whole(model):
    """Both sequences, read at once."""
    return run(model, batch_of(ids(B, T)))


def by_sequence(x_TX):
    return np.asarray(x_TX).reshape(B, -1, *x_TX.shape[1:])


def test_no_gradient_reaches_a_later_token(model):
    batch = batch_of(ids(1, T))

    @jax.jit
    def influence(embed, row_T):
        def loss(embed):
            graphdef, state = nnx.split(model)
            changed = nnx.merge(graphdef, state, copy=True)
            changed.embed.set_value(embed)
            hidden_TD = forward(changed, batch).hidden_TD
            return jnp.sum(jnp.where(row_T[:, None], hidden_TD, 0.0) ** 2)

        # Every token has an id of its own, so a row of this gradient belongs to one token.
        return jnp.sum(jnp.abs(jax.grad(loss)(embed)), axis=1)[batch.ids_T]

    reach_TS = np.stack([influence(model.embed[...], jnp.arange(T) == t) for t in range(T)])
    assert not np.triu(reach_TS, 1).any()
    assert (np.diag(reach_TS) > 0).all()
    assert (np.count_nonzero(reach_TS, axis=1)[1:] >= 2).all()


def test_a_later_token_changes_no_selection_route_or_logit_before_it(model, whole):
    for t in (1, 5, 11):
        changed = ids(B, T)
        changed[:, t:] = ids(B, T, seed=1)[:, t:]
        other = run(model, batch_of(changed))
        before = np.s_[:, :t]
        np.testing.assert_allclose(
            by_sequence(other.logits_TV)[before], by_sequence(whole.logits_TV)[before], atol=1e-5
        )
        for layer in range(SMALL.num_hidden_layers):
            a, b = whole.taps[f"layer{layer}"], other.taps[f"layer{layer}"]
            np.testing.assert_array_equal(a["selected"][before], b["selected"][before])
            if "router_experts" in a:
                np.testing.assert_array_equal(
                    by_sequence(a["router_experts"])[before],
                    by_sequence(b["router_experts"])[before],
                )
        assert not np.allclose(
            by_sequence(other.logits_TV)[:, t], by_sequence(whole.logits_TV)[:, t]
        )


def test_padding_changes_nothing(model, whole):
    padded = run(model, batch_of(ids(B, T), rows=T + 5))
    np.testing.assert_allclose(
        by_sequence(padded.logits_TV)[:, :T], by_sequence(whole.logits_TV), atol=1e-5
    )
    for layer in range(SMALL.num_hidden_layers):
        a, b = whole.taps[f"layer{layer}"]["selected"], padded.taps[f"layer{layer}"]["selected"]
        np.testing.assert_array_equal(a, b[:, :T, :T])
        assert not b[:, T:].any() and not b[:, :, T:].any()


def test_what_stands_in_the_padding_does_not_matter(model):
    batch = batch_of([ids(1, T)[0], ids(1, 7)[0]])
    noise_T = jnp.asarray(ids(1, batch.n_tokens, seed=2)[0], jnp.int32)
    noisy = type(batch)(
        ids_T=jnp.where(batch.valid_T, batch.ids_T, noise_T),
        positions_T=batch.positions_T,
        slots_T=batch.slots_T,
        valid_T=batch.valid_T,
        rows=batch.rows,
    )
    valid_T = np.asarray(batch.valid_T)
    a, b = (np.asarray(run(model, x).logits_TV) for x in (batch, noisy))
    np.testing.assert_allclose(a[valid_T], b[valid_T], atol=1e-5)
    assert np.isfinite(a).all()


def test_sequences_do_not_see_each_other(model, whole):
    sequences = np.concatenate([ids(B, T)[:1], ids(1, T, seed=4)])
    other = by_sequence(run(model, batch_of(sequences)).logits_TV)
    np.testing.assert_allclose(other[0], by_sequence(whole.logits_TV)[0], atol=1e-5)
    assert not np.allclose(other[1], by_sequence(whole.logits_TV)[1])


def test_masked_and_gathered_attention_agree(model, whole):
    gathered = run(model, batch_of(ids(B, T)), gathered=True)
    np.testing.assert_allclose(gathered.logits_TV, whole.logits_TV, atol=1e-5)
    for layer in range(SMALL.num_hidden_layers):
        mask_GRS = np.asarray(whole.taps[f"layer{layer}"]["selected"])
        ids_Tk = np.asarray(gathered.taps[f"layer{layer}"]["selected"])
        for mask_S, ids_k in zip(mask_GRS.reshape(-1, T), ids_Tk, strict=True):
            assert ids_k[ids_k < T].tolist() == np.flatnonzero(mask_S).tolist()


@WAYS
def test_prefill_and_decode_through_the_cache_give_the_same_logits(
    model, whole, contract, gathered
):
    sequences, lengths = ids(B, T), [6, 4]
    cache = LatentCache.empty(SMALL, n_slots=B + 1, capacity=T + 1, contract=contract)
    prompts = [row[:n] for row, n in zip(sequences, lengths, strict=True)]
    out = run(model, batch_of(prompts), cache, gathered)
    expected_BTV = by_sequence(whole.logits_TV)
    for i, n in enumerate(lengths):
        np.testing.assert_allclose(
            by_sequence(out.logits_TV)[i, :n], expected_BTV[i, :n], atol=1e-5
        )
    for step in range(T - max(lengths)):
        at = [n + step for n in lengths]
        tokens = [[row[t]] for row, t in zip(sequences, at, strict=True)]
        out = run(model, batch_of(tokens, start=at), out.cache, gathered)
        for i, t in enumerate(at):
            np.testing.assert_allclose(out.logits_TV[i], expected_BTV[i, t], atol=1e-5)
    rows_LUSC = slot_rows(out.cache, "latent_LPsC")
    assert not rows_LUSC[:, B].any()  # nobody's slot
    assert not rows_LUSC[:, :, T:].any()  # nobody's position


def test_pinned_selection_is_the_native_one(model, whole):
    cache = LatentCache.empty(SMALL, n_slots=B, capacity=T, contract=PINNED)
    out = run(model, batch_of(ids(B, T)), cache)
    for layer in range(SMALL.num_hidden_layers):
        mask_TS = np.asarray(whole.taps[f"layer{layer}"]["selected"]).reshape(-1, T)
        ids_Tk = np.asarray(out.taps[f"layer{layer}"]["selected"])
        assert ids_Tk.shape == (B * T, SMALL.index_topk)
        for mask_S, ids_k in zip(mask_TS, ids_Tk, strict=True):
            listed = np.flatnonzero(mask_S).tolist()
            assert ids_k.tolist() == listed + [T] * (SMALL.index_topk - len(listed))


def test_pinned_values_are_named_like_the_native_ones_but_for_the_scores(model, whole):
    cache = LatentCache.empty(SMALL, n_slots=B, capacity=T, contract=PINNED)
    out = run(model, batch_of(ids(B, T)), cache)
    assert out.taps.keys() == whole.taps.keys()
    for layer, values in whole.taps.items():
        assert out.taps[layer].keys() == values.keys() - {"idx_scores"}
        for name in values.keys() - {"idx_scores", "selected"}:
            np.testing.assert_allclose(out.taps[layer][name], values[name], atol=3e-5)


@WAYS
def test_padding_is_not_written_to_the_cache(model, contract, gathered):
    sequences = ids(B, T)
    cache = LatentCache.empty(SMALL, n_slots=B + 1, capacity=T + 1, contract=contract)
    out = run(model, batch_of([sequences[0, :6], sequences[1, :2]]), cache, gathered)
    n_layers = {"latent_LPsC": SMALL.num_hidden_layers, "index_MPsJ": 3}
    for store, n in n_layers.items():
        written_LUS = slot_rows(out.cache, store).any(axis=3)
        assert written_LUS.shape[0] == n + 1
        assert not written_LUS[-1].any()  # the draft layer's rows
        expected_US = np.arange(cache.capacity)[None] < np.asarray([6, 2, 0])[:, None]
        np.testing.assert_array_equal(written_LUS[:-1], np.tile(expected_US, (n, 1, 1)))


@WAYS
def test_padding_with_positions_past_the_cache_hides_no_key(model, whole, contract, gathered):
    # Both in one row tile; the first sequence's padding counts on past the cache's last page.
    cache = LatentCache.empty(SMALL, n_slots=B, capacity=T, contract=contract)
    sequences = [ids(B, T)[0, :3], ids(B, T)[1]]
    first = run(model, batch_of(sequences, rows=2 * T), cache, gathered)
    got_TV = np.asarray(first.logits_TV).reshape(B, 2 * T, -1)
    expected_BTV = by_sequence(whole.logits_TV)
    np.testing.assert_allclose(got_TV[0, :3], expected_BTV[0, :3], atol=1e-5)
    np.testing.assert_allclose(got_TV[1, :T], expected_BTV[1], atol=1e-5)


@WAYS
def test_keys_are_found_wherever_their_pages_are(model, whole, contract, gathered):
    cache = LatentCache.empty(SMALL, n_slots=B + 1, capacity=T, contract=contract, n_pages=9)
    assert (np.asarray(cache.table_Up) == -1).all()
    cache = cache.replace(table_Up=jnp.asarray([[7, 0, 3], [-1] * 3, [5, 8, 1]], jnp.int32))
    batch = batch_of(ids(B, T))
    batch = type(batch)(
        batch.ids_T, batch.positions_T, 2 * batch.slots_T, batch.valid_T, rows=batch.rows
    )
    out = run(model, batch, cache, gathered)
    np.testing.assert_allclose(out.logits_TV, whole.logits_TV, atol=1e-5)
    used_P = np.asarray(out.cache.latent_LPsC)[0].any(axis=(1, 2))
    assert np.flatnonzero(used_P).tolist() == [0, 1, 3, 5, 7, 8]


@WAYS
def test_the_draft_layer_gives_the_same_through_the_cache(model, whole, contract, gathered):
    sequences = ids(B, T)
    hidden_BTD, next_ids_BT = by_sequence(whole.hidden_TD), np.roll(sequences, -1, axis=1)

    def step(first, last, cache):
        start = [first] * B
        return run_draft(
            model,
            batch_of(sequences[:, first:last], start=start),
            jnp.asarray(hidden_BTD[:, first:last].reshape(-1, SMALL.hidden_size)),
            jnp.asarray(next_ids_BT[:, first:last].reshape(-1), jnp.int32),
            cache,
            gathered=gathered if cache is not None else False,
        )

    at_once_TD, none, taps = step(0, T, None)
    assert none is None and list(taps) == ["mtp"]
    cache = LatentCache.empty(SMALL, n_slots=B, capacity=T, contract=contract)
    for t in range(T):
        y_TD, cache, _ = step(t, t + 1, cache)
        np.testing.assert_allclose(y_TD, by_sequence(at_once_TD)[:, t], atol=1e-5)
    # Its rows are the last on both layer axes; the model's own stay empty.
    for store in (cache.latent_LPsC, cache.index_MPsJ):
        assert np.asarray(store)[-1].any() and not np.asarray(store)[:-1].any()


def test_draft_without_a_draft_layer_is_a_clear_error():
    cfg = SMALL.with_overrides(num_nextn_predict_layers=0)
    batch = batch_of(ids(1, 2))
    hidden_TD, next_ids_T = jnp.zeros((2, SMALL.hidden_size)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"no MTP layer \(num_nextn_predict_layers is 0\)"):
        draft(model_of(cfg), batch, hidden_TD, next_ids_T)


@pytest.mark.parametrize(("n_slots", "capacity"), [(0, 4), (1, 0), (1, 2**20 + 1)])
def test_a_cache_out_of_range_is_an_error(n_slots, capacity):
    text = f"cache: {n_slots} slots of {capacity} tokens; need at least one slot"
    with pytest.raises(GlmError, match=text):
        LatentCache.empty(SMALL, n_slots, capacity)


@pytest.mark.parametrize("n_pages", [0, -1])
def test_a_cache_without_a_page_is_an_error(n_pages):
    with pytest.raises(GlmError, match=f"cache: {n_pages} pages; need at least one"):
        LatentCache.empty(SMALL, 1, 4, n_pages=n_pages)


def test_pinned_numerics_without_a_cache_are_an_error(model):
    with pytest.raises(GlmError, match=r"pinned numerics need a cache; pass LatentCache.empty"):
        forward(model, batch_of(ids(1, 2)), contract=PINNED)


def test_a_cache_of_another_contract_is_an_error(model):
    cache = LatentCache.empty(SMALL, 1, 4, contract=PINNED)
    with pytest.raises(GlmError, match=r"cache: numerics contract .* key_block: 64 here, 4 there"):
        forward(model, batch_of(ids(1, 2)), cache, contract=NumericsContract())
    hidden_TD, next_ids_T = jnp.zeros((2, SMALL.hidden_size)), jnp.zeros(2, jnp.int32)
    with pytest.raises(GlmError, match="mode: native here, pinned there"):
        draft(model, batch_of(ids(1, 2)), hidden_TD, next_ids_T, cache, contract=NATIVE)


def test_log_probabilities_are_those_of_the_logits(model, whole):
    targets_T = jnp.asarray(ids(B, T, seed=3).reshape(-1), jnp.int32)
    logits_TV = np.asarray(whole.logits_TV, np.float64)
    total_T = np.log(np.exp(logits_TV).sum(axis=1))
    expected_T = logits_TV[np.arange(B * T), np.asarray(targets_T)] - total_T
    got_T = jax.jit(token_logprobs)(model, whole.hidden_TD, targets_T)
    np.testing.assert_allclose(got_T, expected_T, atol=1e-5)


def test_no_taps_and_no_cache_unless_asked_for(model):
    out = jax.eval_shape(forward, model, batch_of(ids(1, 2)))
    assert out.cache is None
    assert out.taps == {}
    hidden_TD, next_ids_T = jnp.zeros((2, SMALL.hidden_size)), jnp.zeros(2, jnp.int32)
    out = jax.eval_shape(draft, model, batch_of(ids(1, 2)), hidden_TD, next_ids_T)
    assert out.taps == {}
