"""`glm-jax check kernels`: what can be proven of the Pallas kernels without TPU or GPU."""

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from glm_jax.errors import GlmError

if TYPE_CHECKING:  # importing it would import jax
    from pallas_kernels.check.report import KernelReport, PartReport

WIDTH = 120
"""Columns of the table, which has four topologies side by side."""

MOST_ERRORS = 12
"""Failures that the table is followed by; the JSON has them all."""


def kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="An operation; may be given again. Default: all.")
    ] = None,
    topology: Annotated[
        list[str] | None,
        typer.Option(help="v5e, v5p, v6e or v7x; may be given again. Default: all."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check the kernels on this CPU; exit status 1 if any check fails.

    Every operation: the TPU and the GPU kernel in interpret mode against their XLA twin in bits;
    compiled by the real TPU compiler at GLM-5.2's shapes, if libtpu is installed; lowered for an
    H200. Nothing is timed but the compiler, and no device is used.
    """
    # The compiler in libtpu is called directly; jax itself shall look for no TPU.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console

    from pallas_kernels.check import check_kernels
    from pallas_kernels.errors import KernelError

    steps = Console(stderr=True, highlight=False, style="dim", soft_wrap=True)
    try:
        report = check_kernels(op or (), topology or (), progress=steps.print)
    except KernelError as error:
        raise GlmError(str(error)) from None
    if as_json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _print(report)
    raise typer.Exit(0 if report.ok else 1)


def _print(report: "KernelReport") -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: rich would then fold the lines at 80 columns.
    console = Console(width=max(Console().width, WIDTH), highlight=False)
    table = Table()
    for header in ("operation", "part", "interpreted", "gpu interpreted"):
        table.add_column(header, no_wrap=True)
    for target in (*report.topologies, "h200"):
        table.add_column(target, justify="right")
    for part in report.parts:
        table.add_row(*_row(part, report.topologies))
    console.print(table)
    console.print(
        "interpreted: shapes equal to the twin in all bits, by the TPU kernel, and by the GPU "
        "kernel in Mosaic GPU's interpreter; a topology: shapes compiled, most MiB of VMEM, "
        "compile seconds; h200: shapes lowered, bfloat16 only"
    )
    if not report.topologies:
        console.print(f"TPU {report.tpu}", style="yellow")
    errors = [
        f"{part.op} {part.part}, {x.target}, {x.case}: {x.error or 'lowered differently twice'}"
        for part in report.parts
        for x in (*part.tpu, *part.gpu)
        if not x.ok
    ]
    for error in errors[:MOST_ERRORS]:
        console.print(error, style="red", markup=False)
    if (more := len(errors) - MOST_ERRORS) > 0:
        console.print(f"and {more} more; --json lists them", style="red")
    verdict = "[green]nothing that was checked failed[/]" if report.ok else "[red]it failed[/]"
    console.print(f"{verdict}; jax {report.versions['jax']}, {report.tpu}", style="bold")


def _row(part: "PartReport", topologies: tuple[str, ...]) -> list[str]:
    def count(found) -> str:
        done = sum(x.ok for x in found)
        return f"{done} of {len(found)}" if done < len(found) else str(done)

    cells = [part.op, part.part]
    for found in (part.interpreted, part.gpu_interpreted):
        cells.append(count(found) if found else "none")
    for target in topologies:
        found = [x for x in part.tpu if x.target == target]
        vmem = max((x.vmem_bytes or 0 for x in found), default=0) / 2**20
        seconds = sum(x.seconds for x in found)
        cells.append(f"{count(found)}, {vmem:.1f}, {seconds:.0f} s" if found else "no kernel")
    cells.append(count(part.gpu) if part.gpu else "no kernel")
    return cells
