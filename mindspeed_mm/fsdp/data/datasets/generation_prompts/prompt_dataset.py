"""Prompts for generators that learn from rewards: lines, rows with metadata, or upstream's extracted embeddings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from mindspeed_mm.checkpoint.pt_files import load_weights
from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.rows.readers import open_reader
from mindspeed_mm.fsdp.data.data_utils.rows.sources import rows_folder
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.generation.generation_dataset import GenerationCollator
from mindspeed_mm.fsdp.models.diffusion.adapter import TextFeatures
from mindspeed_mm.fsdp.models.diffusion.components import encoder_files
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

_COLUMNS = ("prompt", "caption", "cap", "text")
_DATASET = "data.dataset_param.basic_parameters.dataset"
_EMBEDS = {"prompt_embed_path": "prompt_embed", "pooled_prompt_embeds_path": "pooled_prompt_embeds"}
"""Columns of upstream's videos2caption.json → folders beside it that hold their files."""
_FEATURES = {"prompt_embed_path": "prompt_embeds", "pooled_prompt_embeds_path": "pooled_prompt_embeds"}


@dataclass(frozen=True)
class PromptRow:
    """One prompt, with the row and the file that it comes from."""

    text: str
    row: JsonMapping
    """All of its columns, which rewards are given."""
    place: str
    """`prompts.txt:7`."""
    folder: Path
    """Of its file."""

    def stored_features(self) -> TextFeatures | None:
        """What was extracted of it by older tools (`prompt_embed_path`, `pooled_prompt_embeds_path`), one prompt's,
        without batch axis; None: it has to be encoded.

        Raises:
            DataError: A file is missing, leads elsewhere, or holds something else than a tensor.
        """
        if not self.row.keys() >= _EMBEDS.keys():
            return None
        return {_FEATURES[name]: self._stored(name) for name in _EMBEDS}

    def _stored(self, name: str) -> torch.Tensor:
        root = (self.folder / _EMBEDS[name]).resolve()
        path = (root / str(self.row[name])).resolve()
        way_out = f"Extract it again, or leave '{name}' out to have the prompt encoded."
        if not path.is_relative_to(root):
            raise DataError(f"'{self.row[name]}' leads out of {root}", where=self.place, key=name, way_out=way_out)
        try:
            loaded = load_weights(path)
        except (MMError, OSError) as error:
            raise DataError(f"{path} cannot be read: {error}", where=self.place, key=name, way_out=way_out) from error
        if not isinstance(loaded, torch.Tensor):
            raise DataError(f"{path} holds no tensor", where=self.place, key=name, way_out=way_out)
        return loaded


class DrawnPrompt(TypedDict):
    """A prompt whose turn has come."""

    sample_id: str
    """Its place and the epoch."""
    row: int
    """Its number."""
    prompt: PromptRow


class PromptCollator:
    """Prompts → what a rollout is drawn from."""

    def __call__(self, prompts: Sequence[DrawnPrompt]) -> Batch:
        """A batch of nothing but prompts."""
        return {"sample_ids": [each["sample_id"] for each in prompts], "prompts": list(prompts)}


