"""Towers: the parts of a model that see images or video or hear sound, and the smallest input of zeros that runs them.

A sharded tower is gathered by all ranks together, so a rank whose batch lacks the modality runs it on such an input.
Zeros and never noise: what is multiplied by zero afterwards must be finite.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from mindspeed_mm.fsdp.utils.device import current_device


@dataclass(frozen=True)
class Tower:
    """One modality of a model."""

    name: str
    """The modality: image, video or audio."""
    module: str
    """Name of the tower's module; several modalities may share one."""
    key: str
    """The batch key that feeds it."""
    decoder: str
    """Name of the module that takes `inputs_embeds`."""
    run: Callable[[nn.Module], Any]
    """Runs the tower of a model on the smallest legal input of zeros, returning what it hands to the decoder."""
    embedding: str = ""
    """Name of the token embedding, where the decoder makes its `inputs_embeds` itself."""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        """Every tensor that the tower hands to the decoder, for the smallest legal input of zeros."""
        return handed_on(self.run(model))


def find_towers(model: nn.Module) -> list[Tower]:
    """The towers of a model, in the order in which it calls them. Its own `get_towers() -> list[Tower]` wins; else
    known shapes of transformers, whose omni models hear first."""
    own = getattr(model, "get_towers", None)
    if own is not None:
        return list(own())
    return [*_audio_towers(model), *_patch_towers(model), *_image_towers(model), *_code_towers(model)]


def find_media_without_towers(model: nn.Module) -> list[str]:
    """Batch keys of media that feed no tower known here, so that nothing can stand in for them on a rank that lacks
    them. An encoder in front of a decoder that reads it in every layer is none: it has something in every row."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    known = {tower.key for tower in find_towers(model)}
    taken = inspect.signature(model.forward).parameters
    keys = [key for key in taken if _MEDIA_KEYS.fullmatch(key) and key not in known]
    return [key for key in keys if not _lacks_encoder(model, "audio" if key.startswith("input_") else "image")]


def _lacks_encoder(model: Any, kind: str) -> bool:
    """Gemma 4 takes sounds in all sizes, and has ears in some."""
    return hasattr(model, "get_encoder") and model.get_encoder(modality=kind) is None


_MEDIA_KEYS = re.compile(r"pixel_values\w*|\w+_pixel_values|input_features|input_values")


def handed_on(output: Any) -> list[torch.Tensor]:
    """Of what a tower returns, the tensors that the decoder reads. Others must get no gradients, not even zeros: LLaVA
    takes the features in front of the tower's last layer, and trains that layer on no rank."""
    if isinstance(output, dict) and output.get("pooler_output") is not None:
        return flat_tensors([output[name] for name in ("pooler_output", "deepstack_features") if name in output])
    return flat_tensors(output)


def flat_tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a model output, nested however, each once."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        found = {id(tensor): tensor for item in output for tensor in flat_tensors(item)}
        return list(found.values())
    return []


@dataclass(frozen=True)
class _TowerLocation:
    """Where a model has its towers."""

    holder: str
    """Name of the module that they are attributes of; empty: the model."""
    decoder: str

    def of(self, model: nn.Module) -> Any:
        return model.get_submodule(self.holder)

    def name(self, part: str) -> str:
        return f"{self.holder}.{part}" if self.holder else part


def _place_of(model: nn.Module, *parts: str) -> _TowerLocation | None:
    """Beside the decoder in the inner model; the omni models of transformers 5.17 have them beside the inner model."""
    inner = getattr(model, "model", None)
    if all(hasattr(inner, part) for part in ("language_model", *parts)):
        return _TowerLocation("model", "model.language_model")
    if isinstance(inner, nn.Module) and all(hasattr(model, part) for part in parts):
        # transformers has had names on the model that stand for parts of the inner one.
        return _TowerLocation("", "model") if parts[0] in dict(model.named_children()) else None
    return None


def _patch_towers(model: nn.Module) -> list[Tower]:
    """Qwen-VL and GLM-4V style: flat patches of many images, with their grids. One merged patch is the least."""
    place = _place_of(model, "visual", "get_image_features")
    config = getattr(getattr(model, "config", None), "vision_config", None)
    sizes = ("spatial_merge_size", "patch_size", "temporal_patch_size", "in_channels")
    if place is None or not all(hasattr(config, size) for size in sizes):
        return []

    def run(whole: nn.Module, feature: str) -> Any:
        vision: Any = whole.config.vision_config
        merge, holder = vision.spatial_merge_size, place.of(whole)
        numbers = vision.in_channels * _product(vision.temporal_patch_size) * _area(vision.patch_size)
        pixels = torch.zeros(merge * merge, numbers, device=current_device(), dtype=holder.visual.dtype)
        grid = torch.tensor([[1, merge, merge]], device=current_device())
        return getattr(holder, feature)(pixels, grid, return_dict=True)

    towers = []
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        feature = f"get_{kind}_features"
        if hasattr(place.of(model), feature):
            towers.append(Tower(kind, place.name("visual"), key, place.decoder, partial(run, feature=feature)))
    return towers


