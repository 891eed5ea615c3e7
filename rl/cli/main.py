"""The `glm-jax` command: one sub-command per verb.

Nothing here imports jax; each verb does so when it runs, so that `--help` and usage errors are
instant and a verb may still set flags that jax reads on import.
"""

import io
import itertools
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from glm_jax.errors import GlmError
from rl.cli import bench, bench_delta, check, check_kernels, check_ops, compare, delta, info, train

app = typer.Typer(
    name="glm-jax",
    help="GLM-5-family models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
)
app.add_typer(info.app)
check.app.command()(check_ops.ops)
check.app.command()(check_kernels.kernels)
app.add_typer(check.app, name="check")
bench.app.command()(bench_delta.delta)
app.add_typer(bench.app, name="bench")
app.add_typer(delta.app, name="delta")
app.add_typer(train.app, name="train")
app.command()(compare.compare)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    import jax

    for package in ("glm-jax", "jax", "jaxlib", "flax"):
        print(package, version(package))
    print("device", jax.devices()[0].device_kind)
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions in use and the kind of device, then leave.",
            callback=_print_versions,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """GLM-5-family models in JAX."""


def main() -> None:
    """Runs the command line. A user's mistake is one `error:` line and exit status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without these characters shows "?"
            stream.reconfigure(errors="replace")
    try:
        status = app(standalone_mode=False)
    except GlmError as error:
        _leave(str(error))
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a place that cannot be written
        _leave(str(error), 1)
    except _USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            raise SystemExit(2) from None
        _leave(_usage(error))
    except typer.Abort:
        _leave("interrupted", 130)
    raise SystemExit(status or 0)


# Typer carries its own copy of click; its base class is reached through the public name.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def _usage(error: Any) -> str:
    """One line: what is wrong with which option, and where its right form is shown."""
    message = " ".join(error.format_message().split()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "glm-jax"
    for option in getattr(getattr(error, "param", None), "opts", ()):
        if (given := _given(option)) is not None and given not in message:
            message = f"{option} {given}: {message}"
    return f"{message}; see {command} --help"


def _given(option: str) -> str | None:
    """What the command line says for an option."""
    for word, after in itertools.pairwise([*sys.argv, ""]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else after
    return None


def _leave(message: str, status: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status) from None
