"""What this package knows about a model besides its modules: one typed record a model, `facts_of(model)`.

The record is an attribute of the model, not an entry of a `WeakKeyDictionary`: a deep copy or a pickle of the model
takes its own record along, in which hooks and records still refer to each other; `fully_shard` changes the class of a
module and keeps its attributes; a stage of a pipeline copies the attributes of the part that it is made of. It is no
`nn.Module`, so a model that it names (`Share.whole`) becomes no submodule, and torch.compile guards only what a forward
pass reads, which the record never is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from mindspeed_mm.core.model_kinds import GENERATOR, LANGUAGE, UNIFIED, ModelKind

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.models.added_tokens import AddedTokens
    from mindspeed_mm.fsdp.models.behaviour.attention import AttentionChoice
    from mindspeed_mm.fsdp.models.behaviour.multi_token import DecoderWatch
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
    from mindspeed_mm.fsdp.models.lora.names import LoraReport
    from mindspeed_mm.fsdp.models.structure.stages import Share

_ATTRIBUTE = "_mm_model_facts"
Fact = TypeVar("Fact")


@dataclass
class ModelFacts:
    """What is known about one model. A field that nothing has set is None."""

    adapter: DiffusionAdapter | None = None
    """The family's adapter; a model that has one is an image or video generator."""
    denoises_pictures: bool = False
    """Whether it is a model that answers and draws, whose class has `denoises_pictures`."""
    added_tokens: AddedTokens | None = None
    """Tokens that the configuration adds to the folder's vocabulary."""
    lora: LoraReport | None = None
    """The low-rank adapters that are trained."""
    conversion_rules: list[object] | None = None
    """Transformers' rules by which a folder's tensors become the model's parameters; of transformers' models only."""
    attention: AttentionChoice | None = None
    """The attention kernel that the model was built with."""
    multi_token: DecoderWatch | None = None
    """What reads the decoder's pass for the heads that predict further tokens."""
    share: Share | None = None
    """What a rank of a pipeline knows about the rest of the model."""
    _others: dict[type, object] = field(default_factory=dict)

    @property
    def kind(self) -> ModelKind:
        """What the engine does differently for this model."""
        if self.adapter is not None:
            return GENERATOR
        if self.denoises_pictures:
            return UNIFIED
        return LANGUAGE

    def note(self, fact: object) -> None:
        """Keep a fact whose class is defined in a room above this one, instead of an earlier one of its class."""
        self._others[type(fact)] = fact

    def noted(self, kind: type[Fact]) -> Fact | None:
        """The fact of this class that was noted last."""
        fact = self._others.get(kind)
        if isinstance(fact, kind):
            return fact
        return None


def facts_of(model: nn.Module) -> ModelFacts:
    """The record of a model, to read and to write; an empty one where nothing has been noted yet."""
    # Not `getattr`: a module looks a missing name up among its parameters and submodules, and raises.
    facts: ModelFacts = vars(model).setdefault(_ATTRIBUTE, ModelFacts())
    return facts
