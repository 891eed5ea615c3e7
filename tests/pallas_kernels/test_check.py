"""`glm-jax check kernels` finds a kernel that differs, does not lower, or lowers differently."""

import dataclasses
import itertools
import json
import re

import pytest

from pallas_kernels.backend import XLA
from pallas_kernels.cases import Case, Op, Part, case
from pallas_kernels.check import check_kernels
from pallas_kernels.check.lowering import NO_LIBTPU, TOPOLOGIES, for_h200, for_tpu, libtpu_version
from pallas_kernels.errors import KernelError
from pallas_kernels.registry import OPS
from rl.cli.main import main

CASES = (
    case("small", "bfloat16", "test", M=5, K=40, N=16),
    case("real", "bfloat16", "glm-5.2", M=16, K=6144, N=576),
)
PRODUCT = OPS["pinned_matmul"].parts[0]
needs_libtpu = pytest.mark.skipif(libtpu_version() is None, reason="libtpu is not installed")


def only(part: Part) -> dict[str, Op]:
    """A registry of one operation with one part."""
    return {"pinned_matmul": Op("pinned_matmul", (part,), CASES)}


@pytest.fixture
def registry(monkeypatch):
    """Puts one operation in the place of all."""

    def replace(part: Part):
        for where in ("pallas_kernels.check.report.OPS", "pallas_kernels.registry.OPS"):
            monkeypatch.setattr(where, only(part))

    return replace


@pytest.fixture
def no_libtpu(monkeypatch):
    monkeypatch.setattr("pallas_kernels.check.report.libtpu_version", lambda: None)


@pytest.mark.usefixtures("no_libtpu")
def test_without_the_compiler_the_report_says_so_and_the_rest_is_done(registry, capsys):
    registry(PRODUCT)
    report = check_kernels()
    (part,) = report.parts
    assert report.ok and report.tpu == NO_LIBTPU and report.topologies == ()
    assert [x.elements for x in part.interpreted] == [5 * 16]
    assert part.tpu == ()
    for flags in ([], ["--json"]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr("sys.argv", ["glm-jax", "check", "kernels", *flags])
            main()
        shown = capsys.readouterr().out
        assert end.value.code == 0
        assert "not checked: libtpu is not installed, so nothing was compiled for TPU" in shown
    assert json.loads(shown)["versions"]["libtpu"] is None


@pytest.mark.usefixtures("no_libtpu")
def test_a_kernel_whose_bits_differ_fails_the_check(registry, monkeypatch, capsys):
    def run(case: Case, backend):
        f = PRODUCT.run(case, backend)
        return f if backend == XLA else lambda x, w: f(x, w).at[0, 0].multiply(-1)

    registry(dataclasses.replace(PRODUCT, run=run))
    report = check_kernels()
    assert not report.ok and report.parts[0].interpreted[0].unequal == 1
    monkeypatch.setattr("sys.argv", ["glm-jax", "check", "kernels"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert re.search("forward *│ *0 of 1", capsys.readouterr().out)


@needs_libtpu
def test_the_real_compiler_takes_the_product_for_every_topology(registry):
    registry(PRODUCT)
    (part,) = check_kernels().parts
    assert [x.target for x in part.tpu] == list(TOPOLOGIES)
    for found in part.tpu:
        assert found.ok and found.vmem_bytes and 2**20 < found.vmem_bytes < 32 * 2**20


@needs_libtpu
def test_what_the_compiler_refuses_is_reported():
    def run(case: Case, backend):
        raise KernelError("no such tile")

    found = for_tpu(dataclasses.replace(PRODUCT, run=run), CASES[1], "v5e")
    assert not found.ok and found.error == "KernelError: no such tile"


def test_a_program_that_lowers_differently_twice_is_found():
    counter = itertools.count()

    def run(case: Case, backend):
        return lambda x, w: x[:, :1] + next(counter)

    def fixed(case: Case, backend):
        return lambda x, w: x[:, :1] + 1

    assert for_h200(dataclasses.replace(PRODUCT, run=fixed), CASES[0]).ok
    found = for_h200(dataclasses.replace(PRODUCT, run=run), CASES[0])
    assert found.error is None and not found.deterministic and not found.ok


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"ops": ["matmul"]}, "op 'matmul' is unknown; use one of .*pinned_matmul"),
        ({"topologies": ["v4"]}, "topology 'v4' is unknown; use one of v5e, v5p, v6e, v7x"),
    ],
)
def test_unknown_names_are_refused(asked, text, capsys, monkeypatch):
    with pytest.raises(KernelError, match=text):
        check_kernels(**asked)
    flag = {"ops": "--op", "topologies": "--topology"}[next(iter(asked))]
    argv = ["glm-jax", "check", "kernels", flag, *next(iter(asked.values()))]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and re.search(text, capsys.readouterr().err)
