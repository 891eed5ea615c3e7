"""Settings of every test run: a CPU with eight fake devices, strict JAX, no network.

The settings are environment variables, so that programs a test starts inherit them. They must be
set before jax is imported: `pytest_configure` comes before any test module is loaded.
"""

import gc
import hashlib
import os
import platform
import random
import re
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import tests.shape_checks  # noqa: F401  (jaxtyping finds its checker by this name)

if TYPE_CHECKING:
    import jax

ROOT = Path(__file__).resolve().parent.parent
FAKE_DEVICES = "--xla_force_host_platform_device_count=8"
MOST_MAPPINGS = 20_000
"""Memory mappings of a process after which compiled programs are dropped."""
LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0|::|")


class NetworkRefusedError(RuntimeError):
    """A test reached for the network; not an OSError, so that no retry or fallback hides it."""


def selects_device_tests(markexpr: str) -> bool:
    """Tells whether `-m MARKEXPR` asks for tests marked `device`."""
    return re.search(r"(?<!not )\bdevice\b", markexpr) is not None


def machine_id() -> str:
    """Names what compiled CPU code depends on, so that a copied cache is not run elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = platform.processor()
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        cpu = "\n".join(
            sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
        )
    text = "\n".join([platform.platform(), cpu, version("jax"), version("jaxlib")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could set it up")
    if not selects_device_tests(config.option.markexpr):
        os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [x for x in flags if not x.startswith(FAKE_DEVICES.partition("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*flags, FAKE_DEVICES])
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
    # A bounded cache is also a locked one: two runs at once cannot read half-written entries.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".jax_cache" / machine_id())
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 * 2**30)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """Makes any connection or name look-up that leaves this machine raise NetworkRefusedError."""

    def refuse(host: object) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and not (isinstance(name, str) and LOOPBACK.fullmatch(name)):
            raise NetworkRefusedError(f"tests may not use the network, tried to reach {name!r}")

    def guard_connect(method):
        def connect(self: socket.socket, address):
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse(address[0])
            return method(self, address)

        return connect

    def getaddrinfo(host, *args, **kwargs):
        refuse(host)
        return resolve(host, *args, **kwargs)

    resolve = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guard_connect(socket.socket.connect))
        patch.setattr(socket.socket, "connect_ex", guard_connect(socket.socket.connect_ex))
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield


@pytest.fixture(scope="module", autouse=True)
def few_mappings() -> Iterator[None]:
    """Drops compiled programs of the files before, where there are too many.

    XLA's CPU code takes some mappings a program; past the kernel's limit (65,530) it crashes.
    """
    yield
    maps = Path("/proc/self/maps")
    n_mappings = maps.read_bytes().count(b"\n") if maps.exists() else 0
    if "jax" in sys.modules and n_mappings > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Starts every test from the same state of the global generators."""
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A NumPy generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def key() -> "jax.Array":
    """A JAX key with a fixed seed."""
    import jax

    return jax.random.key(0)
