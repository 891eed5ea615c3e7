"""What was applied where, and what was not and why: a line of JSON each."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.hotload.status import Status, identity_of


class Ledger:
    """A file that grows by a line for each applied version and each failure, of all replicas."""

    def __init__(self, path: str | Path):
        self._path, self._lock = Path(path), threading.Lock()

    def recorder(self, replica: str) -> Callable[[Status], None]:
        """For a subscriber's `on_event`: notes each applied version and each failure."""

        def note(status: Status) -> None:
            failed = status.stage == "failed"
            self.add(
                {
                    "replica": replica,
                    "identity": identity_of(status.target if failed else status.version),
                    "outcome": "failed" if failed else "applied",
                    "error": status.error if failed else None,
                }
            )

        return note

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record and the time."""
        line = json.dumps({"time": time.time(), **record}, allow_nan=False) + "\n"
        with self._lock, self._path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a writer was killed amid its line
                    line = "\n" + line
            file.write(line.encode())

    def records(self) -> list[dict[str, Any]]:
        """All records, oldest first; lines that were cut are left out."""
        with self._lock:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return [record for line in text.splitlines() if (record := _parsed(line)) is not None]

    def reset(self) -> None:
        """Empties it."""
        with self._lock:
            self._path.unlink(missing_ok=True)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:
        return None
