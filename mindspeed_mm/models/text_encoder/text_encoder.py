"""`TextEncoder`: one text encoder of transformers, or several.

Facts: `mindspeed_mm/models/text_encoder/text_encoder.py` of MindSpeed-MM.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.components import load_class
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.models.component_section import dtype_of, folder_of, needed, note_unread, section_of

_NAME = "text_encoder"
_CLASSES = {
    "T5": "T5EncoderModel",
    "MT5": "MT5EncoderModel",
    "UMT5": "UMT5EncoderModel",
    "CLIP": "CLIPTextModel",
    "BertModel": "BertModel",
    "CLIPWithProjection": "CLIPTextModelWithProjection",
}
"""`model_id` → class of transformers."""
_AUTO = "Auto"
_KEYS = {
    *("model_id", "from_pretrained", "dtype", "hub_backend", "use_attention_mask", "ucg_rate", "output_key"),
    *("hidden_state_skip_layer", "using_kwargs", "load_in_8bit", "low_cpu_mem_usage"),
}
_SEQUENCES, _POOLED = ("last_hidden_state", "hidden_states"), ("pooler_output", "text_embeds")


class SingleTextEncoder(nn.Module):
    """A text encoder of transformers, and which of its outputs is taken.

    Args:
        section: `model_id` (T5, MT5, UMT5, CLIP, CLIPWithProjection, BertModel; Auto: as config.json says),
            `from_pretrained` (its folder), `dtype`, `use_attention_mask` (true), `output_key` (`last_hidden_state`;
            `hidden_states`, `pooler_output`, `text_embeds`), `hidden_state_skip_layer` n (of the hidden states the
            one n layers before the last), `ucg_rate` (share of captions whose features become 0), `using_kwargs`
            (names of further inputs).

    Raises:
        ConfigError: The section asks for what is not known here.
        ModelFolderError: The folder holds no such encoder.
    """

    def __init__(self, section: JsonObject) -> None:
        super().__init__()
        model_id = str(needed(section, "model_id", _NAME))
        note_unread(section, _KEYS, _NAME)
        self.use_attention_mask = bool(section.get("use_attention_mask", True))
        self.output_key = section.get("output_key", "last_hidden_state")
        self.skip_layers = section.get("hidden_state_skip_layer")
        self.ucg_rate = float(section.get("ucg_rate") or 0.0)
        self.using_kwargs: Sequence[str] = section.get("using_kwargs") or ()
        if self.output_key not in (*_SEQUENCES, *_POOLED):
            way_out = f"Write one of {', '.join((*_SEQUENCES, *_POOLED))}."
            raise ConfigError(f"'{self.output_key}' is not known", key=f"{_NAME}.output_key", way_out=way_out)
        if (self.output_key == "hidden_states") != (self.skip_layers is not None):
            what, way_out = "go together, and one is given without the other", "Give both or neither."
            raise ConfigError(what, key=f"{_NAME}.output_key and hidden_state_skip_layer", way_out=way_out)
        self.model: Any = load_class(_class_of(model_id), folder_of(section, _NAME), dtype_of(section, _NAME))

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(self.model.parameters()).device

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of captions.

        Args:
            input_ids: (…, L); any axes may stand in front, and stand in front of the features.
            mask: As many, 1 on real tokens.
            kwargs: What `using_kwargs` names is taken of them.

        Returns:
            (…, L, D), or (…, D) of one vector for a caption; and (…, L) the mask.

        Raises:
            ValueError: An input that `using_kwargs` names is not given.
        """
        *before, length = input_ids.shape
        ids_BL = input_ids.to(self.device).reshape(-1, length)
        mask_BL = mask.to(self.device).reshape(-1, length)
        missing = [name for name in self.using_kwargs if name not in kwargs]
        if missing:
            raise ValueError(f"{', '.join(missing)}: text_encoder.using_kwargs names it, and it is not given")
        output = self.model(
            input_ids=ids_BL,
            attention_mask=mask_BL if self.use_attention_mask else None,
            output_hidden_states=self.skip_layers is not None,
            **{name: kwargs[name] for name in self.using_kwargs},
        )
        features = output[self.output_key]
        if self.skip_layers is not None:
            features = features[-(self.skip_layers + 1)]
        if self.ucg_rate:
            kept = torch.bernoulli(torch.full((len(features),), 1 - self.ucg_rate, device=features.device))
            features = features * kept.to(features.dtype).reshape(-1, *[1] * (features.dim() - 1))
        return features.reshape(*before, *features.shape[1:]), mask_BL.reshape(*before, length)


class TextEncoder(nn.Module):
    """The text encoders that a section describes.

    Args:
        config: A section, or a list of them; see `SingleTextEncoder`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.text_encoders: nn.Module
        if isinstance(config, (list, tuple)):
            self.text_encoders = nn.ModuleList(SingleTextEncoder(section_of(each)) for each in config)
        else:
            self.text_encoders = SingleTextEncoder(section_of(config))

    def get_model(self) -> nn.Module:
        """The encoder, or a list of them."""
        return self.text_encoders

    def encode(self, input_ids: Any, mask: Any, offload_cpu: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        """Features and masks, in the form that the ids have.

        Args:
            input_ids: Of one encoder a tensor (…, L); of several a list with one for each; of several steps a list of
                such lists.
            mask: The same.
            offload_cpu: Of several steps: move each encoder to the device for its turn, and back.
            kwargs: Further inputs of encoders.
        """
        encoders = list(self.text_encoders) if isinstance(self.text_encoders, nn.ModuleList) else [self.text_encoders]
        if isinstance(input_ids, torch.Tensor):
            found: tuple[torch.Tensor, torch.Tensor] = encoders[0](input_ids, mask, **kwargs)
            return found
        if not isinstance(input_ids[0], (list, tuple)) and isinstance(self.text_encoders, nn.ModuleList):
            pairs = [encoder(*each, **kwargs) for encoder, *each in zip(encoders, input_ids, mask, strict=True)]
            return [features for features, _ in pairs], [own for _, own in pairs]
        features: list[list[torch.Tensor]] = [[] for _ in input_ids]
        masks: list[list[torch.Tensor]] = [[] for _ in input_ids]
        for place, encoder in enumerate(encoders):  # one after the other, each over all steps
            if offload_cpu:
                encoder.to(current_device())
            for step, (ids, own) in enumerate(zip(input_ids, mask, strict=True)):
                made, kept = encoder(ids[place], own[place], **kwargs)
                features[step].append(made)
                masks[step].append(kept)
            if offload_cpu:
                encoder.to("cpu")
        return features, masks


def _class_of(model_id: str) -> object:
    if model_id not in (*_CLASSES, _AUTO):
        raise ConfigError(
            f"'{model_id}' is not built as a part",
            key=f"{_NAME}.model_id",
            way_out=f"It is one of {', '.join((*_CLASSES, _AUTO))}. Of other models mm extract and mm train encode "
            "captions with the encoders of the model's folder.",
        )
    prepare_for_transformers()
    return getattr(importlib.import_module("transformers"), _CLASSES.get(model_id, "AutoModel"))
