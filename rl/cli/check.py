"""`glm-jax check`: proofs that run on the user's machine."""

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm_jax.config import GlmConfig
from glm_jax.errors import GlmError
from glm_jax.presets import PRESETS
from rl.cli.bench import WIDTH, Dtype
from rl.cli.info import load_config

if TYPE_CHECKING:  # importing it would import jax
    from rich.console import Console

    from glm_jax.invariance import Bisection, Invariance
    from glm_jax.model import GlmModel
    from glm_jax.numerics.contract import NumericsContract
    from glm_jax.parity import Group, ParityReport

MOST_RANDOM_BYTES = 8 * 10**9
"""Random weights above this are refused: they are made on the host, to prove something small."""

MOST_FAILURES = 12
"""Failed arrays that the table names, first computed first; the JSON names them all."""


class Numerics(StrEnum):
    """Choices of `--numerics`."""

    PINNED = "pinned"
    NATIVE = "native"


ModelOption = Annotated[
    str,
    typer.Option(help="A preset or a config.json (random weights), or a checkpoint's directory."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of all draws.")]
NumericsOption = Annotated[
    Numerics, typer.Option(help="Arithmetic to check; native promises nothing.")
]

app = typer.Typer(help="Check the model, and its numbers on this machine.", no_args_is_help=True)


@app.callback()
def checks() -> None:
    """Check the model, and its numbers on this machine."""


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
    """Run a checkpoint in fp32 and compare it with a reference; exit status 1 if they differ.

    Values, logits, selected keys, expert routes, decoding, draft layer, loss and gradients. Nearly
    all of the time is compiling, which a second run finds on disk.
    """
    from glm_jax.compile_cache import use_compile_cache

    if latent_norm_eps is not None and not 0 < latent_norm_eps < math.inf:
        raise GlmError(f"--latent-norm-eps {latent_norm_eps}: must be a number above 0, like 1e-5")
    use_compile_cache()
    from glm_jax.parity import check_parity

    steps = _steps()
    report = check_parity(
        checkpoint,
        reference,
        latent_norm_eps=latent_norm_eps,
        progress=lambda step: steps.print(f"{step} ..."),
    )
    if as_json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _print_table(report, checkpoint, reference)
    raise typer.Exit(0 if report.ok else 1)


@app.command()
def invariance(
    model: ModelOption = "small",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of weights and activations.")] = Dtype.BOTH,
    trials: Annotated[
        int, typer.Option(min=1, help="Sets of sequences; 3 or more see all model variants.")
    ] = 3,
    seed: SeedOption = 0,
    numerics: NumericsOption = Numerics.PINNED,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help='Print JSON; for both dtypes: {"ok": ..., "results": [one a dtype]}.'
        ),
    ] = False,
) -> None:
    """Prove that a token's bits do not depend on how it is computed; exit status 1 if they do.

    Random sequences are computed alone, in chunks, by decoding, in random company and cache pages,
    packed, and after preemption. All log-probability bits and hidden states are compared.
    """
    from glm_jax.compile_cache import use_compile_cache

    use_compile_cache()
    from glm_jax.invariance import check_invariance
    from glm_jax.numerics.contract import NumericsContract

    names = ("float32", "bfloat16") if dtype is Dtype.BOTH else (dtype.value,)
    cfgs = [_config(model, name) for name in names]
    contract = NumericsContract(mode=numerics.value)
    steps = _steps()
    _print_contract(steps, contract)
    results = []
    for name, cfg in zip(names, cfgs, strict=True):
        result = check_invariance(
            _load(model, cfg), trials=trials, seed=seed, contract=contract, progress=steps.print
        )
        steps.print(f"{name}: compiling took {result.facts['compile_seconds']} s")
        if not as_json:
            _print_invariance(result, model)
        results.append(result)
    ok = all(result.ok for result in results)
    if as_json:
        shown = [{**result.to_json(), "model": model} for result in results]
        answer = {"ok": ok, "results": shown} if dtype is Dtype.BOTH else shown[0]
        print(json.dumps(answer, indent=2, allow_nan=False))
    raise typer.Exit(0 if ok else 1)


