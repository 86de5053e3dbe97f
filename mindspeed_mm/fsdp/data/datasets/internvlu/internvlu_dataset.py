"""Rows for InternVL-U, which answers in words or draws one picture: `dataset_type: internvlu`."""

from __future__ import annotations

import random
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from typing_extensions import override

from mindspeed_mm.core.batch import IGNORED_LABEL, SEEN
from mindspeed_mm.core.errors import ConfigError, DataError, told_as
from mindspeed_mm.core.json_file import JsonMapping, JsonObject
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.data.data_utils.sample import (
    REPAIR,
    EncodedSample,
    NothingTrainedError,
    RowLocation,
    Sample,
    SampleSize,
)
from mindspeed_mm.fsdp.data.datasets.bagel.bagel_dataset import BagelDataset, at_row, share_of
from mindspeed_mm.fsdp.data.datasets.bagel.parts import resized
from mindspeed_mm.fsdp.data.datasets.internvlu.turns import (
    LEFT,
    GenerationSize,
    Left,
    ReadingSizes,
    Task,
    TurnEncoder,
    TurnRow,
    arrays_of,
    seen_pixels,
)
from mindspeed_mm.fsdp.models.diffusion.joint_positions import latent_positions, state_positions
from mindspeed_mm.fsdp.params.data_args import BasicParameters, PreprocessParameters
from mindspeed_mm.fsdp.utils.register import data_register

_PREPROCESS = "data.dataset_param.preprocess_parameters"
_SHARES = (("text_cond_dropout_prob", 0.1), ("all_cond_dropout_prob", 0.1))
_PATCH = 8
"""Pixels that `image_gen_processor_kwargs` count areas in."""


class TurnsTold(NamedTuple):
    """A conversation, taken apart into what its tokens are made of."""

    system: str | None
    turns: list[tuple[str, list[str | None], float]]
    """Role; texts, and None for each picture; how much the turn counts."""
    pictures: list[Any]
    """Of the questions, in order."""
    drawn: Any = None
    """The picture that the last answer ends with."""


@data_register.register("internvlu")
class InternVLUDataset(BagelDataset):
    """Conversations in every layout of `huggingface`: questions with pictures, answered in words; or one question whose
    answer ends with a picture that is drawn. Arguments and errors as of `BagelDataset`."""

    @override
    def read_settings(self, basic_param: BasicParameters, preprocess_param: PreprocessParameters) -> None:
        self._sizes = ReadingSizes.of(self.folder)
        self._size = generation_size(preprocess_param, self._sizes)
        self._turns = TurnEncoder(self.processor, self.folder, self._sizes.seen_side**2)
        self._shares = [share_of(basic_param, *told) for told in _SHARES]
        if sum(self._shares) > 1:
            raise ConfigError(
                f"{self._shares[0]} and {self._shares[1]} are more than all rows",
                key=f"data.dataset_param.basic_parameters.{_SHARES[1][0]}",
                way_out="Lower one of the two.",
            )

    @override
    def settings(self) -> JsonObject:
        return {"dropout": self._shares, "sizes": repr((self._sizes, self._size))}

    @override
    def item(self, index: int, epoch: int) -> EncodedSample:
        place, seed = self.place(index), derive_seed(self.draw_seed, epoch, index)
        with told_as(partial(at_row, place)):
            told = taken_apart(self.conversation(index), place)
            left = self._left(random.Random(seed)) if told.drawn is not None else ""
            row, seen = self._encoded(told, left)
            self.check_length(len(row.ids), place)
            arrays = self._arrays(row, told, seen, seed)
        if not any(row.counts) and told.drawn is None:
            raise NothingTrainedError(
                "no word of an answer is trained and nothing is drawn", where=str(place), way_out="Drop the row."
            )
        return {"sample_id": str(place), "media": [], "shrunk": False, **arrays}  # type: ignore[typeddict-item]

    @override
    def measure(self, index: int) -> SampleSize:
        with told_as(partial(at_row, self.place(index))):
            told = taken_apart(self.conversation(index), self.place(index))
            for source in (*told.pictures, *([] if told.drawn is None else [told.drawn])):
                self.media.probe("image", source)
            encoded = [self._encoded(told, left) for left in (LEFT if told.drawn is not None else LEFT[:1])]
        tokens = max(len(row.ids) for row, _ in encoded)
        self.check_length(tokens, self.place(index))
        return SampleSize(tokens, len(told.pictures) * self._sizes.seen_side**2)

    def _left(self, chance: random.Random) -> Left:
        drawn = chance.random()
        if drawn < self._shares[1]:
            return "all"
        if drawn < sum(self._shares):
            return "text"
        return ""

    def _encoded(self, told: TurnsTold, left: Left) -> tuple[TurnRow, int]:
        """Tokens, and how many pictures are seen."""
        draws = told.drawn is not None
        task: Task = "answer" if not draws else "edit" if told.pictures else "draw"
        row, seen = self._turns.begin(task, told.system), len(told.pictures)
        for role, pieces, weight in told.turns:
            if role == "user" and left:
                seen = self._turns.left_out(row, left, seen)
            elif role == "user":
                self._turns.question(row, pieces, is_read=draws)
            elif draws:
                self._turns.drawn(row, "" if left else str("".join(filter(None, pieces))), weight)
            else:
                self._turns.answer(row, "".join(filter(None, pieces)), weight)
        return row, seen

    def _arrays(self, row: TurnRow, told: TurnsTold, seen: int, seed: int) -> dict[str, Any]:
        """Under the names of batch keys; keys of pictures only where there are some."""
        arrays: dict[str, Any] = dict(arrays_of(row))
        counts = np.array(row.counts, dtype=np.float32)
        arrays["labels"] = np.where(counts != 0, arrays["input_ids"], IGNORED_LABEL)
        if np.any((counts != 0) & (counts != 1)):
            arrays["loss_weights"] = counts
        pictures = [self.media.load_image(source) for source in told.pictures[:seen]]
        if pictures:
            arrays["pixel_values"] = seen_pixels(self._sizes, pictures)
        if told.drawn is None:
            return arrays
        with_latents = [*pictures, self.media.load_image(told.drawn)]
        pixels = [resized(each, self._size(each.height, each.width)) for each in with_latents]
        return arrays | pictures_with_latents(pixels, seed) | read_states(row, pixels, self._sizes)


