"""What was applied where, and what was not and why: a line of JSON each."""

import json
import threading
import time
from pathlib import Path
from typing import Any


class Ledger:
    """A file that grows by a line for each applied version and each failure, of all replicas."""

    def __init__(self, path: str | Path):
        self._path, self._lock = Path(path), threading.Lock()

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record and the time."""
        line = json.dumps({"time": time.time(), **record}, allow_nan=False) + "\n"
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(line)

    def records(self) -> list[dict[str, Any]]:
        """All records, oldest first; a last line that was cut is left out."""
        with self._lock:
            text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]

    def reset(self) -> None:
        """Empties it."""
        with self._lock:
            self._path.unlink(missing_ok=True)
