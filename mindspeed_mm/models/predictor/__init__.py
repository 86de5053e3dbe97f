"""`PredictModel`: the transformer of a generator, as MindSpeed-MM's scripts build it from the section `predictor` of
model.json.

Facts: `mindspeed_mm/models/predictor/{predict_model,dits/wan_dit}.py` of MindSpeed-MM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mindspeed_mm.checkpoint.original.diffusers_model import fitting_config
from mindspeed_mm.checkpoint.original.reading import open_generator
from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.models.component_section import dtype_of, needed, section_of
from mindspeed_mm.provider.generator_json import WAN_SIZES
from mindspeed_mm.provider.sized_folder import files_of_sizes

__all__ = ["PredictModel"]

_WAN = "wandit"
_WITH_IMAGE = ("i2v", "flf2v")
"""Tasks of Wan whose transformer reads features of an image, and latents of frames beside the noisy ones."""
_WITH_FRAMES = (*_WITH_IMAGE, "wan2.2-i2v")


class WanPredictor(nn.Module):
    """Wan's transformer with the arguments of MindSpeed-MM's `WanDiT`. Inside is diffusers' class: its weights have
    the names of diffusers, under `transformer.`.

    Args:
        section: The sizes of model.json; `model_type` (t2v, i2v, flf2v, ti2v, wan2.2-t2v, wan2.2-i2v), `dtype`,
            `seperated_timestep` (their spelling; Wan 2.2's 5B: the first frame is a condition, at timestep 0), and
            `from_pretrained`: weights in MindSpeed-MM's, the authors' or diffusers' layout, or a run.

    Raises:
        ConfigError: Sizes are missing, or are not those of the weights.
        ModelFolderError: The weights are of another model.
    """

    def __init__(self, section: Mapping[str, object]) -> None:
        super().__init__()
        self.model_type = str(section.get("model_type", "t2v"))
        self.separated_timestep = bool(section.get("seperated_timestep", False))
        dtype = dtype_of(section, "predictor")
        weights = section.get("from_pretrained")
        config = files_of_sizes({"predictor": section}, "predictor")["transformer/config.json"]
        tensors: dict[str, torch.Tensor] | None = None
        if weights is not None:
            config, tensors = _stored(Path(str(weights)), config, self.model_type)
        self.transformer: Any = diffusers_class("WanTransformer3DModel").from_config(config)
        if tensors is not None:
            self.transformer.load_state_dict(tensors)
        if dtype is not None:
            self.transformer.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights are kept in."""
        return next(self.transformer.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device that the weights are on."""
        return next(self.transformer.parameters()).device

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        prompt: torch.Tensor,
        prompt_mask: torch.Tensor | None = None,
        i2v_clip_feature: torch.Tensor | None = None,
        i2v_vae_feature: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """The velocity (B, C, T, H, W) of noisy latents.

        Args:
            x: (B, C, T, H, W) latents.
            timestep: (B,) or (1,), 0..1000.
            prompt: (B, L, D) text features; axes between the first and the last two are joined.
            prompt_mask: (B, L): features behind the tokens that it counts become 0.
            i2v_clip_feature: (B, N, E) features of the image, of tasks that read them.
            i2v_vae_feature: (B, C', T, H, W) mask and latents of given frames, of tasks that read them.

        Raises:
            ValueError: The task reads features that are not given.
        """
        rows = len(x)
        text_BLD = prompt.reshape(rows, -1, prompt.shape[-1]).to(self.dtype)
        if prompt_mask is not None:
            lengths = prompt_mask.reshape(rows, -1).sum(-1).to(text_BLD.device)
            places = torch.arange(text_BLD.shape[1], device=text_BLD.device)
            text_BLD = text_BLD * (places < lengths[:, None])[..., None].to(text_BLD.dtype)
        image = None
        if self.model_type in _WITH_IMAGE:
            image = _given("i2v_clip_feature", i2v_clip_feature, self.model_type).to(x)
        if self.model_type in _WITH_FRAMES:
            x = torch.cat([x, _given("i2v_vae_feature", i2v_vae_feature, self.model_type).to(x)], dim=1)
        time = timestep.to(x.device)
        if self.separated_timestep:
            time = self._by_token(time.expand(rows), x)
        else:
            time = time.expand(rows) if time.dim() == 1 else time
        velocity: torch.Tensor = self.transformer(
            x.to(self.dtype),
            time,
            encoder_hidden_states=text_BLD,
            encoder_hidden_states_image=None if image is None else image.to(self.dtype),
            return_dict=False,
        )[0]
        return velocity

    def _by_token(self, timestep_B: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(B, tokens): 0 for those of the first frame."""
        of_time, of_height, of_width = self.transformer.config.patch_size
        frames = x.shape[2] // of_time
        of_frame = (x.shape[3] // of_height) * (x.shape[4] // of_width)
        is_later = torch.arange(frames * of_frame, device=x.device) >= of_frame
        return timestep_B[:, None] * is_later.to(timestep_B.dtype)


class PredictModel(nn.Module):
    """The transformer that a section describes.

    Args:
        config: The section, a mapping or what `args.mm.model.predictor` is; see `WanPredictor`.

    Raises:
        ConfigError: The family is not built as a part.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        section = section_of(config)
        model_id = str(needed(section, "model_id", "predictor"))
        if model_id != _WAN:
            raise ConfigError(
                f"'{model_id}' is not built as a part, only '{_WAN}' is",
                key="predictor.model_id",
                way_out="SoRAModel (mindspeed_mm.models.sora_model) and mm train train it; mm infer draws with it.",
            )
        self.predictor = WanPredictor(section)

    def get_model(self) -> WanPredictor:
        """The transformer, which is called as `WanPredictor.forward` says."""
        return self.predictor


def _given(name: str, value: torch.Tensor | None, task: str) -> torch.Tensor:
    if value is None:
        raise ValueError(f"{name} is not given, which '{task}' needs")
    return value


def _stored(path: Path, sizes: Mapping[str, object], task: str) -> tuple[JsonObject, dict[str, torch.Tensor]]:
    """The configuration and the tensors of weights in any layout, compared with the sizes."""
    asked = "i2v" if task in _WITH_FRAMES else "t2v" if task in ("t2v", "wan2.2-t2v") else None
    with open_generator(path) as weights:
        hub = weights.under_diffusers_names()
        config = fitting_config(hub, weights, task=asked)
        if config.get("_class_name") != "WanTransformer3DModel":
            raise ConfigError(
                f"holds {weights.family.name}", where=str(path), key="predictor.from_pretrained", way_out="Name Wan's."
            )
        problems = []
        for key, (name, *_) in WAN_SIZES.items():
            theirs = config.get(name)
            if name in sizes and theirs is not None and sizes[name] != theirs:
                problems.append(Problem(f"is {sizes[name]}, and the weights have {theirs}", key=f"predictor.{key}"))
        if problems:
            raise ConfigError(f"{path}: the weights have other sizes than model.json", problems=problems)
        return config, {name: tensor.read() for name, tensor in hub.items()}
