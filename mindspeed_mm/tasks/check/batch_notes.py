"""What `mm check` remarks on a batch that a model takes, where training or use may still differ from what is meant."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from mindspeed_mm.fsdp.data.data_utils.data_collator import keys_beside
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import complete_of, marks_left_to_collators
from mindspeed_mm.fsdp.utils.processor import beginning_of, tokenizer_of


def notes_on_keys(
    processor: object, plugin: Any, collator: str | None, given: Collection[str], taken: Collection[str]
) -> list[str]:
    """Remarks on inputs that the released model has and training lacks, and on those that training alone has.

    Args:
        processor: Of the model.
        plugin: The media plugin of the rows; None of a data set without one.
        collator: `collate_param.model_name`.
        given: Keys of the first batch that the model is given.
        taken: Arguments of its forward.
    """
    notes = []
    marks = marks_left_to_collators(processor)
    if marks is not None and marks in taken and marks not in given:
        notes.append(
            f"the batch has no {marks}, which {type(processor).__name__} gives and the model's forward "
            "takes: attention may differ from the released model's; a collator can add them (docs/data.md, B)"
        )
    added = sorted(keys_beside(collator) & set(given) & set(taken))
    if added and plugin is not None and complete_of(plugin) is None:
        notes.append(
            f"questions of mm infer, mm evaluate and rollouts are given no {', '.join(added)}, which the collator "
            f"'{collator}' adds for training: if answers need them, make them in `complete` of the media plugin "
            "(docs/data.md, B)"
        )
    return notes


def notes_on_beginnings(processor: Any, input_ids_BL: torch.Tensor) -> list[str]:
    """A remark where a processor begins every text with tokens that rows of a batch lack, as Molmo2's does, which
    neither the tokenizer nor the chat template writes.

    Args:
        processor: Of the model.
        input_ids_BL: Of the first batch, padded on the right.
    """
    beginning = beginning_of(processor)
    if not beginning or all(row[: len(beginning)] == beginning for row in input_ids_BL.tolist()):
        return []
    written = tokenizer_of(processor).decode(beginning)
    return [
        f"{type(processor).__name__} begins every text with {written!r}, the rows do not: the model may answer worse; "
        "set chat_template to a file with the model's own template behind it (docs/data.md, B)"
    ]
