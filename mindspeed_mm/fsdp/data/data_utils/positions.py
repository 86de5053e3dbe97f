"""Position ids of a packed row: they start again with every sample, and where a model counts time, height and width of
media (mRoPE), by the model's own rule (`get_rope_index`), which needs its configuration and not the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from mindspeed_mm.core.batch import Batch, first_of
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.fsdp.models.loading.folder import trained_config
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KEY = "data.dataset_param.basic_parameters.packing"

MEDIA_OF: dict[str, str] = {
    "image_grid_thw": "image",
    "video_grid_thw": "video",
    "second_per_grid_ts": "video",
    "video_second_per_grid": "video",
    "feature_attention_mask": "audio",
    "input_features_mask": "audio",
    "target_sizes": "image",
    "target_sizes_videos": "video",
}
"""Batch keys that positions may depend on → the media of which each is a row."""
_WHOLE_BATCH = ("use_audio_in_video",)
_OTHER_NAMES = {"second_per_grids": ("video_second_per_grid", "second_per_grid_ts")}
"""Argument of a `get_rope_index` → the batch keys that it may have."""
_MASKS_OF_SOUND = ("feature_attention_mask", "input_features_mask")
_NOT_NEEDED = ("kwargs", "downsample_mode")


class PositionRule(Protocol):
    """How a model counts the tokens of one sample."""

    @property
    def reads(self) -> frozenset[str]:
        """Batch keys of media that the count depends on, out of `MEDIA_OF`."""

    def __call__(self, input_ids: np.ndarray, inputs: Batch) -> torch.Tensor:
        """(1, L) int64 positions; (4, L) of a model with mRoPE: text, time, height, width. int32 are the bits of fp32
        numbers: positions that are not whole numbers, which would be rounded to bf16 on their way into the model.

        Args:
            input_ids: (L,) of one sample.
            inputs: What else the model gets of this sample, by batch key.
        """


class TextPositions:
    """Counts the tokens of a sample one by one: 0, 1, 2 …"""

    reads: frozenset[str] = frozenset()

    def __call__(self, input_ids: np.ndarray, inputs: Batch) -> torch.Tensor:
        """Return the positions 0 … L − 1 of a sample's tokens, (1, L) int64."""
        return torch.arange(len(input_ids))[None]


class RopeIndexPositions:
    """Applies a model class's `get_rope_index`, called on a stand-in that has nothing but the configuration.

    Args:
        owner: The class.
        config: What its instances have as `config`.

    Raises:
        ConfigError: The rule asks for something that a batch does not hold.
    """

    def __init__(self, owner: type, config: PreTrainedConfig) -> None:
        self._stand_in = _stand_in(owner, config)
        parameters = inspect.signature(owner.get_rope_index).parameters  # type: ignore[attr-defined]
        # The first parameter is `self`.
        self._names = [name for name in list(parameters)[1:] if name not in _NOT_NEEDED]
        of_text = ("input_ids", "attention_mask", "mm_token_type_ids", "audio_seqlens")
        known = {*of_text, *_OTHER_NAMES, *MEDIA_OF, *_WHOLE_BATCH}
        unknown = [name for name in self._names if name not in known]
        if unknown:
            raise ConfigError(
                f"positions of {owner.__name__} depend on {', '.join(unknown)}, which a packed row does not keep apart",
                key=KEY,
                way_out="Set it to false.",
            )
        names_of = _OTHER_NAMES | {"audio_seqlens": _MASKS_OF_SOUND}
        named = chain.from_iterable(names_of.get(name, (name,)) for name in self._names)
        self.reads = frozenset(MEDIA_OF.keys() & named)

    def __call__(self, input_ids: np.ndarray, inputs: Batch) -> torch.Tensor:
        """Return the positions of one sample as the model's rule counts them, in the shape and type that `PositionRule`
        names."""
        ids_1L = torch.as_tensor(input_ids)[None]
        arguments = {}
        for name in self._names:
            value = self._argument(name, ids_1L, inputs)
            if value is not None:
                arguments[name] = value
        try:
            # (3, 1, L) and the offset of later tokens, which only generation needs; text models give (1, 1, L).
            three_R1L, _ = self._stand_in.get_rope_index(**arguments)
        except Exception as error:  # the model's own code: it goes through tokens and media side by side
            raise DataError(
                f"positions cannot be counted, since its tokens of media do not fit its media ({self._told(inputs)}): "
                f"{type(error).__name__}: {error}",
                way_out="Give each medium that `input_ids` has tokens of, with as many tokens as the processor makes.",
            ) from error
        rows = as_whole_numbers(three_R1L[:, 0])
        text = torch.arange(ids_1L.shape[1])[None]
        if len(rows) == 3:
            return torch.cat(in_one_form([text, rows]))
        return rows

    def _told(self, inputs: Batch) -> str:
        media = [f"{key} of {len(inputs[key])}" for key in sorted(self.reads & inputs.keys())]
        return ", ".join(media) or "none"

    def _argument(self, name: str, ids_1L: torch.Tensor, inputs: Batch) -> object:
        if name == "input_ids":
            return ids_1L
        if name == "attention_mask":
            return torch.ones_like(ids_1L)
        if name == "mm_token_type_ids":
            return torch.as_tensor(inputs.get(name, torch.zeros_like(ids_1L[0])))[None]
        if name == "audio_seqlens":
            mask = first_of(inputs, _MASKS_OF_SOUND)
            if mask is None:
                return None
            return torch.as_tensor(mask).sum(-1)
        found = first_of(inputs, _OTHER_NAMES.get(name, (name,)))
        if isinstance(found, (np.ndarray, list)):
            return torch.as_tensor(found)
        return found


