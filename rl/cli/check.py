"""`glm-jax check`: proofs that run on the user's machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # importing it would import jax
    from glm_jax.parity import Group, ParityReport

MOST_FAILURES = 12
"""Failed arrays that the table names, first computed first; the JSON names them all."""

app = typer.Typer(help="Check the model against a reference.", no_args_is_help=True)


@app.callback()
def checks() -> None:
    """Check the model against a reference."""


@app.command()
def parity(
    checkpoint: Annotated[
        Path, typer.Option(help="Directory of a checkpoint in the hub's layout.")
    ],
    reference: Annotated[
        Path, typer.Option(help="Arrays another implementation computed for it (.npz).")
    ],
    latent_norm_eps: Annotated[
        float | None,
        typer.Option(
            help="eps of the latent norms; default: that of meta.json beside the reference, "
            "else the checkpoint's. Training and serving engines use 1e-5, transformers 1e-6."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run a checkpoint in fp32 and compare it with a reference; exit status 1 if they differ."""
    from rich.console import Console

    from glm_jax.parity import check_parity

    steps = Console(stderr=True, highlight=False)

    def show(step: str) -> None:
        if steps.is_terminal:
            steps.print(f"{step} ...", style="dim")

    report = check_parity(checkpoint, reference, latent_norm_eps=latent_norm_eps, progress=show)
    if as_json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _print_table(report, checkpoint, reference)
    raise typer.Exit(0 if report.ok else 1)


def _print_table(report: "ParityReport", checkpoint: Path, reference: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from glm_jax.parity.report import GROUPS

    console = Console(highlight=False)
    table = Table(
        title=f"{checkpoint} against {reference}", title_justify="left", title_style="bold"
    )
    table.add_column("what")
    for header in ("arrays", "measured", "tolerance"):
        table.add_column(header, justify="right")
    table.add_column("verdict")
    for name in GROUPS:
        table.add_row(*_row(report.group(name)))
    console.print(table)
    settings = f"latent-norm eps {report.latent_norm_eps:g} (from {report.latent_norm_eps_from})"
    forms = " and ".join(report.forms)
    console.print(f"fp32; {settings}; attention {forms}; decoding from token {report.prefill}")
    if report.absent:
        console.print(f"not in the reference: {', '.join(report.absent)}", style="yellow")
    for failure in report.failures[:MOST_FAILURES]:
        bound = f"{failure.value:.3g} > {failure.tolerance:g}"
        console.print(f"differs: {failure.label}: {bound}", style="red")
    if (more := len(report.failures) - MOST_FAILURES) > 0:
        console.print(f"and {more} more; --json lists them", style="red")
    verdict = "[green]parity holds[/]" if report.ok else "[red]parity does not hold[/]"
    console.print(verdict, style="bold")


def _row(group: "Group") -> tuple[str, ...]:
    if group.value is None:
        return group.title, "0", "", "", "[yellow]not in the reference[/]"
    exact = group.tolerance == 0
    measured = f"{group.value:.0f}" if exact else f"{group.value:.2e}"
    verdict = "[green]ok[/]" if group.ok else "[red]differs[/]"
    return group.title, str(group.arrays), measured, f"{group.tolerance:g}", verdict
