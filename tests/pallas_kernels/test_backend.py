"""One choice of implementation, never silent; tiles are validated when they are loaded."""

import logging

import jax
import pytest

from pallas_kernels import backend, tuned
from pallas_kernels.backend import GPU, INTERPRET, TPU, XLA, Backend, describe, described, resolve
from pallas_kernels.errors import KernelError
from pallas_kernels.pinned_matmul.pallas_tpu import Config
from pallas_kernels.registry import OPS

BOTH, ALL = ("xla", "tpu"), ("xla", "tpu", "gpu")
DIGEST = tuned.digest("pinned_matmul")


@pytest.fixture
def on(monkeypatch):
    """Pretends that the default backend is of a platform."""

    def pretend(platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    return pretend


@pytest.mark.parametrize(
    ("platform", "asked", "kinds", "comes_to"),
    [
        ("cpu", "auto", ALL, XLA),
        ("tpu", "auto", ALL, TPU),
        ("gpu", "auto", ALL, XLA),
        ("tpu", "xla", ALL, XLA),
        ("cpu", "pallas", ALL, INTERPRET),
        ("tpu", "pallas", ALL, TPU),
        ("gpu", "pallas", ALL, GPU),
        ("tpu", "auto", ("xla",), XLA),
        ("cpu", GPU, ALL, GPU),
    ],
)
def test_what_a_choice_comes_to(platform, asked, kinds, comes_to, on):
    on(platform)
    assert resolve("op", asked, kinds) == comes_to


@pytest.mark.parametrize(
    ("platform", "asked", "kinds", "text"),
    [
        ("gpu", "pallas", BOTH, "op: dx has no gpu kernel; it has tpu, xla. Ask for 'xla'"),
        ("tpu", "pallas", ("xla",), "op: dx has no tpu kernel; it has xla"),
        ("cpu", "pallas", ("xla",), "op: dx has no tpu kernel"),
        ("cpu", TPU, ("xla",), "op: dx has no tpu kernel"),
        ("cpu", "mosaic", ALL, "implementation 'mosaic' is none; use one of auto, xla, pallas"),
        ("metal", "auto", ALL, "platform 'metal'; supported are cpu, tpu, gpu"),
    ],
)
def test_what_is_not_there_is_refused_and_never_replaced(platform, asked, kinds, text, on):
    on(platform)
    with pytest.raises(KernelError, match=text):
        resolve("op", asked, kinds, "dx")


def test_a_fallback_of_auto_is_logged_and_stands_in_the_contract(on, caplog):
    on("tpu")
    with caplog.at_level(logging.INFO, backend.log.name):
        assert describe("auto", {"pinned_matmul": ("xla",)}) == "pinned_matmul xla"
    assert "pinned_matmul: no tpu kernel of forward; its xla twin runs" in caplog.text


def test_interpret_mode_is_logged(caplog):
    resolve("op", "pallas", BOTH)
    assert "op: the TPU kernel runs in interpret mode, which is slow" in caplog.text


def test_a_described_choice_is_read_back(on):
    for platform in ("cpu", "tpu"):
        on(platform)
        for asked in backend.IMPLEMENTATIONS:
            line = describe(asked, {"pinned_matmul": BOTH})
            assert described("pinned_matmul", line) == resolve("pinned_matmul", asked, BOTH)
    assert describe("pallas", {"pinned_matmul": BOTH}) == f"pinned_matmul tpu {DIGEST}"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "the contract's kernels do not name it: ''"),
        ("grouped_matmul xla", "do not name it"),
        ("pinned_matmul tpu 00000000", f"made with tiles 00000000, tuned.json here is {DIGEST}"),
        ("pinned_matmul fast", "'fast' is none; use one of xla, tpu, gpu"),
    ],
)
def test_a_choice_of_another_program_is_refused(line, text):
    with pytest.raises(KernelError, match=text):
        described("pinned_matmul", line)


def test_every_backend_has_a_name_of_its_own():
    backends = [Backend(kind, interpret) for kind in ALL for interpret in (False, True)]
    assert [Backend.parse(str(b)) for b in backends] == backends


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ([], "must map 'tpu' and 'gpu' to devices"),
        ({"npu": {}}, "must map 'tpu' and 'gpu' to devices"),
        ({"tpu": {"TPU v5": {}}}, "tpu has no 'default' device"),
    ],
)
def test_a_table_of_tiles_that_is_none_is_refused(table, text):
    with pytest.raises(KernelError, match=f"op: tuned.json.*{text}"):
        tuned.check("op", table)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"colour": 1}, "fields colour are unknown or missing"),
        ({"column_tile": "wide"}, "column_tile 'wide': must be a multiple of 128"),
        ({"column_tile": 0}, "column_tile 0: must be a multiple of 128; nearest is 128"),
    ],
)
def test_tiles_with_a_bad_field_are_refused(change, text):
    fields = tuned.table("pinned_matmul")["tpu"]["default"]
    with pytest.raises(KernelError, match=f"pinned_matmul: tuned.json: {text}"):
        tuned.build("pinned_matmul", Config, fields | change)


def test_a_missing_table_is_refused():
    with pytest.raises(KernelError, match=r"no_such_op: tuned\.json cannot be read"):
        tuned.table("no_such_op")


def test_every_operation_of_the_registry_has_shapes_to_test_and_real_ones():
    for name, op in OPS.items():
        assert op.name == name
        assert op.parts[0].name == "forward"
        for tag in ("test", "rows", "glm-5.2"):
            assert op.tagged(tag), (name, tag)