def inputs_of_samples(samples: Sequence[JsonMapping], media: Batch, reads: Collection[str]) -> list[Batch]:
    """What positions of each sample depend on, cut out of what was joined for the batch.

    Args:
        samples: Encoded; each says which media it has, or has their arrays itself.
        media: Joined over the samples.
        reads: The keys that are looked at, out of `MEDIA_OF`; others may have any number of rows.

    Raises:
        DataError: A tensor has another number of rows than there are media.
    """
    of_all = {key: media[key] for key in _WHOLE_BATCH if key in media}
    found: list[Batch] = [dict(of_all) for _ in samples]
    for key in media.keys() & reads:
        parts = [sample.get(key) for sample in samples]
        if all(part is None for part in parts):
            counts = _media_of_samples(samples, key, len(media[key]))
            parts = list(torch.as_tensor(media[key]).split(counts))
        for inputs, part in zip(found, parts, strict=True):
            if part is not None and len(part):
                inputs[key] = part
    return found


def _media_of_samples(samples: Sequence[JsonMapping], key: str, rows: int) -> list[int]:
    """How many rows of a tensor each sample has. Videos may bring their sound, which then counts too."""
    # Sounds of videos are rows of the same tensor, and items of kind "video".
    for kinds in ({MEDIA_OF[key]}, {"video", "audio"}):
        counts = []
        for sample in samples:
            items = sample.get("media") or ()
            counts.append(sum(item.kind in kinds for item in items))
        if sum(counts) == rows:
            return counts
    raise DataError(
        f"{key} has {rows} rows, but the samples of the pack have {sum(counts)} media of that kind",
        where=", ".join(str(sample.get("sample_id")) for sample in samples),
        way_out="The media plugin must give a row for each item, in order.",
    )


def as_whole_numbers(positions: torch.Tensor) -> torch.Tensor:
    """int64 where all are whole, else the bits of the fp32 numbers as int32."""
    if not positions.is_floating_point() or bool((positions == positions.round()).all()):
        return positions.long()
    return positions.float().contiguous().view(torch.int32)


def in_one_form(positions: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All whole numbers, or all the bits of fp32 numbers, as they are joined."""
    joined = list(positions)
    if torch.int32 in {each.dtype for each in positions}:
        for i, each in enumerate(positions):
            if each.dtype != torch.int32:
                joined[i] = each.float().view(torch.int32)
    return joined


def build_positions(folder: str | Path, processor: object, *, trust_remote_code: bool = False) -> PositionRule:
    """The rule of the model in a folder.

    Args:
        folder: With the model's `config.json`; a tokenizer may lie in one without.
        processor: Processor or tokenizer of the folder.
        trust_remote_code: As `data.dataset_param.preprocess_parameters.trust_remote_code`.

    Raises:
        ConfigError: It is not known how the model counts, or samples of the model cannot share a row.
    """
    if not (Path(folder) / "config.json").is_file():
        if tokenizer_of(processor) is processor:
            return TextPositions()
        raise ConfigError(
            "the processor's folder has no config.json, which says how the model counts positions",
            where=str(folder),
            key=KEY,
            way_out="Put the model's config.json beside the processor, or set packing to false.",
        )
    from transformers import AutoConfig  # loaded with the processor

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"config.json, which says how the model counts positions, cannot be read: {str(error).splitlines()[0]}",
            where=str(folder),
            key=KEY,
            way_out="Set it to false, or use a model that transformers knows or whose own code is trusted.",
        ) from error
    if setting_of(config, bool, "is_encoder_decoder"):
        raise ConfigError(
            f"an encoder-decoder ({config.model_type}) spends nearly all its work on the encoder, which takes every "
            "sample by itself: a shared row would save nothing",
            key=KEY,
            way_out="Set it to false and data.dataloader_param.sampler_type: LengthGroupedSampler.",
        )
    config = trained_config(config)
    owner = find_rope_index(config)
    if owner is None:
        return TextPositions()
    return RopeIndexPositions(owner, config)


def find_rope_index(config: PreTrainedConfig) -> type | None:
    """The class that counts positions of a model: the one that `architectures` names, or the one of its body."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    classes = [setting_of(transformers, type, name) for name in config.architectures or ()]
    classes.append(MODEL_MAPPING.get(type(config), None))
    for found in classes:
        if isinstance(found, type) and hasattr(found, "get_rope_index"):
            return found
    return None


def _stand_in(owner: type, config: PreTrainedConfig) -> Any:
    """An instance that was never initialised: its methods are the class's, and it has no modules."""
    stand_in: Any = object.__new__(owner)
    # Some rules read it of the instance, whose __init__ would have copied it from the configuration.
    merge = setting_of(setting_of(config, object, "vision_config"), int, "spatial_merge_size")
    vars(stand_in).update(config=config, spatial_merge_size=merge)
    return stand_in
