"""Environments: what a model is asked, and what its answers are worth."""

from rl.envs.environment import Answer, Demonstration, Environment, Episode, Split

__all__ = ["Answer", "Demonstration", "Environment", "Episode", "Split"]
