"""Rows whose media and captions were encoded by `mm extract`."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.datasets.generation.sizes import Buckets, SizeSettings
from mindspeed_mm.fsdp.data.feature_store import check_provenance, open_features
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters

_KEY = "data.dataset_param.basic_parameters.features_dir"
_PROBLEMS_SHOWN = 5


class FeatureSource:
    """Features of captioned pictures and clips.

    Args:
        folder: What `mm extract` wrote.
        basic: `max_samples` is read.
        preprocess: Sizes that the features should have, where it names any.
        adapter: The model that is trained.

    Raises:
        DataError: The folder is missing or broken, was made by other weights, or in other sizes.
    """

    left_out: dict[str, str] = {}
    """Nothing: what could not be read was never extracted."""

    def __init__(
        self, folder: Path, basic: BasicParameters, preprocess: PreprocessParameters, adapter: DiffusionAdapter
    ) -> None:
        self._store = open_features(folder, adapter)
        check_provenance(self._store, adapter)
        self._adapter, self._folder = adapter, folder
        self._records = self._store.records[: basic.max_samples]
        if not self._records:
            raise DataError("the feature set is empty", where=str(folder), key=_KEY, way_out="Run mm extract again.")
        self.sizes: list[MediaSize] = [record.size for record in self._records]
        self._check_sizes(SizeSettings.read(preprocess))
        self._warn_of_duplicates()

    def __len__(self) -> int:
        return len(self._records)

    def place(self, index: int) -> str:
        """The medium that the features are of."""
        return f"{self._folder.name}:{self._records[index].path}"

    def item(self, index: int, epoch: int) -> dict[str, Any]:
        """`sample_id`, `epoch`, `latents`, `text` (features of one caption by batch key) and conditions."""
        record = self._records[index]
        caption = derive_seed(record.key, epoch, "caption") % len(record.captions)
        features = self._store.read(index, caption)
        text = {name: features.pop(name) for name in self._text_keys & features.keys()}
        return {"sample_id": record.key, "epoch": epoch, "text": text, **features}

    @property
    def null_text(self) -> dict[str, torch.Tensor] | None:
        """Features of the empty caption as batches have them, without the batch axis."""
        if self._store.null_text is None:
            return None
        return {name: value[0] for name, value in self._adapter.pad_text([self._store.null_text]).items()}

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run compares: which samples, in which order, made by what."""
        keys = [(record.key, str(record.size), tuple(record.captions)) for record in self._records]
        digest = hashlib.sha256(repr((keys, self._store.provenance)).encode()).hexdigest()
        return {"rows": len(self), "features": self._store.provenance, "hash": digest}

    @property
    def _text_keys(self) -> set[str]:
        if self._store.null_text is not None:
            return set(self._store.null_text)
        return {"prompt_embeds", "pooled_prompt_embeds"}

    def _check_sizes(self, settings: SizeSettings) -> None:
        """Features have their sizes for good: other ones in the YAML would be ignored in silence."""
        if not settings.is_set:
            return
        buckets = Buckets(settings, self._adapter.geometry)
        others = {str(size): size for size in self.sizes if not buckets.takes(size)}
        if others:
            asked = ", ".join(str(size) for size in buckets.sizes[:_PROBLEMS_SHOWN])
            raise DataError(
                "the features have other sizes than data.dataset_param.preprocess_parameters asks for",
                problems=[
                    Problem(
                        f"holds samples of {', '.join(list(others)[:_PROBLEMS_SHOWN])}; asked for are {asked}",
                        str(self._folder),
                        _KEY,
                        "Extract them anew into another folder, or correct the sizes.",
                    )
                ],
            )

    def _warn_of_duplicates(self) -> None:
        twice = len(self._records) - len({record.key for record in self._records})
        if twice:
            warnings.warn(f"{twice} of {len(self)} samples repeat another: in an epoch they share noise", stacklevel=2)
