"""What can be proven of the kernels without the devices they are for: see `check_kernels`."""

from pallas_kernels.check.report import KernelReport, check_kernels

__all__ = ["KernelReport", "check_kernels"]
