"""Progress on stderr: a live table on a terminal, plain lines elsewhere."""

from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("step", "d"),
    "reward": ("reward/mean", ".3f"),
    "correct": ("reward/correct", ".1%"),
    "k1": ("kl/k1", ".2g"),
    "k3": ("kl/k3", ".2g"),
    "max |d|": ("kl/max_abs", ".2g"),
    "unequal": ("kl/unequal_tokens", "d"),
    "clipped": ("ppo/clip_frac", ".2%"),
    "tokens": ("tokens/generated", ",d"),
    "generate": ("time/generate", ".2f"),
    "sync": ("time/sync", ".4f"),
    "update": ("time/update", ".2f"),
}
"""Heading -> metric and its format. |d| is |difference of log-probability|; times in seconds."""

WIDTH = 9
"""Characters of a column of plain lines."""

ROOM = 12
"""Lines of a terminal that the table leaves to its frame and to what stands above it."""


class Display:
    """Shows a run. Everything goes to stderr, so that stdout holds results alone."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._rows: list[list[str]] = []
        self._live: Live | None = None

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """One line."""
        self.console.print(text, style="dim", markup=False)

    def warm_start(self, record: dict[str, Any], steps: int) -> None:
        """A supervised step; about twenty of all are shown."""
        step = record["step"]
        if step == 1 or step == steps or step % max(1, steps // 20) == 0:
            self.note(
                f"warm start {step}/{steps}: loss {record['loss']:.4f}, {record['time/step']:.2f} s"
            )

    def evaluation(self, record: dict[str, Any]) -> None:
        """Greedy answers to held-out problems."""
        correct = record.get("reward/correct")
        share = "" if correct is None else f", {correct:.1%} correct"
        text = (
            f"{record['problems']} held-out problems after RL step {record['step']}: "
            f"reward {record['reward/mean']:.3f}{share}"
        )
        self.console.print(text, style="bold", markup=False)

    def step(self, record: dict[str, Any]) -> None:
        """An RL step; a metric that could not be computed has an empty cell."""
        cells = [
            format(record[key], form) if key in record else "" for key, form in COLUMNS.values()
        ]
        if not self.console.is_terminal:
            if not self._rows:
                self._line(list(COLUMNS))
            self._line(cells)
            self._rows = [cells]
            return
        self._rows.append(cells)
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def _line(self, cells: list[str]) -> None:
        self.console.print(" ".join(cell.rjust(WIDTH) for cell in cells), markup=False)

    def _table(self) -> Table:
        table = Table()
        for heading in COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self._rows[-max(1, self.console.height - ROOM) :]:
            table.add_row(*row)
        return table
