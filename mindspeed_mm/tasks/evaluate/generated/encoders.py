"""Models in local folders that turn frames and texts into features: CLIP, and DINO for what a clip shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from PIL import Image

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.evaluate.generated.samples import frames_of

T = TypeVar("T")
_DINO = ("vit", "dinov2", "dinov2_with_registers", "dinov3_vit")


class Clip:
    """A CLIP model: features of frames and of texts, not normalised.

    Args:
        folder: As transformers has it.
        batch_size: Frames, or texts, at a time.

    Raises:
        ModelFolderError: It holds another model.
    """

    def __init__(self, folder: Path, batch_size: int) -> None:
        check_kind(folder, ("clip",), "CLIP model", "--clip")
        self._folder, self._batch_size = folder, batch_size
        self._processor: Any = load_processor(folder, use_fast=False)

    @cached_property
    def _model(self) -> Any:
        from transformers import CLIPModel  # seconds

        return CLIPModel.from_pretrained(self._folder, local_files_only=True).to(current_device()).eval()

    def of_samples(self, paths: Sequence[Path]) -> list[torch.Tensor]:
        """Of each sample (T, F): a row for each of its frames."""
        return by_sample(paths, self._batch_size, self._of_frames)

    @torch.inference_mode()
    def of_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """(N, F); a text is cut at the model's longest."""
        found = []
        for batch in _batches(texts, self._batch_size):
            read = self._processor(text=batch, padding=True, truncation=True, return_tensors="pt")
            found.append(_tensor_of(self._model.get_text_features(**read.to(current_device()))))
        return torch.cat(found).cpu()

    def _of_frames(self, frames: Sequence[Image.Image]) -> torch.Tensor:
        shown = self._processor(images=list(frames), return_tensors="pt").to(current_device())
        return _tensor_of(self._model.get_image_features(**shown))


class Dino:
    """A vision transformer that DINO has trained: of each frame the features of its class token.

    Args:
        folder: As transformers has it, such as that of facebook/dino-vitb16.
        batch_size: Frames at a time.

    Raises:
        ModelFolderError: It holds another model.
    """

    def __init__(self, folder: Path, batch_size: int) -> None:
        check_kind(folder, _DINO, "vision transformer of DINO's kind", "--dino")
        self._folder, self._batch_size = folder, batch_size

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

        prepare_for_transformers()
        from transformers import AutoImageProcessor, AutoModel  # seconds

        options = {"local_files_only": True}
        model = AutoModel.from_pretrained(self._folder, **options).to(current_device()).eval()
        return model, AutoImageProcessor.from_pretrained(self._folder, use_fast=False, **options)

    def of_samples(self, paths: Sequence[Path]) -> list[torch.Tensor]:
        """Of each sample (T, F): a row for each of its frames."""
        return by_sample(paths, self._batch_size, self._of_frames)

    def _of_frames(self, frames: Sequence[Image.Image]) -> torch.Tensor:
        model, processor = self._parts
        shown = processor(images=list(frames), return_tensors="pt").to(current_device())
        return model(**shown).last_hidden_state[:, 0]


def check_kind(folder: Path, kinds: Sequence[str], title: str, key: str) -> None:
    """Raise `ModelFolderError` unless a folder holds a model of one of these types."""
    config = folder / "config.json"
    if not config.is_file() or read_json_object(config, ModelFolderError).get("model_type") not in kinds:
        way_out = f"Name the folder of one, whose config.json says {' or '.join(kinds)}."
        raise ModelFolderError(f"holds no {title}", where=str(folder), key=key, way_out=way_out)


@torch.inference_mode()
def by_sample(paths: Sequence[Path], batch_size: int, encode: Any) -> list[torch.Tensor]:
    """Features of each sample's frames; frames of neighbours go through the model together.

    Args:
        paths: Pictures or clips.
        batch_size: Frames at a time.
        encode: Pictures → (N, F).
    """
    counts: list[int] = []
    found = [encode(batch).cpu() for batch in _batches(_all_frames(paths, counts), batch_size)]
    return list(torch.cat(found).split(counts))


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


def _all_frames(paths: Iterable[Path], counts: list[int]) -> Iterator[Image.Image]:
    """Frame by frame; how many each sample has is added to `counts`."""
    for path in paths:
        frames = frames_of(path)
        counts.append(len(frames))
        yield from map(Image.fromarray, frames)


def _tensor_of(found: Any) -> torch.Tensor:
    """A tensor until transformers 5, an output object that holds it since."""
    if isinstance(found, torch.Tensor):
        return found
    return found.pooler_output
