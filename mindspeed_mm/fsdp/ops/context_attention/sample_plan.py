"""Where the forward pass of a family of generators is cut when a sample is spread over ranks. Data: the families hold
it, context parallelism reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplePlan:
    """Names of arguments and modules, each with the dimension of its tensors that runs along tokens."""

    image_inputs: Mapping[str, int] = field(default_factory=dict)
    """Arguments of forward along image tokens. Without `hidden_states` among them it takes latents, and tokens are made
    inside."""
    text_inputs: Mapping[str, int] = field(default_factory=dict)
    """Arguments along text tokens that attend together with the image's. Empty: every rank reads the whole text."""
    module_inputs: Mapping[str, int] = field(default_factory=dict)
    """Modules whose first input, given by position, is along image tokens."""
    module_outputs: Mapping[str, int] = field(default_factory=dict)
    """Modules that return tuples along image tokens."""
    gathered: tuple[str, int] = ("proj_out", 1)
    """The module whose output is put together again."""
