"""What the engine did so far."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Sums since the engine was made; `later - earlier` is what happened between."""

    n_steps: int = 0
    """Dispatches."""
    n_generated: int = 0
    """Tokens that completions hold or will hold."""
    n_prefilled: int = 0
    """Tokens computed to fill the cache: prompts, and what preemption made to be recomputed."""
    n_reused: int = 0
    """Tokens that kept pages saved from being computed."""
    n_preempted: int = 0
    n_compiled: int = 0
    compile_seconds: float = 0.0
    device_seconds: float = 0.0
    """From handing a step to the device until its results are here, without compiling."""
    host_seconds: float = 0.0
    """The rest of the time within `step`."""

    def __sub__(self, earlier: "EngineStats") -> "EngineStats":
        """What happened since `earlier`."""
        return EngineStats(
            **{name: value - getattr(earlier, name) for name, value in vars(self).items()}
        )

    def plus(self, **more: float) -> "EngineStats":
        """With these fields raised."""
        return dataclasses.replace(
            self, **{name: getattr(self, name) + value for name, value in more.items()}
        )