def pictures_with_latents(pixels: list[torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Keys of pictures (3, H, W) uint8, of which the last one is drawn and the others are given.

    Args:
        pixels: Of each picture.
        seed: What noise is drawn with.
    """
    return {
        "picture_pixels": torch.cat([each.flatten() for each in pixels]),
        "picture_sizes": torch.tensor([each.shape[1:] for each in pixels]),
        "picture_is_drawn": torch.tensor([number == len(pixels) - 1 for number in range(len(pixels))]),
        "picture_seeds": torch.tensor([derive_seed(seed, number) >> 1 for number in range(len(pixels))]),
    }


def read_states(row: TurnRow, pixels: list[torch.Tensor], sizes: ReadingSizes) -> dict[str, torch.Tensor]:
    """Keys of the states that a picture is drawn from.

    Args:
        row: Its tokens.
        pixels: As of `pictures_with_latents`.
        sizes: Of the folder.
    """
    side = sizes.latent_side
    grids = [(each.shape[1] // side, each.shape[2] // side) for each in (pixels[-1], *pixels[:-1])]
    seen = [kind == SEEN for kind, is_read in zip(row.kinds, row.reads, strict=True) if is_read]
    latents = latent_positions(grids, sizes.scale)
    positions = state_positions(latents, seen, sizes.seen_side, sizes.seen_scale)
    return {"state_positions": positions, "state_lengths": torch.tensor([len(positions)])}


def taken_apart(sample: Sample, place: RowLocation) -> TurnsTold:
    """A conversation as turns.

    Raises:
        DataError: It has media that are no pictures, tools, or pictures where this model has none.
    """
    system: str | None = None
    turns: list[tuple[str, list[str | None], float]] = []
    pictures: list[Any] = []
    drawn, media, last = None, iter(sample.media), len(sample.messages) - 1
    for number, (message, weight) in enumerate(zip(sample.messages, sample.weights, strict=True)):
        role, content = message["role"], message["content"]
        if drawn is not None:
            raise _refused("goes on behind a picture that is drawn", place)
        pieces: list[str | None] = []
        for piece in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if piece["type"] == "text":
                if drawn is not None and piece["text"].strip():
                    raise _refused("has words behind a picture that is drawn", place)
                pieces.append(piece["text"])
                continue
            item = next(media)
            if item.kind != "image":
                raise DataError(f"the row has a {item.kind}, but the model takes pictures only", key=f"{item.kind}s")
            if role == "user":
                pictures.append(item.source)
                pieces.append(None)
            elif role == "assistant" and drawn is None and number == last and weight != 0:
                drawn = item.source
            else:
                raise _refused("has a picture that is neither a question's nor the end of the last answer", place)
        if role == "system":
            system = "".join(filter(None, pieces))
        elif role in ("user", "assistant"):
            turns.append((role, pieces, 0.0 if role == "user" else 1.0 if weight is None else float(weight)))
        else:
            raise DataError(f"has a turn of '{role}', which this model does not know", key="messages", way_out=REPAIR)
    if drawn is not None:
        if [role for role, _, _ in turns] != ["user", "assistant"]:
            raise _refused("draws a picture in a conversation of several questions", place)
        if turns[-1][2] != 1:
            raise DataError(f"a turn with a picture counts {turns[-1][2]:g}, and drawn pictures count 0 or 1",
                            key="weight", way_out=REPAIR)  # fmt: skip
    return TurnsTold(system, turns, pictures, drawn)


def _refused(what: str, place: RowLocation) -> DataError:
    return DataError(
        f"the row {what}",
        where=str(place),
        key="messages",
        way_out="Give one question, and one answer that ends with the picture it draws; or answers in words alone.",
    )


def generation_size(preprocess: PreprocessParameters, sizes: ReadingSizes) -> GenerationSize:
    """How large pictures are that have latents. What is not given is as the folder's `image_gen_processor_kwargs` say.

    Raises:
        ConfigError: A size is none.
    """
    told: JsonMapping = sizes.processor.get("image_gen_processor_kwargs") or {}
    published = {
        "vae_min_pixels": told.get("min_dynamic_patch", 4096) * _PATCH**2,
        "vae_max_pixels": told.get("max_dynamic_patch", 16384) * _PATCH**2,
        "vae_max_image_size": told.get("max_length") or 1024,
    }
    values = []
    for name, default in published.items():
        value = preprocess.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{value!r} is not a size in pixels",
                key=f"{_PREPROCESS}.{name}",
                way_out="Give a whole number above 0.",
            )
        values.append(value)
    return GenerationSize(sizes.latent_side, *values)


def opened(picture: Image.Image, size: GenerationSize) -> torch.Tensor:
    """(3, H, W) uint8 of an RGB picture, as large as one is that has latents."""
    return resized(picture, size(picture.height, picture.width))
