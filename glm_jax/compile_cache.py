"""A compilation cache on the user's disk, so that a check compiles once a machine."""

import hashlib
import importlib.util
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path


def use_compile_cache() -> Path | None:
    """Lets jax keep executables under the user's cache directory.

    To be called before jax is imported. What the user has set (`JAX_COMPILATION_CACHE_DIR`) stays;
    so does everything once jax is loaded.

    Returns:
        The directory, or None if nothing was changed.
    """
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "glm-jax" / "jax" / _machine()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    if importlib.util.find_spec("filelock") is not None:  # jax needs it for a bounded cache
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 2**30))
    return directory


def _machine() -> str:
    """Names what compiled CPU code depends on: a home directory may be shared between machines."""
    cpuinfo, cpu = Path("/proc/cpuinfo"), platform.processor()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = ("model name", "flags", "Features")
        cpu = "\n".join(sorted({line for line in lines if line.startswith(names)}))
    text = "\n".join([platform.platform(), cpu, version("jax"), version("jaxlib")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
