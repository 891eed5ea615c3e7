"""The child that measures another implementation."""

import sys
from pathlib import Path

import pytest

from glm_jax.bench.peer import Peer
from glm_jax.bench.timing import Sample
from glm_jax.errors import GlmError

GREETING = """
import json, sys
work = json.loads(sys.argv[1])
print(json.dumps({"other": work["version"]}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path):
    """Writes a program that greets and then runs the given lines."""

    def write(lines: str) -> Path:
        path = tmp_path / "peer.py"
        path.write_text(GREETING + lines)
        return path

    return write


def start(program: Path) -> Peer:
    return Peer(Path(sys.executable), program, {"version": "7"})


def test_each_request_is_answered_by_one_timing(program):
    lines = """
for i, request in enumerate(sys.stdin):
    wall_s = {"float32": 1, "bfloat16": 2}[request.strip()]
    print(json.dumps({"wall_s": wall_s, "cpu_s": i}), flush=True)
"""
    with start(program(lines)) as peer:
        assert peer.versions == {"other": "7"}
        assert peer.task("bfloat16")() == Sample(wall_s=2, cpu_s=0)
        assert peer.task("float32")() == Sample(wall_s=1, cpu_s=1)


def test_a_request_may_bring_a_number(program):
    lines = """
for request in sys.stdin:
    dtype, n = request.split()
    print(json.dumps({"wall_s": int(n), "cpu_s": len(dtype)}), flush=True)
"""
    with start(program(lines)) as peer:
        assert peer.task("float32", 16)() == Sample(wall_s=16, cpu_s=7)


def test_the_child_ends_with_the_block(program):
    with start(program("sys.stdin.read()")) as peer:
        child = peer._child
        assert child.poll() is None
    assert child.poll() is not None


def test_a_child_that_ends_is_an_error_with_its_last_line(program):
    lines = "sys.stdin.readline(); raise SystemExit('no torch here')"
    with start(program(lines)) as peer, pytest.raises(GlmError, match=r"status 1 \(no torch here"):
        peer.task("float32")()


def test_a_child_that_is_gone_before_the_request_is_the_same_error(program):
    with start(program("raise SystemExit('too early')")) as peer:
        peer._child.wait()
        with pytest.raises(GlmError, match=r"status 1 \(too early"):
            peer.task("float32")()


def test_a_child_that_does_not_greet_is_an_error(program):
    path = program("")
    path.write_text("raise SystemExit('no such module')")
    with pytest.raises(GlmError, match=r"no such module.*leave out --peer-python"):
        start(path)


@pytest.mark.parametrize(
    ("answer", "text"), [("pardon", "need one line of JSON"), ('{"error": "too hot"}', "too hot")]
)
def test_answers_that_are_no_timing_are_errors(program, answer, text):
    lines = f"sys.stdin.readline(); print({answer!r}, flush=True); sys.stdin.read()"
    with start(program(lines)) as peer, pytest.raises(GlmError, match=text):
        peer.task("float32")()


def test_missing_interpreter_and_program_are_errors(program, tmp_path):
    with pytest.raises(GlmError, match=r"no-python: cannot be run \(No such file"):
        Peer(tmp_path / "no-python", program(""), {})
    with pytest.raises(GlmError, match=r"nowhere\.py: missing; run the comparison from a checkout"):
        Peer(Path(sys.executable), tmp_path / "nowhere.py", {})