def _image_towers(model: nn.Module) -> list[Tower]:
    """Every other model with `get_image_features`: what that method takes beside the pixels says what an image is."""
    inner = getattr(model, "model", None)
    config = getattr(getattr(model, "config", None), "vision_config", None)
    name, decoder = _first_of(inner, "vision_tower", "vision_model"), _first_of(inner, "language_model", "text_model")
    if not name or not decoder or config is None or not hasattr(inner, "get_image_features"):
        return []
    if hasattr(inner, "high_res_vision_model"):
        return _two_eyes()
    parameters = inspect.signature(inner.get_image_features).parameters.values()  # type: ignore[union-attr]
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    make = _least_input(needed, {p.name for p in parameters}, config)
    if make is None:
        return []

    def run(whole: nn.Module) -> Any:
        pixels, more = make(whole, getattr(whole.model, name).dtype)  # type: ignore[union-attr]
        return whole.model.get_image_features(pixels, **more, return_dict=True)  # type: ignore[union-attr]

    def run_frame(whole: nn.Module) -> Any:
        pixels = _zeros(1, 1, _channels(whole), *_side(whole), dtype=getattr(whole.model, name).dtype)  # type: ignore[union-attr]
        return whole.model.get_video_features(pixels, return_dict=True)  # type: ignore[union-attr]

    runs = {("image", "pixel_values"): run}
    if "pixel_values_local" in {p.name for p in parameters}:  # DeepSeek-OCR: tiles of pictures in a call of their own
        runs["tiles", "pixel_values_local"] = run
    if hasattr(inner, "get_video_features"):  # flat patches are the same of a picture and of a clip
        runs["video", "pixel_values_videos"] = run if make in (_patches_with_grid, _patches_with_places) else run_frame
    return [Tower(kind, f"model.{name}", key, f"model.{decoder}", call) for (kind, key), call in runs.items()]


def _first_of(module: Any, *names: str) -> str:
    return next((name for name in names if hasattr(module, name)), "")


def _code_towers(model: nn.Module) -> list[Tower]:
    """Chameleon: a picture becomes tokens, and these go through the embedding of words, once more."""
    inner, config = getattr(model, "model", None), getattr(getattr(model, "config", None), "vq_config", None)
    if not all(hasattr(inner, part) for part in ("vqmodel", "vocabulary_mapping", "embed_tokens")) or config is None:
        return []

    def run(whole: nn.Module) -> Any:
        vq: Any = whole.config.vq_config
        side = 2 ** len(vq.channel_multiplier)  # two tokens a side: what is normalised is more than one number
        pixels = _zeros(1, vq.in_channels, side, side, dtype=whole.model.vqmodel.encoder.conv_in.weight.dtype)  # type: ignore[union-attr]
        return whole.model.get_image_features(pixels, return_dict=True)  # type: ignore[union-attr]

    return [Tower("image", "model.vqmodel.encoder", "pixel_values", "model", run, "model.embed_tokens")]


def _two_eyes() -> list[Tower]:
    """DeepSeek-VL of 7 B: two towers see each picture, in two sizes, and the aligner joins what they hand on."""

    def run(whole: Any, pixels: str, tower: str) -> Any:
        model, (height, width) = whole.model, _side(whole)
        if pixels == "pixel_values":
            return model.get_low_res_image_features(_zeros(1, 3, height, width, dtype=getattr(model, tower).dtype))
        side = whole.config.high_res_vision_config.image_size
        seen = model.get_high_res_image_features(_zeros(1, 3, side, side, dtype=getattr(model, tower).dtype))
        joined = seen.last_hidden_state
        beside = _zeros(*joined.shape[:2], whole.config.vision_config.hidden_size, dtype=joined.dtype)
        return model.aligner(beside, joined)

    kinds = (
        ("image", "pixel_values", "vision_model"),
        ("large image", "high_res_pixel_values", "high_res_vision_model"),
    )
    return [
        Tower(kind, f"model.{tower}", key, "model.language_model", partial(run, pixels=key, tower=tower))
        for kind, key, tower in kinds
    ]


