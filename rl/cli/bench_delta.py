"""`glm-jax bench delta`: weight deltas against other formats."""

import json
from typing import Annotated, Any

import typer


def delta(
    vocab: Annotated[int, typer.Option(help="Rows of embedding and head, 2048 wide.")] = 1024,
    layers: Annotated[int, typer.Option(help="Layers, of 6.3 million elements each.")] = 1,
    full: Annotated[
        bool, typer.Option("--full", help="142.6 million elements: vocab 16384, 12 layers.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; the fastest of each tensor counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Time weight deltas of updates as RL makes them, and compare sizes with the entropy.

    One thread. Beside our levels stand plain formats and, where it is installed with torch, the
    package fireworks-delta-compression.
    """
    from rich.console import Console

    from glm_jax.bench.delta import DeltaBench, bench_delta
    from glm_jax.bench.delta_weights import FULL_LAYERS, FULL_VOCAB

    vocab, layers = (FULL_VOCAB, FULL_LAYERS) if full else (vocab, layers)
    bench = DeltaBench(vocab=vocab, n_layers=layers, repeats=repeats)
    steps = Console(stderr=True, highlight=False, style="dim")
    figures = bench_delta(bench, progress=steps.print if steps.is_terminal else lambda step: None)
    if as_json:
        print(json.dumps(figures, indent=2, allow_nan=False))
    else:
        _print(figures)


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from rl.cli.bench import WIDTH, print_device

    console = Console(width=max(Console().width, WIDTH), highlight=False)
    for case, result in figures["results"].items():
        entropies = f"{result['entropy']:.3f} %, {result['entropy_given_exponent']:.3f} %"
        title = f"{case}: {result['changed']:.2f} % changed; entropy, given exponents: {entropies}"
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("")
        for column in ("size, %", "over floor", "encode, MB/s", "by CPU", "apply, MB/s", "by CPU"):
            table.add_column(column, justify="right")
        for name, x in result["formats"].items():
            table.add_row(
                name,
                f"{x['size']:.3f}",
                f"{x['size_over_floor']:.2f}",
                f"{x['encode_mb_per_s']:,.0f}",
                f"{x['encode_mb_per_cpu_s']:,.0f}",
                f"{x['apply_mb_per_s']:,.0f}",
                f"{x['apply_mb_per_cpu_s']:,.0f}",
            )
        console.print(table)
    print_device(console, figures)
