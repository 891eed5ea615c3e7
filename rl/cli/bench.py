"""`glm-jax bench`: speed on the user's machine."""

import contextlib
import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl.cli.info import load_config

if TYPE_CHECKING:  # importing them would import jax
    from rich.console import Console

    from glm_jax.bench.peer import Peer

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


ConfigOption = Annotated[
    str, typer.Option(help="A preset, a checkpoint's directory, or a config.json.")
]
BatchOption = Annotated[int, typer.Option(help="Sequences.")]
LengthOption = Annotated[int, typer.Option(help="Tokens of each sequence.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")]
RepeatsOption = Annotated[int, typer.Option(help="Rounds that count, after one of warm-up.")]
PeerOption = Annotated[
    Path | None,
    typer.Option(
        help="Python of another environment, with torch and transformers: compare with them."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]


@app.callback()
def benches() -> None:
    """Measure speed on this machine."""


@app.command()
def forward(
    config: ConfigOption = "small",
    batch: BatchOption = 8,
    length: LengthOption = 256,
    dtype: DtypeOption = Dtype.BOTH,
    repeats: RepeatsOption = 5,
    peer_python: PeerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time a forward of random weights: logits, and log-probabilities pinned and native."""
    from glm_jax.bench.forward import ForwardBench, bench_forward

    bench = ForwardBench(
        cfg=load_config(config), batch=batch, length=length, dtypes=_dtypes(dtype), repeats=repeats
    )
    with _peer(peer_python, bench.work_of_peer("forward")) as peer:
        figures = bench_forward(bench, peer=peer, progress=_show)
    title = f"forward of {config}, {batch} x {length} tokens"
    _print(figures, title, as_json, _forward_rows)


@app.command()
def score(
    config: ConfigOption = "small",
    batch: BatchOption = 64,
    micro_batch: Annotated[int, typer.Option(help="Sequences of one forward.")] = 8,
    length: LengthOption = 256,
    dtype: DtypeOption = Dtype.BOTH,
    repeats: RepeatsOption = 5,
    peer_python: PeerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time log-probabilities of given tokens, pinned and native."""
    from glm_jax.bench.score import ScoreBench, bench_score

    bench = ScoreBench(
        cfg=load_config(config),
        batch=batch,
        micro_batch=micro_batch,
        length=length,
        dtypes=_dtypes(dtype),
        repeats=repeats,
    )
    with _peer(peer_python, bench.work_of_peer("score", micro_batch)) as peer:
        figures = bench_score(bench, peer=peer, progress=_show)
    title = f"scores of {config}, {batch} x {length} tokens, {micro_batch} sequences at a time"
    _print(figures, title, as_json, _program_rows)


@app.command()
def decode(
    config: ConfigOption = "small",
    sequences: Annotated[
        list[int] | None, typer.Option(help="Sequences; may be repeated. Default: 1, 16 and 64.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens that the new one attends.")] = 200,
    capacity: Annotated[int, typer.Option(help="Tokens of a sequence that the cache holds.")] = 256,
    steps: Annotated[int, typer.Option(help="Steps of one sample.")] = 8,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt of the engine.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens that the engine draws of each.")] = 96,
    dtype: DtypeOption = Dtype.BOTH,
    repeats: RepeatsOption = 5,
    peer_python: PeerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time one decode step (a new token of each sequence), and the engine on whole requests."""
    from glm_jax.bench.decode import DecodeBench, bench_decode
    from serving.bench import EngineBench, bench_engine

    options: dict[str, Any] = {
        "cfg": load_config(config),
        "sequences": tuple(sequences or (1, 16, 64)),
        "dtypes": _dtypes(dtype),
        "repeats": repeats,
    }
    bench = DecodeBench(context=context, capacity=capacity, steps=steps, **options)
    engine_bench = EngineBench(prompt=prompt, new_tokens=new_tokens, **options)
    figures = bench_decode(bench, progress=_show)
    with _peer(peer_python, engine_bench.work_of_peer()) as peer:
        engine = bench_engine(engine_bench, peer=peer, progress=_show)
    for name, result in figures["results"].items():
        result["engine"] = engine["results"][name]["engine"]
    figures |= {name: engine[name] for name in ("prompt", "new_tokens", "versions")}
    _print(figures, f"decode step of {config} at context {context}", as_json, _decode_rows)


@app.command()
def train(
    config: ConfigOption = "small",
    batch: BatchOption = 8,
    length: LengthOption = 256,
    dtype: DtypeOption = Dtype.BOTH,
    repeats: RepeatsOption = 5,
    peer_python: PeerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time forward and backward: pinned, and native autodiff without and with recomputing."""
    from glm_jax.bench.train import TrainBench, bench_train

    bench = TrainBench(
        cfg=load_config(config), batch=batch, length=length, dtypes=_dtypes(dtype), repeats=repeats
    )
    with _peer(peer_python, bench.work_of_peer("train")) as peer:
        figures = bench_train(bench, peer=peer, progress=_show)
    title = f"forward and backward of {config}, {batch} x {length} tokens"
    _print(figures, title, as_json, _program_rows)


def _dtypes(dtype: Dtype) -> tuple[str, ...]:
    if dtype is Dtype.BOTH:
        return tuple(x.value for x in Dtype if x is not Dtype.BOTH)
    return (dtype.value,)


def _show(step: str) -> None:
    from rich.console import Console

    steps = Console(stderr=True, highlight=False)
    if steps.is_terminal:
        steps.print(step, style="dim")


@contextlib.contextmanager
def _peer(python: Path | None, work: dict[str, Any]) -> Iterator["Peer | None"]:
    """The peer at work, if one is asked for."""
    if python is None:
        yield None
        return
    from glm_jax.bench.peer import Peer

    _show("starting transformers ...")
    with Peer(python, PEER, work) as peer:
        yield peer


type Row = tuple[str, Callable[[dict[str, Any]], str]]


def _print(
    figures: dict[str, Any],
    title: str,
    as_json: bool,
    rows: Callable[[dict[str, Any]], Iterator[Row]],
) -> None:
    if as_json:
        print(json.dumps(figures, indent=2, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: rich would then fold the lines at 80 columns.
    console = Console(width=max(Console().width, WIDTH), highlight=False)
    title = f"{title}, median of {figures['repeats']}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    results: dict[str, dict[str, Any]] = figures["results"]
    for dtype in results:
        table.add_column(dtype, justify="right")
    for name, text in rows(next(iter(results.values()))):
        table.add_row(name, *(text(result) for result in results.values()))
    console.print(table)
    print_device(console, figures)


def print_device(console: "Console", figures: dict[str, Any]) -> None:
    """What was measured on, with which versions, and whether other programs ran."""
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


def _forward_rows(result: dict[str, Any]) -> Iterator[Row]:
    yield from _rates("logits", lambda result: result)
    if result["ratio"] is not None:
        yield "transformers, tokens/s", lambda result: f"{result['peer_tokens_per_s']:,.0f}"
        yield "ratio ours / theirs (min to max)", lambda result: _spread(result["ratio"])
        yield "the same, by CPU seconds", lambda result: _spread(result["cpu_ratio"])
    yield from _program_rows(result)


def _program_rows(result: dict[str, Any]) -> Iterator[Row]:
    for name in ("pinned", "native", "native_remat", "peer"):
        if result.get(name) is not None:
            yield from _rates(_NAMES[name], lambda result, name=name: result[name])
    yield from _comparison_rows(result, lambda result: result)
    yield from _gemm_rows()


def _decode_rows(result: dict[str, Any]) -> Iterator[Row]:
    for n in result["steps"]:

        def pick(result: dict[str, Any], n: str = n) -> dict[str, Any]:
            return result["steps"][n]

        for mode in ("pinned", "native"):
            yield (
                f"{n} x, {mode}, tokens/s",
                lambda result, pick=pick, mode=mode: f"{pick(result)[mode]['tokens_per_s']:,.0f}",
            )
        yield from _comparison_rows(pick(result), pick, f"{n} x, ")
    for n in result["engine"]:

        def pick_engine(result: dict[str, Any], n: str = n) -> dict[str, Any]:
            return result["engine"][n]

        yield from _engine_rows(n, pick_engine(result), pick_engine)
    yield from _gemm_rows()


def _engine_rows(
    n: str, first: dict[str, Any], pick: Callable[[dict[str, Any]], dict[str, Any]]
) -> Iterator[Row]:
    def rate(result: dict[str, Any], key: str) -> str:
        return f"{pick(result)[key]['tokens_per_s']:,.0f}"

    yield f"{n} x, engine, new tokens/s", partial(rate, key="engine")
    yield "  host time of a step", lambda result: f"{pick(result)['host_share']:.1%}"
    if first["peer"] is not None:
        yield f"{n} x, transformers, new tokens/s", partial(rate, key="peer")
        yield from _comparison_rows(first, pick, f"{n} x, ")


_NAMES = {
    "engine": "engine",
    "pinned": "pinned",
    "native": "native",
    "native_remat": "native remat",
    "peer": "transformers",
}


def _rates(title: str, pick: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Row]:
    yield f"{title}, tokens/s", lambda result: f"{pick(result)['tokens_per_s']:,.0f}"
    yield "  per CPU second", lambda result: f"{pick(result)['tokens_per_cpu_s']:,.0f}"
    yield "  share of the best dense product", lambda result: f"{pick(result)['gemm_share']:.1%}"
    yield "  the same, by CPU seconds", lambda result: f"{pick(result)['gemm_cpu_share']:.1%}"


def _comparison_rows(
    result: dict[str, Any], pick: Callable[[dict[str, Any]], dict[str, Any]], lead: str = ""
) -> Iterator[Row]:
    """An overhead against another of our programs, a speed against the peer."""
    for ours, others in result["comparisons"].items():
        for theirs, figures in others.items():
            if figures is None:
                continue
            kind = "speed" if theirs == "peer" else "overhead"
            what = {"speed": "speed over", "overhead": "time over"}[kind]

            def text(r: dict[str, Any], key: str, ours: str = ours, theirs: str = theirs) -> str:
                return _spread(pick(r)["comparisons"][ours][theirs][key])

            yield f"{lead}{_NAMES[ours]}, {what} {_NAMES[theirs]}", partial(text, key=kind)
            yield "  the same, by CPU seconds", partial(text, key=f"cpu_{kind}")


def _gemm_rows() -> Iterator[Row]:
    yield "best dense product, GFLOP/s", lambda result: f"{result['best_gemm_gflops']:.1f}"
    yield "its shape", lambda result: result["best_gemm"]


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.2f} ({figures['min']:.2f} to {figures['max']:.2f})"
