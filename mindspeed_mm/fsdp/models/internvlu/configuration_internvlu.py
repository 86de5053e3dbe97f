"""The settings of InternVL-U (arXiv:2603.09877): those of the two parts that are trained, in one config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig

from mindspeed_mm.fsdp.models.diffusion.picture_vae import FLUX_LATENTS

_OWN_TOKENS = 10
"""Tokens that have an embedding of their own beside the language model's: those of pictures, boxes and references."""
_TOWER = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm"}
"""Released name of a setting of the tower → name in transformers, where they differ."""
_KNOWN = {"ps_version": "v2", "select_layer": -1, "anyres_image_size": False}
_KNOWN_OF_HEAD = {"decoder_projector_type": "identity", "region_weighting": False, "sigmas_as_weight": False}
_DECODER = {
    "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 20, "attention_head_dim": 128,
    "num_attention_heads": 12, "joint_attention_dim": 4096, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip


class InternVLUConfig(PreTrainedConfig):
    """A Qwen3 language model with an InternViT tower, and a diffusion transformer that draws from its states.

    Args:
        llm_config: Of Qwen3.
        vision_config: Of the tower, by released names or by those of transformers.
        generation_decoder_config: `config.json` of the release's folder `generation_decoder`.
        processor_config: `processor_config.json` of its folder `processor`: how pictures are prepared.
        special_token_ids: Numbers in the tokenizer of the tokens that have an embedding of their own, in the order of
            that table, as the converter of the released folder writes them.
        vae_config: `z_channels` of a latent, `downsample` pixels along a side of one.
        downsample_ratio: Features along a side of the tower's that become one.
        kwargs: What every configuration has, and further settings of the release's folder `vlm`.

    Raises:
        ValueError: The file asks for something that the release has not and that is not built, or its sections do not
            fit each other.
    """

    model_type = "internvlu"
    attribute_map: ClassVar[dict[str, str]] = {"text_config": "llm_config"}
    sub_configs: ClassVar[dict[str, Any]] = {"llm_config": Qwen3Config, "vision_config": InternVLVisionConfig}

    def __init__(
        self,
        *,
        llm_config: Mapping[str, Any] | Qwen3Config | None = None,
        vision_config: Mapping[str, Any] | InternVLVisionConfig | None = None,
        generation_decoder_config: Mapping[str, Any] | None = None,
        processor_config: Mapping[str, Any] | None = None,
        special_token_ids: Sequence[int] | None = None,
        vae_config: Mapping[str, Any] | None = None,
        downsample_ratio: float = 0.5,
        **kwargs: Any,
    ) -> None:
        head = dict(generation_decoder_config or {})
        _check_known("", kwargs, _KNOWN)
        _check_known("generation_decoder_config.", head, _KNOWN_OF_HEAD)
        self.llm_config, self.vision_config = _language(llm_config), _tower(vision_config)
        self.generation_decoder_config = head | {"decoder_config": _DECODER | dict(head.get("decoder_config") or {})}
        self.processor_config, self.downsample_ratio = dict(processor_config or {}), float(downsample_ratio)
        self.vae_config = FLUX_LATENTS | dict(vae_config or {})
        self.special_token_ids = list(special_token_ids or range(_OWN_TOKENS))
        if len(self.special_token_ids) != _OWN_TOKENS:
            raise ValueError(f"special_token_ids has {len(self.special_token_ids)} of {_OWN_TOKENS} numbers")
        self._check_widths()
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)

    @property
    def decoder_config(self) -> dict[str, Any]:
        """Sizes of the transformer that draws, by diffusers' names."""
        return self.generation_decoder_config["decoder_config"]  # type: ignore[no-any-return]

    @property
    def vlm_select_layer(self) -> list[int]:
        """Which states of the language model it reads, beside each other; -1: those behind the last norm."""
        return list(self.generation_decoder_config.get("vlm_select_layer", [-1]))

    @property
    def latent_patch_size(self) -> int:
        """Latents along the side of the square that is one token."""
        return int(self.decoder_config["patch_size"])

    @property
    def video_position_scale(self) -> float:
        """Places of latents on the grid of positions for each token."""
        return float(self.generation_decoder_config.get("video_position_scale_factor", 1.0))

    @property
    def seen_position_scale(self) -> float:
        """The same of a picture that is seen."""
        return float(self.generation_decoder_config.get("vlm_cond_position_scale_factor", 1.0))

    @property
    def timestep_shift(self) -> float:
        """Shift s of the noise level while training: t ← s t / (1 + (s − 1) t)."""
        return float(self.generation_decoder_config.get("flow_shift", 3.0))

    @property
    def latent_features(self) -> int:
        """Numbers of a token of a picture that is drawn."""
        return int(self.vae_config["z_channels"]) * self.latent_patch_size**2

    @property
    def latent_side(self) -> int:
        """Pixels along a side of such a token."""
        return int(self.vae_config["downsample"]) * self.latent_patch_size

    @property
    def latents_beside_words(self) -> bool:
        """Latents are no part of the sequence of words: another transformer reads that sequence's states."""
        return True

    @property
    def seen_side(self) -> int:
        """Tokens along a side of a picture that is seen."""
        size, patch = self.vision_config.image_size[0], self.vision_config.patch_size[0]
        return int(size // patch * self.downsample_ratio)

    def _check_widths(self) -> None:
        decoder, states = self.decoder_config, self.llm_config.hidden_size * len(self.vlm_select_layer)
        expected = {
            "joint_attention_dim": (decoder["joint_attention_dim"], states),
            "in_channels": (decoder["in_channels"], self.latent_features),
            "out_channels": (decoder["out_channels"], self.vae_config["z_channels"]),
            "axes_dims_rope": (sum(decoder["axes_dims_rope"]), decoder["attention_head_dim"]),
        }
        for key, (value, needed) in expected.items():
            if value != needed:
                raise ValueError(f"decoder_config.{key} makes {value}, and the other sections make it {needed}")


def _language(given: Any) -> Qwen3Config:
    if isinstance(given, Qwen3Config):
        return given
    values = dict(given or {})
    kind = values.pop("model_type", "qwen3")
    if kind != "qwen3":
        raise ValueError(f"llm_config.model_type is {kind!r}; known is 'qwen3'")
    if values.setdefault("tie_word_embeddings", False):
        raise ValueError("llm_config.tie_word_embeddings is true, and the released weights have a head of their own")
    return Qwen3Config(**values)


def _tower(given: Any) -> InternVLVisionConfig:
    if isinstance(given, InternVLVisionConfig):
        return given
    values = dict(given or {})
    if values.pop("model_type", None) != "internvl_vision":
        values = {_TOWER.get(name, name): value for name, value in values.items()}
    return InternVLVisionConfig(**values)


def _check_known(section: str, values: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, expected in known.items():
        if values.get(key, expected) != expected:
            raise ValueError(f"{section}{key}: {values[key]!r} is not built here, {expected!r} is")
