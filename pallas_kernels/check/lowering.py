"""Lowering and compiling for devices that are not here.

TPU: the libtpu wheel holds the compiler and describes topologies; nothing is run. GPU: Mosaic GPU
lowers to its own code under an abstract H200; the CUDA tools that would assemble it are not needed
and not asked.
"""

import dataclasses
import hashlib
import importlib.util
import os
import re
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from pallas_kernels.backend import GPU, TPU
from pallas_kernels.cases import Case, Part

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
"""Generation -> a small topology of it."""

SCOPED_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)
"""What a compiled program says of the VMEM of one operation."""

NO_LIBTPU = (
    "not checked: libtpu is not installed, so nothing was compiled for TPU; "
    "install the extra 'tpu' (uv sync --extra tpu)"
)

WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment that lets libtpu start on a machine that is no TPU host, several times at once: its
lock guards chips, and nothing here opens one."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One shape for one target."""

    case: str
    target: str
    seconds: float = 0.0
    """Of the compiler (TPU) or of the lowering (GPU)."""
    vmem_bytes: int | None = None
    """Scoped VMEM of the largest kernel of the program, as the compiler reports it; TPU only."""
    text: str = ""
    """First 12 hex digits of the SHA-256 of the lowered program."""
    deterministic: bool = False
    """Whether lowering it again from nothing gave the same text."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it went through and was the same twice."""
        return self.error is None and self.deterministic

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**dataclasses.asdict(self), "ok": self.ok}


def libtpu_version() -> str | None:
    """Version of the wheel; None where it is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        return None
    return version("libtpu")


def for_tpu(part: Part, case: Case, generation: str) -> Lowered:
    """Compiles one shape by the real TPU compiler. Needs libtpu; see `libtpu_version`."""
    for name, value in WITHOUT_A_TPU.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    device = topology.devices[0]
    sharding = SingleDeviceSharding(device)
    inputs = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in part.inputs(case)]

    # The lowering of copies asks which chip it is for; there is none to ask.
    chip = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)

    def lower():
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.jit(part.run(case, TPU)).lower(*inputs)

    def compile_it(lowered):
        lines = lowered.compile().as_text().splitlines()
        kernels = [line for line in lines if 'custom_call_target="tpu_custom_call"' in line]
        return max((int(n) for line in kernels for n in SCOPED_VMEM.findall(line)), default=None)

    return _twice(str(case), generation, lower, compile_it)


def for_h200(part: Part, case: Case) -> Lowered:
    """Lowers one shape by Mosaic GPU for an abstract H200."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]

    def lower():
        with jax.sharding.use_abstract_mesh(mesh):
            f = jax.jit(part.run(case, GPU))
            return jax.export.export(f, platforms=["cuda"], disabled_checks=checks)(
                *part.inputs(case)
            )

    return _twice(str(case), "h200", lower)


def _twice(
    case: str,
    target: str,
    lower: Callable[[], Any],
    compile_it: Callable[[Any], int | None] | None = None,
) -> Lowered:
    def timed(f, *args):
        start = time.perf_counter()
        return f(*args), time.perf_counter() - start

    def afresh():
        jax.clear_caches()
        return lower()

    vmem_bytes = None
    try:
        # One place of call: a lowered program names the lines it was called from.
        (first, _), (second, seconds) = (timed(afresh) for _ in range(2))
        if compile_it is not None:
            vmem_bytes, seconds = timed(compile_it, second)
    except Exception as error:  # whatever a compiler says is the finding
        text = " ".join(str(error).split())[:400]
        return Lowered(case, target, error=f"{type(error).__name__}: {text}")
    same = _text(first) == _text(second)
    digest = hashlib.sha256(_text(first).encode()).hexdigest()[:12]
    return Lowered(case, target, round(seconds, 3), vmem_bytes, digest, same)


def _text(lowered: Any) -> str:
    return lowered.mlir_module() if hasattr(lowered, "mlir_module") else lowered.as_text()
