"""The rollout engine: continuous batching over the paged cache, by the one forward."""

from serving.engine.engine import Engine
from serving.engine.request import Completion
from serving.engine.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "SamplingParams"]
