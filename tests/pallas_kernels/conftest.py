"""Parametrises `OpSuite`: every part and shape of the class's operation, every backend on a CPU."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    op = getattr(metafunc.cls, "op", None)
    if op is None:
        return
    # Not above: jax may only be imported once tests/conftest.py has set it up.
    from pallas_kernels.backend import INTERPRET, XLA

    names = metafunc.fixturenames
    if "part" in names and "case" in names:
        pairs = [
            pytest.param(part, case, id=f"{part.name}-{case}", marks=marks)
            for tag, marks in (("test", ()), ("more", pytest.mark.slow))
            for part in op.parts
            for case in op.tagged(tag)
        ]
        metafunc.parametrize(("part", "case"), pairs)
    elif "part" in names and "rows_case" in names:
        pairs = [(part, case) for part in op.parts for case in op.tagged("rows")]
        metafunc.parametrize(
            ("part", "rows_case"), pairs, ids=[f"{p.name}-{c.dtype}" for p, c in pairs]
        )
    if "backend" in names:
        backends = [XLA, INTERPRET]
        metafunc.parametrize("backend", backends, ids=str)
