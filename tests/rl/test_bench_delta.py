"""`glm-jax bench delta` prints a table and JSON."""

import json
import sys

import pytest

from glm_jax.bench import delta_weights
from rl.cli import main as cli


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(delta_weights, "shapes", lambda vocab, n: {"lm_head": (vocab, 256)})

    def run(*args: str) -> tuple[int | str | None, str, str]:
        words = ["glm-jax", "bench", "delta", "--vocab", "64", "--repeats", "1", *args]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        return leaving.value.code, *capsys.readouterr()

    return run


def test_json_has_every_case_and_format(run):
    status, out, _ = run("--json")
    figures = json.loads(out)
    assert status == 0 and len(figures["results"]) == 6
    for result in figures["results"].values():
        assert {"small", "fast", "xor_zstd1", "sparse_step_zstd1"} <= result["formats"].keys()


def test_the_table_names_cases_and_machine(run):
    status, out, _ = run()
    assert status == 0 and "new 1e-06, 8 steps" in out and "numba" in out


def test_a_bad_size_is_one_line(run):
    assert run("--layers", "0")[::2] == (2, "error: --layers 0: must be positive\n")
