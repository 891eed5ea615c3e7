"""`glm-jax bench`: speed on the user's machine."""

import contextlib
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from rl.cli.info import load_config

PEER = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench_transformers.py"

WIDTH = 100
BUSY = 0.5
"""Load average per CPU above which the table warns."""

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


class Dtype(StrEnum):
    """Choices of `--dtype`."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    BOTH = "both"


@app.callback()
def benches() -> None:
    """Measure speed on this machine."""


@app.command()
def forward(
    config: Annotated[
        str, typer.Option(help="A preset, a checkpoint's directory, or a config.json.")
    ] = "small",
    batch: Annotated[int, typer.Option(help="Sequences.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 256,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.BOTH,
    repeats: Annotated[int, typer.Option(help="Rounds that count, after one of warm-up.")] = 5,
    peer_python: Annotated[
        Path | None,
        typer.Option(
            help="Python of another environment, with torch and transformers: compare with them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time the forward (logits of every token) of random weights, and dense products beside it."""
    from rich.console import Console

    from glm_jax.bench.forward import DTYPES, ForwardBench, bench_forward
    from glm_jax.bench.peer import Peer

    bench = ForwardBench(
        cfg=load_config(config),
        batch=batch,
        length=length,
        dtypes=DTYPES if dtype is Dtype.BOTH else (dtype.value,),
        repeats=repeats,
    )
    steps = Console(stderr=True, highlight=False)

    def show(step: str) -> None:
        if steps.is_terminal:
            steps.print(step, style="dim")

    with contextlib.ExitStack() as stack:
        peer = None
        if peer_python is not None:
            show("starting transformers ...")
            peer = stack.enter_context(Peer(peer_python, PEER, bench.work_of_peer()))
        figures = bench_forward(bench, peer=peer, progress=show)
    if as_json:
        print(json.dumps(figures, indent=2, allow_nan=False))
    else:
        _print_table(figures, config)


def _print_table(figures: dict[str, Any], config: str) -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: rich would then fold the lines at 80 columns.
    console = Console(width=max(Console().width, WIDTH), highlight=False)
    table = Table(
        title=f"forward of {config}, {figures['batch']} x {figures['length']} tokens, "
        f"median of {figures['repeats']}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("")
    results: dict[str, dict[str, Any]] = figures["results"]
    for dtype in results:
        table.add_column(dtype, justify="right")
    for name, text in _rows(next(iter(results.values()))["ratio"] is not None):
        table.add_row(name, *(text(result) for result in results.values()))
    console.print(table)
    device = figures["device"]
    versions = ", ".join(f"{name} {number}" for name, number in figures["versions"].items())
    console.print(f"on {device['kind']}: {device['cpu']}, {device['cpus']} CPUs; {versions}")
    load = device["load_average"]
    if load is not None and load > BUSY * device["cpus"]:
        console.print(
            f"the load average was {load:.1f} at the start: other programs share these CPUs, and "
            "they slow one implementation more than another; measure again when they have ended",
            style="yellow",
        )


def _rows(compared: bool):
    def count(key: str):
        return lambda result: f"{result[key]:,.0f}"

    def spread(key: str):
        return lambda result: (
            f"{result[key]['median']:.2f} ({result[key]['min']:.2f} to {result[key]['max']:.2f})"
        )

    yield "tokens/s", count("tokens_per_s")
    yield "tokens per CPU second", count("tokens_per_cpu_s")
    yield "GFLOP/s", lambda result: f"{result['gflops']:.1f}"
    yield "best dense product, GFLOP/s", lambda result: f"{result['best_gemm_gflops']:.1f}"
    yield "its shape", lambda result: result["best_gemm"]
    yield "share of it", lambda result: f"{result['gemm_share']:.1%}"
    yield "share of it, by CPU seconds", lambda result: f"{result['gemm_cpu_share']:.1%}"
    if compared:
        yield "transformers, tokens/s", count("peer_tokens_per_s")
        yield "transformers, tokens per CPU second", count("peer_tokens_per_cpu_s")
        yield "ratio ours / theirs (min to max)", spread("ratio")
        yield "the same, by CPU seconds", spread("cpu_ratio")
