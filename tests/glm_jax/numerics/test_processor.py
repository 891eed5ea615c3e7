"""A contract tells CPU models apart."""

import jax
import pytest

from glm_jax.numerics.processor import cpu_kind, device_kind

AMD = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx avx2 avx512f

processor\t: 1
vendor_id\t: Other
"""
ARM = """processor\t: 0
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU variant\t: 0x0
CPU part\t: 0xd4f
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (AMD, "cpu AuthenticAMD 25 17 avx512f"),
        (AMD.replace(" avx512f", ""), "cpu AuthenticAMD 25 17 avx2"),
        (AMD.replace("25", "26"), "cpu AuthenticAMD 26 17 avx512f"),
        (ARM, "cpu 0x41 0xd4f 0x0 sve"),
    ],
)
def test_a_cpu_is_its_model_and_its_widest_vectors(tmp_path, text, kind):
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert cpu_kind(tmp_path / "cpuinfo") == kind


def test_without_cpuinfo_python_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert cpu_kind(tmp_path / "none") == "cpu arm64 arm"


def test_the_kind_of_an_accelerator_is_its_own(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert device_kind() == "NVIDIA H200"
