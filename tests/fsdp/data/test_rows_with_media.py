"""What a media plugin makes of rows and their media together is in every batch that a model gets: of training, of
questions, of pairs and of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm.fsdp.data.data_utils.data_collator import (
    DATA_COLLATOR,
    GenericCollator,
    register_collator,
    with_media_once,
)
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import CollateParam, PreprocessParameters
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.fsdp.train.rollouts.text import TextRollouts
from mindspeed_mm.tasks.check.batch import notes_on_keys
from tests.fsdp.data.conftest import picture

PICTURES = (1, 0, 2)
"""Of each row."""


def complete(plugin: Any, batch: dict[str, Any], media_of_rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Pictures of each row, the place of its first token, and the joined grids row by row."""
    counts = [len(media) for media in media_of_rows]
    grids = batch["image_grid_thw"].split(counts)
    padded = torch.nn.utils.rnn.pad_sequence(list(grids), batch_first=True)
    return {"pictures": torch.tensor(counts), "begins": batch["attention_mask"].argmax(1), "image_grid_thw": padded}


@pytest.fixture
def plugin(processor: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    plugin = build_mm_plugin(processor, PreprocessParameters())
    monkeypatch.setattr(type(plugin), "complete", complete, raising=False)
    return plugin


def sample_of(plugin: Any, row: int, pictures: int) -> dict[str, Any]:
    media = [plugin.encode_image(picture(32, 32 * (1 + each), seed=row)) for each in range(pictures)]
    ids = np.concatenate([*(item.token_ids for item in media), np.arange(1, 3 + row)])
    return {"input_ids": ids, "labels": ids.copy(), "media": media, "sample_id": f"row {row}"}


def check(batch: dict[str, Any], begins: Sequence[int]) -> None:
    assert batch["pictures"].tolist() == [PICTURES[row % 3] for row in range(len(batch["pictures"]))]
    assert batch["begins"].tolist() == list(begins)
    assert batch["image_grid_thw"].shape == (len(begins), 2, 3)
    assert batch["image_grid_thw"][2, 1].tolist() == [1, 8, 4]  # the second picture of the third row, 64 × 32


def test_batches_of_training_and_of_pairs(processor: Any, plugin: Any) -> None:
    samples = [sample_of(plugin, row, pictures) for row, pictures in enumerate(PICTURES)]
    collate = GenericCollator(processor, plugin, CollateParam())
    check(collate(samples), begins=[0, 0, 0])
    # Pairs and rollouts hold the media of equal rows once, which would part rows from their media.
    check(with_media_once(collate, plugin, samples * 2, copies=2), begins=[0] * 6)


def test_questions_and_prompts_of_rollouts(vlm_folder: Path, plugin: Any) -> None:
    samples = [sample_of(plugin, row, pictures) for row, pictures in enumerate(PICTURES)]
    longest = max(len(sample["input_ids"]) for sample in samples)
    begins = [longest - len(sample["input_ids"]) for sample in samples]
    encoder = QuestionEncoder(vlm_folder)
    check(encoder.collate([EncodedQuestion(sample["input_ids"], sample["media"]) for sample in samples]), begins)
    rollouts = SimpleNamespace(_dataset=SimpleNamespace(plugin=plugin), _tokenizer=encoder.tokenizer)
    check(TextRollouts._collate_prompts(rollouts, samples), begins)  # type: ignore[arg-type]


def test_the_check_tells_keys_that_only_training_has(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DATA_COLLATOR, "_entries", dict(DATA_COLLATOR._entries))
    register_collator("seen", keys=["seen_by", "pixel_values"])(GenericCollator)
    plugin, given = build_mm_plugin(processor, PreprocessParameters()), {"input_ids", "pixel_values", "seen_by"}
    (note,) = notes_on_keys(processor, plugin, "seen", given, given)
    assert "are given no seen_by, which the collator 'seen' adds" in note
    assert not notes_on_keys(processor, plugin, "seen", given, given - {"seen_by"})  # no argument of the forward
    assert not notes_on_keys(processor, plugin, None, given, given)
    monkeypatch.setattr(type(plugin), "complete", complete, raising=False)
    assert not notes_on_keys(processor, plugin, "seen", given, given)
    monkeypatch.setattr(type(plugin), "of_text", frozenset({"seen_by"}), raising=False)
    (note,) = notes_on_keys(processor, plugin, None, given - {"seen_by"}, given)
    assert "the batch has no seen_by, which" in note and "in `complete` of the media plugin" in note
    assert not notes_on_keys(processor, plugin, None, {"input_ids"}, given)  # a batch without pictures
    assert not notes_on_keys(processor, plugin, None, given, given)
