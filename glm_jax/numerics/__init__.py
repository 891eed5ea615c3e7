"""Arithmetic whose rounding points are stated."""
