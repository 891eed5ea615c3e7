"""The report's page: text, tables and pictures in one file that needs no other."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rl.display import COLUMNS
from rl.report.runs import Run

SHOWN_SAMPLES = 24
"""Completions shown of a run: some from its start, some from its end."""

CSS = """
:root { color-scheme: light; --ink: #1f2933; --faint: #66727f; --line: #e3e8ed; --panel: #fff; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 2rem 1.25rem 4rem; color: var(--ink);
  background: #f6f8fa; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
p { margin: .25rem 0; color: var(--faint); } code, .mono { font-family: ui-monospace, monospace; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr));
  margin: 1.25rem 0; }
.tile, figure, .table { background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
.tile { padding: .7rem .9rem; } .tile b { display: block; font-size: 1.35rem; }
.tile b.small { font-size: 1rem; line-height: 2rem; } .tile span { color: var(--faint);
  font-size: .82rem; } .good { color: #1a7f4b; } .bad { color: #c0392b; }
.plots { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); }
figure { margin: 0; padding: .5rem; } figure svg { width: 100%; height: auto; display: block; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .86rem; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { color: var(--faint); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
tr:last-child td { border-bottom: 0; } td.differs { background: #fff4e5; }
details { margin-top: .75rem; } summary { cursor: pointer; color: var(--faint); }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def heading(title: str, *lines: str) -> str:
    """The page's title, and lines under it (HTML)."""
    return f"<h1>{escape(title)}</h1>" + "".join(f"<p>{line}</p>" for line in lines)


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Large figures: (what, value, class: good, bad, small or none)."""
    each = (
        f'<div class="tile"><b class="{kind}">{escape(value)}</b><span>{escape(what)}</span></div>'
        for what, value, kind in values
    )
    return f'<div class="tiles">{"".join(each)}</div>'


def section(title: str, body: str) -> str:
    """A heading and what belongs to it."""
    return f"<h2>{escape(title)}</h2>\n{body}"


def plots(pictures: Iterable[str]) -> str:
    """SVGs side by side."""
    return '<div class="plots">' + "".join(f"<figure>{x}</figure>" for x in pictures) + "</div>"


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]], numbers: int = 0) -> str:
    """A table; columns from `numbers` on are aligned as numbers. Cells are text."""
    return table_of_cells(headings, ([(cell, "") for cell in row] for row in rows), numbers)


def table_of_cells(
    headings: Sequence[str], rows: Iterable[Sequence[tuple[Any, str]]], numbers: int
) -> str:
    """A table of (cell, class)."""
    kinds = ["" if i < numbers else "n" for i in range(len(headings))]
    head = "".join(
        f'<th class="{kind}">{escape(name)}</th>'
        for kind, name in zip(kinds, headings, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind} {extra}">{escape(str(cell))}</td>'
            for kind, (cell, extra) in zip(kinds, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    whole = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="table"><table>{whole}</table></div>'


def steps_table(run: Run) -> str:
    """The live table, whole."""
    rows = [
        [format(step[key], form) if key in step else "" for key, form in COLUMNS.values()]
        + [step["weights/digest"]]
        for step in run.steps
    ]
    return table([*COLUMNS, "weights"], rows)


def samples_table(run: Run) -> str:
    """Completions from the start and from the end of a run."""
    samples = run.samples
    if len(samples) > SHOWN_SAMPLES:
        half = SHOWN_SAMPLES // 2
        samples = samples[:half] + samples[-half:]
    rows = ([s["step"], f"{s['reward']:.2g}", s["prompt"], s["completion"]] for s in samples)
    return table(["step", "reward", "prompt", "completion"], rows, numbers=4)


def settings_table(recipe: dict[str, Any]) -> str:
    """Every key of a recipe."""
    return table(["key", "value"], recipe.items(), numbers=2)
