"""What a measurement was made on."""

import os
import platform
from pathlib import Path
from typing import Any

import jax


def n_cpus() -> int:
    """CPUs this process may use; `taskset` limits them, for us and for a child alike."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device() -> dict[str, Any]:
    """What is measured on, and how many other programs want its CPUs now."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "cpu": _cpu_model(),
        "cpus": n_cpus(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
