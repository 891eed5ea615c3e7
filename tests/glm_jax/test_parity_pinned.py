"""Mistakes that only the pinned path can make break its parity."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from glm_jax import forward
from glm_jax.checkpoint.hub import load_hub
from glm_jax.model import select
from glm_jax.parity import Reference, check_model
from glm_jax.parity.report import MAX_ABS, Form

DATA = Path(__file__).resolve().parents[1] / "data" / "glm5_tiny"


def own_key_left_out(monkeypatch) -> None:
    up_to = select._up_to
    wrong = lambda position_R, *rest: up_to(position_R - 1, *rest)
    monkeypatch.setattr(select, "_up_to", wrong)


def padding_of_lists_attended(monkeypatch) -> None:
    attend = select.attend_gathered

    def wrong(ops, query, keys, allowed, **sizes):
        return attend(ops, query, keys, jnp.ones_like(allowed), **sizes)

    monkeypatch.setattr(select, "attend_gathered", wrong)


def pages_of_another_slot(monkeypatch) -> None:
    build = forward.make_context

    def wrong(model, batch, cache, ops, **options):
        context = build(model, batch, cache, ops, **options)
        return dataclasses.replace(context, pages_Tp=context.pages_Tp[::-1])

    monkeypatch.setattr(forward, "make_context", wrong)


@pytest.fixture(scope="module")
def subject():
    """The checkpoint, and its reference cut down to the logits: the quickest to check."""
    reference = Reference.load(DATA / "reference.npz")
    model = load_hub(DATA, dtype="float32", latent_norm_eps=reference.latent_norm_eps)
    logits = {"logits": reference.arrays["logits"]}
    return model, dataclasses.replace(reference, arrays=logits)


def check(subject, form: Form):
    return check_model(*subject, parts=("prefill",), forms=(form,))


def test_unchanged_the_pinned_form_passes(subject):
    assert check(subject, "pinned").max_abs_logit_diff < MAX_ABS / 10


@pytest.mark.parametrize(
    "mistake", [own_key_left_out, padding_of_lists_attended, pages_of_another_slot]
)
def test_a_mistake_of_the_pinned_path_is_found(subject, monkeypatch, mistake):
    mistake(monkeypatch)
    assert check(subject, "pinned").max_abs_logit_diff > 100 * MAX_ABS
