"""The classes that verl's configuration of this engine is read into."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.workers.config import ActorConfig, EngineConfig


@dataclass
class MindSpeedMMEngineConfig(EngineConfig):  # type: ignore[misc]
    """What verl does not ask itself, in the words of this package's YAML."""

    strategy: str = "mindspeed_mm"
    config: str | None = None
    """A YAML of `parallel`, `features`, `training` and `model`; null: everything has its default."""
    overrides: list[str] = field(default_factory=list)
    """`section.key=value`, which win over it."""


@dataclass
class MindSpeedMMActorConfig(ActorConfig):  # type: ignore[misc]
    """Of the actor, and of the reference."""

    strategy: str = "mindspeed_mm"
    mindspeed_mm: MindSpeedMMEngineConfig = field(default_factory=MindSpeedMMEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        """Where verl looks for the engine's settings."""
        super().__post_init__()
        self.engine = self.mindspeed_mm
