"""What the modules of model families are called, so that files which name parts of a model by role can be read without
building it. A test compares the names with the models of transformers and diffusers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

HubConfig = Mapping[str, Any]
"""A config.json, or a section of one."""


@dataclass(frozen=True)
class ModuleNames:
    """Dotted names of the parts of a model; empty where it has no such part."""

    decoder: str
    """The language model without its head; of a generator the transformer, which is the whole model."""
    layers: str
    """The decoder's list of layers."""
    head: tuple[str, ...] = ("lm_head",)
    vision: str = ""
    """The vision tower, with its projector where that is inside."""
    vision_layers: str = ""
    vision_parts: tuple[str, ...] = ()
    """The vision tower without its projector."""
    projector: tuple[str, ...] = ()
    audio: str = ""
    released: tuple[tuple[str, str], ...] = ()
    """Name of a module in the original code, which files of MindSpeed-MM use → its name here; the longest first."""

    def of_decoder(self, name: str) -> str:
        """A module of the decoder."""
        if self.decoder:
            return f"{self.decoder}.{name}"
        return name


def _qwen(
    decoder: str, vision: str, extra: tuple[str, ...] = (), mergers: tuple[str, ...] = ("merger",)
) -> ModuleNames:
    return ModuleNames(
        decoder,
        f"{decoder}.layers",
        vision=vision,
        vision_layers=f"{vision}.blocks",
        vision_parts=tuple(f"{vision}.{part}" for part in ("patch_embed", *extra, "blocks.{*}")),
        projector=tuple(f"{vision}.{merger}" for merger in mergers),
    )


def _with_audio(names: ModuleNames) -> ModuleNames:
    return replace(names, audio="model.audio_tower")


_LLM, _VIS = "model.language_model", "model.visual"
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_GLM = _qwen(_LLM, _VIS, ("embeddings", "post_conv_layernorm", "downsample", "post_layernorm"))
_QWEN3 = _qwen(_LLM, _VIS, ("pos_embed",), ("merger", "deepstack_merger_list"))
_TEXT = ModuleNames("model", "model.layers")
_INTERNVL = ModuleNames(
    _LLM, f"{_LLM}.layers", vision=_TOWER, vision_layers=f"{_TOWER}.encoder.layer",
    vision_parts=(_TOWER,), projector=(_PROJECTOR,),
    released=(("vision_model.encoder.layers", f"{_TOWER}.encoder.layer"), ("language_model.lm_head", "lm_head"),
              ("language_model.model", _LLM), ("vision_model", _TOWER), ("mlp1", _PROJECTOR)),
)  # fmt: skip

FAMILIES: dict[str, ModuleNames] = {
    "qwen2_vl": _qwen(_LLM, _VIS),
    "qwen2_5_vl": _qwen(_LLM, _VIS),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "internvl": _INTERNVL,
    "internvl_chat": _INTERNVL,
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _qwen(_LLM, _VIS, ("pos_embed",))),
    "mistral3": ModuleNames(
        _LLM, f"{_LLM}.layers", vision=_TOWER, vision_layers=f"{_TOWER}.transformer.layers",
        vision_parts=(_TOWER,), projector=(_PROJECTOR,),
    ),
    "deepseek_vl_v2": ModuleNames(
        "language.model", "language.model.layers", head=("language.lm_head",), vision="vision",
        vision_layers="vision.blocks", vision_parts=("vision",), projector=("projector",),
    ),
    "qwen2_5_omni": _with_audio(_qwen(_LLM, _VIS)),
    "qwen3_omni_moe": _with_audio(_qwen(_LLM, _VIS, ("pos_embed",), ("merger", "merger_list"))),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen2", "llama"), _TEXT),
    "wan": ModuleNames("", "blocks", head=("proj_out",)),
    "wan_vace": ModuleNames(
        "", "blocks", head=("proj_out",),
        released=(("wan_dit.head", "proj_out"), ("vace_dit.vace_blocks", "vace_blocks"), ("wan_dit.blocks", "blocks")),
    ),
    "stepvideo": ModuleNames("", "transformer_blocks", head=("proj_out",)),
    "hunyuan_video_1_5": ModuleNames(
        "", "transformer_blocks", head=("proj_out",), released=(("double_blocks", "transformer_blocks"),)
    ),
}  # fmt: skip
"""`model_type` in config.json, without `_thinker` → names."""

