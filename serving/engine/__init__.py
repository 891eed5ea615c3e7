"""The rollout engine: continuous batching over the paged cache, by the one forward."""

from serving.engine.engine import Engine
from serving.engine.request import Completion, Event
from serving.engine.sampling_params import SamplingParams
from serving.engine.stats import EngineStats
from serving.engine.switch import ResetPromptCache, SwitchMode

__all__ = [
    "Completion",
    "Engine",
    "EngineStats",
    "Event",
    "ResetPromptCache",
    "SamplingParams",
    "SwitchMode",
]
