"""`glm-jax compare`: two runs in one report."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.")]


def compare(
    first: RunArgument,
    second: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of the report; default: FIRST-vs-SECOND beside the first."),
    ] = None,
) -> None:
    """Lay two runs side by side: figures, curves, samples, and where their recipes differ."""
    from rl.report import write_comparison

    place = out or first.absolute().parent / f"{first.absolute().name}-vs-{second.absolute().name}"
    print(write_comparison(first, second, place))
