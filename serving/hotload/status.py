"""What a subscriber tells of itself."""

import dataclasses
from typing import Literal

Stage = Literal["idle", "transfer", "apply", "switch", "failed"]
"""What is done for the version wanted: nothing; it is copied here; rebuilt and verified; waits for
the end of a step (or, in mode `finish`, of the requests on the weights before the last); given up.
In any stage the engine goes on with the weights it has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """Where a subscriber is. Versions are those of the store."""

    version: int | None = None
    """That new requests run on; None: what the engine was made with."""
    parent: int | None = None
    """What `version` was a delta on; None for a full one."""
    target: int | None = None
    """Version that is being prepared, or that failed."""
    stage: Stage = "idle"
    ready: bool = True
    """Whether the version wanted last is the one that serves."""
    error: str | None = None
    """Why `target` was given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the last switch."""

    transfer: float = 0.0
    apply: float = 0.0
    switch: float = 0.0


def identity_of(version: int | None) -> str | None:
    """Name of a version on the wire: that of its folder."""
    return None if version is None else f"v{version:08d}"
