"""Directories and files that appear complete or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from glm_jax.errors import GlmError


@contextlib.contextmanager
def replace_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Gives an empty directory beside `target` that is renamed to it when the block ends well.

    A process that is killed leaves only a hidden `.NAME.partial-XXXX` behind, which nobody reads.

    Raises:
        GlmError: `target` is a file, or not empty while `overwrite` is False, or not a checkpoint
            (no config.json) while it is True: a mistyped path must not cost other files.
    """
    target = target.absolute()
    check_free(target, overwrite=overwrite, marker="config.json")
    name = f".{target.name}.{{}}-{secrets.token_hex(4)}"
    partial, old = target.with_name(name.format("partial")), target.with_name(name.format("old"))
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.iterdir(), partial]:
            _flush(file)
        if target.exists():
            # No portable call swaps two directories: killed between these lines, the old
            # checkpoint is whole, under its hidden name.
            target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        _flush(target.parent)
    except OSError as error:
        remedy = "give a place that can be written and has room"
        raise GlmError(f"{target}: cannot be written ({error}); {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Gives an empty file beside `target` that is renamed to it when the block ends well.

    Raises:
        GlmError: there is something at `target`, or it cannot be written.
    """
    target = target.absolute()
    if target.exists():
        raise GlmError(f"{target}: exists; give a new name")
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.rename(target)
        _flush(target.parent)
    except OSError as error:
        remedy = "give a place that can be written and has room"
        raise GlmError(f"{target}: cannot be written ({error}); {remedy}") from error
    finally:
        partial.unlink(missing_ok=True)


def check_free(target: Path, *, overwrite: bool, marker: str) -> None:
    """Raises `GlmError` unless `target` may be written; see `replace_directory`."""
    if target.exists() and not target.is_dir():
        raise GlmError(f"{target}: is a file; give a directory")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        remedy = "give another directory, or pass overwrite=True to replace it"
        raise GlmError(f"{target}: is not empty; {remedy}")
    if not (target / marker).is_file():
        remedy = "give another directory; only a checkpoint is ever replaced"
        raise GlmError(f"{target}: is not empty and has no {marker}; {remedy}")


def _flush(path: Path) -> None:
    # A rename may reach the disk before the data it uncovers.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
