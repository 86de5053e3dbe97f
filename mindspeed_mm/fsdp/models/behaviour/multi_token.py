"""Heads that predict further tokens than the next one (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    h_i^k = norm(layer_k(fc [norm(e_{i+k}); norm(h_i^{k-1})]))        k = 1 … depths

e are the embeddings that enter the decoder, pictures in their places; h^0 what its last norm returns, which is what
released serving code (vLLM's DeepSeek and Qwen3-Next models) feeds them; the model's own output head reads h^k.
Position i looks at positions up to i alone, so what a row ends with, which has no next embedding, reaches no position
that has a label.

The parameters have the names that Qwen3-Next and Qwen3.5 folders have (`mtp.fc`, `mtp.layers.0…`). DeepSeek-V3 and
GLM-4.5 keep the same as one more layer of the decoder; their keys are renamed both ways. A model whose heads are made
otherwise has `further_token_heads(depths)`, and says in `further_token_layers` what kind of layers they are like.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.ops.forward_stack import Args, Kwargs
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, decoder_of, has_all, head_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.core_model_loading import WeightRenaming

NAME = "mtp"
KEY = "model.mtp_num_layers"
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_AS_A_LAYER = {
    r"enorm": "pre_fc_norm_embedding",
    r"hnorm": "pre_fc_norm_hidden",
    r"eh_proj": "fc",
    r"shared_head\.norm": "norm",
}
"""DeepSeek's names, below the layer → ours, below `mtp`."""


class LayeredDecoder(Protocol):
    """A module that takes embeddings through `layers` and a last `norm`."""

    layers: nn.ModuleList
    norm: nn.Module
    config: PreTrainedConfig


