"""Which processor the numbers are those of."""

import platform
from pathlib import Path

import jax

CPUINFO = Path("/proc/cpuinfo")
VECTORS = ("amx_tile", "avx512f", "avx2", "avx", "sve", "asimd")
"""Widest first: XLA picks its code and its libraries' by them."""


def device_kind() -> str:
    """Kind of the first device; of a CPU, which JAX calls just `cpu`, the model and its vectors.

    Two CPU models were seen to give different bits to the same program (docs/numerics.md).
    """
    device = jax.devices()[0]
    return cpu_kind() if device.platform == "cpu" else device.device_kind


def cpu_kind(cpuinfo: Path = CPUINFO) -> str:
    """`cpu AuthenticAMD 25 17 avx512f`; without Linux's `/proc/cpuinfo` what Python knows."""
    try:
        first = cpuinfo.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return " ".join(["cpu", platform.machine(), platform.processor()]).strip()
    known = {}
    for line in first.splitlines():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")
    flags = known.get("flags", known.get("Features", "")).split()
    vectors = next((name for name in VECTORS if name in flags), "")
    found = [known[name] for name in names if name in known] or [platform.machine()]
    return " ".join(["cpu", *found, vectors]).strip()
