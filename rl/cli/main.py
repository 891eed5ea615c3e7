"""The `glm-jax` command: one sub-command per verb.

Nothing here imports jax; each verb does so when it runs, so that `--help` and usage errors are
instant and a verb may still set flags that jax reads on import.
"""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from glm_jax.errors import GlmError
from rl.cli import bench, check, check_ops, info

app = typer.Typer(
    name="glm-jax",
    help="GLM-5-family models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug shows Python's own traceback
)
app.add_typer(info.app)
check.app.command()(check_ops.ops)
app.add_typer(check.app, name="check")
app.add_typer(bench.app, name="bench")


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
    try:
        app()
    except GlmError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
