"""arc_v2: the package's vectors are read, ours come back, damage is refused."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import zstandard
from typer.testing import CliRunner

from glm_jax.checkpoint import directories
from glm_jax.checkpoint.delta.arc_v2 import ArcV2, write_arc_v2
from glm_jax.checkpoint.delta.store import DeltaStore
from glm_jax.checkpoint.problems import Problems
from glm_jax.checkpoint.safetensors_files import open_file
from glm_jax.errors import GlmError
from rl.cli.main import app
from tests.glm_jax.checkpoint.delta.arrays import assert_bits

VECTORS = Path(__file__).parents[3] / "data" / "arc_v2"


def read(path: Path) -> dict[str, np.ndarray]:
    return {k: np.array(x.map()) for k, x in open_file(path, Problems(path)).items()}


OLD, NEW = read(VECTORS / "old.safetensors"), read(VECTORS / "new.safetensors")


def raw(path: Path, metadata: dict, values: dict[str, bytes], dtype="U8") -> Path:
    """A file as somebody else may have written it."""
    at, header = 0, {"__metadata__": metadata}
    for name, x in values.items():
        entry = {"dtype": dtype, "shape": [len(x)], "data_offsets": [at, at + len(x)]}
        header[name], at = entry, at + len(x)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.values()))
    return path


def stored(path: Path) -> tuple[dict, dict[str, bytes]]:
    data = path.read_bytes()
    n = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:n])
    metadata = header.pop("__metadata__")
    spans = {k: slice(*(n + at for at in x["data_offsets"])) for k, x in header.items()}
    return metadata, {k: data[span] for k, span in spans.items()}


def test_the_packages_delta_gives_the_new_weights():
    found = ArcV2(OLD, VECTORS / "delta.safetensors")
    assert any(OLD[k].tobytes() != x.tobytes() for k, x in NEW.items())
    for name, x in NEW.items():
        assert_bits(found[name], x)


def test_our_delta_says_what_the_packages_says(tmp_path):
    n = write_arc_v2(tmp_path / "d.safetensors", OLD, NEW)
    assert n == (tmp_path / "d.safetensors").stat().st_size
    (ours, frames), (theirs, others) = (
        stored(x) for x in (tmp_path / "d.safetensors", VECTORS / "delta.safetensors")
    )
    assert ours == theirs and frames.keys() == others.keys()
    for name, frame in frames.items():
        assert zstandard.decompress(frame) == zstandard.decompress(others[name])
        # Its decompressor allocates what the frame declares, so every frame must declare it.
        assert zstandard.frame_content_size(frame) == OLD[name].nbytes
    found = ArcV2(OLD, tmp_path / "d.safetensors")
    for name, x in NEW.items():
        assert_bits(found[name], x)


def test_other_weights_and_damage_are_refused_and_named(tmp_path):
    with pytest.raises(GlmError, match=r"w has checksum \d+ after the delta, not \d+"):
        dict(
            ArcV2(
                OLD | {"model.layers.0.w": NEW["model.layers.0.w"]}, VECTORS / "delta.safetensors"
            )
        )
    metadata, frames = stored(VECTORS / "delta.safetensors")
    more = frames | {"more": b""}
    with pytest.raises(GlmError, match=r"other tensors: \['more'\]"):
        ArcV2(OLD, raw(tmp_path / "a", metadata | {"more": "1"}, more))
    with pytest.raises(GlmError, match=r"odd has checksum 'x', no decimal number"):
        ArcV2(OLD, raw(tmp_path / "b", metadata | {"odd": "x"}, frames))
    with pytest.raises(GlmError, match=r"is I8 .*, no vector of U8"):
        ArcV2(OLD, raw(tmp_path / "c", metadata, frames, "I8"))
    cut = (VECTORS / "delta.safetensors").read_bytes()[:-1]
    (tmp_path / "d").write_bytes(cut)
    with pytest.raises(GlmError, match="truncated tensor"):
        ArcV2(OLD, tmp_path / "d")
    with pytest.raises(GlmError, match="are in another file too"):
        ArcV2(OLD, *[VECTORS / "delta.safetensors"] * 2)


@pytest.mark.parametrize("declared", [True, False])
def test_a_frame_of_another_size_is_refused_before_it_is_unpacked(tmp_path, declared):
    metadata, frames = stored(VECTORS / "delta.safetensors")
    bomb = zstandard.ZstdCompressor(write_content_size=declared).compress(bytes(2**26))
    found = ArcV2(OLD, raw(tmp_path / "bomb", metadata, frames | {"odd": bomb}))
    with pytest.raises(GlmError, match="odd: delta: damaged"):
        found["odd"]
    with pytest.raises(GlmError, match="odd is empty, its weights are not"):
        ArcV2(OLD, raw(tmp_path / "empty", metadata, frames | {"odd": b""}))["odd"]


def test_a_full_disk_or_an_existing_file_leaves_nothing_half_written(tmp_path, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(directories.os, "fsync", no_room)
    with pytest.raises(GlmError, match=r"No space left on device.*has room"):
        write_arc_v2(tmp_path / "d", OLD, NEW)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    write_arc_v2(tmp_path / "d", OLD, NEW)
    with pytest.raises(GlmError, match="exists; give a new name"):
        write_arc_v2(tmp_path / "d", OLD, NEW)
    with pytest.raises(GlmError, match="old and new weights have other tensors"):
        write_arc_v2(tmp_path / "e", OLD, {"odd": NEW["odd"]})
    with pytest.raises(GlmError, match=r"odd: new is bfloat16 \(3,\), old is bfloat16 \(6,\)"):
        write_arc_v2(tmp_path / "e", OLD, NEW | {"odd": NEW["odd"][:3]})


def test_the_command_line_exports_and_imports(tmp_path):
    chain = DeltaStore(tmp_path / "store", contract="c1")
    chain.save(OLD)
    chain.save(NEW)
    run = CliRunner().invoke
    out = str(tmp_path / "out")
    done = run(app, ["delta", "export", str(tmp_path / "store"), out])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "previous_snapshot_identity": "0",
        "compression_format": "arc_v2",
        "checksum_format": "alder32",
    }
    found = ArcV2(OLD, tmp_path / "out" / "model.safetensors")
    for name, x in NEW.items():
        assert_bits(found[name], x)
    other = DeltaStore(tmp_path / "other", contract="c1")
    other.save(OLD)
    done = run(app, ["delta", "import", str(tmp_path / "other"), out, "--contract", "c1"])
    assert done.exit_code == 0 and "version 1: delta of 0" in done.stdout, done.output
    for name, x in other.read().items():
        assert_bits(x, NEW[name])
    shutil.copy(VECTORS / "old.safetensors", tmp_path / "out" / "model.safetensors")
    assert run(app, ["delta", "import", str(tmp_path / "other"), out]).exception
    assert other.versions() == [0, 1]
