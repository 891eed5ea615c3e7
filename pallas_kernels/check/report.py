"""All operations: interpreted, compiled for TPU, lowered for GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from pallas_kernels.backend import GPU_DTYPES, GPU_INTERPRET
from pallas_kernels.cases import Op, Part
from pallas_kernels.check.interpret import Interpreted, interpret
from pallas_kernels.check.lowering import (
    NO_LIBTPU,
    TOPOLOGIES,
    Lowered,
    for_h200,
    for_tpu,
    libtpu_version,
)
from pallas_kernels.errors import KernelError
from pallas_kernels.registry import OPS

LISTS = ("interpreted", "gpu_interpreted", "tpu", "gpu")
"""What was found of a part, by field."""


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of one operation."""

    op: str
    part: str
    kinds: tuple[str, ...]
    """Implementations it has; where a kind is missing nothing was checked for it."""
    interpreted: tuple[Interpreted, ...]
    gpu_interpreted: tuple[Interpreted, ...]
    """By the interpreter of Mosaic GPU, which computes a block by one product of the CPU: it shows
    what is multiplied and added in which order, not how a tensor core rounds."""
    tpu: tuple[Lowered, ...]
    gpu: tuple[Lowered, ...]
    """For an H200; bf16 shapes, as the GPU kernels take no other."""

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked failed."""
        found = (*self.interpreted, *self.gpu_interpreted, *self.tpu, *self.gpu)
        return all(x.ok for x in found)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        lists = {name: getattr(self, name) for name in LISTS}
        return {
            "op": self.op,
            "part": self.part,
            "kinds": list(self.kinds),
            "ok": self.ok,
            **{name: [x.to_json() for x in found] for name, found in lists.items()},
        }


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """The whole check."""

    versions: dict[str, str | None]
    tpu: str
    """What compiled for TPU, or that nothing did and why."""
    topologies: tuple[str, ...]
    parts: tuple[PartReport, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked failed."""
        return all(part.ok for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.ok,
            "versions": self.versions,
            "tpu_compiler": self.tpu,
            "topologies": list(self.topologies),
            "parts": [part.to_json() for part in self.parts],
        }


def check_kernels(
    ops: Sequence[str] = (),
    topologies: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> KernelReport:
    """Checks every part of the named operations (default: all) on every topology (default: all).

    Without libtpu nothing is compiled for TPU; the report says so and the rest is done.

    Raises:
        KernelError: an operation or a topology is unknown.
    """
    for what, asked, known in (("op", ops, OPS), ("topology", topologies, TOPOLOGIES)):
        for name in asked:
            if name not in known:
                raise KernelError(f"{what} {name!r} is unknown; use one of {', '.join(known)}")
    libtpu = libtpu_version()
    generations = tuple(topologies or TOPOLOGIES) if libtpu else ()
    versions = {"jax": version("jax"), "jaxlib": version("jaxlib"), "libtpu": libtpu}
    parts = []
    for name in ops or OPS:
        for part in OPS[name].parts:
            progress(f"{name}: {part.name}")
            parts.append(_check_part(OPS[name], part, generations))
    tpu = f"libtpu {libtpu}" if libtpu else NO_LIBTPU
    return KernelReport(versions, tpu, generations, tuple(parts))


def _check_part(op: Op, part: Part, generations: Sequence[str]) -> PartReport:
    real = op.tagged("glm-5.2")
    has_tpu, has_gpu = "tpu" in part.kinds, "gpu" in part.kinds
    small = op.tagged("test")
    interpreted = tuple(interpret(part, case) for case in small if has_tpu)
    gpu_interpreted = tuple(
        interpret(part, case, backend=GPU_INTERPRET)
        for case in small
        if has_gpu and part.gpu_interpreted and case.dtype in GPU_DTYPES
    )
    tpu = tuple(for_tpu(part, case, g) for g in generations for case in real if has_tpu)
    gpu = tuple(for_h200(part, case) for case in real if has_gpu and case.dtype in GPU_DTYPES)
    return PartReport(op.name, part.name, part.kinds, interpreted, gpu_interpreted, tpu, gpu)
