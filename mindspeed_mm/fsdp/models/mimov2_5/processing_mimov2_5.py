"""The processor of MiMo-V2.5: pictures as Qwen2-VL's, videos frame by frame with their times, sound as codes.

The numbers of its tokens are those of `processor_config` in the folder's config.json. Times and marks of videos follow
the published serving code, as the released folder has no processor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import AutoTokenizer, ProcessorMixin, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object
from mindspeed_mm.fsdp.models.mimov2_5.audio_codes import MiMoV2FeatureExtractor

_TOKENS = ("image", "video", "audio", "vision_start", "vision_end", "video_start", "video_end")
_RELEASED_IDS = dict(zip(_TOKENS, (151655, 151656, 151669, 151652, 151653, 151670, 151671), strict=True))
_PATCHES = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
_GROUP = 4
"""Frames of codes of a token, where processor_config does not say."""
_MINUTE = 60


class MiMoV2Processor(ProcessorMixin):
    """Pictures, videos and sound among words.

    Args:
        image_processor: Cuts pictures into patches.
        tokenizer: Of the text model.
        video_processor: Cuts frames into patches.
        feature_extractor: Makes codes of sound.
        chat_template: Jinja text.
        tokens: Number of each of its tokens, by what it stands for.

    Raises:
        ValueError: The tokenizer has no token of such a number.
    """

    takes_sound_of_videos = False
    return_mm_token_type_ids = False
    text_kwargs: ClassVar[dict[str, Any]] = {"return_token_type_ids": False}  # type: ignore[assignment]
    videos_kwargs: ClassVar[dict[str, Any]] = {"return_metadata": True}  # type: ignore[assignment]

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        feature_extractor: Any = None,
        chat_template: str | None = None,
        tokens: Mapping[str, int] = _RELEASED_IDS,
    ) -> None:
        self._words = {name: tokenizer.convert_ids_to_tokens(number) for name, number in tokens.items()}
        for name in _TOKENS:
            if self._words[name] is None:
                raise ValueError(f"the tokenizer has no token {tokens[name]}, processor_config.{name}_token_id")
            setattr(self, f"{name}_token", self._words[name])
            setattr(self, f"{name}_token_id", tokens[name])
        # A template writes marks of a picture around a video, whose frames have marks of their own.
        self.video_token = f"{self.vision_start_token}{self._words['video']}{self.vision_end_token}"
        super().__init__(image_processor, tokenizer, video_processor, feature_extractor, chat_template=chat_template)

    @classmethod
    def get_attributes(cls) -> list[str]:
        """The parts it is made of."""
        return ["image_processor", "tokenizer", "video_processor", "feature_extractor"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """The processor of a released folder.

        Args:
            pretrained_model_name_or_path: The folder.
            kwargs: For the tokenizer.

        Raises:
            ModelFolderError: A file of it is damaged, or sounds are grouped otherwise than the model takes them.
        """
        folder = Path(pretrained_model_name_or_path)
        config = read_json_object(folder / "config.json", ModelFolderError)
        settings, hears = (config.get(name) or {} for name in ("processor_config", "audio_config"))
        group = settings.get("audio_group_size", _GROUP)
        if hears.get("group_size", group) != group:
            raise ModelFolderError(
                f"is {group}, audio_config.group_size is {hears['group_size']}",
                where=str(folder / "config.json"),
                key="processor_config.audio_group_size",
                way_out="Compare them with the original model's config.json.",
            )
        path = folder / "preprocessor_config.json"
        sizes = read_json_object(path, ModelFolderError) if path.is_file() else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, **kwargs)
        patches = {name: sizes.get(name, value) for name, value in _PATCHES.items()}
        look = {name: sizes[name] for name in ("image_mean", "image_std") if name in sizes}
        limits = {kind: _limits(sizes, settings, kind) for kind in ("image", "video")}
        return cls(
            Qwen2VLImageProcessor(**patches, **look, size=limits["image"]),
            tokenizer,
            Qwen2VLVideoProcessor(**patches, **look, size=limits["video"]),
            MiMoV2FeatureExtractor(
                folder,
                settings.get("audio_sampling_rate", 24000),
                group,
                settings.get("audio_segment_size", 6000),
            ),
            chat_template=tokenizer.chat_template,
            tokens={name: int(settings.get(f"{name}_token_id", number)) for name, number in _RELEASED_IDS.items()},
        )

    def replace_image_token(self, image_inputs: Mapping[str, Any], image_idx: int, **kwargs: object) -> str:
        """A token for each merged square of patches."""
        grid = image_inputs["image_grid_thw"][image_idx]
        return self._words["image"] * (int(grid.prod()) // self.image_processor.merge_size**2)

    def replace_video_token(self, video_inputs: Mapping[str, Any], video_idx: int, **kwargs: object) -> str:
        """Minutes and seconds in front of the tokens of each patch of frames, all of it between marks."""
        time, height, width = video_inputs["video_grid_thw"][video_idx].tolist()
        metadata, deep = video_inputs["video_metadata"][video_idx], self.video_processor.temporal_patch_size
        # One time for each pair of frames: that of its first one.
        seconds = [index / (metadata.fps or 1.0) for index in metadata.frames_indices][::deep]
        tokens = self._words["video"] * (height * width // self.video_processor.merge_size**2)
        frame = f"{self._words['vision_start']}{tokens}{self._words['vision_end']}"
        frames = "".join(f"{_told(second)}{frame}" for second in seconds[:time])
        return f"{self._words['video_start']}{frames}{self._words['video_end']}"

    def replace_audio_token(self, audio_inputs: Mapping[str, Any], audio_idx: int, **kwargs: object) -> str:
        """A token for each group of frames of codes."""
        return self._words["audio"] * int(audio_inputs["num_audio_tokens"][audio_idx])

    def _check_special_mm_tokens(self, text: list[str], text_inputs: object, modalities: list[str]) -> None:
        super()._check_special_mm_tokens(text, text_inputs, [name for name in modalities if name != "video"])


def _told(second: float) -> str:
    return f"{int(second) // _MINUTE:02d}:{int(second) % _MINUTE:02d}"


def _limits(sizes: JsonMapping, settings: JsonMapping, kind: str) -> dict[str, int]:
    """Least and most pixels: as `processor_config` says, else the file of picture sizes."""
    least = settings.get(f"{kind}_min_pixels") or sizes.get("min_pixels", 8192)
    most = settings.get(f"{kind}_max_pixels") or sizes.get("max_pixels", 8388608)
    return {"shortest_edge": int(least), "longest_edge": int(most)}
