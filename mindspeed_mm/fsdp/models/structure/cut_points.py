"""Where a model can be cut into stages that run one after the other: data, read off the live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.facts import facts_of
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
    behind = [name_of(model, norm)]
    if head is not None:
        behind.append(name_of(model, head))
    layer_list = name_of(model, layers)
    return CutPoints({layer_list: ("hidden_states",)}, behind=tuple(behind), embedding=name_of(model, embedding))
