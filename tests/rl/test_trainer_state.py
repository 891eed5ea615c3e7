"""A trainer's state on disk: whole or absent, complete, and refused when it is not what it was."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from glm_jax.errors import GlmError
from glm_jax.model import GlmModel
from glm_jax.numerics.contract import NumericsContract
from rl import trainer_state
from rl.trainer import Trainer
from tests.rl.trainers import ADAM, CFG, CONFIG, contract, data, hashes, model, stepped, trainer

ROOT = Path(__file__).resolve().parents[2]


def test_a_state_goes_on_to_the_same_weights(tmp_path):
    straight = trainer()
    for _ in range(2):
        straight.forward_backward(data(), "ppo")
        straight.optim_step(ADAM)
    t, _ = stepped([data()])
    t.save_state(tmp_path / "state", {"position": 17})
    other = trainer()
    assert other.load_state(tmp_path / "state") == {"position": 17}
    assert (other.step, other.version, other.digest()) == (1, 1, t.digest())
    other.forward_backward(data(), "ppo")
    other.optim_step(ADAM)
    assert other.digest() == straight.digest()
    for a, b in zip(jax.tree.leaves(other._opt), jax.tree.leaves(straight._opt), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    t, _ = stepped([data()])
    state = t.save_state(tmp_path / "state")
    with pytest.raises(GlmError, match="token_leaf: 32 here, 16 there"):
        Trainer(
            model(), contract=NumericsContract(token_leaf=32, key_block=16), config=CONFIG
        ).load_state(state)
    with pytest.raises(GlmError, match="dtype: bfloat16 here, float32 there"):
        trainer("bfloat16").load_state(state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_holds_frozen_arrays_too(tmp_path, dtype):
    t, _ = stepped([data()], dtype=dtype)
    t.save_state(tmp_path / "state")
    other = GlmModel.init(CFG.with_overrides(dtype=dtype), seed=1)
    other = Trainer(other, contract=contract(), config=CONFIG)
    assert other.digest() != t.digest()
    other.load_state(tmp_path / "state")
    assert other.digest() == t.digest() and hashes(other) == hashes(t)
    for a, b in zip(jax.tree.leaves(other.model), jax.tree.leaves(t.model), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def flip_a_bit_of_a_moment(state):
    arrays = load_file(state / "arrays.safetensors")
    name = next(name for name in sorted(arrays) if ".nu" in name)
    arrays[name].view(np.uint32).flat[0] ^= 1
    save_file(arrays, state / "arrays.safetensors")


def cut_arrays(state):
    file = state / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def forget_a_counter(state):
    counters = json.loads((state / "state.json").read_text())
    del counters["version"]
    (state / "state.json").write_text(json.dumps(counters))


def change_a_counter(state):
    counters = json.loads((state / "state.json").read_text())
    counters["step"] += 1
    (state / "state.json").write_text(json.dumps(counters))


DAMAGE = [
    (change_a_counter, "the files were changed"),
    (flip_a_bit_of_a_moment, "the files were changed"),
    (cut_arrays, "cannot be read"),
    (forget_a_counter, "cannot be read .*'version'"),
    (lambda state: (state / "state.json").write_text("[1]"), "cannot be read"),
    *(
        (lambda state, name=name: (state / name).unlink(), f"has no {name}")
        for name in ("state.json", "arrays.safetensors", "config.json", "numerics.json")
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(tmp_path, damage, message):
    state = trainer().save_state(tmp_path / "state")
    damage(state)
    t, _ = stepped([data()])
    t.forward_backward(data(), "ppo")
    before = (hashes(t), t.step, t.version, t.digest())
    with pytest.raises(GlmError, match=message):
        t.load_state(state)
    assert (hashes(t), t.step, t.version, t.digest()) == before
    t.optim_step(ADAM)  # what had accumulated is there


def test_a_save_that_fails_anywhere_leaves_the_state_before(tmp_path, monkeypatch):
    first, (second, _) = trainer(), stepped([data()])
    first.save_state(tmp_path / "state")
    calls = {"fsync": os.fsync, "rename": Path.rename, "mkdir": Path.mkdir}
    for name, real in calls.items():
        for at in itertools.count():
            count = itertools.count()

            def failing(*args, real=real, count=count, at=at, **more):
                if next(count) == at:
                    raise OSError("no space left")
                return real(*args, **more)

            with monkeypatch.context() as patch:
                patch.setattr(os if name == "fsync" else Path, name, failing)
                try:
                    second.save_state(tmp_path / "state")
                    break
                except GlmError as error:
                    assert "cannot be written" in str(error)
            # Where only the last flush fails, the new state is there, the old one beside it.
            t = trainer()
            t.load_state(tmp_path / "state")
            assert t.digest() in (first.digest(), second.digest())
            assert not list(tmp_path.glob(".*partial*"))
        assert at > 0
        first.save_state(tmp_path / "state")


SAVES_FOREVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from rl import trainer_state
from tests.rl.trainers import CFG, contract
step = 0
while True:
    step += 1
    counters = {"step": step, "version": step, "more": {}}
    state = {"x": jnp.full(20_000, step, jnp.float32)}
    trainer_state.save(Path(sys.argv[1]), CFG, contract(), state, counters)
    print(step, flush=True)
"""


def test_kill_at_any_moment_leaves_a_whole_state(tmp_path, rng):
    like = {"x": np.zeros(20_000, np.float32)}
    for _ in range(2):
        command = [sys.executable, "-c", SAVES_FOREVER, str(tmp_path / "state")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            done = int([child.stdout.readline() for _ in range(3)][-1])
            time.sleep(rng.uniform(0, 0.05))
            child.kill()
        found, counters = load_or_rename(tmp_path / "state", like)
        assert counters["step"] >= done
        assert (np.asarray(found["x"]) == counters["step"]).all()


def load_or_rename(state, like):
    """As the error says when the kill came between two renames."""
    try:
        return trainer_state.load(state, CFG, contract(), like)
    except GlmError as error:
        old = re.search(r"rename (\S+) to get", str(error))
        (state.parent / old[1]).rename(state)
        return trainer_state.load(state, CFG, contract(), like)


def test_more_that_is_no_json_is_refused_before_anything_is_written(tmp_path):
    for more in ({"x": np.zeros(2)}, {"x": float("nan")}):
        with pytest.raises(GlmError, match="more: cannot be kept as JSON"):
            trainer().save_state(tmp_path / "state", more)
    assert not list(tmp_path.iterdir())
