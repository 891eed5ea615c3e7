"""Fixtures of these tests."""

import pytest


@pytest.fixture
def quick(monkeypatch):
    """No control, and no comparison after every layer: they need programs of their own."""
    from glm_jax.invariance import check
    from glm_jax.invariance.program import Programs
    from tests.glm_jax.models import PINNED

    monkeypatch.setattr(check, "LAYERED", ())
    monkeypatch.setattr(check, "_control", lambda model, *_: (Programs(model, PINNED), 1))
