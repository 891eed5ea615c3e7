"""The settings of tests/conftest.py hold."""

import importlib
import socket
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from tests.conftest import selects_device_tests


def test_eight_fake_cpu_devices():
    assert [d.platform for d in jax.devices("cpu")] == ["cpu"] * 8


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_dtype_promotion_raises():
    with pytest.raises(ValueError, match="implicit"):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16)


def test_warnings_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn("noticed", stacklevel=1)


def test_connections_leaving_the_machine_are_refused():
    with socket.socket() as sock, pytest.raises(RuntimeError, match=r"192\.0\.2\.1"):
        sock.connect(("192.0.2.1", 80))
    with pytest.raises(RuntimeError, match=r"example\.invalid"):
        socket.create_connection(("example.invalid", 80))


def test_loopback_connections_work():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        assert connection.getpeername() == server.getsockname()


PROBE = """
import dataclasses
from jaxtyping import Array, Float

def add(x_TD: Float[Array, "T D"], b_D: Float[Array, "D"]) -> Float[Array, "T D"]:
    return x_TD + b_D[None]

def bias(x_TD: Float[Array, "T D"]) -> tuple[int, Float[Array, "D"]]:
    return 0, x_TD[:, 0]

def plain(name: str) -> int:
    return name

@dataclasses.dataclass
class Pair:
    x_TD: Float[Array, "T D"]
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config):
    """A module whose annotations are checked by the checker of this test run."""
    *packages, checker = pytestconfig.getoption("--jaxtyping-packages").split(",")
    assert packages == ["glm_jax", "pallas_kernels", "serving"]
    (tmp_path / "annotated_probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("annotated_probe", checker):
        yield importlib.import_module("annotated_probe")
    sys.modules.pop("annotated_probe")


def test_wrong_shapes_break_annotations(probe):
    x_TD = jnp.ones((2, 3))
    assert probe.add(x_TD, jnp.ones(3)).shape == (2, 3)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameters of annotated_probe\.add"):
        probe.add(x_TD, jnp.ones(1))
    with pytest.raises(jaxtyping.TypeCheckError, match=r"return value\s+of annotated_probe\.bias"):
        probe.bias(x_TD)


def test_plain_types_and_constructors_are_not_checked(probe):
    assert probe.plain(3) == 3
    assert probe.Pair("a sharding").x_TD == "a sharding"


@pytest.mark.parametrize(
    ("markexpr", "selected"),
    [("device", True), ("slow or device", True), ("not slow and not device", False), ("", False)],
)
def test_only_an_explicit_marker_leaves_the_cpu(markexpr: str, selected: bool):
    assert selects_device_tests(markexpr) is selected
