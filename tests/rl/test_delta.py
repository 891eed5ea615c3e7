"""`glm-jax delta`: checkpoints to versions and back."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rl.cli import main as cli


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*args: object) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["glm-jax", "delta", *map(str, args)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def store(run, rng, tmp_path):
    """A store of three versions, and their weights as `step-N` beside it."""
    w = rng.standard_normal((30, 40), np.float32)
    for n in range(3):
        (tmp_path / f"step-{n}").mkdir()
        save_file({"w": w}, tmp_path / f"step-{n}" / "model.safetensors")
        w = w + np.float32(1e-3) * (w > 0)
        status, out, err = run("make", tmp_path / "store", tmp_path / f"step-{n}", "--step", n)
        assert status == 0, err
        assert out.startswith(f"version {n}: {'delta of ' if n else 'full'}")
    return tmp_path / "store"


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_version_comes_back_as_the_checkpoint_it_was_made_from(run, store, version):
    out = store.parent / "out"
    assert run("apply", store, out, "--version", version)[0] == 0
    found = load_file(out / "v00000000" / "model.safetensors")["w"]
    made_from = load_file(store.parent / f"step-{version}" / "model.safetensors")["w"]
    assert found.tobytes() == made_from.tobytes()
    status, _, err = run("apply", store, out)
    assert status == 2 and "out: is not an empty folder; give another" in err


def test_verifying_tells_good_from_damaged(run, store):
    status, out, _ = run("verify", store)
    assert status == 0 and out.count("verified") == 3
    path = store / "v00000001" / "deltas.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    status, out, _ = run("verify", store)
    assert status == 1 and out.count("verified") == 1 and "1: version 1, w: delta: damaged" in out


def test_log_and_info_show_the_chain(run, store):
    status, out, _ = run("log", store)
    assert status == 0 and [line.split(",")[0] for line in out.splitlines()] == [
        "version 0: full",
        "version 1: delta of 0",
        "version 2: delta of 1",
    ]
    assert [x["parent"] for x in json.loads(run("log", store, "--json")[1])] == [None, 0, 1]
    assert "rests on 0, 1" in run("info", store)[1]
    assert json.loads(run("info", store, "--json", "--version", 1)[1])["chain"] == [0, 1]


def test_old_versions_are_removed_when_asked(run, store):
    args = ("make", store, store.parent / "step-0", "--full", "--keep", 1)
    status, out, _ = run(*args)
    assert status == 0 and "removed 0, 1, 2" in out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("log", "STORE/none"), "none: holds no version; save one first"),
        (("info", "STORE", "--version", 9), "has no version 9 (it has 0 to 2); name another"),
        (("verify", "STORE", "--contract", "abc"), "its contract is None, wanted abc"),
        (("make", "STORE", "STORE/none"), "none: no such folder; give one of safetensors files"),
        (("make", "STORE", "STORE", "--level", "tiny"), "--level tiny: no such level; use small"),
        (("make", "STORE", "STORE", "--full-every", 0), "full_every: 0; must be positive"),
        (("make", "STORE", "STORE", "--keep", 0), "--keep 0: must be positive"),
    ],
)
def test_a_mistake_is_one_line_with_status_2(run, store, args, expected):
    words = [str(x).replace("STORE", str(store)) for x in args]
    status, out, err = run(*words)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and expected in err
