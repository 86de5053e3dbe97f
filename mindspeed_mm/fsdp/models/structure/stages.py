"""Stages of a pipeline: where a model can be cut into stages that run one after the other, the part that a rank holds,
how a stage is left, and what routers say across them.

Cut points are data, read off the live model. The part is a model with the names of the whole: modules of other stages
are replaced by placeholders. What concerns all stages alike (patterns of the plan, parameter groups, keys of a folder)
is asked of the whole, which is kept beside it without weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.towers import find_uncarried
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of, embedding_of, head_of, name_of

KEY = "parallel.pipeline_parallel_size"


@dataclass(frozen=True)
class CutPoints:
    """The lists of layers that are cut, and what stands around them. Modules named nowhere belong to the first stage.

    Code between layers runs on the stage that has the layer in front of it; code in front of the layers runs on every
    stage (masks, rotary tables), with placeholders where modules of the first stage would be called.
    """

    layers: Mapping[str, tuple[str, ...]]
    """Names of the lists, in the order in which they run → the arguments of a layer that it returns changed, in the
    order in which it returns them."""
    behind: tuple[str, ...]
    """Modules of the last stage, in the order in which they are called; the first takes what the last layer returns."""
    behind_parameters: tuple[str, ...] = ()
    """Parameters of the modules around the lists that the last stage uses."""
    embedding: str = ""
    """Of a language model: the token embedding. What is called elsewhere in its place must return hidden states, of
    zeros."""
    carried: tuple[str, ...] = ()
    """Of a generator: modules of the first stage whose outputs all stages need. They travel beside the hidden states;
    a release of the family may lack some."""

    @property
    def list_names(self) -> str:
        """Names of the lists, for messages."""
        return ", ".join(self.layers)


def find_cut_points(model: nn.Module) -> CutPoints:
    """The cut points of a model: a generator's adapter states them, a model of one's own by `get_cut_points()`, of a
    decoder of transformers they are read off.

    Raises:
        ConfigError: They are not known.
    """
    own = attribute_at(model, "get_cut_points")
    if own is not None:
        points: CutPoints = own()
        return points
    adapter = facts_of(model).adapter
    known = adapter.cut_points if adapter is not None else _of_decoder(model)
    if known is None:
        why = "its family states no cut points"
        if adapter is not None and adapter.uncut_because:
            why = adapter.uncut_because
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into stages: {why}",
            key=KEY,
            way_out="Set it to 1; shard (fully_shard_parallel_size) or split matrices (tensor_parallel_size) instead.",
        )
    return known


def _of_decoder(model: nn.Module) -> CutPoints | None:
    """`embed_tokens → layers → norm` inside, `lm_head` outside, as all decoders of transformers have it. A model with
    further tables and heads beside them (`code_heads`) is not known."""
    if attribute_at(model, "code_heads"):
        return None
    decoder, embedding, head = decoder_of(model), embedding_of(model), head_of(model)
    layers, norm = attribute_at(decoder, "layers"), attribute_at(decoder, "norm")
    if decoder is None or embedding is None or not isinstance(layers, nn.ModuleList) or norm is None:
        return None
    strange = []
    for name, child in decoder.named_children():
        has_parameters = next(child.parameters(), None) is not None
        if has_parameters and child not in (embedding, layers, norm):
            strange.append(name)
    if strange:
        raise ConfigError(
            f"{type(decoder).__name__} holds {', '.join(strange)}, and it is not known which stage needs it",
            key=KEY,
            way_out="Set it to 1, or give the model class a get_cut_points().",
        )
    if uncarried := find_uncarried(decoder):
        raise ConfigError(
            f"layers of {type(decoder).__name__} read {', '.join(uncarried)}, which later stages are not given",
            key=KEY,
            way_out="Set it to 1; shard (fully_shard_parallel_size) or split matrices (tensor_parallel_size) instead.",
        )
    behind = [name_of(model, norm)]
    if head is not None:
        behind.append(name_of(model, head))
    layer_list = name_of(model, layers)
    return CutPoints({layer_list: ("hidden_states",)}, behind=tuple(behind), embedding=name_of(model, embedding))


_PLAIN = (bool, int, float, str, tuple, torch.dtype, torch.device)


@dataclass(frozen=True)
class Share:
    """What the holder of a part knows of the rest."""

    whole: nn.Module
    """The model before it was cut, parameters on meta."""
    owners: Mapping[str, int]
    """Parameter or persistent buffer of the whole, by its first name → rank in `group` that keeps it in checkpoints."""
    group: dist.ProcessGroup | None
    """The ranks of the pipeline."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Own parameter that is a copy of a shared weight → the first name of that weight, which another stage keeps."""
    stages: list[nn.Module] = field(default_factory=list)
    """Own stages, once they are made: each is sharded by itself and holds its part of the model as `model`."""