_IDS = {
    "qwen2vl": "qwen2_vl",
    "qwen2_5vl": "qwen2_5_vl",
    "glm4.1v": "glm4v",
    "qwen2_5_omni": "qwen2_5_omni",
    "qwen3_omni": "qwen3_omni_moe",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    **dict.fromkeys(("InternVL", "InternVL2.5", "InternVL3"), "internvl"),
    **dict.fromkeys(("deepseekvl2", "DeepSeek-VL2"), "deepseek_vl_v2"),
    "wandit": "wan",
    "vace": "wan_vace",
    "hunyuanvideo15dit": "hunyuan_video_1_5",
    "stepvideodit": "stepvideo",
}
"""`model_id` of model.json → family, where it is not its name."""


def names_of(config: HubConfig, model_id: str = "") -> ModuleNames | None:
    """The names of a model, by its config.json or by the id that model.json gives it; None for other models."""
    model_type = str(config.get("model_type", "")).removesuffix("_thinker")
    return FAMILIES.get(model_type) or FAMILIES.get(_IDS.get(model_id, model_id))


_ROLES: tuple[tuple[str, str], ...] = (
    ("text_decoder.decoder.layers", "layers"),
    ("text_decoder.decoder.final_layernorm", "norm"),
    ("text_decoder.embedding", "embed_tokens"),
    ("text_decoder.output_layer", "head"),
    ("text_decoder.rotary_pos_emb", "rotary_emb"),
    ("text_decoder", "decoder"),
    ("image_encoder.encoder.blocks.layers", "vision_layers"),
    ("image_encoder.projector", "projector"),
    ("image_encoder", "vision"),
    ("audio_encoder", "audio"),
    ("predictor.blocks", "layers"),
    ("predictor.head", "head"),
    ("predictor", "decoder"),
)
"""What such files call a part → its role, the longest first."""

_CLASSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"VisionModel|VisionTransformer$"), "vision"),
    (re.compile(r"(Vision|Vit)\w*(Layer|Block)"), "vision_layers"),
    (re.compile(r"(Decoder|Transformer|Text|DiT)\w*(Layer|Block)|(Double|Single)StreamBlock"), "layers"),
    (re.compile(r"\w*Embedding$(?<!RotaryEmbedding)"), "embed_tokens"),
    (re.compile(r"RotaryEmbedding$"), "rotary_emb"),
)
"""The name of a class → the role of its modules."""


def patterns_of(written: str, names: ModuleNames | None) -> list[str]:
    """The model's own patterns for what a file calls a part of it: by role, by class, or by its name.

    Args:
        written: `text_decoder.decoder.layers.{*}`, `package.module.Class`, or a pattern of the model's own names.
        names: The model's; None leaves the pattern as it is.
    """
    if names is None:
        return [written]
    for role, part in _ROLES:
        if written == role or written.startswith(f"{role}."):
            rest = written.removeprefix(role)
            found = [f"{module}{rest}".removeprefix(".") for module in _modules(part, names)]
            return [_own_name(each, names) for each in found if each] or [written]
    class_name = written.rpartition(".")[2]
    if "." in written and class_name[:1].isupper():
        return _of_class(class_name, names) or [written]
    if (own := _own_name(written, names)) != written:
        return [own]
    for root in (names.decoder, names.vision, names.audio, *names.projector):
        if root.startswith("model.") and f"{written}.".startswith(f"{root.removeprefix('model.')}."):
            return [f"model.{written}"]
    return [written]


def _own_name(written: str, names: ModuleNames) -> str:
    """A name of the original code as it is here; any other as it stands."""
    for released, own in names.released:
        if f"{written}.".startswith(f"{released}."):
            return f"{own}{written.removeprefix(released)}"
    return written


def _of_class(class_name: str, names: ModuleNames) -> list[str]:
    """The modules of a class, by its name; each of a list of layers."""
    for pattern, part in _CLASSES:
        if pattern.search(class_name):
            modules = _modules(part, names)
            if part.endswith("layers"):
                return [f"{name}.{{*}}" for name in modules]
            return modules
    return []


def _modules(part: str, names: ModuleNames) -> list[str]:
    """The modules of a role; of a generator, the decoder is the model itself, whose name is empty."""
    if part == "decoder":
        return [names.decoder]
    if part in ("norm", "embed_tokens", "rotary_emb"):
        return [names.of_decoder(part)]
    found = vars(names)[part]
    if isinstance(found, tuple):
        return list(found)
    if found:
        return [found]
    return []
