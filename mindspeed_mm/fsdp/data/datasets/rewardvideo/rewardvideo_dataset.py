"""Pairs of videos of one caption, and which is better in each dimension: `dataset_type: rewardvideo`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.media import located
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import may_draw
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows
from mindspeed_mm.fsdp.data.data_utils.sample import RowLocation, SampleSize
from mindspeed_mm.fsdp.data.data_utils.training_view import with_view
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.rewardvideo.video_questions import DIMENSIONS, FOLDER_KEY, VideoQuestions
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

SIDES = ("A", "B")
INVALID = 2
"""In `preferences`: nothing is said of this dimension."""
_CHOICES = {"A": 1, "B": -1, "same": 0, "invalid": INVALID}
_REPAIR = "Repair or drop the row."


@data_register.register("rewardvideo")
class RewardVideoDataset(MMDataset):
    """Rows of VideoAlign's CSV: `path_A`, `path_B`, `prompt`, and in `VQ`, `MQ` and `TA` one of A, B, same and invalid,
    where an empty one is invalid. Rates and numbers of frames are read of the videos themselves.

    Args:
        basic_param: Which rows.
        preprocess_param: The model's folder, and how videos are seen.
        dataset_param: The whole section.

    Raises:
        DataError: Files are missing or broken, or no row is left.
        ConfigError: No folder is named, or rows are streamed or packed.
        ModelFolderError: The folder has no processor.
    """

    is_deterministic = True
    rows_of_a_sample = 2

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        sections = {"basic_parameters": basic_param, "preprocess_parameters": preprocess_param}
        param = with_view(dataset_param.model_copy(update=sections), preprocess_param.model_name_or_path)
        basic, preprocess = param.basic_parameters, param.preprocess_parameters
        if not preprocess.model_name_or_path:
            raise ConfigError("there is no folder to take the processor from", key=FOLDER_KEY, way_out="Name it.")
        for name in ("streaming", "packing", "neat_packing"):
            if basic[name]:
                what, key = "pairs of videos are neither streamed nor packed", f"basic_parameters.{name}"
                raise ConfigError(what, key=f"data.dataset_param.{key}", way_out="Set it to false.")
        self.basic_parameters = basic
        self.on_bad_sample, self.max_bad_fraction = basic.on_bad_sample, basic.max_bad_fraction
        self.truncation = basic.if_too_long
        self._rows: Any = open_rows(basic, param.attr)
        self._with_ties = bool(preprocess.get("use_tied_data", True))
        self._numbers = [n for n in range(len(self._rows)) if self._with_ties or self._has_choice(n)]
        if not self._numbers:
            way_out = "Give files with rows; or set preprocess_parameters.use_tied_data: true."
            raise DataError("there are no rows", key="data.dataset_param.basic_parameters.dataset", way_out=way_out)
        root = self._rows.folders[0]
        if basic.dataset_dir:
            root = Path(basic.dataset_dir)
        roots: list[str | Path] = [*basic.media_roots, *self._rows.folders, *self._rows.media_roots]
        self.questions = VideoQuestions(Path(preprocess.model_name_or_path), preprocess, basic, root, roots)
        self.processor = self.questions.processor
        if may_draw(self.processor, self.questions.plugin):
            self.is_deterministic = False

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Both questions of pair `index` in `A` and `B`, and its `preferences` (3,).

        Raises:
            DataError: The row or a video is off.
            TooLongError: A question does not fit `cutoff_len`.
        """
        place, found = self.place(index), {}
        preferences = self._choices(self._numbers[index])  # first: it opens no video
        for side, (video, caption) in self._asked(index).items():
            found[side] = self.questions.encode(video, caption, place)
        return {"sample_id": str(place), "preferences": preferences, **found}

    @override
    def place(self, index: int) -> RowLocation:
        return self._rows.place(self._numbers[index])  # type: ignore[no-any-return]

    def row(self, index: int) -> JsonObject:
        """The row of pair `index` as it stands in its file."""
        found: JsonObject = self._rows.row(self._numbers[index])
        return found

    def measure(self, index: int) -> SampleSize:
        """The size of both questions, each as long as the longer. Raises `DataError` as `__getitem__`."""
        self._choices(self._numbers[index])
        sizes = [self.questions.measure(*asked, self.place(index)) for asked in self._asked(index).values()]
        return SampleSize(len(sizes) * max(size.tokens for size in sizes), sum(size.patches for size in sizes))

    @override
    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Questions about videos A, and behind them those about videos B, padded to the right."""
        return _PairsOfVideos(self.questions, collate_param)

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: files, and what shapes the questions."""
        files = self._rows.facts()
        settings = self.questions.settings() | {
            "use_tied_data": self._with_ties,
            "cutoff_len": self.basic_parameters.cutoff_len,
        }
        digest = hashlib.sha256(repr((settings, files)).encode()).hexdigest()
        return {"rows": len(self), "files": files, "settings": settings, "hash": digest}

    def _asked(self, index: int) -> Mapping[str, tuple[object, str]]:
        """Side → video and caption."""
        row, place = self.row(index), str(self.place(index))
        caption = row.get("prompt")
        if not isinstance(caption, str) or not caption.strip():
            raise DataError(f"{caption!r:.80} is not a caption", where=place, key="prompt", way_out=_REPAIR)
        folder = self._rows.media_root(self._numbers[index])
        if folder is None and self.basic_parameters.dataset_dir is None:
            folder = self._rows.folder(self._numbers[index])
        found: dict[str, tuple[object, str]] = {}
        for side in SIDES:
            video = row.get(f"path_{side}")
            if not isinstance(video, str) or not video:
                raise DataError(f"{video!r:.80} is no video", where=place, key=f"path_{side}", way_out=_REPAIR)
            source: object = video
            if folder is not None:
                source = located(video, str(Path(folder).absolute()))
            found[side] = (source, caption)
        return found

    def _choices(self, number: int) -> list[int]:
        """What row `number` says of each dimension: 1 for A, -1 for B, 0 for a tie, else `INVALID`."""
        row, place, found = self._rows.row(number), str(self._rows.place(number)), []
        for name in DIMENSIONS:
            if name not in row:
                way_out = "Give the choices under this name; it is empty where there is none."
                raise DataError("is no column of the row", where=place, key=name, way_out=way_out)
            said = row[name]
            if said in (None, ""):
                said = "invalid"
            if not isinstance(said, str) or said not in _CHOICES:
                what = f"{said!r:.80} is not one of {', '.join(_CHOICES)}"
                raise DataError(what, where=place, key=name, way_out=_REPAIR)
            found.append(_CHOICES[said])
        return found

    def _has_choice(self, number: int) -> bool:
        """Whether some dimension of row `number` is no tie, as `use_tied_data: false` asks."""
        return any(self._rows.row(number).get(name) != "same" for name in DIMENSIONS)


class _PairsOfVideos:
    """P pairs as 2P rows. Arguments: what joins questions, and `dataloader_param.collate_param`."""

    def __init__(self, questions: VideoQuestions, collate_param: CollateParam) -> None:
        self._questions, self._collate_param = questions, collate_param

    def __call__(self, samples: Sequence[JsonMapping]) -> Batch:
        """Rows n and P + n are of pair n, whose `preferences` are (P, 3) int64."""
        sides = [sample[side] for side in SIDES for sample in samples]
        batch = self._questions.joined(sides, self._collate_param)
        return batch | {
            "preferences": torch.tensor([sample["preferences"] for sample in samples]),
            "pairs": len(samples),
            "sample_ids": [sample["sample_id"] for sample in samples],
        }
