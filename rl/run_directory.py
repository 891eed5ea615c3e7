"""The files of a run: its recipe, its records line by line, and its checkpoints."""

import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_jax.checkpoint import numerics
from glm_jax.checkpoint.numerics import compare_contracts, read_contract_file, write_contract_file
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract
from rl.recipe import Recipe, differing_keys
from rl.recipe_fields import flatten, read_toml

RECIPE, SUMMARY = "recipe.toml", "summary.json"
WARM_START, METRICS = "warm_start.jsonl", "metrics.jsonl"
EVALUATION, SAMPLES, DROPPED = "evaluation.jsonl", "samples.jsonl", "dropped.jsonl"
LOCK = ".lock"


class RunDirectory:
    """One run's directory. A run that was killed is taken up where its last whole checkpoint is."""

    def __init__(self, recipe: Recipe, contract: NumericsContract, note: Callable[[str], None]):
        """Makes the directory, or enters that of the same recipe and contract.

        Args:
            recipe: `recipe.out` is the place.
            contract: the numerics of the run.
            note: told what was skipped.

        Raises:
            GlmError: the directory belongs to another run; names the keys that differ.
        """
        self.path, self._note = Path(recipe.out).absolute(), note
        self.close: Callable[[], Any] = lambda: None
        """Lets others in."""
        try:
            self._claim(recipe, contract)
        except OSError as error:
            remedy = "give a place that can be written: out=DIR"
            raise GlmError(f"out = {recipe.out!r}: {error}; {remedy}") from error

    def _claim(self, recipe: Recipe, contract: NumericsContract) -> None:
        stored = self.path / RECIPE
        if stored.is_file():
            self._lock()
            there = read_toml(stored)
            if differing := "; ".join(differing_keys(recipe, there)):
                raise GlmError(
                    f"out = {recipe.out!r}: holds a run of another recipe ({differing}); give "
                    "another place: out=DIR"
                )
            compare_contracts(contract, read_contract_file(self.path), str(self.path))
            if flatten(recipe) != there:
                if there["rl.steps"] != recipe.rl.steps:
                    (self.path / SUMMARY).unlink(missing_ok=True)  # first: it is complete no more
                _replace(stored, recipe.to_toml())
        elif self.path.exists() and any(self._foreign()):
            raise GlmError(f"out = {recipe.out!r}: is not empty and no run; give another: out=DIR")
        else:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self._lock()
            write_contract_file(self.path, contract)
            _replace(stored, recipe.to_toml())  # last: with it the directory is a run's

    def _foreign(self) -> list[Path]:
        """What is not the beginning of a run."""
        ours = {LOCK, "checkpoints", numerics.FILE, f".{RECIPE}.partial"}
        return [path for path in self.path.iterdir() if path.name not in ours]

    def _lock(self) -> None:
        """Keeps other processes out until `close` or until this one ends, however it ends."""
        file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self.close = weakref.finalize(self, os.close, file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(file, 20).decode() or "unknown"
            self.close()
            raise GlmError(
                f"out = {str(self.path)!r}: process {holder} is running it; wait for its end, "
                "stop it, or give another place: out=DIR"
            ) from error
        os.ftruncate(file, 0)
        os.write(file, str(os.getpid()).encode())

    def append(self, file: str, record: dict[str, Any]) -> None:
        """Adds one JSON object to a file of records. Numbers that are not finite are refused."""
        with (self.path / file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record, allow_nan=False) + "\n")

    def records(self, file: str) -> list[dict[str, Any]]:
        """The objects of a file; a last line that was cut is left out."""
        return read_records(self.path / file)

    def keep(self, file: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Removes all records but the wanted ones: those a resumed run will not write again."""
        lines = [json.dumps(record) + "\n" for record in self.records(file) if wanted(record)]
        _replace(self.path / file, "".join(lines))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes the file whose presence says that the run is complete."""
        _replace(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    @property
    def summary(self) -> dict[str, Any] | None:
        """Of a complete run."""
        file = self.path / SUMMARY
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def checkpoint(self, n_steps: int) -> Path:
        """Place of the checkpoint after so many optimiser steps."""
        return self.path / "checkpoints" / f"step-{n_steps:06d}"

    def checkpoints(self) -> list[Path]:
        """Whole checkpoints, newest first: directories are renamed to these names when complete."""
        return sorted((self.path / "checkpoints").glob("step-??????"), reverse=True)

    def restore[T](self, load: Callable[[Path], T]) -> T | None:
        """What `load` gives for the newest checkpoint that it can read; None if there is none.

        Half-written ones are removed and unusable ones renamed, with a note.
        """
        for partial in (self.path / "checkpoints").glob(".step-*"):
            self._note(f"{partial.name} was only half written: skipped")
            shutil.rmtree(partial)
        for path in self.checkpoints():
            try:
                return load(path)
            except GlmError as error:
                aside = path.with_name(f"unusable-{path.name}")
                self._note(f"{path.name} cannot be used: skipped, kept as {aside.name} ({error})")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
        return None

    def prune(self, n_kept: int) -> None:
        """Removes all but the newest checkpoints."""
        for path in self.checkpoints()[n_kept:]:
            # Renamed first: one that is killed here is half-written, not half-removed.
            gone = path.with_name(f".{path.name}.old")
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone)


def read_records(path: Path) -> list[dict[str, Any]]:
    """JSON objects of a file of lines; none if it is absent. A cut last line is left out.

    Raises:
        GlmError: another line is no JSON, or the file no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError as error:
        raise GlmError(f"{path}: is no UTF-8 text ({error}); restore or remove it") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise GlmError(f"{path}, line {number}: is no JSON ({error}); remove it") from error
    return records


def _replace(path: Path, text: str) -> None:
    """Writes a file so that it is there complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
