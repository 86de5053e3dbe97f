"""Rows for models that answer in words and pictures: `dataset_type: bagel`."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError, Problem, told_as
from mindspeed_mm.core.json_file import JsonObject, parse_json, read_json_object
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.convert import convert_row
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, GenericCollator
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader, with_media_beside
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import TextOnlyPlugin
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import open_rows
from mindspeed_mm.fsdp.data.data_utils.sample import (
    EncodedSample,
    NotesReported,
    NothingTrainedError,
    RowLocation,
    Sample,
    SampleSize,
    TooLongError,
)
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.datasets.bagel.features import PictureFeatures
from mindspeed_mm.fsdp.data.datasets.bagel.parts import (
    Marks,
    RowPart,
    SizeRule,
    TokenRow,
    parts_of_sample,
    resized,
    with_context,
)
from mindspeed_mm.fsdp.params.data_args import BasicParameters, CollateParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.fsdp.utils.register import data_register

_BASIC, _PREPROCESS = "data.dataset_param.basic_parameters", "data.dataset_param.preprocess_parameters"
_FOLDER_KEY = f"{_PREPROCESS}.model_name_or_path"
_DROPOUT = {"text": ("text_cond_dropout_prob", 0.1), "seen": ("vit_cond_dropout_prob", 0.3),
            "given": ("vae_cond_dropout_prob", 0.3)}  # fmt: skip
"""Kind of part → the key of the share that is left out, and its default."""
_SIZES = {
    "vit_max_image_size": 980,
    "vit_min_image_size": 378,
    "vit_max_pixels": 2_007_040,
    "vae_max_image_size": 1024,
    "vae_min_image_size": 512,
    "vae_max_pixels": 1_806_336,
}
_MARKS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")


class _Positions:
    """The rule by which a packed row counts: as each sample says."""

    reads: frozenset[str] = frozenset()

    def __call__(self, input_ids: object, inputs: Mapping[str, object]) -> torch.Tensor:
        """(1, L) int64 positions of a sample, which its arrays hold."""
        return torch.as_tensor(inputs["position_ids"])[None]


@data_register.register("bagel")
class BagelDataset(MMDataset):
    """Conversations in every layout of `huggingface`, whose answers may hold pictures; rows of pictures with captions
    (`image`, `captions`) and of edits (`image_list`, `instruction_list`), as the published parquet files have them.

    Args:
        basic_param: Which rows, and which share of conditions is left out; with `features_dir`, latents of pictures are
            not made of their pixels.
        preprocess_param: The model's folder, and sizes of pictures.
        dataset_param: The whole section; its `attr` says where a conversation keeps what.

    Raises:
        DataError: Files are missing or broken.
        ConfigError: A setting cannot be used.
        ModelFolderError: The folder is not one of BAGEL.
    """

    def __init__(
        self, basic_param: BasicParameters, preprocess_param: PreprocessParameters, dataset_param: DatasetParam
    ) -> None:
        _check_settings(basic_param)
        if not preprocess_param.model_name_or_path:
            raise ConfigError("there is no folder with a tokenizer", key=_FOLDER_KEY, way_out="Name the model's.")
        self.folder = Path(preprocess_param.model_name_or_path)
        self.basic_parameters, self._preprocess = basic_param, preprocess_param
        self.on_bad_sample, self.max_bad_fraction = basic_param.on_bad_sample, basic_param.max_bad_fraction
        self.truncation = basic_param.if_too_long
        self._rows = open_rows(basic_param, dataset_param.attr)
        self.parts = self._rows.parts
        self.row_numbers = self._rows.row_numbers
        self.processor: Any = load_processor(str(self.folder))
        self.draw_seed, self._notes = 0, NotesReported()
        features_dir = basic_param.get("features_dir")
        self.is_raw = features_dir is None
        self._features = None if features_dir is None else PictureFeatures(Path(features_dir), self.folder)
        self.read_settings(basic_param, preprocess_param)

    def read_settings(self, basic_param: BasicParameters, preprocess_param: PreprocessParameters) -> None:
        """Take what depends on the model: marks around parts, sizes of pictures, shares that are left out. Arguments as
        of the class."""
        self._marks = marks_of(self.processor, self.folder)
        self._seen_size, self._latent_size = size_rules(preprocess_param, self.folder)
        self._dropout = {kind: share_of(basic_param, *told) for kind, told in _DROPOUT.items()}

    def settings(self) -> JsonObject:
        """What of it shapes samples, for a run that is resumed."""
        return {"dropout": self._dropout, "sizes": repr((self._seen_size, self._latent_size))}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> EncodedSample:
        """Sample `index` as it is in the first epoch. Raises `DataError` for a row that does not fit."""
        return self.item(index, 0)

    def item(self, index: int, epoch: int) -> EncodedSample:
        """Sample `index`. Its noise, which parts are left out, and of several captions or edits which one is taken, are
        drawn for each epoch.

        Raises:
            DataError: The row does not fit, or a picture cannot be read.
            TooLongError: It has more tokens than `cutoff_len`.
        """
        place, seed = self.place(index), derive_seed(self.draw_seed, epoch, index)
        chance = random.Random(seed)
        row = TokenRow(self._marks, seed)
        parts = self._parts_of(index, chance)
        pictures = sum(part.kind == "seen" for part in parts)
        with told_as(partial(at_row, place)):
            for part in parts:
                self._add(row, part, pictures, leaves_out=part.may_drop and chance.random() < self._dropout[part.kind])
        arrays = row.arrays()
        if not any(row.counts) and not any(row.drawn):
            raise NothingTrainedError(
                "no word of an answer is trained and nothing is drawn", where=str(place), way_out="Drop the row."
            )
        self.check_length(len(row.ids), place)
        return {"sample_id": str(place), "media": [], "shrunk": False, **arrays}  # type: ignore[typeddict-item]

    def measure(self, index: int) -> SampleSize:
        """The most tokens and patches that the sample has in any epoch."""
        tokens = patches = 0
        parts = self._parts_of(index, None)
        pictures = sum(part.kind == "seen" for part in parts)
        for part in parts:
            if part.kind == "text":
                tokens += len(self._ids_of(part.content)) + 2
                continue
            with told_as(partial(at_row, self.place(index))):
                header: Any = self.media.probe("image", part.content)
            rule = self._seen_size if part.kind == "seen" else self._latent_size
            own = _tokens(rule(header.height, header.width, pictures if part.kind == "seen" else 1), rule.stride)
            tokens += own + 2
            patches += own if part.kind == "seen" else 0
        self.check_length(tokens, self.place(index))
        return SampleSize(tokens, patches)

    @override
    def place(self, index: int) -> RowLocation:
        return self._rows.place(index)

    def row(self, index: int) -> JsonObject:
        """Row `index` as it stands in its file."""
        found: JsonObject = self._rows.row(index)
        return found

    def draw_captions(self, seed: int) -> None:
        """Draw with this seed, `training.seed`, from now on."""
        self.draw_seed = seed

    def build_collator(self, collate_param: CollateParam, *, packs: bool | None = None) -> Collator:
        """Rows padded to the right, or one packed row, in which samples do not see each other."""
        does_pack = self.basic_parameters.packs if packs is None else packs
        return GenericCollator(self.processor, TextOnlyPlugin(), collate_param, _Positions() if does_pack else None)

    def fingerprint(self) -> JsonObject:
        """What a resumed run compares: files, and what shapes samples."""
        files = self._rows.facts()
        settings = {"cutoff_len": self.basic_parameters.cutoff_len, **self.settings()}
        digest = hashlib.sha256(repr((settings, files)).encode()).hexdigest()
        return {"rows": len(self), "files": files, "settings": settings, "hash": digest}

    # --- rows --------------------------------------------------------------------------------------------------------

    def _parts_of(self, index: int, chance: random.Random | None) -> list[RowPart]:
        """The parts of a row; without chance those of the longest that it may be."""
        row, place = self.row(index), self.place(index)
        if "captions" in row and "image" in row:
            return with_context(
                [RowPart("text", _caption(row, place, chance, self._ids_of)), RowPart("drawn", row["image"])]
            )
        if "image_list" in row and "instruction_list" in row:
            return with_context(_edit(row, place, chance, self._ids_of))
        return _placed_parts(self.conversation(index))

    def conversation(self, index: int) -> Sample:
        """A row that is a conversation, converted; its pictures are looked up beside it."""
        sample = convert_row(self.row(index), self._rows.row_format(index), self.place(index), draws=True)
        self._notes.report(sample)
        folder = self._rows.media_root(index)
        if folder is None and self.basic_parameters.dataset_dir is None:
            folder = self._rows.folder(index)
        return sample if folder is None else with_media_beside(sample, str(folder.absolute()))

    def _add(self, row: TokenRow, part: RowPart, pictures: int, *, leaves_out: bool) -> None:
        if part.kind == "text":
            if not leaves_out:
                row.add_text(self._ids_of(part.content), part.weight)
            return
        if leaves_out:
            row.pass_over_picture()
            return
        if part.kind == "seen":
            picture = self.media.load_image(part.content)
            size = self._seen_size(picture.height, picture.width, pictures)
            row.add_seen(resized(picture, size), self._seen_size.stride)
        elif self._features is None:
            row.add_latents(self.latent_pixels(part.content), self._latent_size.stride, is_drawn=part.kind == "drawn")
        else:
            content, size = self.latent_picture(part.content)
            posterior = self._features.posterior(content, size)
            row.add_posterior(posterior, size, self._latent_size.stride, is_drawn=part.kind == "drawn")

    # --- pictures that have latents ----------------------------------------------------------------------------------

    def latent_sources(self, index: int) -> list[Any]:
        """The pictures of a row that have latents in any epoch, as `MediaLoader` takes them. Raises `DataError` for a
        row that does not fit."""
        return [part.content for part in self._parts_of(index, None) if part.kind in ("given", "drawn")]

    def latent_picture(self, source: object) -> tuple[bytes, tuple[int, int]]:
        """The bytes of such a picture, and the height and width that it is brought to. Raises `DataError` as `media`
        does."""
        header: Any = self.media.probe("image", source)
        return self.media.read(source)[0], self._latent_size(header.height, header.width)

    def latent_pixels(self, source: object) -> torch.Tensor:
        """(3, H, W) uint8 of such a picture, in that size."""
        picture = self.media.load_image(source)
        return resized(picture, self._latent_size(picture.height, picture.width))

    def _ids_of(self, text: str) -> list[int]:
        """Its tokens; marks that are written in it are spelled out."""
        ids: list[int] = self.processor(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return ids

    @cached_property
    def media(self) -> MediaLoader:  # type: ignore[override]
        """What opens the pictures of rows, in the folders that are named."""
        basic = self.basic_parameters
        limits = MediaLimits.of(self._preprocess, self.processor, allow_remote=basic.allow_remote_media)
        beside, root = self._rows.media_roots, basic.dataset_dir
        if root is None:
            beside, root = [*self._rows.folders, *beside], str(self._rows.folders[0])
        return MediaLoader(root, (*basic.media_roots, *beside), limits)

    def check_length(self, length: int, place: RowLocation) -> None:
        """Raise `TooLongError` for a sample of more tokens than `cutoff_len`."""
        longest = self.basic_parameters.cutoff_len
        if length > longest:
            error = TooLongError(
                f"the sample has {length} tokens, more than cutoff_len {longest}",
                where=str(place),
                key=f"{_BASIC}.cutoff_len",
                way_out="Raise it, or lower vae_max_image_size and vit_max_image_size of preprocess_parameters.",
            )
            error.tokens = length
            raise error


# --- settings ---------------------------------------------------------------------------------------------------------


def marks_of(tokenizer: Any, folder: Path) -> Marks:
    """The tokens around parts. Raises `ModelFolderError` where the tokenizer lacks one."""
    known = tokenizer.get_vocab()
    for mark in _MARKS:
        if mark not in known:
            raise ModelFolderError(
                f"the tokenizer has no {mark}", where=str(folder), way_out="Take the released model's tokenizer."
            )
    return Marks(*(known[mark] for mark in _MARKS))


def size_rules(preprocess: PreprocessParameters, folder: Path) -> tuple[SizeRule, SizeRule]:
    """How large pictures are seen, and how large those are that have latents. What is not given is as published, or the
    most that the folder's model has places for.

    Raises:
        ConfigError: A size is none, or larger than the model has places for.
        ModelFolderError: The folder's config.json does not tell of patches.
    """
    path = folder / "config.json"
    config = read_json_object(path, ModelFolderError)
    patch: Any = (config.get("vit_config") or {}).get("patch_size")
    latent, pixels = config.get("latent_patch_size", 2), (config.get("vae_config") or {}).get("downsample", 8)
    places = {"vit": config.get("vit_max_num_patch_per_side", 70), "vae": config.get("max_latent_size", 64)}
    if not all(isinstance(each, int) and each > 0 for each in (patch, latent, pixels, *places.values())):
        raise ModelFolderError(
            "has no vit_config.patch_size: it is not a folder of BAGEL",
            where=str(path),
            key=_FOLDER_KEY,
            way_out="Put llm_config.json and vit_config.json of the release into it as llm_config and vit_config.",
        )
    rules = []
    for name, stride in (("vit", patch), ("vae", latent * pixels)):
        most = places[name] * stride
        longest = _size(preprocess, f"{name}_max_image_size", most)
        shortest = _size(preprocess, f"{name}_min_image_size", longest)
        if longest > most:
            raise ConfigError(
                f"{longest} is more than the {most} pixels that the model has places for",
                key=f"{_PREPROCESS}.{name}_max_image_size",
                way_out="Lower it.",
            )
        rules.append(SizeRule(stride, longest, shortest, _size(preprocess, f"{name}_max_pixels", None)))
    return rules[0], rules[1]


def _size(preprocess: PreprocessParameters, name: str, most: int | None) -> int:
    """A given size; else the published one, as far as it fits."""
    value = preprocess.get(name)
    if value is None:
        return _SIZES[name] if most is None else min(_SIZES[name], most)
    key = f"{_PREPROCESS}.{name}"
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{value!r} is not a size in pixels", key=key, way_out="Give a whole number above 0.")
    if name.endswith("min_image_size") and most is not None and value > most:
        raise ConfigError(f"{value} is more than the longest side, {most}", key=key, way_out="Lower it.")
    return value


def share_of(basic: BasicParameters, name: str, default: float) -> float:
    """A share from 0 to 1. Raises `ConfigError` for anything else."""
    value = basic.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{value!r} is not a share", key=f"{_BASIC}.{name}", way_out="Give a number from 0 to 1.")
    return float(value)


def _check_settings(basic: BasicParameters) -> None:
    """Raise `ConfigError` for what these rows are not read with."""
    refused = (
        ("stage", basic.stage, "sft", "Leave it at sft."),
        ("streaming", basic.streaming, False, "Set it to false."),
        ("train_on_prompt", basic.train_on_prompt, False, "Set it to false."),
        ("mask_history", basic.mask_history, False, "Set it to false."),
    )
    for name, value, known, way_out in refused:
        if value != known:
            raise ConfigError(f"{value!r} is not built for these rows", key=f"{_BASIC}.{name}", way_out=way_out)


# --- rows of the published layouts ------------------------------------------------------------------------------------


def at_row(place: RowLocation, problem: Problem) -> Problem:
    """A problem of a picture, with the row that names it."""
    return replace(problem, where=problem.where or str(place))


def _placed_parts(sample: Sample) -> list[RowPart]:
    try:
        return parts_of_sample(sample)
    except DataError as error:
        raise DataError(f"{error}", where=str(sample.place)) from error


def _chosen(texts: Sequence[str], chance: random.Random | None, ids_of: Any) -> str:
    """One of several texts; without chance the longest."""
    if chance is None:
        return max(texts, key=lambda text: len(ids_of(text)))
    return chance.choice(texts)


def _caption(row: Mapping[str, object], place: RowLocation, chance: random.Random | None, ids_of: object) -> str:
    """A caption of a picture: `captions` is an object of texts, as text or as it is."""
    captions = row["captions"]
    try:
        captions = parse_json(captions) if isinstance(captions, str) else captions
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", where=str(place), key="captions") from error
    texts = list(captions.values()) if isinstance(captions, Mapping) else captions
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{captions!r:.80} are not texts by name", where=str(place), key="captions")
    if texts:
        return _chosen(texts, chance, ids_of)
    return " "


def _edit(row: Mapping[str, object], place: RowLocation, chance: random.Random | None, ids_of: object) -> list[RowPart]:
    """A stretch of a chain of edits: its first picture, then an instruction and the picture that it made, once or
    twice; or the instructions of two edits together, and the last picture. Without chance the whole chain."""
    pictures, told = _list_of(row["image_list"]), [_texts(each) for each in _list_of(row["instruction_list"])]
    if len(pictures) < 2 or len(told) < len(pictures) - 1 or not all(told):
        raise DataError(
            f"{len(pictures)} pictures and {len(told)} instructions are no chain of edits",
            where=str(place),
            key="image_list",
            way_out="Give at least two pictures, and one or several texts for each but the first.",
        )
    first, last, joins = 0, len(pictures) - 1, False
    if chance is not None:
        first = chance.randrange(len(pictures) - 1)
        last = chance.randrange(first + 1, min(first + 3, len(pictures)))
        joins = last - first > 1 and chance.random() < 0.5
    said = [_chosen(told[number], chance, ids_of) for number in range(first, last)]
    if joins:
        return [
            RowPart("seen", pictures[first]),
            RowPart("text", ". ".join(said) + "."),
            RowPart("drawn", pictures[last]),
        ]
    parts = [RowPart("seen", pictures[first])]
    for text, picture in zip(said, pictures[first + 1 : last + 1], strict=True):
        parts += [RowPart("text", text), RowPart("drawn", picture)]
    return parts


def _list_of(value: object) -> list[Any]:
    """A column of a row as a list; what is none is empty."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return []


def _texts(value: object) -> list[str]:
    """The ways to say one instruction, which may be one text; none where something else is among them."""
    texts = [value] if isinstance(value, str) else _list_of(value)
    if all(isinstance(text, str) and text.strip() for text in texts):
        return texts
    return []


def _tokens(size: tuple[int, int], stride: int) -> int:
    return (size[0] // stride) * (size[1] // stride)
