"""Writes the report of a run, and the comparison of two."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from glm_jax.errors import GlmError
from rl.report import html
from rl.report.plots import save_all
from rl.report.runs import Run, read_run
from rl.weight_sync import STAGES

REPORT = "report.html"


def write_report(path: str | Path) -> Path:
    """Writes `report.html` and `plots/*.png` into a run's directory; returns the page.

    Raises:
        GlmError: the directory is no run's, or has no step to report.
    """
    run = read_run(path)
    if not (run.steps or run.warm_start):
        raise GlmError(f"{run.path}: has no step yet; let the run take one")
    pictures = save_all([run], run.path / "plots")
    text = html.page(run.name, _report(run, pictures))
    (run.path / REPORT).write_text(text, encoding="utf-8")
    return run.path / REPORT


def write_comparison(first: str | Path, second: str | Path, out: str | Path) -> Path:
    """Writes one page that lays two runs side by side, and its plots beside it.

    Args:
        first: a run's directory.
        second: another.
        out: directory of the report; made if absent.

    Raises:
        GlmError: a directory is no run's, or `out` is a file.
    """
    runs, out = (read_run(first), read_run(second)), Path(out)
    if runs[0].name == runs[1].name:
        a, b = (replace(run, name=f"{run.path.parent.name}/{run.name}") for run in runs)
        runs = (a, b)
    try:
        pictures = save_all(runs, out / "plots")
        title = " and ".join(run.name for run in runs)
        (out / REPORT).write_text(html.page(title, _comparison(runs, pictures)), encoding="utf-8")
    except OSError as error:
        raise GlmError(f"{out}: cannot be written ({error}); give a directory") from error
    return out / REPORT


def _report(run: Run, pictures: list[str]) -> Iterator[str]:
    state = "complete" if run.summary else "not complete"
    yield html.heading(
        run.name, f"{run.recipe['numerics.mode']} numerics, seed {run.recipe['seed']}; {state}"
    )
    yield html.tiles((what, value, kind) for what, value, kind in _figures(run) if value)
    yield html.section("Curves", html.plots(pictures))
    yield html.section("Seconds by stage", html.table(*_seconds([run]), numbers=1))
    yield html.section("Steps", html.steps_table(run))
    yield html.section("Sample completions", html.samples_table(run))
    yield html.section("Digests", html.table(["what", "digest"], _digests(run).items(), 2))
    yield html.section("Recipe", html.settings_table(run.recipe))


def _comparison(runs: tuple[Run, Run], pictures: list[str]) -> Iterator[str]:
    names = [run.name for run in runs]
    differing = [key for key in runs[0].recipe if not _same(runs, key) and key != "out"]
    same = "the same recipe" if not differing else f"recipes differ in {', '.join(differing)}"
    yield html.heading(" and ".join(names), same)
    figures = [{what: (value, kind) for what, value, kind in _figures(run)} for run in runs]
    rows = [
        [(what, ""), *(f[what] for f in figures)]
        for what in figures[0]
        if any(f[what][0] for f in figures)
    ]
    yield html.section("Side by side", html.table_of_cells(["", *names], rows, numbers=1))
    yield html.section("Curves", html.plots(pictures))
    yield html.section("Seconds by stage", html.table(*_seconds(runs), numbers=1))
    digests = [_digests(run) for run in runs]
    rows = ([what, *(d.get(what, "") for d in digests)] for what in digests[0] | digests[1])
    yield html.section("Digests", html.table(["what", *names], rows, 3))
    for run in runs:
        yield html.section(f"Sample completions of {run.name}", html.samples_table(run))
    keys = dict.fromkeys((*runs[0].recipe, *runs[1].recipe))
    rows = []
    for key in keys:
        kind = "" if _same(runs, key) else "differs"
        rows.append([(key, ""), *((run.recipe.get(key, ""), kind) for run in runs)])
    yield html.section("Recipes", html.table_of_cells(["key", *names], rows, 3))


def _seconds(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Where the time of RL steps went: headings and rows. The first step compiles, so medians."""
    headings = ["stage"]
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        headings += [f"{before}all steps", f"{before}median step"]
    rows = []
    for stage in ("generate", *STAGES, "update", "step"):
        each = [run.series(f"time/{stage}")[1] for run in runs]
        cells = [(f"{s.sum():,.3f}", f"{np.median(s):.4f}") if s.size else ("", "") for s in each]
        if any(s.size for s in each):
            name = "whole step" if stage == "step" else stage
            rows.append([name, *(cell for pair in cells for cell in pair)])
    return headings, rows


def _same(runs: tuple[Run, Run], key: str) -> bool:
    return runs[0].recipe.get(key) == runs[1].recipe.get(key)


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """What a reader wants first: (what, value or nothing, class)."""
    yield from _rise("mean reward, first to last step", run.series("reward/mean")[1], ".3f")
    yield from _rise("correct, first to last step", run.series("reward/correct")[1], ".1%")
    held_out = run.series("reward/correct", run.evaluation)[1]
    yield from _rise("correct on held-out problems", held_out, ".1%")
    unequal, most = run.total("kl/unequal_tokens"), run.series("kl/max_abs")[1]
    zero = "" if unequal is None else ("good" if unequal == 0 else "bad")
    yield "unequal tokens", "" if unequal is None else f"{unequal:,.0f}", zero
    yield "largest |Δ log-probability|", f"{most.max():.3g}" if most.size else "", zero
    clipped = run.series("ppo/clip_frac")[1]
    kind = "good" if clipped.size and clipped.max() == 0 else ""
    yield "largest clipped share", f"{clipped.max():.2%}" if clipped.size else "", kind
    tokens, seconds = run.total("tokens/generated"), run.total("time/step")
    yield "tokens generated", "" if tokens is None else f"{tokens:,.0f}", ""
    yield "seconds of RL steps", "" if seconds is None else f"{seconds:,.1f}", ""
    yield "weights", _digests(run).get("weights at the end", ""), "small mono"


def _rise(what: str, values: Any, form: str) -> Iterator[tuple[str, str, str]]:
    text = f"{values[0]:{form}} → {values[-1]:{form}}" if values.size else ""
    yield what, text, "small"


def _digests(run: Run) -> dict[str, str]:
    """Weights and numerics contract."""
    out = {}
    if run.steps:
        out["weights after the first RL step"] = run.steps[0]["weights/digest"]
    if run.summary:
        out["weights at the end"] = run.summary["weights/digest"]
        out["numerics contract"] = run.summary["numerics/digest"]
    return out
