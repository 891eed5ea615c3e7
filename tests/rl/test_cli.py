"""The frame of the `glm-jax` command."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

from glm_jax.errors import GlmError
from rl.cli import main as cli


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int | str | None:
    """Runs the command in this process and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["glm-jax", *args])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    return leaving.value.code


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch):
    """Adds a verb `fail` that raises what `failing_verb.error` holds."""

    def fail() -> None:
        raise fail.error

    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    cli.app.command("fail")(fail)
    return fail


def test_version_names_every_package_and_the_device(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [f"{x} {version(x)}" for x in ("glm-jax", "jax", "jaxlib", "flax")]
    assert lines[4] == "device cpu"


def test_users_mistake_is_one_error_line_and_status_2(monkeypatch, capsys, failing_verb):
    failing_verb.error = GlmError("model.safetensors: missing; download it")
    assert run(monkeypatch, "fail") == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: model.safetensors: missing; download it\n")


def test_a_full_disk_is_one_line_and_status_1(monkeypatch, capsys, failing_verb):
    failing_verb.error = OSError(28, "No space left", "run/x")
    assert run(monkeypatch, "fail") == 1
    assert capsys.readouterr().err == "error: [Errno 28] No space left: 'run/x'\n"


def test_other_errors_keep_their_traceback(monkeypatch, failing_verb):
    failing_verb.error = ValueError("a bug")
    monkeypatch.setattr(sys, "argv", ["glm-jax", "fail"])
    with pytest.raises(ValueError, match="a bug"):
        cli.main()


@pytest.mark.parametrize("args", [["nonsense"], ["check", "nonsense"], ["--nonsense"]])
def test_unknown_names_are_usage_errors_with_status_2(monkeypatch, capsys, args):
    assert run(monkeypatch, *args) == 2
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["check", "invariance", "--trials", "-3"],
        ["check", "invariance", "--seed=-3"],
        ["check", "invariance", "--model", "glm-5.2-3"],
        ["check", "bisect", "--phases", "prefill,-3"],
        ["check", "bisect", "--variant", "x-3"],
        ["check", "parity", "--checkpoint", "x", "--reference", "y-3"],
        ["check", "parity", "--checkpoint", "x", "--reference", "y", "--latent-norm-eps", "-3"],
        ["info", "tiny", "--context", "x-3"],
        ["bench", "forward", "--dtype", "x-3"],
    ],
)
def test_a_bad_value_is_one_line_that_shows_it_before_anything_runs(monkeypatch, capsys, args):
    assert run(monkeypatch, *args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert "-3" in err


@pytest.mark.parametrize("args", [[], ["check"], ["bench"]])
def test_a_group_without_a_verb_shows_its_help(monkeypatch, capsys, args):
    assert run(monkeypatch, *args) == 2
    assert "Usage: glm-jax" in "".join(capsys.readouterr())


def test_a_published_model_is_not_filled_with_random_weights(monkeypatch, capsys):
    assert run(monkeypatch, "check", "invariance", "--model", "glm-5") == 2
    assert "GB of random weights" in capsys.readouterr().err


def test_text_of_a_terminal_without_unicode_is_replaced_not_refused():
    environment = dict(os.environ, PYTHONIOENCODING="ascii")
    code = "import sys; sys.argv[1:] = ['info', 'tiny']; from rl.cli.main import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env=environment
    )
    assert shown.returncode == 0 and shown.stdout.startswith(b"tiny: 8 layers"), shown.stderr


def test_loading_the_command_does_not_import_jax():
    code = "import sys, rl.cli.main; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_verbs_are_registered():
    names = {group.name for group in cli.app.registered_groups}
    assert {"check", "bench"} <= names
    assert isinstance(cli.app, typer.Typer)
