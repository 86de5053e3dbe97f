"""Towers: the parts of a model that see images or video or hear sound, and the smallest input of zeros that runs them.

A sharded tower is gathered by all ranks together, so a rank whose batch lacks the modality runs it on such an input.
Zeros and never noise: what is multiplied by zero afterwards must be finite.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, first_of, has_all


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
    run: Callable[[nn.Module], object]
    """Runs the tower of a model on the smallest legal input of zeros, returning what it hands to the decoder."""
    embedding: str = ""
    """Name of the token embedding, where the decoder makes its `inputs_embeds` itself."""

    def run_idle(self, model: nn.Module) -> Sequence[torch.Tensor]:
        """Every tensor that the tower hands to the decoder, for the smallest legal input of zeros."""
        return handed_on(self.run(model))


def find_towers(model: nn.Module) -> list[Tower]:
    """The towers of a model, in the order in which it calls them. Its own `get_towers() -> list[Tower]` wins; else
    known shapes of transformers, whose omni models hear first."""
    own = attribute_at(model, "get_towers")
    if own is not None:
        return list(own())
    return [*_audio_towers(model), *_patch_towers(model), *_image_towers(model), *_code_towers(model)]


_MEDIA_KEYS = re.compile(r"pixel_values\w*|\w+_pixel_values|input_features|input_values")


def find_media_without_towers(model: nn.Module) -> list[str]:
    """Batch keys of media that feed no tower known here, so that nothing can stand in for them on a rank that lacks
    them. An encoder in front of a decoder that reads it in every layer is not meant: every row has something for it."""
    if attribute_at(model, "config.is_encoder_decoder", False):
        return []
    known = {tower.key for tower in find_towers(model)}
    keys = []
    for key in inspect.signature(model.forward).parameters:
        kind = "audio" if key.startswith("input_") else "image"
        if _MEDIA_KEYS.fullmatch(key) and key not in known and not _lacks_encoder(model, kind):
            keys.append(key)
    return keys


_FEATURES_OF_LAYERS = re.compile(r"deepstack|cross_attention_states")


def find_uncarried(decoder: nn.Module) -> list[str]:
    """Arguments by which layers of a decoder behind its first one read what a tower saw, in a form that neither stages
    nor shares of a sequence hand on: Granite 4 Vision's by numbers of layers, Llama 3.2 Vision's by attention."""
    taken = inspect.signature(decoder.forward).parameters
    return [name for name in taken if _FEATURES_OF_LAYERS.match(name) and name != "deepstack_visual_embeds"]


def _lacks_encoder(model: nn.Module, kind: str) -> bool:
    """Whether the model says that it has no encoder of this kind: every size of Gemma 4 takes sounds in its forward
    pass, and only some sizes have an audio encoder."""
    get_encoder = attribute_at(model, "get_encoder")
    return get_encoder is not None and get_encoder(modality=kind) is None


def handed_on(output: object) -> list[torch.Tensor]:
    """Of what a tower returns, the tensors that the decoder reads. Others must get no gradients, not even zeros: LLaVA
    takes the features in front of the tower's last layer, and trains that layer on no rank."""
    if isinstance(output, dict) and output.get("pooler_output") is not None:
        return flat_tensors([output["pooler_output"], output.get("deepstack_features")])
    return flat_tensors(output)


def flat_tensors(output: object) -> list[torch.Tensor]:
    """The floating-point tensors of a model output, nested however, each once."""
    found: dict[int, torch.Tensor] = {}
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        for item in output:
            for tensor in flat_tensors(item):
                found[id(tensor)] = tensor
    elif isinstance(output, torch.Tensor) and output.is_floating_point():
        found[id(output)] = output
    return list(found.values())


# --- what a model of transformers says of its towers ------------------------------------------------------------------

Sides = int | Sequence[int]
"""A square's side, or the sides of a rectangle or a box."""


class VisionSettings(Protocol):
    """What the smallest image is made by, in `config.vision_config`; each family has some of it."""

    image_size: Sides
    patch_size: Sides
    temporal_patch_size: Sides
    spatial_merge_size: int
    pooling_kernel_size: int
    in_channels: int
    hidden_size: int
    model_type: str