class PlaceholderModule(nn.Module):
    """Stands where a module of another stage would be: returns its input, and has the plain attributes (sizes,
    configuration) that the code around it reads.

    Args:
        module: What it stands for.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            is_plain = isinstance(value, _PLAIN) or name == "config"
            if is_plain and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        if not isinstance(module, PlaceholderModule):
            self.dtype = torch.get_default_dtype()
            for parameter in module.parameters():
                self.dtype = parameter.dtype
                break

    def forward(self, hidden: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states as they come in, whether by position or as `hidden_states`."""
        if hidden is None:
            return kwargs.get("hidden_states")
        return hidden


def whole_of(model: nn.Module) -> nn.Module:
    """The model before it was cut, without weights; the model itself where it was not."""
    share = facts_of(model).share
    if share is None:
        return model
    return share.whole


def first_names(model: nn.Module) -> Mapping[str, str]:
    """Own copy of a shared weight → the name that the whole model has for it."""
    share = facts_of(model).share
    if share is None:
        return {}
    return share.copies


def holders_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a model's memory: its stages, where it has some."""
    share = facts_of(model).share
    if share is None or not share.stages:
        return [model]
    return share.stages


def bind_stages(model: nn.Module) -> None:
    """Let a part see the parameters and buffers that its stages hold in copies of the modules around the layers."""
    for stage in holders_of(model):
        if stage is model:
            continue
        for name, module in stage.get_submodule("model").named_modules():
            own = model.get_submodule(name)
            if own is not module and not isinstance(module, PlaceholderModule):
                own._parameters.update(module._parameters)
                for key in own._buffers.keys() & module._buffers.keys():
                    own._buffers[key] = module._buffers[key]


def own_names(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Of these modules of the whole, those that this part holds."""
    held = {name for name, module in model.named_modules() if not isinstance(module, PlaceholderModule)}
    return [name for name in names if name in held]


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy without weights: parameters on meta, tied ones tied."""
    memo: dict[int, Any] = {}  # what the copy is to have in the place of an object
    for parameter in model.parameters():
        on_meta = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(on_meta, requires_grad=parameter.requires_grad)
    adapter = facts_of(model).adapter
    memo[id(adapter)] = adapter
    return copy.deepcopy(model, memo)


class StageExit(BaseException):
    """A stage has done its layers. It is no `Exception`: code around a forward pass that catches those lets it by.

    Args:
        streams: The hidden states that the next layer would be given; of models with several streams all of them.
    """

    def __init__(self, *streams: Tensor) -> None:
        super().__init__("the stage ends here")
        self.streams = streams


@dataclass
class RouterPassing:
    """Sums over the routers of all stages so far, which travel beside the hidden states of a micro-batch: a term over
    the layers of all stages is computed by the last one, and its gradients come back the same way."""

    numbers: int
    """How many there are."""
    dtype: torch.dtype
    """fp32 at least: what is counted must stay exact."""
    received: Tensor | None = None
    """(numbers,) of the stages in front of the one that runs; None on the first one."""
    sent: Tensor | None = None
    """(numbers,) with those of the stage that has run."""

    def leaving(self, like: Tensor) -> Tensor:
        """What the stage that has run hands on; zeros where its routers were not asked.

        Args:
            like: A tensor of its device.
        """
        sent, self.sent = self.sent, None
        if sent is None:
            return torch.zeros(self.numbers, dtype=self.dtype, device=like.device)
        return sent