@data_register.register("generation_prompts")
class PromptDataset(MMDataset):
    """Prompts for the generator in `model.model_name_or_path`, and the size of what is drawn from them.

    Outside of rollouts (`stage` other than prompt) they are blank media with captions, by which a run's memory is
    forecast.

    Args:
        basic_param: Which files: `.txt` with a prompt a line; .json, .jsonl, .csv, .parquet with a column of prompts.
        preprocess_param: The model's folder, and the size of media.
        dataset_param: The whole section.

    Raises:
        DataError: A file is missing or has no prompts; the size is none that the family takes.
        ConfigError: The size is not given.
    """

    is_deterministic = True
    is_raw = True
    prompts_for = GENERATOR

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        folder = preprocess_param.model_name_or_path
        if not folder:
            raise ConfigError(
                "there is no model to draw from the prompts",
                key="data.dataset_param.preprocess_parameters.model_name_or_path",
                way_out="Set model.model_name_or_path.",
            )
        given = (preprocess_param.get(name) for name in ("model_id", "transformer", "task"))
        self._adapter = find_adapter(folder, *given)
        self.size = _media_size(preprocess_param)
        self.geometry = self._adapter.geometry
        self.geometry.check(self.size, key="data.dataset_param.preprocess_parameters")
        self.prompts = _read_all(basic_param)
        self._for_rollouts = basic_param.stage == "prompt"
        self.sizes = [self.size] * len(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> DrawnPrompt | dict[str, Any]:
        """Prompt `index` as it is in the first epoch."""
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> DrawnPrompt | JsonObject:
        """Prompt `index` in an epoch: it is drawn anew, from other noise."""
        prompt = self.prompts[index]
        if self._for_rollouts:
            return DrawnPrompt(sample_id=f"{prompt.place} epoch {epoch}", row=index, prompt=prompt)
        pixels = torch.zeros(3, self.size.frames, self.size.height, self.size.width, dtype=torch.uint8)
        return {"sample_id": prompt.place, "epoch": epoch, "caption": prompt.text, "pixels": pixels, "fps": None}

    def place(self, index: int) -> str:
        """Where prompt `index` comes from."""
        return self.prompts[index].place

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """For rollouts, or as of captioned media."""
        if self._for_rollouts:
            return PromptCollator()
        return GenerationCollator(self._adapter.pad_text)

    def check_encoders(self) -> None:
        """Raise `ModelFolderError` when the model's folder lacks an encoder, or the VAE that decodes samples."""
        encoder_files(self._adapter)

    def fingerprint(self) -> JsonObject:
        """The prompts' hash and the size."""
        digest = hashlib.sha256(repr([prompt.text for prompt in self.prompts]).encode()).hexdigest()[:16]
        return {**super().fingerprint(), "prompts": digest, "size": str(self.size)}


def _media_size(preprocess: PreprocessParameters) -> MediaSize:
    height, width = preprocess.get("height"), preprocess.get("width")
    if not (isinstance(height, int) and isinstance(width, int)):
        raise ConfigError(
            "prompts have no default size",
            key=f"data.dataset_param.preprocess_parameters.{'width' if height else 'height'}",
            way_out="Set height and width in pixels; for clips num_frames, too.",
        )
    return MediaSize(preprocess.get("num_frames") or 1, height, width)


def _read_all(basic: BasicParameters) -> list[PromptRow]:
    given = basic.dataset
    names = list(map(str.strip, given.split(","))) if isinstance(given, str) else list(given or ())
    if not names:
        raise ConfigError("there are no prompts", key=_DATASET, way_out="Name a .txt or .json file of prompts.")
    prompts = []
    for name in names:
        path = Path(name if isinstance(name, str) else name.path)
        if not path.exists():
            path = rows_folder(basic.dataset_dir) / path
        if not path.is_file():
            raise DataError("there is no such file", where=str(path), key=_DATASET)
        prompts += _read(path, basic.get("caption_column"))
    kept = prompts[: basic.max_samples]
    if not kept:
        raise DataError("there are no prompts in it", where=str(names[0]), key=_DATASET, way_out="Write one a line.")
    return kept


def _read(path: Path, column: str | None) -> list[PromptRow]:
    folder = path.absolute().parent
    prompts = []
    if path.suffix in (".txt", ""):
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise DataError("is not UTF-8", where=str(path), way_out="Save the file as UTF-8.") from error
        for number, line in enumerate(map(str.strip, lines), start=1):
            if line:
                prompts.append(PromptRow(line, {"prompt": line}, f"{path.name}:{number}", folder))
        return prompts
    reader = open_reader(path)
    for number in range(len(reader)):
        prompts.append(_of_row(reader.read(number), str(reader.place(number)), column, folder))
    return prompts


def _of_row(row: Mapping[str, object], place: str, column: str | None, folder: Path) -> PromptRow:
    columns = [column] if column else [name for name in _COLUMNS if name in row]
    name = columns[0] if columns else "prompt"
    text = row.get(name)
    if isinstance(text, list) and text:
        text = text[0]
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"has no prompt: its columns are {', '.join(sorted(row)) or 'none'}",
            where=place,
            key=name,
            way_out="Give the row a 'prompt', or name its column in basic_parameters.caption_column.",
        )
    return PromptRow(text.strip(), row, place, folder)