class MultiTokenHeads(nn.Module):
    """The parts that a model needs besides its own to look further ahead.

    Args:
        layer: A decoder layer to be like.
        norm: A norm over hidden states to be like.
        width: H.
        depths: How many further tokens.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module, width: int, depths: int) -> None:
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(depths))
        self.norm = copy.deepcopy(norm)

    def forward(
        self, hidden_BLH: torch.Tensor, embeddings_BLH: torch.Tensor, **arguments: Any
    ) -> tuple[torch.Tensor, ...]:
        """(B, L, H) for each depth.

        Args:
            hidden_BLH: What the decoder's last norm returned.
            embeddings_BLH: What entered its first layer.
            arguments: What its layers are called with besides hidden states.
        """
        found = []
        for layer in self.layers:
            # Each depth reads one token further; zeros behind the end reach no position with a label.
            embeddings_BLH = torch.cat([embeddings_BLH[:, 1:], torch.zeros_like(embeddings_BLH[:, :1])], dim=1)
            both = [self.pre_fc_norm_embedding(embeddings_BLH), self.pre_fc_norm_hidden(hidden_BLH)]
            output = layer(self.fc(torch.cat(both, dim=-1)), **arguments)
            if isinstance(output, tuple):
                output = output[0]
            hidden_BLH = self.norm(output)
            found.append(hidden_BLH)
        return tuple(found)


@dataclass
class Pass:
    """What went through a decoder once."""

    embeddings: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class DecoderWatch:
    """Keeps, while asked to, what further heads need of a decoder's pass. Made before sharding."""

    def __init__(self, model: nn.Module) -> None:
        decoder = find_layered_decoder(model)
        self._kept: Pass | None = None
        decoder.layers[0].register_forward_pre_hook(self._see_embeddings, with_kwargs=True)
        decoder.layers[like_layer(model, decoder)].register_forward_pre_hook(self._see_arguments, with_kwargs=True)
        decoder.norm.register_forward_hook(self._see_hidden)

    @contextmanager
    def watching(self) -> Iterator[Pass]:
        """Yield a `Pass` that the decoder's forward passes fill until the context ends."""
        self._kept = Pass()
        try:
            yield self._kept
        finally:
            self._kept = None

    def _see_embeddings(self, _layer: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if self._kept is not None:
            self._kept.embeddings = args[0] if args else kwargs["hidden_states"]

    def _see_arguments(self, _layer: nn.Module, _args: Args, kwargs: Kwargs) -> None:
        if self._kept is not None:
            left_out = {"hidden_states", *_CACHES}  # training keeps no cache, and heads have none
            self._kept.arguments = {name: value for name, value in kwargs.items() if name not in left_out}

    def _see_hidden(self, _norm: nn.Module, _args: Args, output: torch.Tensor) -> None:
        if self._kept is not None:
            self._kept.hidden = output


def attach_multi_token(model: nn.Module, depths: int) -> None:
    """Give a model on meta its further heads, in place, as the module `mtp`. A folder that has them fills them; they
    are initialised from the seed otherwise.

    Raises:
        ConfigError: The model has no decoder of layers and a last norm, or no output head.
    """
    decoder = find_layered_decoder(model)
    if head_of(model) is None:
        raise ConfigError(f"{type(model).__name__} has no output head", key=KEY, way_out="Set it to 0.")
    layer, width = decoder.layers[like_layer(model, decoder)], decoder.config.hidden_size
    own = attribute_at(model, "further_token_heads")
    with parameters_on_meta():
        if own is not None:
            heads = own(depths)
        else:
            heads = MultiTokenHeads(layer, decoder.norm, width, depths)
    setattr(model, NAME, heads)
    facts_of(model).multi_token = DecoderWatch(model)
    may_lack = attribute_at(model, "_keys_to_ignore_on_load_missing", ())
    model._keys_to_ignore_on_load_missing = [*may_lack, rf"^{NAME}\."]  # type: ignore[assignment]


def heads_of(model: nn.Module) -> nn.Module | None:
    """The further heads of a model; None where it has none."""
    heads: nn.Module | None = attribute_at(model, NAME)
    return heads


def renamings(model: nn.Module) -> list[WeightRenaming]:
    """Rules for folders that keep the heads as layer L of the decoder; none for others.

    Raises:
        ConfigError: Such a folder's layout has room for one depth only.
    """
    heads = heads_of(model)
    if heads is None:
        return []
    config = find_layered_decoder(model).config
    if not attribute_at(config, "num_nextn_predict_layers", 0):
        return []
    depths = len(heads.layers)  # type: ignore[arg-type]
    if depths > 1:
        raise ConfigError(
            f"{depths}, but this family's folders hold separate modules for each depth, and here all depths share one",
            key=KEY,
            way_out="Set it to 1.",
        )
    from transformers.core_model_loading import WeightRenaming  # heavy

    layer = rf"model\.layers\.{config.num_hidden_layers}"
    ours = [WeightRenaming(rf"^{layer}\.{theirs}\.", f"{NAME}.{own}.") for theirs, own in _AS_A_LAYER.items()]
    shared = [rf"^{NAME}\.layers\.0\.(embed_tokens|shared_head\.head)\."]  # copies of the model's own ends
    own_class = attribute_at(model, "_keys_to_ignore_on_load_unexpected", ())
    model._keys_to_ignore_on_load_unexpected = [*own_class, *shared]  # type: ignore[assignment]
    return [*ours, WeightRenaming(rf"^{layer}\.", f"{NAME}.layers.0.")]


def find_layered_decoder(model: nn.Module) -> LayeredDecoder:
    """The decoder of a model. Raises `ConfigError` where it has none with layers and a last norm."""
    decoder: Any = decoder_of(model)
    if isinstance(attribute_at(decoder, "layers"), nn.ModuleList) and has_all(decoder, "norm"):
        found: LayeredDecoder = decoder
        return found
    raise ConfigError(
        f"{type(model).__name__} has no decoder of layers with a norm behind them",
        key=KEY,
        way_out="Set it to 0 for this model.",
    )


def like_layer(model: nn.Module, decoder: LayeredDecoder) -> int:
    """The decoder's last layer of the kind that released heads are of, which sees the whole sequence unless the model
    says otherwise.

    Raises:
        ConfigError: There is none.
    """
    kinds = attribute_at(decoder.config, "layer_types") or ["full_attention"] * len(decoder.layers)
    wanted = attribute_at(model, "further_token_layers", "full_attention")
    alike = [index for index, kind in enumerate(kinds) if kind == wanted]
    if not alike:
        said = wanted.replace("_", " ")
        raise ConfigError(f"no layer of the decoder has {said}", key=KEY, way_out="Set it to 0 for this model.")
    return alike[-1]
