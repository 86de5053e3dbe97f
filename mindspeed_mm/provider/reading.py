"""What the rules of flags read from and write to."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from mindspeed_mm.fsdp.params.yaml.tree import SourcePosition
from mindspeed_mm.provider.draft import Draft
from mindspeed_mm.provider.module_names import ModuleNames
from mindspeed_mm.provider.parse import GivenFlags, given_of

LENGTH_OF_RUN = "training.train_iters"


@dataclass
class Reading:
    """One command line on its way to a configuration."""

    namespace: Namespace
    draft: Draft = field(default_factory=Draft)
    names: ModuleNames | None = None
    """What the model's modules are called; None where the model is not known."""
    decoder_layers: int | None = None
    """Number of layers of the language model, or of a generator's transformer."""
    stage_layers: list[int] = field(default_factory=list)
    """Number of layers on each stage, where model.json says it."""
    is_generator: bool = False
    """Whether the model draws pictures or clips."""
    folder_of_weights: str = ""
    """The folder of a generator's weights inside the model's folder."""
    sharing_stages: int = 1
    """Number of pipeline stages whose ranks share each sequence, where a model's pairs are not cut into stages."""
    settled: set[str] = field(default_factory=set)
    """Flags whose place model.json has taken."""

    @property
    def given(self) -> GivenFlags:
        """Which flags were given, and where."""
        return given_of(self.namespace)

    def has(self, dest: str) -> bool:
        """Whether a flag was given."""
        return dest in self.given.places

    def value(self, dest: str, default: Any = None) -> Any:
        """A flag's value: what was given, or else Megatron's default."""
        value = getattr(self.namespace, dest, None)
        return default if value is None else value

    def place(self, dest: str) -> SourcePosition:
        """Where a flag was given."""
        return self.given.places.get(dest, SourcePosition(f"--{dest.replace('_', '-')}"))

    def set_ones(self, *names: str) -> list[str]:
        """Those of some flags that have a value other than false, nothing or 0."""
        return [name for name in names if self.value(name)]

    def size(self, name: str) -> int:
        """A key of `parallel` as it stands, 1 where it is not given or is no number."""
        value = self.draft.value(f"parallel.{name}", 1)
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def context(self) -> int:
        """Number of ranks that share a sequence."""
        return max(1, int(self.value("context_parallel_size", 1))) * self.sharing_stages

    @property
    def model_ranks(self) -> int:
        """Number of ranks that work on the same rows."""
        return self.size("tensor_parallel_size") * self.size("pipeline_parallel_size") * self.context

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different rows, 1 where nobody says how many ranks there are."""
        return max(1, (self.given.world_size or self.model_ranks) // self.model_ranks)
