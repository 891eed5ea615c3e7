"""The chain: every version comes back exactly, faults leave the versions before whole."""

import errno
import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from glm_jax.checkpoint.delta import places, store
from glm_jax.checkpoint.delta.manifest import Manifest
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.errors import GlmError
from tests.glm_jax.checkpoint.delta.arrays import assert_bits


def history(rng, n: int) -> list[dict[str, np.ndarray]]:
    """Weights after so many steps: large, small, f32, 0-d and empty tensors."""
    shapes = {"w": (64, 96), "e": (3, 40, 30), "norm": (32,), "scalar": (), "none": (0, 4)}
    masters = {k: np.asarray(rng.standard_normal(s, np.float32)) * 0.02 for k, s in shapes.items()}
    found = []
    for _ in range(n):
        dtypes = {"norm": np.float32}
        found.append(
            {k: np.asarray(x).astype(dtypes.get(k, ml_dtypes.bfloat16)) for k, x in masters.items()}
        )
        for k, x in masters.items():
            masters[k] = np.asarray(x + 1e-4 * rng.standard_normal(x.shape))
    return found


def assert_version(chain: DeltaStore, version: int, expected: dict[str, np.ndarray]) -> None:
    found = chain.read(version)
    assert list(found) == list(expected)
    for name in expected:
        assert_bits(found[name], expected[name])


@pytest.fixture
def weights(rng):
    return history(rng, 7)


@pytest.fixture
def chain(tmp_path, weights):
    """Versions 0 (full), 1, 2 (deltas), 3 (full), 4, 5."""
    chain = DeltaStore(tmp_path / "store", contract="c1", full_every=3)
    for number, new in enumerate(weights[:6]):
        chain.save(new, weights[number - 1] if number and number % 2 else None, step=10 * number)
    return chain


def folder(chain: DeltaStore, version: int):
    return chain.places.root / f"v{version:08d}"


def edit(chain: DeltaStore, version: int, change) -> None:
    path = folder(chain, version) / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def test_every_version_comes_back_whatever_the_deltas_between(chain, weights):
    kinds = [chain.manifest(n).kind for n in chain.versions()]
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta"]
    for number in range(6):
        assert_version(chain, number, weights[number])
        assert chain.manifest(number).step == 10 * number


def test_a_full_version_is_a_safetensors_file(chain, weights):
    with safe_open(str(folder(chain, 3) / "model.safetensors"), "np") as file:
        assert sorted(file.keys()) == sorted(weights[3])
        assert_bits(file.get_tensor("norm"), weights[3]["norm"])


def test_advancing_gives_fresh_arrays_and_leaves_the_old_ones(chain, weights):
    before = {k: x.tobytes() for k, x in weights[4].items()}
    found = chain.advance(weights[4], 5)
    for name, array in found.items():
        assert_bits(array, weights[5][name])
        assert not np.shares_memory(array, weights[4][name])
        assert weights[4][name].tobytes() == before[name]


def test_the_wrong_parent_is_refused_and_named(chain, weights):
    with pytest.raises(GlmError, match=r": other bytes than in version 4; give the weights of"):
        chain.advance(weights[3], 5)
    with pytest.raises(GlmError, match=r": other bytes than in version 5"):
        DeltaStore(chain.places.root, contract="c1").save(weights[6], weights[2])


def test_another_contract_is_refused_and_the_next_version_is_full(chain, weights):
    other = DeltaStore(chain.places.root, contract="c2")
    with pytest.raises(GlmError, match="its contract is c1, wanted c2"):
        other.read()
    assert other.save(weights[6]).kind == "full"
    assert_version(other, 6, weights[6])


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_corrupt_byte_is_found_and_the_next_version_stands_alone(chain, weights, version, at):
    path = chain.places.data(chain.manifest(version))
    data = bytearray(path.read_bytes())
    first = min(x.offset for x in chain.manifest(version).tensors.values() if x.n_bytes)
    data[first + int(at * (len(data) - first))] ^= 16
    path.write_bytes(bytes(data))
    with pytest.raises(GlmError):
        chain.verify(5)
    assert_version(chain, 2, weights[2])
    wide = DeltaStore(chain.places.root, contract="c1")
    with pytest.raises(GlmError):
        wide.save(weights[6])  # reads the damaged version to make a delta of it
    assert wide.save(weights[6]).kind == "full"
    assert_version(wide, wide.versions()[-1], weights[6])


