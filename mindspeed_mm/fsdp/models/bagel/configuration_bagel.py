"""The settings of BAGEL (arXiv:2505.14683), as its released config.json has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig, Qwen2Config, SiglipVisionConfig

from mindspeed_mm.fsdp.models.diffusion.picture_vae import FLUX_LATENTS

_LAYER = "Qwen2MoTDecoderLayer"


class BagelConfig(PreTrainedConfig):
    """A Qwen2 language model whose layers have two sets of parameters, a SigLIP tower that sees pictures of any size,
    and linear layers between latents of a VAE and the language model.

    Args:
        llm_config: Of Qwen2, with an RMSNorm of each query and key.
        vit_config: Of SigLIP. As in the release, it counts one layer more than the model has: the last one is left out.
        vae_config: `z_channels` of a latent, `downsample` pixels along a side of one.
        latent_patch_size: Latents along a side of the square that is one token.
        max_latent_size: Tokens along a side of the largest picture that is drawn.
        vit_max_num_patch_per_side: Patches along a side of the largest picture that is seen.
        connector_act: Activation between the two layers behind the tower.
        timestep_shift: Shift s of the noise level while training: t ← s t / (1 + (s − 1) t).
        kwargs: What every configuration has.

    Raises:
        ValueError: The file asks for something that the release has not and that is not built, or lacks a section.
    """

    model_type = "bagel"
    attribute_map: ClassVar[dict[str, str]] = {"text_config": "llm_config", "vision_config": "vit_config"}
    sub_configs: ClassVar[dict[str, Any]] = {"llm_config": Qwen2Config, "vit_config": SiglipVisionConfig}

    def __init__(
        self,
        *,
        llm_config: Mapping[str, Any] | Qwen2Config | None = None,
        vit_config: Mapping[str, Any] | SiglipVisionConfig | None = None,
        vae_config: Mapping[str, Any] | None = None,
        latent_patch_size: int = 2,
        max_latent_size: int = 64,
        vit_max_num_patch_per_side: int = 70,
        connector_act: str = "gelu_pytorch_tanh",
        timestep_shift: float = 1.0,
        **kwargs: Any,
    ) -> None:
        for key in ("visual_gen", "visual_und"):
            _check_known(key, kwargs.get(key, True), True)
        _check_known("interpolate_pos", kwargs.get("interpolate_pos", False), False)
        self.llm_config, self.vit_config = _section(llm_config, Qwen2Config), _section(vit_config, SiglipVisionConfig)
        for key, known in (("qk_norm", True), ("layer_module", _LAYER), ("tie_word_embeddings", False)):
            _check_known(f"llm_config.{key}", getattr(self.llm_config, key, known), known)
        _check_known("vit_config.rope", getattr(self.vit_config, "rope", False), False)
        self.vae_config = FLUX_LATENTS | dict(vae_config or {})
        self.latent_patch_size, self.max_latent_size = latent_patch_size, max_latent_size
        self.vit_max_num_patch_per_side, self.connector_act = vit_max_num_patch_per_side, connector_act
        self.timestep_shift = timestep_shift
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)

    @property
    def vit_layers(self) -> int:
        """Layers of the tower that the model has."""
        return int(self.vit_config.num_hidden_layers) - 1

    @property
    def latent_features(self) -> int:
        """Numbers of a token of a picture that is drawn."""
        return int(self.vae_config["z_channels"]) * self.latent_patch_size**2

    @property
    def latent_side(self) -> int:
        """Pixels along a side of such a token."""
        return int(self.vae_config["downsample"]) * self.latent_patch_size


def _section(given: Any, kind: type[PreTrainedConfig]) -> Any:
    if isinstance(given, PreTrainedConfig):
        return given
    values = dict(given or {})
    values.pop("model_type", None)
    if kind is Qwen2Config:  # Qwen2's own file says nothing of it, and its class ties the two
        values.setdefault("tie_word_embeddings", False)
    return kind(**values)


def _check_known(key: str, value: object, known: object) -> None:
    if value != known:
        raise ValueError(f"{key}: {value!r} is not built here, {known!r} is")
