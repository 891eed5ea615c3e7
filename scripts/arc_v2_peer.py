"""Exchanges arc_v2 deltas with the package fireworks-delta-compression, in both directions.

    uv run python scripts/arc_v2_peer.py WORK [--vectors tests/data/arc_v2]

makes an environment with torch and the package in WORK (a folder outside the project; Python 3.11
must be on the path), lets the package apply our delta and us apply the package's, and prints both
results as JSON; exit status 1 if any bit differs. `--vectors` also keeps what the package wrote.
The project never imports torch: the other side of the exchange is this file, started with the
environment's Python.
"""

# pyright: reportMissingImports=false

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch==2.13.0", "fireworks-delta-compression==0.1.0", "numpy")
OLD, NEW, OURS, THEIRS = (
    "old.safetensors",
    "new.safetensors",
    "ours.safetensors",
    "delta.safetensors",
)


def main() -> int:
    """Runs the exchange."""
    parser = argparse.ArgumentParser(description="Exchanges arc_v2 deltas with Fireworks' package.")
    parser.add_argument("work", type=Path)
    parser.add_argument("--vectors", type=Path)
    parser.add_argument("--python", default="python3.11", help="for the environment")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        print(json.dumps(peer(options.work)))
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    write_weights(options.work)
    ours(options.work)
    found = run_peer(options.work, options.python) | {"we_apply_theirs": apply_theirs(options.work)}
    print(json.dumps(found, indent=2))
    if options.vectors:
        options.vectors.mkdir(parents=True, exist_ok=True)
        for name in (OLD, NEW, THEIRS):
            shutil.copy(options.work / name, options.vectors / name)
    good = [x["unequal_tensors"] for x in found.values() if isinstance(x, dict)]
    return int(any(good) or len(good) != 3)


def write_weights(work: Path) -> None:
    """Old and new weights of every kind: bf16 with NaN payloads and -0, f32, fp8, 0-d, empty."""
    import ml_dtypes
    import numpy as np

    from glm_jax.checkpoint.safetensors_files import CODES, file_header

    rng = np.random.default_rng(0)
    old, new = {}, {}
    shapes = {"model.layers.0.w": (40, 32), "model.norm": (33,), "scale": (), "none": (0, 4)}
    for name, shape in shapes.items():
        master = np.asarray(rng.standard_normal(shape, np.float32) * 0.02)
        step = 1e-4 * rng.standard_normal(shape)
        dtype = np.float32 if name == "model.norm" else ml_dtypes.bfloat16
        old[name], new[name] = (np.asarray(x).astype(dtype) for x in (master, master + step))
    odd = np.array([0x8000, 0, 0x7FC1, 0xFFFF, 0x7F80, 1], np.uint16)
    old["odd"], new["odd"] = odd.view(ml_dtypes.bfloat16), odd[::-1].copy().view(ml_dtypes.bfloat16)
    for name, bits in (("old", old), ("new", new)):
        codes = rng.integers(0, 256, (8, 16), np.uint8)
        bits["fp8"] = codes.view(ml_dtypes.float8_e4m3fn)
        kinds = {name: (CODES[x.dtype], x.shape) for name, x in bits.items()}
        values = b"".join(x.tobytes() for x in bits.values())
        (work / f"{name}.safetensors").write_bytes(file_header(kinds) + values)


def ours(work: Path) -> None:
    """Our delta of the two."""
    from glm_jax.checkpoint.delta.arc_v2 import write_arc_v2

    (work / OURS).unlink(missing_ok=True)
    write_arc_v2(work / OURS, _read(work / OLD), _read(work / NEW))


def apply_theirs(work: Path) -> dict[str, int]:
    """Compares the new weights with those that we get from the package's delta."""
    from glm_jax.checkpoint.delta.arc_v2 import ArcV2

    new = _read(work / NEW)
    found = ArcV2(_read(work / OLD), work / THEIRS)
    unequal = sum(found[k].tobytes() != x.tobytes() for k, x in new.items())
    return {"tensors": len(new), "unequal_tensors": unequal}


def _read(path: Path) -> dict[str, Any]:
    from glm_jax.checkpoint.problems import Problems
    from glm_jax.checkpoint.safetensors_files import open_file

    problems = Problems(path)
    found = open_file(path, problems)
    problems.raise_if_any()
    return {name: stored.map() for name, stored in found.items()}


def run_peer(work: Path, python: str) -> dict[str, Any]:
    """Starts this file in the package's environment, which is made where it is missing."""
    environment = work / "environment"
    executable = environment / "bin" / "python"
    if not executable.exists():
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        subprocess.run([str(executable), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    command = [str(executable), __file__, str(work), "--peer"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def peer(work: Path) -> dict[str, Any]:
    """What the package makes of our delta, in both of its ways; writes its own."""
    from importlib.metadata import version

    import fireworks_delta_compression as package
    import torch
    from safetensors.torch import load_file

    formats = {"compression_format": "arc_v2"}
    old, new = str(work / OLD), str(work / NEW)
    package.delta_compress_files_to_file(src=old, dst=new, diff_file=str(work / THEIRS), **formats)
    wanted = load_file(new)

    def compare(found: dict[str, Any]) -> dict[str, int]:
        unequal = 0
        for name, x in wanted.items():
            a, b = (y.contiguous().flatten().view(torch.uint8) for y in (x, found[name]))
            unequal += not (x.dtype == found[name].dtype and torch.equal(a, b))
        return {"tensors": len(wanted), "unequal_tensors": unequal}

    copy = work / "applied.safetensors"
    shutil.copy(old, copy)
    package.delta_decompress_inplace(base_path=str(copy), diff_path=str(work / OURS), **formats)
    again = package.delta_decompress_dict_from_file(
        src=load_file(old), diff_file=str(work / OURS), **formats
    )
    return {
        "package": version("fireworks-delta-compression"),
        "torch": torch.__version__,
        "they_apply_ours_in_place": compare(load_file(str(copy))),
        "they_apply_ours": compare(again),
    }


if __name__ == "__main__":
    sys.exit(main())
