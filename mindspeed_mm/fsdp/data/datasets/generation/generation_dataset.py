"""The data set of image and video generators: captioned media, or features extracted from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from mindspeed_mm.core.batch import Batch, check_batch
from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.media_geometry import MediaGeometry, MediaSize
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.datasets.generation.feature_source import FeatureSource
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.sample_description import SampleDescription
from mindspeed_mm.fsdp.models.diffusion.adapter import TextFeatures
from mindspeed_mm.fsdp.models.diffusion.caption_lengths import CaptionLengths
from mindspeed_mm.fsdp.models.diffusion.components import encoder_files
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("generation")
class GenerationDataset(Dataset[dict[str, Any]]):
    """Captioned media for the generator in `model.model_name_or_path`.

    A sample is the same whether it is read raw or as features: the same id, and the same caption in an epoch.

    Args:
        basic_param: Which rows; with `features_dir`, the features are read and the rows are not.
        preprocess_param: The model's folder, and the sizes of media.
        dataset_param: The whole section.

    Raises:
        DataError: Files, rows or features are off.
        ConfigError: Keys contradict each other, or the folder is none of a generator.
    """

    is_deterministic = True
    """Reading draws no random numbers."""

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        folder = preprocess_param.model_name_or_path
        if not folder:
            raise ConfigError(
                "there is no model to read the data for",
                key="data.dataset_param.preprocess_parameters.model_name_or_path",
                way_out="Set model.model_name_or_path.",
            )
        own = {key: getattr(preprocess_param, key, None) for key in ("model_id", "transformer")}
        adapter = find_adapter(folder, **own)
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self._adapter, self._pad_text = adapter, adapter.pad_text
        features_dir = getattr(basic_param, "features_dir", None)
        self._source: RawSource | FeatureSource
        if features_dir is None:
            adapter.require("vae")  # sizes follow from it
            self._source = RawSource(basic_param, preprocess_param, adapter.geometry)
        else:
            self._source = FeatureSource(Path(features_dir), basic_param, preprocess_param, adapter)
        self.geometry: MediaGeometry = adapter.geometry
        """What the model takes."""
        self.noted_components = adapter.noted
        """Configurations of components that the model's folder lacks and the features know."""
        self.item = self._source.item
        """(index, epoch) → sample."""

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample `index` as it is in the first epoch."""
        return self.item(index, 0)

    @property
    def is_raw(self) -> bool:
        """Whether samples are pixels and captions, to be encoded while training."""
        return isinstance(self._source, RawSource)

    @property
    def sizes(self) -> list[MediaSize]:
        """Size of each sample, known without decoding."""
        return self._source.sizes

    @property
    def left_out(self) -> dict[str, str]:
        """Place → reason, of rows that were found unusable before the start."""
        return self._source.left_out

    @property
    def media(self) -> MediaLoader | None:
        """What opens the media; None of features."""
        return self._source.media if isinstance(self._source, RawSource) else None

    def describe(self, index: int) -> SampleDescription:
        """What is known of a sample without decoding it. Raises `DataError` for a false declaration of its size."""
        return self._source.describe(index)

    def caption_lengths(self) -> CaptionLengths:
        """Measures captions by the tokenizers of the model's folder. Raises `ModelFolderError` where they lack."""
        return CaptionLengths(self._adapter)

    def draw_captions(self, seed: int) -> None:
        """Draw captions with this seed, `training.seed`, from now on."""
        self._source.seed = seed

    def check_encoders(self) -> None:
        """Raise `ModelFolderError` when samples are raw and the model's folder lacks an encoder."""
        if self.is_raw:
            encoder_files(self._adapter)

    def row_changes(self) -> list[Problem]:
        """How the rows that the configuration names differ from those that its features were made of; nothing of raw
        media."""
        return self._source.row_changes() if isinstance(self._source, FeatureSource) else []

    @property
    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption, padded, without batch axis; None of raw media."""
        return self._source.null_text if isinstance(self._source, FeatureSource) else None

    def place(self, index: int) -> Any:
        """Where sample `index` comes from."""
        return self._source.place(index)

    def build_collator(self, collate_param: Any) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        """Samples of one size → batch."""
        return GenerationCollator(self._pad_text)

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run compares."""
        return self._source.fingerprint()


class GenerationCollator:
    """Stacks samples of one size; text features are padded as the family pads them.

    Args:
        pad_text: Of the family's adapter.
    """

    def __init__(self, pad_text: Callable[[Sequence[TextFeatures]], dict[str, torch.Tensor]]) -> None:
        self._pad_text = pad_text

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Collate and check; see `core.batch.BATCH_KEYS`."""
        batch: Batch = {
            "sample_ids": [sample["sample_id"] for sample in samples],
            "epochs": [sample["epoch"] for sample in samples],
        }
        if "caption" in samples[0]:
            batch["captions"] = [sample["caption"] for sample in samples]
        else:
            batch |= self._pad_text([sample["text"] for sample in samples])
        for name in samples[0].keys() - _NOT_STACKED:
            batch[name] = torch.stack([sample[name] for sample in samples])
        check_batch(batch)
        return batch


_NOT_STACKED = {"sample_id", "epoch", "caption", "text"}
