"""Tiny models of every family that is to keep packed samples apart, with samples that would show it if they did not:
text alone first, one token, more tokens than any window or chunk, several media of every kind the family takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)

TESTED = Version("5.23")
"""The transformers of constraints.txt, which has every family."""

PAD, IMAGE, VIDEO, AUDIO, VISION_START, VISION_END, AUDIO_START, AUDIO_END = range(8)
PATCH, MERGE, FRAMES = 4, 2, 2
NUMBERS = 3 * FRAMES * PATCH * PATCH
WINDOW = 8

Item = tuple[list[int], dict[str, torch.Tensor]]
"""Token ids that stand for an item, and its tensors by batch key."""
MakeItem = Callable[[torch.Generator], Item]


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Args:
        config: Makes its configuration.
        model: Class of transformers.
        media: Kind → makes an item.
        marks: Batch key of marks of media tokens, if the model wants any.
        bound: On every deviation of packed from single samples.
    """

    config: Callable[[], Any]
    model: str
    media: Mapping[str, Callable[..., Item]] = field(default_factory=dict)
    marks: str = ""
    bound: float = 1e-10

    def build(self, *, attention: str | None = None) -> Any:
        """The model in fp64, weights twice as large as they come: what leaks is seen."""
        torch.manual_seed(0)
        config = self.config()
        cls = getattr(transformers, self.model)
        options = {"attn_implementation": attention} if attention else {}
        model = cls._from_config(config, dtype=torch.float64, **options).double().train()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products have no fp64
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        model.config.architectures = [self.model]
        return model

    def samples(self) -> list[dict[str, Any]]:
        """Encoded: text alone, a long one with an image, one token, and all kinds of media together."""
        draw = torch.Generator().manual_seed(1)
        first = next(iter(self.media), None)
        layouts: list[list[Any]] = [
            [11],
            [3, first, 75] if first else [80],
            [1],
            [2, *[part for kind in self.media for part in (kind, 3)], 9],
            [4, first, first, 5] if first else [20],
        ]
        return [self._sample(f"s:{number}", layout, draw) for number, layout in enumerate(layouts)]

    def _sample(self, name: str, layout: Sequence[Any], draw: torch.Generator) -> dict[str, Any]:
        ids: list[int] = []
        labels: list[int] = []
        media: list[MediaFeatures] = []
        for part in layout:
            if isinstance(part, int):
                text = torch.randint(20, 200, (part,), generator=draw).tolist()
                ids, labels = ids + text, labels + text
                continue
            tokens, tensors = self.media[part](draw)
            ids, labels = ids + tokens, labels + [-100] * len(tokens)
            media.append(MediaFeatures(part.rstrip("0123456789"), np.array(tokens), tensors))  # type: ignore[arg-type]
        arrays = {"input_ids": np.array(ids), "labels": np.array(labels)}
        return {"sample_id": name, **arrays, "media": media, "shrunk": False}


class Plugin:
    """Joins tensors along their first axis, and marks media tokens by their ids.

    Args:
        marks: Batch key of the marks; none when empty.
    """

    def __init__(self, marks: str) -> None:
        self._marks = marks

    def collate(self, media: Sequence[MediaFeatures]) -> dict[str, torch.Tensor]:
        names = dict.fromkeys(name for item in media for name in item.tensors)
        joined = {name: torch.cat([item.tensors[name] for item in media if name in item.tensors]) for name in names}
        if "image_token_pooling" in joined:  # Molmo2's, which counts patches through all pictures
            patches = [item.tensors["pixel_values"].shape[:2].numel() for item in media]
            before = np.cumsum([0, *patches[:-1]]).tolist()
            pooling = [item.tensors["image_token_pooling"] + first for item, first in zip(media, before, strict=True)]
            joined["image_token_pooling"] = torch.cat(pooling)
        return joined

    def token_marks(self, input_ids: np.ndarray) -> dict[str, np.ndarray]:
        kinds = np.select([input_ids == IMAGE, input_ids == VIDEO], [1, 2], 0).astype(np.int32)
        return {self._marks: kinds} if self._marks else {}


