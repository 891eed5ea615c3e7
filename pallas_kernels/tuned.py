"""Tiles of the kernels: JSON beside each operation, validated on load, never chosen by timing.

`tuned.json` maps a kind (`tpu`, `gpu`) to devices, and a device to the fields of the kernel's
config; `default` serves devices that are not named. A kernel's bits depend on the fields that the
operation's docstring lists, so the contract holds the digest of the file.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from pallas_kernels.errors import KernelError


@functools.cache
def table(op: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The whole file. Raises KernelError where it is no table of tables of devices."""
    path = Path(__file__).parent / op / "tuned.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise KernelError(f"{op}: tuned.json cannot be read: {error}") from error
    check(op, found)
    return found


def check(op: str, found: Any) -> None:
    """Refuses a table whose kinds or devices are not as they must be."""
    if not isinstance(found, dict) or not set(found) <= {"tpu", "gpu"}:
        raise KernelError(f"{op}: tuned.json must map 'tpu' and 'gpu' to devices")
    for kind, devices in found.items():
        if not isinstance(devices, dict) or "default" not in devices:
            raise KernelError(f"{op}: tuned.json: {kind} has no 'default' device")


def digest(op: str) -> str:
    """First 8 hex digits of the SHA-256 of the file's content."""
    text = json.dumps(table(op), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def load[Config](op: str, kind: str, config: type[Config], device: str = "default") -> Config:
    """The tiles for a device, as a validated config.

    Raises:
        KernelError: a field is unknown or missing, or the config refuses a value.
    """
    devices = table(op)[kind]
    return build(op, config, devices.get(device, devices["default"]))


def build[Config](op: str, config: type[Config], fields: dict[str, Any]) -> Config:
    """Makes a config of JSON fields; lists become tuples. Raises KernelError; see `load`."""
    assert dataclasses.is_dataclass(config)
    names = {field.name for field in dataclasses.fields(config)}
    if set(fields) != names:
        odd = ", ".join(sorted(set(fields) ^ names))
        raise KernelError(f"{op}: tuned.json: fields {odd} are unknown or missing")
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    try:
        return config(**plain)
    except KernelError as error:
        raise KernelError(f"{op}: tuned.json: {error}") from None


def multiple(name: str, value: Any, unit: int) -> None:
    """Refuses a tile that is no positive multiple of the device's unit."""
    if not isinstance(value, int) or value < 1 or value % unit:
        nearest = max(unit, round(value / unit) * unit) if isinstance(value, int) else unit
        raise KernelError(f"{name} {value!r}: must be a multiple of {unit}; nearest is {nearest}")