LeastInput = Callable[[nn.Module, torch.dtype], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(model, type) → pixels of the smallest legal image of zeros, and what else the tower is told of it."""


def _least_input(needed: set[str], taken: set[str], config: Any) -> LeastInput | None:
    """How the smallest image of a kind of tower is made; None where it is of none that is known."""
    if "image_grid_thw" in taken:
        return _patches_with_grid
    if "image_position_ids" in taken:
        return _patches_with_places
    if not needed <= {"pixel_values", "image_sizes"}:
        return None
    if "pixel_attention_mask" in taken:
        return _tiles_of_one_row
    if hasattr(config, "patch_size") and config.model_type == "pixtral":  # LLaVA of 5.17 hands sizes on unnamed
        return _image_of_any_size
    if "image_sizes" in needed:
        return _tiles
    return _image_of_one_size if hasattr(_with_side(config), "image_size") else None


def _with_side(vision: Any) -> Any:
    """The section of a tower's configuration that tells its picture's side: DeepSeek-OCR2's tower begins with SAM."""
    return getattr(vision, "sam_config", vision)


def _image_of_one_size(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """LLaVA, InternVL, Gemma3, DeepSeek-VL, Janus."""
    return _zeros(1, _channels(whole), *_side(whole), dtype=dtype), {}


def _image_of_any_size(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mistral3, and LLaVA with Pixtral's tower: two merged squares of patches (Mistral3 cannot split one)."""
    config: Any = whole.config
    side = _product(config.vision_config.patch_size) * getattr(config, "spatial_merge_size", 1)
    return _zeros(1, _channels(whole), side, 2 * side, dtype=dtype), {"image_sizes": _numbers([[side, 2 * side]])}


def _tiles(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """LLaVA-Next and LLaVA-OneVision: an image of one tile, with the tiles of the grid that fits it best."""
    height, width = _side(whole)
    grids: Any = whole.config.image_grid_pinpoints  # type: ignore[union-attr]
    most = 1 + max((rows // height) * (columns // width) for rows, columns in grids)
    pixels = _zeros(1, most, _channels(whole), height, width, dtype=dtype)
    return pixels, {"image_sizes": _numbers([[height, width]])}


def _tiles_of_one_row(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Idefics3 and SmolVLM: one tile. Of ones: a tile of zeros is taken for padding and left out."""
    return _zeros(1, 1, _channels(whole), *_side(whole), dtype=dtype) + 1, {}


def _patches_with_grid(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Kimi-K2.5 (patches as small images) and MiniMax-M3 (flat patches over two frames): one merged square."""
    vision: Any = whole.config.vision_config  # type: ignore[union-attr]
    merge = _product(getattr(vision, "merge_kernel_size", None) or vision.spatial_merge_size)
    side, deep = _product(vision.patch_size), getattr(vision, "temporal_patch_size", None)
    shape = (_channels(whole), side, side) if deep is None else (_channels(whole) * deep * side * side,)
    grid = _numbers([[1, merge, merge]])
    return _zeros(merge * merge, *shape, dtype=dtype), {"image_grid_thw": grid}


def _patches_with_places(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gemma4: flat patches with the place of each; one pooled square."""
    vision: Any = whole.config.vision_config  # type: ignore[union-attr]
    pool, side = vision.pooling_kernel_size, vision.patch_size
    places = [[x, y] for y in range(pool) for x in range(pool)]
    pixels = _zeros(1, pool * pool, _channels(whole) * side * side, dtype=dtype)
    return pixels, {"image_position_ids": _numbers([places])}


def _side(whole: nn.Module) -> tuple[int, int]:
    size: Any = _with_side(whole.config.vision_config).image_size  # type: ignore[union-attr]
    return (size[0], size[1]) if isinstance(size, (list, tuple)) else (size, size)


def _channels(whole: nn.Module) -> int:
    return getattr(whole.config.vision_config, "num_channels", 3)  # type: ignore[union-attr]


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, device=current_device(), dtype=dtype)


def _numbers(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, device=current_device())


def _audio_towers(model: nn.Module) -> list[Tower]:
    """Qwen-Omni and Qwen-ASR style: spectra, called with a mask of their real frames. One window of frames is enough;
    a tower without windows takes all of its frames at once."""
    place = _place_of(model, "audio_tower", "get_audio_features")
    config = getattr(getattr(model, "config", None), "audio_config", None)
    if place is None or not hasattr(config, "num_mel_bins"):
        return []
    names = list(inspect.signature(place.of(model).get_audio_features).parameters)[:2]
    if names not in (["input_features", "feature_attention_mask"], ["input_features", "input_features_mask"]):
        return []

    def run(whole: nn.Module) -> Any:
        audio: Any = whole.config.audio_config
        frames = 2 * getattr(audio, "n_window", getattr(audio, "max_source_positions", 0))
        holder = place.of(whole)
        features = torch.zeros(1, audio.num_mel_bins, frames, device=current_device(), dtype=holder.audio_tower.dtype)
        mask = torch.ones(1, frames, device=current_device(), dtype=torch.long)
        return holder.get_audio_features(features, mask, return_dict=True)

    return [Tower("audio", place.name("audio_tower"), "input_features", place.decoder, run)]


def _product(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else size[0]


def _area(size: int | Sequence[int]) -> int:
    return size * size if isinstance(size, int) else size[0] * size[-1]