class InDouble(TorchFunctionMode):
    """What a model wants in fp32 it gets in fp64, whatever the tensor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        elif function is not torch.Tensor.view:  # of bits
            if any(value is torch.float32 for value in args):
                args = [torch.float64 if value is torch.float32 else value for value in args]
            if kwargs and kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
        return function(*args, **(kwargs or {}))


# --- media ------------------------------------------------------------------------------------------------------------


def patches(kind: str, time: int, height: int, width: int, *, split: bool = False, channels: int = 3) -> MakeItem:
    """Of the Qwen-VL and GLM-V kind. `split`: a video's frames stand apart."""
    pixels, grid = ("pixel_values", "image_grid_thw") if kind == "image" else ("pixel_values_videos", "video_grid_thw")

    def make(draw: torch.Generator) -> Item:
        numbers = torch.randn(time * height * width, NUMBERS, generator=draw).double()
        token = IMAGE if kind == "image" else VIDEO
        frames = time if split else 1
        tokens = time * height * width // MERGE**2 // frames
        ids = [VISION_START, *[token] * tokens, VISION_END] * frames
        return ids, {pixels: numbers, grid: torch.tensor([[time, height, width]])}

    return make


def image_of(side: int, tokens: int, **more: Callable[[], torch.Tensor]) -> MakeItem:
    """Of models that take images of one size."""

    def make(draw: torch.Generator) -> Item:
        pixels = torch.randn(1, 3, side, side, generator=draw).double()
        return [VISION_START, *[IMAGE] * tokens, VISION_END], {"pixel_values": pixels} | {
            k: f() for k, f in more.items()
        }

    return make


QWEN_IMAGES = {"image": patches("image", 1, 4, 4), "image2": patches("image", 1, 4, 8)}
QWEN2_MEDIA = {**QWEN_IMAGES, "video": patches("video", 2, 4, 4)}
QWEN3_MEDIA = {**QWEN_IMAGES, "video": patches("video", 2, 4, 4, split=True)}

# --- configurations ---------------------------------------------------------------------------------------------------

TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
}
HEADS = TEXT | {"head_dim": 8}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
ROPE3 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PATCH_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "in_channels": 3,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}


def of(name: str, **settings: Any) -> Callable[[], Any]:
    """Makes a configuration of transformers. The test that asks is skipped where an older release has no such family;
    the tested set has all of them."""

    def make() -> Any:
        if not hasattr(transformers, name) and Version(transformers.__version__) < TESTED:
            pytest.skip(f"transformers {transformers.__version__} has no {name}")
        return getattr(transformers, name)(**settings)

    return make


