"""`glm-jax train`: runs on this machine, from a recipe to a report."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from rl.cli.check import Numerics

app = typer.Typer(help="Train a model.", no_args_is_help=True)


@app.callback()
def trainings() -> None:
    """Train a model."""


@app.command()
def rl(
    recipe: Annotated[Path, typer.Argument(help="TOML file, such as recipes/countdown.toml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys to override: seed=7 rl.steps=6 out=DIR"),
    ] = None,
    numerics: Annotated[
        Numerics | None,
        typer.Option(help="Arithmetic, in place of the recipe's; native is the control."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe as TOML and leave.")
    ] = False,
) -> None:
    """Warm-start on demonstrations, then train by RL on rollouts, and write a report.

    The same command takes up a run that was killed. Progress goes to stderr; stdout gets a summary
    as JSON. The first run on a machine compiles for a minute or two.
    """
    from rl.recipe import read_recipe

    resolved = read_recipe(recipe, overrides or (), numerics=numerics and numerics.value)
    if dry_run:
        sys.stdout.write(resolved.to_toml())
        return
    from glm_jax.compile_cache import use_compile_cache

    use_compile_cache()
    from rl.run import run

    print(json.dumps(run(resolved), indent=2))
