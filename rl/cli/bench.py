"""`glm-jax bench`: speed on the user's machine."""

import typer

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def benches() -> None:
    """Measure speed on this machine."""
