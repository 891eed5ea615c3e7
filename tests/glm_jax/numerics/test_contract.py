"""The contract: its digest tells any two apart, and a refusal names what differs."""

import dataclasses
import json
import re

import jax
import pytest

from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract, require_same
from glm_jax.numerics.processor import device_kind

CONTRACT = NumericsContract()
FIELDS = [field.name for field in dataclasses.fields(NumericsContract)]


def changed(name: str) -> NumericsContract:
    """The contract with another valid value in one field."""
    value = getattr(CONTRACT, name)
    if name == "mode":
        other = "native"
    elif isinstance(value, tuple):
        other = value[:-1]
    else:
        other = value + 1 if isinstance(value, int) else f"{value} or not"
    return dataclasses.replace(CONTRACT, **{name: other})


def test_equal_contracts_have_equal_digests_and_hashes():
    other = NumericsContract()
    assert other == CONTRACT and hash(other) == hash(CONTRACT)
    assert other.digest == CONTRACT.digest
    assert re.fullmatch("[0-9a-f]{16}", CONTRACT.digest)


def test_versions_and_device_are_those_of_this_program():
    assert CONTRACT.jax == jax.__version__
    assert CONTRACT.device_kind == device_kind()


def test_every_field_changes_the_digest():
    digests = {name: changed(name).digest for name in FIELDS}
    assert len({*digests.values(), CONTRACT.digest}) == len(FIELDS) + 1


@pytest.mark.parametrize("name", FIELDS)
def test_a_differing_field_is_named_with_both_values(name):
    other = changed(name)
    with pytest.raises(GlmError) as refusal:
        require_same(CONTRACT, other, "weights")
    text = str(refusal.value)
    assert text.startswith(
        f"weights: numerics contract {other.digest} is not ours ({CONTRACT.digest}): "
    )
    ours, theirs = CONTRACT.to_dict()[name], other.to_dict()[name]
    assert text.endswith(f": {name}: {ours} here, {theirs} there")


def test_all_differing_fields_are_named_and_no_others():
    other = dataclasses.replace(CONTRACT, k_leaf=128, column_pad=32, mode="native")
    with pytest.raises(GlmError) as refusal:
        require_same(CONTRACT, other, "cache")
    named = re.findall(r"(\w+): \S+ here", str(refusal.value))
    assert sorted(named) == ["column_pad", "k_leaf", "mode"]


def test_equal_contracts_are_not_refused():
    assert require_same(CONTRACT, NumericsContract(), "cache") is None


@pytest.mark.parametrize("name", FIELDS)
def test_a_contract_survives_json(name):
    contract = changed(name)
    again = NumericsContract.from_dict(json.loads(json.dumps(contract.to_dict())))
    assert again == contract and again.digest == contract.digest


def test_unknown_and_missing_fields_are_named():
    fields = CONTRACT.to_dict()
    with pytest.raises(GlmError, match=r"fields \['colour'\] are unknown or missing"):
        NumericsContract.from_dict(fields | {"colour": "blue"})
    del fields["k_leaf"]
    with pytest.raises(GlmError, match=r"fields \['colour', 'k_leaf'\] are unknown or missing"):
        NumericsContract.from_dict(fields | {"colour": "blue"})


@pytest.mark.parametrize("name", ["row_tiles", "expert_tiles"])
@pytest.mark.parametrize(
    ("tiles", "text"),
    [
        ((), r"\(\); need ascending, different sizes of at least 2"),
        ((64, 8), "need ascending"),
        ((8, 8), "need ascending, different sizes"),
        ((1, 8), "of at least 2"),
        ((0,), "of at least 2"),
        ((-8, 8), "of at least 2"),
        ((8, 20), r"\(8, 20\); each must be a multiple of the smallest"),
    ],
)
def test_bad_tiles_are_refused(name, tiles, text):
    with pytest.raises(GlmError, match=f"{name}: .*{text}"):
        NumericsContract(**{name: tiles})


@pytest.mark.parametrize(
    "name", [name for name in FIELDS if isinstance(getattr(CONTRACT, name), int)]
)
def test_sizes_must_be_positive(name):
    for value in (0, -64):
        with pytest.raises(GlmError, match=f"{name}: {value}; must be positive"):
            NumericsContract(**{name: value})


def test_an_unknown_mode_is_refused():
    with pytest.raises(GlmError, match="numerics: 'exact' is no mode; use 'pinned' or 'native'"):
        NumericsContract(mode="exact")


def test_a_bad_contract_in_a_file_is_refused_too():
    with pytest.raises(GlmError, match=r"row_tiles: .*need ascending"):
        NumericsContract.from_dict(CONTRACT.to_dict() | {"row_tiles": [64, 8]})


def test_the_kernels_are_a_choice_that_the_digest_covers():
    assert CONTRACT.kernels == NumericsContract(kernels="xla").kernels
    assert CONTRACT.kernels == "grouped_matmul xla, pinned_matmul xla, sparse_attention xla"
    kernels = NumericsContract(kernels="pallas")
    assert re.search("pinned_matmul tpu-interpret [0-9a-f]{8}", kernels.kernels)
    assert kernels.digest != CONTRACT.digest
    with pytest.raises(GlmError, match="kernels: grouped_matmul xla, pinned_matmul xla, "):
        require_same(CONTRACT, kernels, "weights")


def test_kernels_that_this_program_does_not_have_are_refused_when_used():
    contract = NumericsContract(kernels="pinned_matmul tpu 00000000")
    with pytest.raises(GlmError, match=r"kernels: pinned_matmul: .* made with tiles 00000000"):
        contract.backend("pinned_matmul")
