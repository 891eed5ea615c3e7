"""Code that a bit depends on does not change unnoticed: `REVISION` is part of every contract."""

import hashlib
import io
import tokenize
from pathlib import Path

from glm_jax.numerics.contract import REVISION

ROOT = Path(__file__).parents[3]
MODULES = (
    "glm_jax/cache.py",
    "glm_jax/forward.py",
    "glm_jax/head.py",
    "glm_jax/model/*.py",
    "glm_jax/numerics/arithmetic.py",
    "glm_jax/numerics/primitives.py",
    "glm_jax/training/*.py",
    "pallas_kernels/row_sum.py",
    "pallas_kernels/tree.py",
    "pallas_kernels/*/op.py",
    "pallas_kernels/*/order.py",
    "pallas_kernels/*/xla.py",
    "serving/engine/sampler.py",
)
KNOWN = (3, "791a3302f18a2810")
"""A revision, and the digest of its code."""

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def words(source: str) -> list[str]:
    """The code without comments, layout, and strings that stand alone (documentation)."""
    found, begins = [], True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and begins:
            continue
        if token.type in LAYOUT:
            begins = begins or token.type == tokenize.NEWLINE
            continue
        found.append(token.string)
        begins = False
    return found


def digest() -> str:
    hashed = hashlib.sha256()
    paths = {path for pattern in MODULES for path in ROOT.glob(pattern)}
    assert len(paths) > 30
    for path in sorted(paths):
        hashed.update("\n".join([path.name, *words(path.read_text(encoding="utf-8"))]).encode())
    return hashed.hexdigest()[:16]


def test_the_revision_is_that_of_the_code():
    assert (REVISION, digest()) == KNOWN, (
        "code that bits depend on has changed. If any bit of a pinned result did, raise REVISION "
        "in glm_jax/numerics/contract.py; then write both here"
    )


def test_documentation_and_layout_do_not_count_and_code_does():
    code = 'def f(x):\n    """Doubles."""\n    return 2 * x  # twice\n'
    assert words(code) == words("def f(x):\n\n    return 2*x\n")
    assert words(code) != words(code.replace("2", "3"))
    assert words('x = "a"') != words('x = "b"')
