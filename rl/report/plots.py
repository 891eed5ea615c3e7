"""Plots of one run, or of two over each other."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl.report.runs import Run
from rl.weight_sync import STAGES

INK, FAINT, GRID = "#1f2933", "#66727f", "#e3e8ed"
COLOURS = ("#1f6feb", "#d9622b")
"""Of the first and the second run: told apart by lightness too, and by the colour-blind."""
PARTS = ("#1f6feb", "#2a9d8f", "#e9a23b", "#c8553d", "#8e6bbf", "#d98cb3", "#b8c2cc")
"""Of a step's time."""

STYLE: Any = {
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "svg.fonttype": "path",
    "svg.hashsalt": "glm-jax",  # the same plot is the same file
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """One picture: metrics over steps."""

    name: str
    title: str
    metrics: tuple[tuple[str, str], ...]
    """Metric and what the legend calls it."""
    label: str = ""
    percent: bool = False
    counts: bool = False
    """Values are whole numbers."""
    stacked: bool = False
    """Parts of a whole."""
    warm_start: bool = False
    """The records are those of the supervised start."""


PLOTS = (
    Plot("reward", "Reward", (("reward/mean", "mean reward"), ("reward/correct", "share correct"))),
    Plot(
        "kl", "Trainer against sampler: largest |Δ log-probability|", (("kl/max_abs", "max |Δ|"),)
    ),
    Plot(
        "unequal",
        "Tokens whose log-probability differs in any bit",
        (("kl/unequal_tokens", "unequal tokens"),),
        counts=True,
    ),
    Plot(
        "kl_estimates",
        "KL estimates",
        (("kl/k1", "k1"), ("kl/k3", "k3")),
        label="nats per token",
    ),
    Plot("clipped", "Clipped share of tokens", (("ppo/clip_frac", "clipped"),), percent=True),
    Plot("entropy", "Entropy of sampled tokens", (("entropy/sampled", "entropy"),), label="nats"),
    Plot(
        "length",
        "Length of answers",
        (("length/mean", "mean"), ("length/max", "longest")),
        label="tokens",
    ),
    Plot(
        "time",
        "Time of a step",
        (
            ("time/generate", "generate"),
            ("time/update", "update"),
            *((f"time/{stage}", stage) for stage in STAGES),
            ("time/other", "other"),
        ),
        label="seconds",
        stacked=True,
    ),
    Plot("gradient", "Gradient norm", (("optim/grad_norm", "norm"),)),
    Plot(
        "warm_start",
        "Loss of the supervised start",
        (("loss", "loss"),),
        label="nats per token",
        warm_start=True,
    ),
)


def draw(plot: Plot, runs: Sequence[Run]) -> Figure | None:
    """The picture of a plot; None if no run has any of its metrics."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), dpi=144, layout="constrained")
        axes = figure.subplots()
        draw_one = _stack if plot.stacked else _lines
        if not draw_one(axes, plot, runs):
            return None
        axes.set_title(plot.title, loc="left", color=INK, fontsize=11.5, fontweight="bold")
        axes.set_xlabel("supervised step" if plot.warm_start else "RL step")
        axes.set_ylabel(plot.label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if plot.counts:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if plot.percent:
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g} %")
        return figure


def _lines(axes: Axes, plot: Plot, runs: Sequence[Run]) -> bool:
    drawn, largest, smallest = 0, 0.0, 0.0
    widths = (1.8,) if len(runs) == 1 else (3.2, 1.4)  # the first shows where both are equal
    for run, colour, width in zip(runs, COLOURS, widths, strict=False):
        for number, (metric, name) in enumerate(plot.metrics[:2]):
            style = ("-", "--")[number]
            # One run's metrics differ in colour; those of two in dashes, as colours tell the runs.
            tint = colour if len(runs) > 1 else COLOURS[number]
            steps, values = run.series(metric, run.warm_start if plot.warm_start else None)
            if not steps.size:
                continue
            values = values * (100 if plot.percent else 1)
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            marker = "o" if len(steps) <= 40 else ""
            axes.plot(
                steps,
                values,
                style,
                color=tint,
                label=label,
                lw=width,
                marker=marker,
                ms=2 * width,
            )
            drawn += 1
            largest, smallest = max(largest, values.max()), min(smallest, values.min())
    if largest == smallest == 0:  # all is 0: a line at the foot of an axis from 0, not amid noise
        axes.set_ylim(-0.04, 1)
        if drawn:
            axes.text(
                0.5, 0.5, "exactly 0 at every step", transform=axes.transAxes,
                ha="center", va="center", color=FAINT, fontsize=12,
            )  # fmt: skip
    elif smallest == 0:
        axes.set_ylim(-0.03 * largest, 1.08 * largest)
    if drawn > 1:
        axes.legend(fontsize=9)
    return drawn > 0


def _stack(axes: Axes, plot: Plot, runs: Sequence[Run]) -> bool:
    """Bars of parts; a second run's stand beside the first's, hatched."""
    width, drawn = 0.8 / len(runs), False
    for number, run in enumerate(runs):
        steps, whole = run.series("time/step")
        shift = (number - (len(runs) - 1) / 2) * width
        below = whole * 0
        for (metric, name), colour in zip(plot.metrics, PARTS, strict=True):
            values = whole - below if metric == "time/other" else run.series(metric)[1]
            if values.shape != whole.shape or not whole.size:
                continue
            axes.bar(
                steps + shift, values, width, bottom=below, color=colour,
                label=name if number == 0 else None, hatch="////" if number else None,
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            below, drawn = below + values, True
    if drawn:
        axes.legend(fontsize=9, ncols=4, loc="upper right")
        axes.margins(y=0.3)
        _cut(axes, [run.series("time/step")[1] for run in runs])
        if len(runs) > 1:
            axes.set_title(f"left {runs[0].name}, right {runs[1].name}", loc="right", fontsize=8.5)
    return drawn


def _cut(axes: Axes, wholes: Sequence[Any]) -> None:
    """Lets a first bar that is far the longest (it compiles) end at the frame; says its length."""
    rest = max((whole[1:].max() for whole in wholes if whole.size > 1), default=0.0)
    cut = [f"{whole[0]:.3g} s" for whole in wholes if whole.size and whole[0] > 3 * rest > 0]
    if cut:
        axes.set_ylim(0, 1.6 * rest)
        axes.annotate(
            f"first step, which compiles: {' and '.join(cut)}", (0.98, 0.72),
            xycoords="axes fraction", ha="right", fontsize=8.5, color=FAINT,
        )  # fmt: skip


def save_all(runs: Sequence[Run], directory: Path) -> list[str]:
    """Writes every plot of which there is something to show as `NAME.png`; returns them as SVG."""
    pictures = []
    directory.mkdir(parents=True, exist_ok=True)
    for plot in PLOTS:
        if (figure := draw(plot, runs)) is not None:
            figure.savefig(directory / f"{plot.name}.png", metadata={"Software": None})
            pictures.append(_svg(figure))
    return pictures


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
