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
        # By default one dtype of each forward; gradients and the other dtype are slow.
        pairs = [
            pytest.param(
                part,
                case,
                id=f"{part.name}-{case.dtype}",
                marks=() if part is op.parts[0] and case.dtype == "float32" else pytest.mark.slow,
            )
            for part in op.parts
            for case in op.tagged("rows")
        ]
        metafunc.parametrize(("part", "rows_case"), pairs)
    if "backend" in names:
        backends = [
            pytest.param(XLA, id=str(XLA)),
            pytest.param(INTERPRET, id=str(INTERPRET), marks=pytest.mark.slow),
        ]
        metafunc.parametrize("backend", backends)
