"""All operations: interpreted, compiled for TPU, lowered for GPU."""

import dataclasses
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class PartReport:
    """One part of one operation."""

    op: str
    part: str
    kinds: tuple[str, ...]
    """Implementations it has; where a kind is missing nothing was checked for it."""
    interpreted: tuple[Interpreted, ...]
    tpu: tuple[Lowered, ...]
    gpu: tuple[Lowered, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked failed."""
        return all(x.ok for x in (*self.interpreted, *self.tpu, *self.gpu))

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        lists = {name: getattr(self, name) for name in ("interpreted", "tpu", "gpu")}
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
    interpreted = tuple(interpret(part, case) for case in op.tagged("test") if has_tpu)
    tpu = tuple(for_tpu(part, case, g) for g in generations for case in real if has_tpu)
    gpu = tuple(for_h200(part, case) for case in real if has_gpu)
    return PartReport(op.name, part.name, part.kinds, interpreted, tpu, gpu)
