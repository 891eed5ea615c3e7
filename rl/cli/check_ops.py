"""`glm-jax check ops`: which operations change a row's bits with the number of rows."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rl.cli.bench import Dtype

if TYPE_CHECKING:  # importing it would import jax
    from rich.table import Table

    from glm_jax.numerics.survey import Changes, Survey


def ops(
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.BOTH,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Survey the operations of the `small` config, one by one, stock and pinned.

    A row's bits are compared between small batches and a large one. Exit status 1 if a pinned
    operation changes any, or if no stock one does: the survey then shows nothing.
    """
    from rich.console import Console

    from glm_jax.numerics.survey import survey

    steps = Console(stderr=True, highlight=False, style="dim", soft_wrap=True)
    dtypes = ("float32", "bfloat16") if dtype is Dtype.BOTH else (dtype.value,)
    result = survey(dtypes, progress=steps.print)
    if as_json:
        print(json.dumps(result.to_json(), indent=2, allow_nan=False))
    else:
        _print(result)
    raise typer.Exit(0 if result.ok else 1)


def _print(result: "Survey") -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for dtype in dict.fromkeys(line.dtype for line in result.lines):
        console.print(_table(result, dtype))
    console.print("price: CPU seconds, pinned over stock; of small operations, a rough figure")
    verdict = "[green]no pinned bit changes[/]" if result.ok else "[red]the survey failed[/]"
    console.print(f"{verdict}; contract {result.contract.digest}", style="bold")


def _table(result: "Survey", dtype: str) -> "Table":
    from rich.table import Table

    table = Table(
        title=f"{dtype}: elements unlike those among {result.reference_rows:,} rows",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("operation", no_wrap=True)
    priced = list(result.lines[0].price)
    for header in ("stock", "at rows", "pinned", *(f"price {m}" for m in priced)):
        table.add_column(header, justify="right")
    for line in result.lines:
        if line.dtype == dtype:
            price = (f"{line.price[m]:.2f}" for m in priced)
            counts = (f"{line.stock.unequal:,}", _span(line.stock), f"{line.pinned.unequal:,}")
            table.add_row(line.name, *counts, *price)
    return table


def _span(changes: "Changes") -> str:
    at = changes.at
    return "" if not at else str(at[0]) if len(at) == 1 else f"{at[0]} to {at[-1]}"
