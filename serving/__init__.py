"""Inference engine and server. Nothing is offered here yet."""
