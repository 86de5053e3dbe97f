"""Samples → a batch: right padding, the one shift of the labels, media joined by the model's plugin.

One generic collator serves every model whose processor names its inputs; a named one exists where a model really
differs. `register_collator` adds one from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from mindspeed_mm.core.batch import Batch, check_batch
from mindspeed_mm.fsdp.data.data_utils.encode import IGNORED
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MediaPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

Collator = Callable[[Sequence[Any]], Batch]
CollatorClass = TypeVar("CollatorClass", bound=Callable[..., Collator])

DATA_COLLATOR = Registry("data.dataloader_param.collate_param.model_name")
_EXTRA_KEYS: dict[str, frozenset[str]] = {}


def register_collator(name: str, *, keys: Sequence[str] = ()) -> Callable[[CollatorClass], CollatorClass]:
    """Decorator that files a collator under `name`.

    The class is called with (processor, plugin, collate_param) and gives a function from samples to a batch, which
    needs `shift_labels` (labels shifted once to the left inside each document) and `sample_ids`.

    Args:
        name: The id that `collate_param.model_name` uses.
        keys: Batch keys beyond the documented ones of `core.batch.BATCH_KEYS`.
    """

    def add(collator: CollatorClass) -> CollatorClass:
        _EXTRA_KEYS[name] = frozenset(keys)
        return DATA_COLLATOR.register(name)(collator)

    return add


def build_collator(processor: Any, plugin: MediaPlugin, collate_param: Any) -> Collator:
    """The collator that the configuration names, or the generic one.

    Args:
        processor: Processor or tokenizer.
        plugin: The media plugin that encoded the samples.
        collate_param: `dataloader_param.collate_param`.
    """
    name = collate_param.model_name
    if name is None:
        return GenericCollator(processor, plugin, collate_param)
    collator, extra = DATA_COLLATOR.get(name)(processor, plugin, collate_param), _EXTRA_KEYS.get(name, frozenset())
    return CheckedCollator(collator, extra)


class CheckedCollator:
    """Checks the keys of what another collator makes."""

    def __init__(self, collator: Collator, extra_keys: frozenset[str] = frozenset()) -> None:
        self._collator, self._extra_keys = collator, extra_keys

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """Collate and check."""
        batch = self._collator(samples)
        check_batch(batch, self._extra_keys)
        return batch


@register_collator("qwen2vl")
@register_collator("qwen3vl")
@register_collator("llm_pretrain")
class GenericCollator:
    """Pads to the right and asks the processor which keys its model takes. B rows, L tokens.

    `ignore_pad_token_for_loss` changes nothing: padding is never trained.

    Args:
        processor: Processor or tokenizer.
        plugin: The media plugin that encoded the samples.
        collate_param: `pad_to_multiple_of` is read.
    """

    def __init__(self, processor: Any, plugin: MediaPlugin, collate_param: Any) -> None:
        self._plugin = plugin
        self._multiple = collate_param.pad_to_multiple_of
        self._pad_id = tokenizer_of(processor).pad_token_id
        self._marks_media = "mm_token_type_ids" in getattr(processor, "model_input_names", ())

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """Collate and check. Further arrays of a sample are joined along their first axis, under their own names."""
        batch = self._text_keys(samples)
        batch |= self._plugin.collate([item for sample in samples for item in sample.get("media") or ()])
        for name in samples[0].keys() - _SAMPLE_KEYS:
            batch[name] = torch.cat([torch.as_tensor(sample[name]) for sample in samples])  # type: ignore[literal-required]
        batch["sample_ids"] = [sample["sample_id"] for sample in samples]
        check_batch(batch)
        return batch

    def _text_keys(self, samples: Sequence[EncodedSample]) -> Batch:
        lengths = [len(sample["input_ids"]) for sample in samples]
        shape = (len(samples), -(-max(lengths) // self._multiple) * self._multiple)
        ids, mask = np.full(shape, self._pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        labels, shifted = np.full(shape, IGNORED, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
            ids[row, :length] = sample["input_ids"]
            mask[row, :length] = 1
            labels[row, :length] = sample["labels"]
            shifted[row, : length - 1] = sample["labels"][1:]
        arrays = {"input_ids": ids, "attention_mask": mask, "labels": labels, "shift_labels": shifted}
        if self._marks_media:
            arrays["mm_token_type_ids"] = ((ids == self._plugin.image_token_id) & (mask == 1)).astype(np.int32)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


_SAMPLE_KEYS = EncodedSample.__annotations__.keys()