def test_a_truncated_file_or_missing_base_is_named(chain, weights):
    path = chain.places.data(chain.manifest(4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GlmError, match=r"version 5 rests on 4: .*deltas.bin: has \d+ bytes, the"):
        chain.open(5)
    shutil.rmtree(folder(chain, 4))
    with pytest.raises(GlmError, match=r"version 5 rests on 4: .*has no version 4"):
        chain.open(5)
    assert DeltaStore(chain.places.root, contract="c1").save(weights[6]).kind == "full"


def test_a_parent_that_was_replaced_is_noticed(chain):
    edit(chain, 4, lambda x: x.update(step=99))
    with pytest.raises(GlmError, match="was made from another version 4 than the one here"):
        chain.open(5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.update(format_version=2), "format version 2, this program reads 1; update"),
        (lambda x: x.update(format="zip"), "is no manifest"),
        (lambda x: x.update(surplus=1), "is no manifest"),
        (lambda x: x.update(data_bytes=-1), "is no size"),
        (lambda x: x.update(data_bytes=2**50), "belong to no tensor"),
        (
            lambda x: (
                x["tensors"]["w"].update(offset=x["data_bytes"], stored=2**40),
                x.update(data_bytes=x["data_bytes"] + 2**40),
            ),
            "tensor w of .* bytes has 1099511627776 stored",
        ),
        (lambda x: x.update(version=9), "is that of version 9"),
        (lambda x: x["tensors"]["w"].update(offset=2**40), "tensor w lies beyond the data file"),
        (lambda x: x["tensors"]["w"].update(shape=[2**40, 2**40]), "is no manifest"),
        (lambda x: x["tensors"]["w"].update(shape=[2**20, 2**20]), r"tensors \['w'\] are not"),
        (lambda x: x["tensors"]["w"].update(dtype="F4"), "is no manifest"),
        (
            lambda x: x["tensors"].update(more=x["tensors"]["w"] | {"stored": 0}),
            r"tensors \['more'\] are",
        ),
        (lambda x: x["tensors"]["norm"].update(offset=0), r"tensor \w+ overlaps"),
        (lambda x: x.update(parent=5), "parent 5 of version 5"),
    ],
)
def test_a_manifest_that_lies_is_refused_before_anything_is_read(chain, change, expected):
    edit(chain, 5, change)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(GlmError, match=expected):
        patch.setattr(store.Snapshot, "_stored", None)
        chain.open(5)


def remote(monkeypatch, url: str) -> DeltaStore:
    """A chain in an object store that cannot rename, of versions 0 (full) and 1."""
    from fsspec.implementations.memory import MemoryFileSystem

    def refused(*_, **__):
        raise AssertionError("an object store has no atomic rename")

    for method in ("mv", "mv_file", "move", "rename"):
        monkeypatch.setattr(MemoryFileSystem, method, refused, raising=False)
    return DeltaStore(url, contract="c1", full_every=3)


def test_a_chain_lives_in_an_object_store(monkeypatch, weights):
    chain = remote(monkeypatch, "memory://bucket/whole")
    for new in weights[:5]:
        chain.save(new)
    assert [chain.manifest(n).kind for n in range(5)] == ["full", "delta", "delta", "full", "delta"]
    for number in range(5):
        assert_version(DeltaStore("memory://bucket/whole", contract="c1"), number, weights[number])
    assert chain.collect(keep=2) == [0, 1, 2] and chain.versions() == [3, 4]
    with pytest.raises(GlmError, match=r"bucket/whole: has no version 0"):
        chain.read(0)