def _vision(whole: nn.Module) -> VisionSettings:
    settings: VisionSettings = attribute_at(whole, "config.vision_config")
    return settings


def _image_side(vision: VisionSettings) -> Sides | None:
    """The side of a tower's images. DeepSeek-OCR2's tower begins with SAM, whose section states it."""
    side: Sides | None = attribute_at(attribute_at(vision, "sam_config", vision), "image_size")
    return side


def _height_and_width(whole: nn.Module) -> tuple[int, int]:
    size = _image_side(_vision(whole))
    assert size is not None
    if isinstance(size, int):
        return (size, size)
    return (size[0], size[1])


def _channels(whole: nn.Module) -> int:
    channels: int = attribute_at(_vision(whole), "num_channels", 3)
    return channels


def _dtype_of(whole: nn.Module, tower: str) -> torch.dtype:
    dtype: torch.dtype = attribute_at(whole.get_submodule(tower), "dtype")
    return dtype


def _first_side(size: Sides) -> int:
    if isinstance(size, int):
        return size
    return size[0]


def _area(size: Sides) -> int:
    if isinstance(size, int):
        return size * size
    return size[0] * size[-1]


def _empty_picture(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(*shape, device=current_device(), dtype=dtype)


def _numbers(values: Sequence[object]) -> torch.Tensor:
    return torch.tensor(values, device=current_device())


@dataclass(frozen=True)
class _TowerLocation:
    """Where a model has its towers."""

    holder: str
    """Name of the module that they are attributes of; empty: the model."""
    decoder: str

    def of(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.holder)

    def name(self, part: str) -> str:
        if self.holder:
            return f"{self.holder}.{part}"
        return part


def _place_of(model: nn.Module, tower: str, getter: str) -> _TowerLocation | None:
    """Beside the decoder in the inner model; the omni models of transformers 5.17 have them beside the inner model."""
    inner = attribute_at(model, "model")
    if has_all(inner, "language_model", tower, getter):
        return _TowerLocation("model", "model.language_model")
    # The tower must be the model's own child: transformers has had names on the model that stand for parts of the
    # inner one.
    if isinstance(inner, nn.Module) and has_all(model, tower, getter) and tower in dict(model.named_children()):
        return _TowerLocation("", "model")
    return None


# --- flat patches -----------------------------------------------------------------------------------------------------


def _patch_towers(model: nn.Module) -> list[Tower]:
    """Qwen-VL and GLM-4V style: flat patches of many images, with their grids. One merged patch is the least."""
    place = _place_of(model, "visual", "get_image_features")
    sizes = ("spatial_merge_size", "patch_size", "temporal_patch_size", "in_channels")
    if place is None or not has_all(_vision(model), *sizes):
        return []

    def run(whole: nn.Module, getter: str) -> object:
        vision, holder = _vision(whole), place.of(whole)
        merge = vision.spatial_merge_size
        numbers = vision.in_channels * _first_side(vision.temporal_patch_size) * _area(vision.patch_size)
        pixels = _empty_picture(merge * merge, numbers, dtype=_dtype_of(holder, "visual"))
        return attribute_at(holder, getter)(pixels, _numbers([[1, merge, merge]]), return_dict=True)

    towers = []
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        getter = f"get_{kind}_features"
        if has_all(place.of(model), getter):
            towers.append(Tower(kind, place.name("visual"), key, place.decoder, partial(run, getter=getter)))
    return towers


# --- images -----------------------------------------------------------------------------------------------------------


def _image_towers(model: nn.Module) -> list[Tower]:
    """Every other model with `get_image_features`: what that method takes beside the pixels says what an image is."""
    inner = attribute_at(model, "model")
    encoder = first_of(inner, "vision_tower", "vision_model")
    decoder = first_of(inner, "language_model", "text_model")
    get_features = attribute_at(inner, "get_image_features")
    if not encoder or not decoder or get_features is None or _vision(model) is None:
        return []
    if has_all(inner, "high_res_vision_model"):
        return _towers_of_two_resolutions()
    parameters = inspect.signature(get_features).parameters
    make = _least_input(parameters.values(), _vision(model))
    if make is None:
        return []
    module = f"model.{encoder}"

    def run(whole: nn.Module) -> object:
        pixels, more = make(whole, _dtype_of(whole, module))
        return attribute_at(whole, "model.get_image_features")(pixels, **more, return_dict=True)

    def run_frame(whole: nn.Module) -> object:
        shape = (1, 1, _channels(whole), *_height_and_width(whole))
        pixels = _empty_picture(*shape, dtype=_dtype_of(whole, module))
        return attribute_at(whole, "model.get_video_features")(pixels, return_dict=True)

    towers = [Tower("image", module, "pixel_values", f"model.{decoder}", run)]
    if "pixel_values_local" in parameters:  # DeepSeek-OCR: tiles of pictures in a call of their own
        towers.append(Tower("tiles", module, "pixel_values_local", f"model.{decoder}", run))
    if has_all(inner, "get_video_features"):
        # Flat patches of a picture and of a clip are the same; other towers take frames.
        has_flat_patches = make in (_patches_with_grid, _patches_with_places)
        run_video = run if has_flat_patches else run_frame
        towers.append(Tower("video", module, "pixel_values_videos", f"model.{decoder}", run_video))
    return towers


def _towers_of_two_resolutions() -> list[Tower]:
    """DeepSeek-VL of 7 B: two towers see each picture, in two sizes, and the aligner joins what they hand on."""

    def run_small(whole: Any) -> object:
        pixels = _empty_picture(1, 3, *_height_and_width(whole), dtype=whole.model.vision_model.dtype)
        return whole.model.get_low_res_image_features(pixels)

    def run_large(whole: Any) -> object:
        side = whole.config.high_res_vision_config.image_size
        pixels = _empty_picture(1, 3, side, side, dtype=whole.model.high_res_vision_model.dtype)
        large = whole.model.get_high_res_image_features(pixels).last_hidden_state
        small = _empty_picture(*large.shape[:2], _vision(whole).hidden_size, dtype=large.dtype)
        return whole.model.aligner(small, large)

    decoder = "model.language_model"
    return [
        Tower("image", "model.vision_model", "pixel_values", decoder, run_small),
        Tower("large image", "model.high_res_vision_model", "high_res_pixel_values", decoder, run_large),
    ]


def _code_towers(model: nn.Module) -> list[Tower]:
    """Chameleon: a picture becomes tokens, and these go through the embedding of words, once more."""
    is_chameleon = has_all(attribute_at(model, "model"), "vqmodel", "vocabulary_mapping", "embed_tokens")
    if not is_chameleon or attribute_at(model, "config.vq_config") is None:
        return []

    def run(whole: Any) -> object:
        vq = whole.config.vq_config
        side = 2 ** len(vq.channel_multiplier)  # two tokens a side: what is normalised is more than one number
        pixels = _empty_picture(1, vq.in_channels, side, side, dtype=whole.model.vqmodel.encoder.conv_in.weight.dtype)
        return whole.model.get_image_features(pixels, return_dict=True)

    return [Tower("image", "model.vqmodel.encoder", "pixel_values", "model", run, "model.embed_tokens")]


# --- the smallest image of each kind ----------------------------------------------------------------------------------

LeastInput = Callable[[nn.Module, torch.dtype], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(model, dtype) → pixels of the smallest legal image of zeros, and what else the tower is given with it."""


def _least_input(parameters: Collection[inspect.Parameter], vision: VisionSettings) -> LeastInput | None:
    """How the smallest image is made for a tower whose method takes these; None where its kind is not known."""
    taken: set[str] = set()
    needed: set[str] = set()
    for each in parameters:
        taken.add(each.name)
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD:
            needed.add(each.name)
    if "image_grid_thw" in taken:
        return _patches_with_grid
    if "image_position_ids" in taken:
        return _patches_with_places
    if "spatial_shapes" in taken:
        return _patches_with_shapes
    if not needed <= {"pixel_values", "image_sizes"}:
        return None
    if "pixel_attention_mask" in taken:
        return _tiles_of_one_row
    if has_all(vision, "patch_size") and vision.model_type == "pixtral":  # LLaVA of 5.17 hands sizes on unnamed
        return _image_of_any_size
    if "image_sizes" in needed:
        return _tiles
    if _image_side(vision) is not None:
        return _image_of_one_size
    return None


def _image_of_one_size(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """LLaVA, InternVL, Gemma3, DeepSeek-VL, Janus."""
    return _empty_picture(1, _channels(whole), *_height_and_width(whole), dtype=dtype), {}


def _image_of_any_size(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mistral3, and LLaVA with Pixtral's tower: two merged squares of patches (Mistral3 cannot split one)."""
    side = _first_side(_vision(whole).patch_size) * attribute_at(whole, "config.spatial_merge_size", 1)
    return _empty_picture(1, _channels(whole), side, 2 * side, dtype=dtype), {
        "image_sizes": _numbers([[side, 2 * side]])
    }


def _tiles(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """LLaVA-Next and LLaVA-OneVision: an image of one tile, with the tiles of the grid that fits it best."""
    height, width = _height_and_width(whole)
    grids: Sequence[tuple[int, int]] = attribute_at(whole, "config.image_grid_pinpoints")
    most = 1 + max((rows // height) * (columns // width) for rows, columns in grids)
    pixels = _empty_picture(1, most, _channels(whole), height, width, dtype=dtype)
    return pixels, {"image_sizes": _numbers([[height, width]])}


def _tiles_of_one_row(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Idefics3 and SmolVLM: one tile. Of ones: a tile of zeros is taken for padding and left out."""
    return _empty_picture(1, 1, _channels(whole), *_height_and_width(whole), dtype=dtype) + 1, {}


def _patches_with_grid(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Kimi-K2.5 (patches as small images) and MiniMax-M3 (flat patches over two frames): one merged square."""
    vision = _vision(whole)
    merge = _first_side(attribute_at(vision, "merge_kernel_size") or vision.spatial_merge_size)
    side, channels = _first_side(vision.patch_size), _channels(whole)
    frames: int | None = attribute_at(vision, "temporal_patch_size")
    shape: tuple[int, ...] = (channels, side, side)
    if frames is not None:
        shape = (channels * frames * side * side,)
    return _empty_picture(merge * merge, *shape, dtype=dtype), {"image_grid_thw": _numbers([[1, merge, merge]])}


def _patches_with_places(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gemma4: flat patches with the place of each; one pooled square."""
    vision = _vision(whole)
    pool = vision.pooling_kernel_size
    places = [[number % pool, number // pool] for number in range(pool * pool)]
    pixels = _empty_picture(1, pool * pool, _channels(whole) * _area(vision.patch_size), dtype=dtype)
    return pixels, {"image_position_ids": _numbers([places])}


def _patches_with_shapes(whole: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """LFM2-VL, which sees by SigLIP2: flat patches with the rows and columns of each picture; one merged square."""
    side: int = attribute_at(whole, "config.downsample_factor", 1)
    pixels = _empty_picture(1, side * side, _channels(whole) * _area(_vision(whole).patch_size), dtype=dtype)
    return pixels, {"spatial_shapes": _numbers([[side, side]]), "pixel_attention_mask": _numbers([[1] * side * side])}


# --- sound ------------------------------------------------------------------------------------------------------------


def _audio_towers(model: nn.Module) -> list[Tower]:
    """Qwen-Omni and Qwen-ASR style: spectra, called with a mask of their real frames. One window of frames is enough;
    a tower without windows takes all of its frames at once."""
    place = _place_of(model, "audio_tower", "get_audio_features")
    if place is None or attribute_at(model, "config.audio_config.num_mel_bins") is None:
        return []
    taken = list(inspect.signature(attribute_at(place.of(model), "get_audio_features")).parameters)
    if taken[:2] not in (["input_features", "feature_attention_mask"], ["input_features", "input_features_mask"]):
        return []

    def run(whole: nn.Module) -> object:
        audio, holder = attribute_at(whole, "config.audio_config"), place.of(whole)
        frames = 2 * attribute_at(audio, "n_window", attribute_at(audio, "max_source_positions", 0))
        features = _empty_picture(1, audio.num_mel_bins, frames, dtype=_dtype_of(holder, "audio_tower"))
        mask = torch.ones(1, frames, device=current_device(), dtype=torch.long)
        return attribute_at(holder, "get_audio_features")(features, mask, return_dict=True)

    return [Tower("audio", place.name("audio_tower"), "input_features", place.decoder, run)]
