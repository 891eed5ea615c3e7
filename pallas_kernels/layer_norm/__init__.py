"""LayerNorm with f32 statistics."""

from pallas_kernels.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
