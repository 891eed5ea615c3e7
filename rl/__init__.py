"""The `glm-jax` command; later the trainer, environments and recipes."""