def vl(name: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Callable[[], Any]:
    """Makes the configuration of a text model with eyes."""
    return of(name, text_config=text, vision_config=vision, **(PATCH_IDS | more))


_OMNI_TEXT = HEADS | {"rope_parameters": ROPE3}
_OMNI_IDS = {"audio_token_id": AUDIO, "audio_start_token_id": AUDIO_START, "audio_end_token_id": AUDIO_END}
QWEN_VISION = VISION | {"out_hidden_size": 32, "num_position_embeddings": 64}


def sound(frames: int, tokens: int, mask: str = "feature_attention_mask", bins: int = 16) -> MakeItem:
    """A spectrum of 100 frames of which so many are real."""

    def make(draw: torch.Generator) -> Item:
        spectrum = torch.randn(1, bins, 100, generator=draw).double()
        real = (torch.arange(100) < frames).long()[None]
        return [AUDIO_START, *[AUDIO] * tokens, AUDIO_END], {"input_features": spectrum * real[:, None], mask: real}

    return make


def timed(make: MakeItem, seconds: float) -> MakeItem:
    """A video with the seconds between its frames, as Omni models are told."""

    def timed_item(draw: torch.Generator) -> Item:
        ids, tensors = make(draw)
        return ids, tensors | {"video_second_per_grid": torch.tensor([seconds])}

    return timed_item


OMNI25_MEDIA = {
    **QWEN_IMAGES,
    "video": timed(patches("video", 2, 4, 4), 0.5),
    "audio": sound(60, 15),
    "audio2": sound(37, 9),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(of("LlamaConfig", **TEXT), "LlamaForCausalLM"),
    "qwen2": Family(of("Qwen2Config", **TEXT), "Qwen2ForCausalLM"),
    "qwen3": Family(of("Qwen3Config", **HEADS), "Qwen3ForCausalLM"),
    "qwen3 with a window": Family(of("Qwen3Config", **HEADS, **SLIDING, use_sliding_window=True), "Qwen3ForCausalLM"),
    "mistral": Family(of("MistralConfig", **TEXT, sliding_window=WINDOW), "MistralForCausalLM"),
    "qwen3_moe": Family(of("Qwen3MoeConfig", **HEADS, **EXPERTS), "Qwen3MoeForCausalLM"),
    "gpt_oss": Family(
        of("GptOssConfig", **HEADS, **SLIDING, num_local_experts=4, num_experts_per_tok=2), "GptOssForCausalLM"
    ),
    "qwen3_next": Family(
        of("Qwen3NextConfig", **HEADS, **DELTA, **EXPERTS, shared_expert_intermediate_size=24), "Qwen3NextForCausalLM"
    ),
    "qwen2_vl": Family(
        vl("Qwen2VLConfig", TEXT | {"rope_parameters": ROPE3}, VISION | {"embed_dim": 32}),
        "Qwen2VLForConditionalGeneration",
        QWEN2_MEDIA,
        "mm_token_type_ids",
    ),
    "qwen2_5_vl": Family(
        vl(
            "Qwen2_5_VLConfig",
            TEXT | {"rope_parameters": ROPE3},
            VISION | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        ),
        "Qwen2_5_VLForConditionalGeneration",
        QWEN2_MEDIA,
        "mm_token_type_ids",
    ),
    "qwen3_vl": Family(
        vl("Qwen3VLConfig", _OMNI_TEXT, QWEN_VISION | {"deepstack_visual_indexes": [0, 1]}),
        "Qwen3VLForConditionalGeneration",
        QWEN3_MEDIA,
        "mm_token_type_ids",
    ),
    "qwen3_vl_moe": Family(
        vl("Qwen3VLMoeConfig", _OMNI_TEXT | EXPERTS, QWEN_VISION | {"deepstack_visual_indexes": [0, 1]}),
        "Qwen3VLMoeForConditionalGeneration",
        QWEN3_MEDIA,
        "mm_token_type_ids",
    ),
    "qwen3_5": Family(
        vl("Qwen3_5Config", _OMNI_TEXT | DELTA, QWEN_VISION),
        "Qwen3_5ForConditionalGeneration",
        QWEN3_MEDIA,
        "mm_token_type_ids",
    ),
    "qwen3_5_moe": Family(
        vl("Qwen3_5MoeConfig", _OMNI_TEXT | DELTA | EXPERTS | {"shared_expert_intermediate_size": 24}, QWEN_VISION),
        "Qwen3_5MoeForConditionalGeneration",
        QWEN3_MEDIA,
        "mm_token_type_ids",
    ),
    "omni": Family(
        of(
            "Qwen2_5OmniThinkerConfig",
            text_config=TEXT | {"rope_parameters": ROPE3},
            vision_config=VISION | {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]},
            audio_config={
                "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
                "d_model": 32, "max_source_positions": 50, "n_window": 8, "output_dim": 32,
            },
            image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO,
            audio_start_token_id=AUDIO_START, audio_end_token_id=AUDIO_END, vision_start_token_id=VISION_START,
        ),
        "Qwen2_5OmniThinkerForConditionalGeneration",
        OMNI25_MEDIA,
    ),
}  # fmt: skip
"""Name → family."""
