"""RMSNorm with f32 statistics, and the residual add before it."""

from pallas_kernels.rms_norm.op import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
