"""GLM-5-family models in JAX, and the numerics that training and serving share."""
