"""Which implementation of an operation runs: one choice, never made silently.

    xla      the fixed-order twin; the path of a CPU
    pallas   the kernel of this device; on a CPU the TPU kernel in interpret mode
    auto     AUTO below, by platform

A choice is resolved to a `Backend` once and written into the numerics contract (`describe`). An
operation without a kernel for the device refuses `pallas` by name; under `auto` it runs its twin,
which is logged and stands in the contract like any other choice.
"""

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuned
from pallas_kernels.errors import KernelError

log = logging.getLogger(__name__)

Implementation = Literal["auto", "xla", "pallas"]
"""What a caller may ask for."""
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
Kind = Literal["xla", "tpu", "gpu"]
KINDS: tuple[Kind, ...] = get_args(Kind)

AUTO: dict[str, Kind] = {"cpu": "xla", "tpu": "tpu", "gpu": "xla"}
"""Platform -> what `auto` asks for. GPU kernels have not been timed on a device yet."""

OWN: dict[str, Kind] = {"cpu": "tpu", "tpu": "tpu", "gpu": "gpu"}
"""Platform -> kernels that `pallas` means there."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """A resolved choice. Static: part of a program's identity."""

    kind: Kind = "xla"
    interpret: bool = False
    """Run the kernel's operations one by one in XLA on this machine's default device."""

    def __str__(self) -> str:
        return f"{self.kind}-interpret" if self.interpret else self.kind

    @classmethod
    def parse(cls, text: str) -> "Backend":
        """The inverse of `str`. Raises KernelError for a word that names none."""
        for kind in KINDS:
            for interpret in (False, True):
                if text == str(cls(kind, interpret)):
                    return cls(kind, interpret)
        raise KernelError(f"backend: {text!r} is none; use one of {', '.join(KINDS)}")


XLA = Backend()
"""The twin."""
TPU = Backend("tpu")
"""The TPU kernel, compiled."""
INTERPRET = Backend("tpu", interpret=True)
"""The TPU kernel on this machine's CPU."""
GPU = Backend("gpu")
"""The GPU kernel, compiled."""
GPU_INTERPRET = Backend("gpu", interpret=True)
"""The GPU kernel in the interpreter of Mosaic GPU, on this machine's CPU."""

GPU_DTYPES = ("bfloat16",)
"""What the GPU kernels compute: a tensor core rounds f32 operands to TF32."""


def resolve(
    op: str, implementation: Implementation | Backend, kinds: Collection[str], part: str = "forward"
) -> Backend:
    """What runs for `implementation` on this machine.

    Args:
        op: name of the operation, for errors and the log.
        implementation: a choice, or one that is already resolved.
        kinds: implementations that this part of the operation has.
        part: `forward` or the name of a gradient.

    Raises:
        KernelError: there is no such implementation of this part, or no such word.
    """
    have = ", ".join(sorted(kinds))
    if isinstance(implementation, Backend):
        if implementation.kind not in kinds:
            raise KernelError(f"{op}: {part} has no {implementation.kind} kernel; it has {have}")
        return implementation
    if implementation not in IMPLEMENTATIONS:
        raise KernelError(
            f"{op}: implementation {implementation!r} is none; "
            f"use one of {', '.join(IMPLEMENTATIONS)}"
        )
    if implementation == "xla":
        return XLA
    platform = _platform(op)
    if implementation == "auto":
        wanted = AUTO[platform]
        if wanted in kinds:
            return Backend(wanted)
        log.info("%s: no %s kernel of %s; its xla twin runs", op, wanted, part)
        return XLA
    kind = OWN[platform]
    if kind not in kinds:
        raise KernelError(
            f"{op}: {part} has no {kind} kernel; it has {have}. Ask for 'xla', or 'auto'"
        )
    if platform == "cpu":
        log.warning("%s: the TPU kernel runs in interpret mode, which is slow", op)
        return INTERPRET
    return Backend(kind)


def by_gpu(op: str, backend: Backend, dtype: DTypeLike) -> bool:
    """Whether the GPU kernel runs. `gpu` means: bf16 operands by the kernel, f32 ones by the twin.

    Both halves are what the word in the contract stands for, so nothing is chosen here; that a
    twin runs is logged.
    """
    if backend.kind != "gpu":
        return False
    if jnp.dtype(dtype).name in GPU_DTYPES:
        return True
    log.info("%s: the gpu kernel takes %s; %s is the twin's", op, ", ".join(GPU_DTYPES), dtype)
    return False


def describe(implementation: Implementation, ops: Mapping[str, Collection[str]]) -> str:
    """One line for the contract: each operation, what runs, and the digest of a kernel's tiles.

    `ops` maps a name to the kinds that all of the operation's parts have.
    """
    words = []
    for op in sorted(ops):
        backend = resolve(op, implementation, ops[op])
        tiles = "" if backend.kind == "xla" else f" {tuned.digest(op)}"
        words.append(f"{op} {backend}{tiles}")
    return ", ".join(words)


def described(op: str, line: str) -> Backend:
    """Reads what `describe` wrote of one operation.

    Raises:
        KernelError: the line does not speak of it, or its tiles are not those of this program.
    """
    for word in line.split(", "):
        name, _, rest = word.partition(" ")
        if name == op:
            text, _, digest = rest.partition(" ")
            if digest and digest != tuned.digest(op):
                raise KernelError(
                    f"{op}: the contract was made with tiles {digest}, tuned.json here is "
                    f"{tuned.digest(op)}"
                )
            return Backend.parse(text)
    raise KernelError(f"{op}: the contract's kernels do not name it: {line!r}")


def _platform(op: str) -> str:
    platform = jax.default_backend()
    if platform not in AUTO:
        raise KernelError(f"{op}: platform {platform!r}; supported are {', '.join(AUTO)}")
    return platform
