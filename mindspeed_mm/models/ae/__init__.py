"""`AEModel`: the autoencoder of a generator, as MindSpeed-MM's scripts build it from the section `ae` of model.json.

Facts: `mindspeed_mm/models/ae/{base,diffusers_ae_model,wan_video_vae}.py` of MindSpeed-MM.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class, load_class
from mindspeed_mm.fsdp.models.diffusion.latents import scaled, standardised
from mindspeed_mm.models.component_section import dtype_of, folder_of, needed, note_unread, section_of

__all__ = ["AEModel"]

_CLASSES = {"wan_video_vae": "AutoencoderKLWan"}
"""`model_id` → class of diffusers; a name of diffusers stands for itself."""
_KEYS = {
    *("model_id", "from_pretrained", "dtype", "do_sample", "norm_latents", "norm_mode", "enable_tiling"),
    *("tiling_param", "i2v_processor"),
}
_OWN_TILES = {"tile_size", "tile_stride"}


class AutoencoderOfDiffusers(nn.Module):
    """An autoencoder of diffusers whose latents are normalised.

    Args:
        section: `model_id` (`wan_video_vae`, or a class of diffusers), `from_pretrained` (its folder), `dtype`,
            `do_sample` (true: draw from the posterior; false: take its mode), `norm_latents` (true), `norm_mode`
            (`value_shift_scale`: (z − shift_factor) · scaling_factor, the default; `channel_specified_shift_scale`:
            (z − latents_mean) / latents_std), `enable_tiling` with `tiling_param`, the arguments of the class's own
            `enable_tiling`.

    Raises:
        ConfigError: The section asks for what is not known here.
        ModelFolderError: The folder holds no such autoencoder.
    """

    def __init__(self, section: JsonObject) -> None:
        super().__init__()
        model_id = str(needed(section, "model_id", "ae"))
        if not model_id.startswith("Autoencoder") and model_id not in _CLASSES:
            raise ConfigError(
                f"'{model_id}' is not built as a part",
                key="ae.model_id",
                way_out="Name a class of diffusers (AutoencoderKLWan, AutoencoderKLCogVideoX, AutoencoderKL …) and its "
                "folder; or extract features with mm extract, which encodes with the VAE of a model's folder.",
            )
        note_unread(section, _KEYS, "ae")
        self.model_name = _CLASSES.get(model_id, model_id)
        component = diffusers_class(self.model_name)
        self.model = load_class(component, folder_of(section, "ae"), dtype_of(section, "ae"))
        self.do_sample = bool(section.get("do_sample", True))
        self.norm_latents = bool(section.get("norm_latents", True))
        self.norm_mode = section.get("norm_mode", "value_shift_scale")
        if self.norm_mode not in ("value_shift_scale", "channel_specified_shift_scale"):
            way_out = "Write value_shift_scale or channel_specified_shift_scale."
            raise ConfigError(f"'{self.norm_mode}' is not known", key="ae.norm_mode", way_out=way_out)
        if section.get("enable_tiling"):
            self._enable_tiling(section.get("tiling_param") or {})

    def _enable_tiling(self, param: JsonObject) -> None:
        if _OWN_TILES & param.keys():
            raise ConfigError(
                f"{', '.join(sorted(param))}: tiles of this form are not built",
                key="ae.tiling_param",
                way_out="Give the arguments of diffusers' enable_tiling (tile_sample_min_height …), or leave it out.",
            )
        try:
            self.model.enable_tiling(**param)
        except TypeError as error:
            raise ConfigError(f"{error}", key="ae.tiling_param") from error

    def encode(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Pixels (B, 3, T, H, W) in −1..1 → latents; `kwargs` go to the class's own `encode`."""
        posterior = self.model.encode(x, return_dict=True, **kwargs).latent_dist
        latents: torch.Tensor = posterior.sample() if self.do_sample else posterior.mode()
        if self.norm_latents:
            return self.normalize_latent(latents)
        return latents

    def normalize_latent(self, x: torch.Tensor) -> torch.Tensor:
        """Latents as training takes them, by `norm_mode`."""
        if self.norm_mode == "value_shift_scale":
            return scaled(self.model, x)
        config = self.model.config
        return standardised(x, config.latents_mean, config.latents_std)

    def decode(self, x: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        """Latents → pixels. As in MindSpeed-MM, they are not brought back to their own scale first."""
        decoded: torch.Tensor = self.model.decode(x).sample
        return decoded


class AEModel(nn.Module):
    """The autoencoder that a section describes.

    Args:
        config: The section, a mapping or what `args.mm.model.ae` is; see `AutoencoderOfDiffusers`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = section_of(config)
        if self.config.pop("i2v_processor", None) is not None:
            raise ConfigError(
                "conditions of image to video are not made by the autoencoder here",
                key="ae.i2v_processor",
                way_out="Use pretrain_sora.py of this package, or mm extract, which make them for the model's family.",
            )
        self.model = AutoencoderOfDiffusers(self.config)

    def get_model(self) -> AutoencoderOfDiffusers:
        """Return the autoencoder, which normalises its latents."""
        return self.model

    def encode(
        self, x: torch.Tensor | list[torch.Tensor], **_kwargs: Any
    ) -> tuple[torch.Tensor | list[torch.Tensor], JsonObject | None]:
        """Latents, and None in the place of conditions of image to video; of a list of clips a list, and no
        conditions."""
        if isinstance(x, (list, tuple)):
            return [self.model.encode(each) for each in x], {}
        return self.model.encode(x), None

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """Latents → pixels, as `AutoencoderOfDiffusers.decode`."""
        return self.model.decode(x)

    def forward(self, x: torch.Tensor) -> NoReturn:
        """Raises `NotImplementedError`: call `encode` or `decode`."""
        raise NotImplementedError("call encode or decode")
