"""Rewards by CLIP models in local folders: how well a picture fits its prompt, and which one people would choose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from PIL import Image

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.posttrain_rewards.open_clip import clip_from_open_clip, read_open_clip
from mindspeed_mm.fsdp.posttrain_rewards.pictures import frames_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, reward_register
from mindspeed_mm.fsdp.utils.processor import load_processor, tokenizer_of

if TYPE_CHECKING:
    from transformers import CLIPModel, PreTrainedTokenizerBase

    from mindspeed_mm.fsdp.utils.processor import Processor

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training pictures."""
_KEY = "posttrain.rewards"
_HPS_FILES = ("HPS_v2.1_compressed.pt", "HPS_v2_compressed.pt")


class ClipReward:
    """The cosine of a picture's and its prompt's features; subclasses say what is made of it.

    Args:
        path: Folder with a CLIP model and its processor, as transformers saves them.
        batch_size: Pictures that are looked at together.
        frames: Frames of a clip, evenly spread, whose scores are averaged.
        device: Where the model works; between two rollouts it is on the host.
    """

    def __init__(self, path: str, batch_size: int = 16, frames: int = 4, device: str = "cpu") -> None:
        self._path, self._batch_size, self._frames, self._device = Path(path), batch_size, frames, device
        if not self._path.exists():
            raise ModelFolderError(
                "there is no such folder", where=path, key=_KEY, way_out="Name one in settings.path."
            )

    def __call__(self, prompts: Sequence[str], completions: Sequence[object], rows: Sequence[Row]) -> list[float]:
        """One score a picture, in order; of a clip the mean over its frames."""
        pairs: list[tuple[str, Image.Image]] = []
        frames_of_each = []
        for prompt, completion in zip(prompts, completions, strict=True):
            frames = frames_of(completion, self._frames)
            pairs += [(prompt, frame) for frame in frames]
            frames_of_each.append(len(frames))
        scores = torch.tensor(self._scores_of_all(pairs), dtype=torch.float64)
        return [float(own.mean()) for own in scores.split(frames_of_each)]

    def _scores_of_all(self, pairs: list[tuple[str, Image.Image]]) -> list[float]:
        scores: list[float] = []
        self._model.to(self._device)
        try:
            for first in range(0, len(pairs), self._batch_size):
                scores += self._scores(pairs[first : first + self._batch_size])
        finally:
            self._model.to("cpu")
        return scores

    @torch.inference_mode()
    def _scores(self, pairs: list[tuple[str, Image.Image]]) -> list[float]:
        prompts, pictures = zip(*pairs, strict=True)
        pixels = self._pixels([picture.convert("RGB") for picture in pictures])
        inputs = self._tokens(list(prompts)) | {"pixel_values": pixels}
        found = self._model(**{name: tensor.to(self._device) for name, tensor in inputs.items()})
        cosines = (found.image_embeds * found.text_embeds).sum(dim=1)  # transformers normalises both
        scores: list[float] = self._of_cosines(cosines).tolist()
        return scores

    def _of_cosines(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines

    @cached_property
    def _model(self) -> CLIPModel:
        from transformers import CLIPModel  # seconds

        return CLIPModel.from_pretrained(self._path, local_files_only=True, dtype=torch.float32).eval()

    @cached_property
    def _processor(self) -> Processor:
        return load_processor(self._path, use_fast=False)

    def _pixels(self, pictures: list[Image.Image]) -> torch.Tensor:
        pixels: torch.Tensor = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        return pixels

    def _tokens(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        """A prompt is cut at the model's longest."""
        options = {"padding": True, "truncation": True, "max_length": self._longest, "return_tensors": "pt"}
        return dict(self._tokenizer(prompts, **options))

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._processor.tokenizer

    @property
    def _longest(self) -> int:
        return int(self._model.config.text_config.max_position_embeddings)


@reward_register.register("clip_score")
class ClipScore(ClipReward):
    """2.5 · max(cosine, 0) (CLIPScore, arXiv:2104.08718, section 3)."""

    def _of_cosines(self, cosines: torch.Tensor) -> torch.Tensor:
        return 2.5 * cosines.clamp(min=0)


@reward_register.register("pickscore")
class PickScore(ClipReward):
    """The cosine by the model's learnt scale, about 20 for a good picture: a model that was trained on people's choices
    (Pick-a-Pic, arXiv:2305.01569, equation 1)."""

    def _of_cosines(self, cosines: torch.Tensor) -> torch.Tensor:
        return self._model.logit_scale.exp() * cosines


@reward_register.register("hps_v2")
class HpsV2(ClipReward):
    """The cosine by HPSv2 (arXiv:2306.09341), about 0.3 for a good picture. Pictures keep their shape: their longer
    side becomes the model's, the rest is black.

    Args:
        path: HPSv2's file (`HPS_v2.1_compressed.pt`), a folder that holds it, or one as transformers saves CLIP.
        tokenizer: Folder of CLIP's tokenizer, which a file comes without; `tokenizer` of FLUX.1 and of Stable Diffusion
            is one.
        batch_size: As of the others.
        frames: As of the others.
        device: As of the others.
    """

    def __init__(
        self, path: str, tokenizer: str | None = None, batch_size: int = 16, frames: int = 4, device: str = "cpu"
    ) -> None:
        super().__init__(path, batch_size, frames, device)
        self._file: Path | None = None
        for path_of_file in (self._path, *map(self._path.joinpath, _HPS_FILES)):
            if path_of_file.is_file():
                self._file = path_of_file
                break
        self._tokenizer_folder = tokenizer
        if self._file is not None and tokenizer is None:
            raise ModelFolderError(
                "comes without a tokenizer",
                where=str(self._file),
                key=_KEY,
                way_out="Name a folder with CLIP's in settings.tokenizer, such as FLUX.1's tokenizer.",
            )
        if self._file is None and not (self._path / "config.json").is_file():
            raise ModelFolderError(f"holds neither {_HPS_FILES[0]} nor a model of transformers", where=path, key=_KEY)

    @cached_property
    def _model(self) -> CLIPModel:
        if self._file is None:
            return super()._model
        return clip_from_open_clip(read_open_clip(self._file), self._tokenizer.eos_token_id)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]
        if self._tokenizer_folder is None:
            return self._processor.tokenizer
        return tokenizer_of(load_processor(self._tokenizer_folder))

    def _pixels(self, pictures: list[Image.Image]) -> torch.Tensor:
        side = int(self._model.config.vision_config.image_size)
        return torch.stack([_on_black(picture, side) for picture in pictures])


def _on_black(picture: Image.Image, side: int) -> torch.Tensor:
    """(3, side, side) normalised pixels of a picture whose longer side becomes `side`, in the middle of black."""
    width, height = picture.size
    scale = side / max(width, height)
    if scale != 1:
        width, height = round(width * scale), round(height * scale)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side))
    square.paste(picture, ((side - width) // 2, (side - height) // 2))
    pixels = torch.frombuffer(bytearray(square.tobytes()), dtype=torch.uint8).view(side, side, 3)
    # (side, side, 3) bytes → (3, side, side), brought to CLIP's mean 0 and deviation 1.
    return (pixels.permute(2, 0, 1) / 255 - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)