@app.command()
def bisect(
    phases: Annotated[
        str, typer.Option(help="Two phases, comma-separated; the first is the reference.")
    ] = "prefill,decode",
    model: ModelOption = "small",
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of weights and activations; one of the two.")
    ] = Dtype.FLOAT32,
    seed: SeedOption = 0,
    numerics: NumericsOption = Numerics.PINNED,
    variant: Annotated[
        str, typer.Option(help="Change to the model: plain, ties or one_expert.")
    ] = "plain",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Count the unequal tokens of every layer and region between two phases; exit status 1 if any.

    Counts cascade: the first region that differs is the one to look at.
    """
    from glm_jax.compile_cache import use_compile_cache

    if dtype is Dtype.BOTH:
        raise GlmError("--dtype both: a bisection is of one dtype; use float32 or bfloat16")
    use_compile_cache()
    from glm_jax.invariance import bisect_model
    from glm_jax.invariance.bisection import phase_pair
    from glm_jax.invariance.variants import check_variant
    from glm_jax.numerics.contract import NumericsContract

    cfg = _config(model, dtype.value)
    pair = phase_pair(phases.split(","))
    check_variant(variant)
    contract = NumericsContract(mode=numerics.value)
    steps = _steps()
    _print_contract(steps, contract)
    found = bisect_model(
        _load(model, cfg),
        pair,
        seed=seed,
        variant_name=variant,
        contract=contract,
        notice=steps.print,
    )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        _print_bisection(found)
    raise typer.Exit(1 if found.first else 0)


def _steps() -> "Console":
    """Where progress goes."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, style="dim", soft_wrap=True)


def _print_contract(steps: "Console", contract: "NumericsContract") -> None:
    """The digest and every constant behind it, a few to a line."""
    steps.print(f"numerics contract {contract.digest}")
    fields = [f"{name} {value}" for name, value in contract.to_dict().items()]
    line = ""
    for field in fields:
        if line and len(line) + len(field) > WIDTH - 4:
            steps.print(f"  {line}")
            line = ""
        line = f"{line}; {field}" if line else field
    steps.print(f"  {line}")


def _load(model: str, cfg: GlmConfig) -> "GlmModel":
    """A checkpoint's weights, or random ones."""
    from glm_jax.checkpoint.hub import load_hub
    from glm_jax.model import GlmModel

    if model not in PRESETS and Path(model).is_dir():
        return load_hub(model, cfg, dtype=cfg.dtype)
    return GlmModel.init(cfg)


def _config(model: str, dtype: str) -> GlmConfig:
    """The config of the model to check. Raises `GlmError` where random weights would be huge."""
    from glm_jax.sizes import Sizes

    cfg = load_config(model).with_overrides(dtype=dtype)
    n_bytes = sum(Sizes.of(cfg).bytes_by_dtype.values())
    if n_bytes > MOST_RANDOM_BYTES and (model in PRESETS or not Path(model).is_dir()):
        raise GlmError(
            f"model {model!r}: {n_bytes / 1e9:,.0f} GB of random weights would be made on the "
            "host; give a checkpoint's directory, or a preset such as small, tiny or wide"
        )
    return cfg


def _print_invariance(result: "Invariance", model: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    mode, facts = result.contract.mode, result.facts
    table = Table(
        title=f"{model}, {result.dtype}, {mode}: against prefill alone",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("phase")
    for header in ("tokens", "unequal"):
        table.add_column(header, justify="right")
    for name, count in result.phases.items():
        table.add_row(name, f"{count.tokens:,}", f"{count.unequal:,}")
    table.add_section()
    table.add_row("control: native, decode", "", f"{result.control_unequal:,}")
    console.print(table)
    console.print(
        f"{result.trials} trials ({', '.join(facts['variants'])}) of "
        f"{facts['sequences_per_trial']} sequences up to {facts['longest_sequence']} tokens, "
        f"index_topk {facts['index_topk']}; of these tokens, {result.layered.tokens:,} after every "
        f"layer; {facts['seconds']} s"
    )
    if first := result.first_unequal:
        console.print(
            f"first unequal: layer {first['layer']}, region {first['region']}, token "
            f"{first['token']} of sequence {first['sequence']} ({first['variant']}), "
            f"{' against '.join(first['phases'])}",
            style="red",
        )
    for problem in result.problems:
        console.print(problem, style="red")
    verdict = "[green]all bits are equal[/]" if result.ok else "[red]the check failed[/]"
    console.print(f"{verdict}; contract {result.contract.digest}", style="bold")


def _print_bisection(found: "Bisection") -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width: rich would then fold the lines at 80 columns.
    console = Console(width=max(Console().width, WIDTH), highlight=False)
    regions = list(dict.fromkeys(part.region for part in found.unequal))
    title = f"{' against '.join(found.phases)}: unequal of {found.n_tokens:,} tokens"
    console.print(title, style="bold")
    table = Table()
    table.add_column("layer")
    for region in regions:
        table.add_column(region, justify="right")
    for layer in dict.fromkeys(part.layer for part in found.unequal):
        row = {part.region: n for part, n in found.unequal.items() if part.layer == layer}
        label = "end" if layer is None else str(layer)
        table.add_row(label, *(f"{row[x]:,}" if x in row else "" for x in regions))
    console.print(table)
    first = found.first
    if first is None:
        console.print("[green]all bits are equal[/]", style="bold")
    else:
        console.print(
            f"first: layer {first.layer}, {first.region}, token {first.position} of sequence "
            f"{first.sequence}",
            style="bold red",
        )


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
