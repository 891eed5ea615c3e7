"""Fails when a Python file is over 600 lines without a written reason."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("glm_jax", "pallas_kernels", "serving", "rl", "scripts", "tests")
MOST_LINES = 600
REASONS: dict[str, str] = {}
"""Path from the root -> why this file may be longer."""


def faults(root: Path, reasons: dict[str, str]) -> list[str]:
    """Returns one line for each file over the budget and each reason no file needs any more."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    sizes = {
        path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in paths
    }
    too_long = {name: size for name, size in sizes.items() if size > MOST_LINES}
    return [
        f"{name}: {size} lines, over {MOST_LINES}; split it, or give a reason in REASONS"
        for name, size in too_long.items()
        if not reasons.get(name)
    ] + [
        f"{name}: not over {MOST_LINES} lines; remove it from REASONS"
        for name in reasons
        if name not in too_long
    ]


def main() -> int:
    """Prints the faults of this repository; returns the exit status."""
    found = faults(ROOT, REASONS)
    print("\n".join(found) or f"every Python file is within {MOST_LINES} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
