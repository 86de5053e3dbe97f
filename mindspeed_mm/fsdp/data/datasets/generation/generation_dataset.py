"""The data set of image and video generators: captioned media, or features extracted from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.batch import Batch, check_batch
from mindspeed_mm.core.errors import ConfigError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.generation.feature_source import FeatureSource
from mindspeed_mm.fsdp.data.datasets.generation.pair_rows import roles_of_rows
from mindspeed_mm.fsdp.data.datasets.generation.pixels import SampleDescription
from mindspeed_mm.fsdp.data.datasets.generation.raw_source import RawSource
from mindspeed_mm.fsdp.data.datasets.generation.row_files import row_sources
from mindspeed_mm.fsdp.data.feature_store import FeatureStore, open_features
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter, TextFeatures
from mindspeed_mm.fsdp.models.diffusion.components import encoder_files
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.live_encoding import CaptionLengths
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register


@data_register.register("generation")
class GenerationDataset(MMDataset):
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
        given = (preprocess_param.get(name) for name in ("model_id", "transformer", "task"))
        adapter = find_adapter(folder, *given)
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self._adapter, self._pad_text = adapter, adapter.pad_text
        features_dir = basic_param.get("features_dir")
        self._source: RawSource | FeatureSource
        self.is_raw = features_dir is None
        if features_dir is None:
            adapter.require("vae")  # sizes follow from it
            self._source = RawSource(
                basic_param,
                preprocess_param,
                adapter.geometry,
                roles=roles_of_rows(adapter.media_roles, basic_param),
                sound=adapter.sound,
                reads_fps=adapter.reads_fps,
                model_fps=adapter.frames_per_second,
            )
            self.media = self._source.media
        else:
            store = self.open_store(Path(features_dir), basic_param, adapter)
            self._source = FeatureSource(store, basic_param, preprocess_param, adapter)
        self.basic_parameters, self.geometry = basic_param, adapter.geometry
        self.left_out, self.noted_components = self._source.left_out, adapter.noted
        entries, sizes = self._source.entries, self._source.sizes
        self._samples = samples_of(self._source.repeats, entries)
        self.row_numbers = [row for row, _ in self._samples]
        self.sizes = [sizes[row] for row in self.row_numbers]
        is_prior = self._source.is_prior
        self.is_prior = None if is_prior is None else [is_prior[row] for row in self.row_numbers]
        self.parts = _parts_of(basic_param, [entries[row] for row in self.row_numbers]) if entries else []

    def open_store(self, folder: Path, basic: BasicParameters, adapter: DiffusionAdapter) -> FeatureStore:
        """The features in a folder."""
        return open_features(folder, adapter)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample `index` as it is in the first epoch."""
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> JsonObject:
        """Sample `index` as it is in an epoch: its caption is drawn anew."""
        row, repeat = self._samples[index]
        return self._source.item(row, epoch, repeat)

    def describe(self, index: int) -> SampleDescription:
        """What is known of a sample without decoding it. Raises `DataError` for a false declaration of its size."""
        return self._source.describe(self._samples[index][0])

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
        if isinstance(self._source, FeatureSource):
            return self._source.row_changes()
        return []

    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption, padded, without batch axis; None of raw media."""
        if isinstance(self._source, FeatureSource):
            return self._source.null_text
        return None

    def place(self, index: int) -> RowLocation | str:
        """Where sample `index` comes from."""
        return self._source.place(self._samples[index][0])

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Samples of one size → batch."""
        return GenerationCollator(self._pad_text)

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares."""
        return self._source.fingerprint()


def samples_of(repeats: Sequence[int], entries: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Row of each sample of an epoch, and which of the row's samples it is: of each entry of `dataset` every row once,
    then the others.

    Args:
        repeats: How often an epoch reads each row.
        entries: That each row belongs to; none: all belong to one.
    """
    samples = [(row, 0) for row in range(len(repeats))]
    for row, times in enumerate(repeats):
        for repeat in range(1, times):
            samples.append((row, repeat))
    if entries:  # sorting is stable: within an entry every row still comes once before the others
        order = {entry: number for number, entry in enumerate(dict.fromkeys(entries))}
        samples.sort(key=lambda sample: order[entries[sample[0]]])
    return samples


def _parts_of(basic: BasicParameters, entries: Sequence[str]) -> list[Part]:
    """The samples of each entry of `dataset`, which stand together; entries without any have an empty part."""
    counts = Counter(entries)
    for source in row_sources(basic):
        counts.setdefault(source.name, 0)
    parts, start = [], 0
    for name, count in counts.items():
        parts.append(Part(name, start, start + count))
        start += count
    return parts


class GenerationCollator:
    """Stacks samples of one size; text features are padded as the family pads them.

    Args:
        pad_text: Of the family's adapter.
    """

    def __init__(self, pad_text: Callable[[Sequence[TextFeatures]], dict[str, torch.Tensor]]) -> None:
        self._pad_text = pad_text

    def __call__(self, samples: Sequence[JsonObject]) -> Batch:
        """Collate and check; see `core.batch.BATCH_KEYS`."""
        batch: Batch = {}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            if name in _LISTED:
                batch[_LISTED[name]] = values
            elif name == "text":
                batch |= self._pad_text(values)
            else:
                batch[name] = torch.stack(values)
        check_batch(batch)
        return batch


_LISTED = {"sample_id": "sample_ids", "epoch": "epochs", "fps": "fps", "caption": "captions"}
"""What batches hold as lists, by its key in a sample → by its key in a batch."""