def test_in_an_object_store_the_manifest_is_last_and_half_a_write_is_no_version(
    monkeypatch, weights
):
    chain = remote(monkeypatch, "memory://bucket/killed")
    chain.save(weights[0])

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(chain.places, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        chain.save(weights[1])
    assert chain.versions() == [0] and chain.places.leftovers() == [1]
    again = DeltaStore("memory://bucket/killed", contract="c1")
    assert_version(again, 0, weights[0])
    assert again.save(weights[1]).version == 2
    assert_version(again, 2, weights[1])


def test_half_a_manifest_in_a_store_without_atomic_writes_is_refused_and_healed(
    monkeypatch, weights
):
    chain = remote(monkeypatch, "memory://bucket/half")
    chain.save(weights[0])
    chain.save(weights[1])
    path = chain.places.folder(1) / "manifest.json"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(GlmError, match=r"is no manifest of a weight chain"):
        chain.read()
    assert_version(chain, 0, weights[0])
    assert chain.save(weights[2]).kind == "full"
    assert_version(chain, 2, weights[2])
    with pytest.raises(GlmError, match=r"nosuch://x: cannot be opened"):
        DeltaStore("nosuch://x")


def test_links_out_of_the_store_are_refused(chain, tmp_path):
    outside = tmp_path / "secret"
    data = folder(chain, 5) / "deltas.bin"
    shutil.copy(data, outside)
    data.unlink()
    os.symlink(outside, data)
    with pytest.raises(GlmError, match="is a link out of the store"):
        chain.open(5)
    shutil.move(folder(chain, 4), tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder(chain, 4))
    with pytest.raises(GlmError, match=r"manifest.json: is a link out of the store"):
        chain.open(4)
    with pytest.raises(GlmError, match="is a link; remove it by hand"):
        chain.places.remove(4)
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_a_full_disk_leaves_the_versions_before_and_heals_with_a_full_one(
    chain, weights, monkeypatch
):
    wide = DeltaStore(chain.places.root, contract="c1")

    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "flush", no_room)
    with pytest.raises(GlmError, match=r"No space left on device.*has room"):
        wide.save(weights[6])
    monkeypatch.undo()
    assert wide.versions() == list(range(6))
    assert_version(wide, 5, weights[5])
    assert wide.save(weights[6]).kind == "full"


def test_a_manifest_that_was_half_written_is_no_version(chain, weights, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(places, "flush", killed)
    with pytest.raises(KeyboardInterrupt):
        chain.save(weights[6])
    monkeypatch.undo()
    assert chain.versions() == list(range(6)) and chain.places.leftovers() == [6]
    assert chain.save(weights[6]).version == 7
    assert chain.collect(keep=9) == [] and chain.places.leftovers() == []


def test_collecting_keeps_what_the_kept_versions_rest_on(chain, weights):
    assert chain.collect(keep=1) == [0, 1, 2]
    assert chain.versions() == [3, 4, 5]
    assert_version(chain, 5, weights[5])
    with pytest.raises(GlmError, match="keep: 0; must be positive"):
        chain.collect(keep=0)


def test_a_killed_collection_leaves_every_listed_version_whole(chain, monkeypatch):
    remove = chain.places.remove
    left = [2]

    def remove_some(version):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        remove(version)

    monkeypatch.setattr(chain.places, "remove", remove_some)
    with pytest.raises(KeyboardInterrupt):
        chain.collect(keep=1)
    for version in chain.versions():
        chain.verify(version)
    assert chain.versions() == [0, 3, 4, 5]


def test_new_shapes_or_names_start_a_new_chain(chain, weights):
    changed = weights[6] | {"w": weights[6]["w"][:10]}
    assert DeltaStore(chain.places.root, contract="c1").save(changed).kind == "full"
    assert DeltaStore(chain.places.root, contract="c1").save({"w": changed["w"]}).kind == "full"


def test_a_manifest_survives_its_own_text(chain):
    manifest = chain.manifest(5)
    assert Manifest.parse(manifest.to_bytes(), "x") == manifest


def test_an_empty_store_and_a_dtype_without_a_code_are_named(tmp_path):
    with pytest.raises(GlmError, match="holds no version"):
        DeltaStore(tmp_path).read()
    with pytest.raises(GlmError, match="w: dtype complex64 is none of safetensors'"):
        DeltaStore(tmp_path).save({"w": np.zeros(3, np.complex64)})
    with pytest.raises(GlmError, match="full_every: 0; must be positive"):
        DeltaStore(tmp_path, full_every=0)
