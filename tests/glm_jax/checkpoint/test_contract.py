"""The numerics contract travels with the weights, and a mismatch is refused by name."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from glm_jax.checkpoint.hub import load_hub, save_hub
from glm_jax.checkpoint.store import load_orbax, save_orbax
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.checkpoint.helpers import FIXTURE, assert_same, random_model, refusal, short

OTHER = {"token_leaf": 64, "k_leaf": 128}


class Store(NamedTuple):
    save: Callable
    load: Callable


@pytest.fixture(
    params=[Store(save_orbax, load_orbax), Store(save_hub, load_hub)], ids=["orbax", "hub"]
)
def store(request) -> Store:
    return request.param


def test_weights_come_back_under_the_contract_they_were_saved_with(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, contract = random_model(short()), NumericsContract()
    store.save(model, tmp_path / "out", contract=contract)
    with caplog.at_level(logging.WARNING, "glm_jax"):
        assert_same(store.load(tmp_path / "out", contract=NumericsContract()), model)
        assert_same(store.load(tmp_path / "out"), model)
    assert not caplog.records


def test_another_contract_is_refused_with_the_differing_fields(
    store: Store, tmp_path: Path
) -> None:
    stored, ours = NumericsContract(), NumericsContract(**OTHER)
    store.save(random_model(short()), tmp_path / "out", contract=stored)
    with pytest.raises(GlmError) as caught:
        store.load(tmp_path / "out", contract=ours)
    text = str(caught.value)
    assert f"out: numerics contract {stored.digest} is not ours ({ours.digest})" in text
    assert "token_leaf: 64 here, 128 there" in text and "k_leaf: 128 here, 256 there" in text
    assert "column_block" not in text


def test_weights_without_a_contract_are_accepted_and_logged(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(short())
    store.save(model, tmp_path / "out")
    with caplog.at_level(logging.WARNING, "glm_jax"):
        assert_same(store.load(tmp_path / "out", contract=NumericsContract()), model)
    (record,) = caplog.records
    text = record.getMessage()
    assert "out: stores no numerics contract" in text and NumericsContract().digest in text


def test_the_file_beside_the_config_holds_digest_and_fields(tmp_path: Path) -> None:
    contract = NumericsContract(**OTHER)
    save_hub(random_model(short()), tmp_path / "out", contract=contract)
    stored = json.loads((tmp_path / "out" / "numerics.json").read_text())
    assert stored["digest"] == contract.digest
    assert NumericsContract.from_dict(stored["contract"]) == contract
    save_hub(random_model(short()), tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "numerics.json").exists()


def test_a_mismatch_is_found_before_anything_is_allocated(tmp_path: Path) -> None:
    save_hub(random_model(short()), tmp_path / "out", contract=NumericsContract(mode="native"))
    text = refusal(tmp_path / "out", contract=NumericsContract())
    assert "mode: pinned here, native there" in text


def _edit(**changes: int) -> str:
    contract = NumericsContract()
    return json.dumps({"digest": contract.digest, "contract": contract.to_dict() | changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "numerics.json: is no JSON"),
        ("[]", "has no fields"),
        ('{"digest": "0"}', "has no fields"),
        (_edit(k_leaf=512), "it was edited"),
        (_edit(future=1), r"fields \['future'\] are unknown or missing"),
        (_edit(k_leaf=-1), "k_leaf: -1; must be positive"),
    ],
)
def test_an_unusable_file_is_named_and_matters_only_when_asked(
    text: str, expected: str, tmp_path: Path
) -> None:
    model = random_model(short())
    save_hub(model, tmp_path / "out")
    (tmp_path / "out" / "numerics.json").write_text(text)
    with pytest.raises(GlmError, match=expected):
        load_hub(tmp_path / "out", contract=NumericsContract())
    assert_same(load_hub(tmp_path / "out"), model)


def test_a_published_checkpoint_loads_under_any_contract() -> None:
    load_hub(FIXTURE, contract=NumericsContract(**OTHER))
