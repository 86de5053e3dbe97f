"""Samples → a batch: padded rows or one packed row, the one shift of the labels, media joined by the model's plugin.

One generic collator serves every model whose processor names its inputs; a named one exists where a model really
differs. `register_collator` adds one from outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from mindspeed_mm.core.batch import BATCH_KEYS, IGNORED_LABEL, Batch, check_batch
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.packing import packed_row
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import MediaFeatures, MediaPlugin, complete_of
from mindspeed_mm.fsdp.data.data_utils.positions import KEY as PACKING_KEY
from mindspeed_mm.fsdp.data.data_utils.positions import PositionRule, in_one_form, inputs_of_samples
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedPair, EncodedSample
from mindspeed_mm.fsdp.data.data_utils.token_arrays import BESIDE, trainable_arrays
from mindspeed_mm.fsdp.data.data_utils.transcript_language import is_whisper
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

Collator = Callable[[Sequence[Any]], Batch]
"""Its `check_sample(sample)`, which raises `DataError`, is asked about each sample of a plugin's data set; where it has
none, `check_lengths` is."""
CollatorClass = TypeVar("CollatorClass", bound=Callable[..., Collator])

PADDING_ON_ACCELERATORS = 8
"""Tokens: matrix products of half precision want sizes that are multiples of it."""


@dataclass(frozen=True)
class _Traits:
    """What has to be known of a collator beside its class."""

    extra_keys: frozenset[str] = frozenset()
    packs: bool = False
    """It can make one row of several samples."""
    checks_itself: bool = False
    """It knows the keys that the processor brings, and allows those, too."""


DATA_COLLATOR = Registry("data.dataloader_param.collate_param.model_name")
_TRAITS: dict[str, _Traits] = {}
"""Of the collators, by name; of one that is filed in `DATA_COLLATOR` alone the defaults."""


def register_collator(
    name: str, *, keys: Sequence[str] = (), packs: bool = False
) -> Callable[[CollatorClass], CollatorClass]:
    """Decorator that files a collator under `name`.

    The class is called with (processor, plugin, collate_param) and gives a function from samples to a batch. What it
    does not give is added: `shift_labels` (labels shifted once to the left inside each document) is made of `labels`,
    and `sample_ids` of what the samples are called.

    Args:
        name: The id that `collate_param.model_name` uses.
        keys: Batch keys beyond the documented ones of `core.batch.BATCH_KEYS`.
        packs: The class takes a fourth argument, the `PositionRule` of a packed row (None: rows are not packed).
    """

    def add(collator: CollatorClass) -> CollatorClass:
        _TRAITS[name] = _Traits(frozenset(keys), packs)
        return DATA_COLLATOR.register(name)(collator)

    return add


def _register_generic(*names: str, packs: bool = False) -> Callable[[CollatorClass], CollatorClass]:
    """The same for collators of this module, which check what they make."""

    def add(collator: CollatorClass) -> CollatorClass:
        for name in names:
            _TRAITS[name] = _Traits(packs=packs, checks_itself=True)
            DATA_COLLATOR.register(name)(collator)
        return collator

    return add


def keys_beside(name: str | None) -> frozenset[str]:
    """The batch keys that a registered collator adds to the documented ones; none of those of the suite."""
    return _TRAITS.get(name or "", _Traits()).extra_keys - BATCH_KEYS.keys()


def build_collator(
    processor: object,
    plugin: MediaPlugin,
    collate_param: CollateParam,
    *,
    positions: PositionRule | None = None,
    pairs: bool = False,
) -> Collator:
    """The collator that the configuration names, or the generic one. Those of the suite, whose names stand for models,
    take preference pairs where the rows are such; one of somebody else that derives from the generic one gets the
    answers of all pairs as rows.

    Args:
        processor: Processor or tokenizer.
        plugin: The media plugin that encoded the samples.
        collate_param: `dataloader_param.collate_param`.
        positions: Pack all samples of a micro-batch into one row, and count their tokens by this rule.
        pairs: The samples are preference pairs.

    Raises:
        ConfigError: The collator cannot pack.
    """
    name = collate_param.model_name
    if pairs and (name is None or _TRAITS.get(name, _Traits()).checks_itself):
        name = "pairwise"
    if name is None and is_whisper(processor):
        name = "whisper"
    if name is None:
        return GenericCollator(processor, plugin, collate_param, positions)
    collator_class, traits = DATA_COLLATOR.get(name), _TRAITS.get(name, _Traits())
    of_answers = isinstance(collator_class, type) and issubclass(collator_class, GenericCollator)
    if positions is None:
        collator = collator_class(processor, plugin, collate_param)
        if pairs and of_answers:
            collator = PairwiseCollator(processor, plugin, collate_param, own=collator)
    elif traits.packs and not (pairs and of_answers):
        collator = collator_class(processor, plugin, collate_param, positions)
    else:
        raise ConfigError(
            f"the collator '{name}' does not put samples into one row",
            key=PACKING_KEY,
            way_out="Set it to false; or leave collate_param.model_name out, which takes the processor's; or give "
            "the collator a fourth argument and register it with packs=True.",
        )
    if traits.checks_itself:
        return collator
    return partial(_collate_checked, collator, traits.extra_keys)


def _collate_checked(collator: Collator, extra_keys: frozenset[str], samples: Sequence[object]) -> Batch:
    """What the collator of somebody else makes, its keys checked."""
    batch = collator(samples)
    check_batch(batch, extra_keys)
    return batch


@_register_generic(
    *("qwen2vl", "qwen3vl", "qwen3omni", "qwen3asr", "funasr", "internvl", "glm4v_moe", "step3_vl", "llm_pretrain"),
    packs=True,
)
class GenericCollator:
    """Rows padded to the right, or one packed row, with the keys that the plugin and the samples bring.

    `ignore_pad_token_for_loss` changes nothing: padding is never trained.

    Args:
        processor: Processor or tokenizer.
        plugin: The media plugin that encoded the samples.
        collate_param: `pad_to_multiple_of` is read; null: by the device.
        positions: Pack, and count tokens by this rule.
    """

    def __init__(
        self, processor: object, plugin: MediaPlugin, collate_param: CollateParam, positions: PositionRule | None = None
    ) -> None:
        self._plugin = plugin
        self._multiple = padding_multiple(collate_param)
        self._pad_id = tokenizer_of(processor).pad_token_id
        self._positions = positions

    def check_sample(self, sample: object) -> None:
        """Raise `DataError` for a sample, a plugin's, that cannot be joined with others."""
        trainable_arrays(sample)

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """Collate and check. Further arrays of a sample are joined along their first axis, under their own names."""
        # Media of all samples are joined in the order of the rows: models assign them to placeholders by order.
        media = self._plugin.collate(_media_of(samples))
        of_processor = frozenset(media)  # what a processor calls its tensors, the model's `forward` names too
        media |= _further_arrays(samples)
        documents = self._documents(samples)
        fills = {name: _FILLS.get(name, 0) for name in documents[0]} | {"input_ids": self._pad_id}
        if self._positions is None:
            batch: Batch = padded_rows(documents, fills, self._multiple)
        else:
            # Positions are counted sample by sample, each from its own tokens and media, before the rows are joined.
            positions = []
            inputs = inputs_of_samples(samples, media, self._positions.reads)
            for document, own in zip(documents, inputs, strict=True):
                positions.append(self._positions(document["input_ids"], own | document))
            batch = packed_row(documents, fills, self._multiple, in_one_form(positions))
        batch |= media | _names(samples)
        of_rows = completed_by_plugin(batch, self._plugin, [sample.get("media") or [] for sample in samples])
        check_batch(of_rows, of_processor | (of_rows.keys() - batch.keys()))
        return of_rows

    def _documents(self, samples: Sequence[EncodedSample]) -> list[dict[str, np.ndarray]]:
        """The arrays of each sample along its tokens (L,), under the names of batch keys."""
        arrays = [trainable_arrays(sample) for sample in samples]
        is_weighted = any(each.weights is not None for each in arrays)
        beside = [name for name in BESIDE if any(name in each.beside for each in arrays)]
        documents = []
        for ids, labels, weights, own in arrays:
            assert labels is not None
            document = {"input_ids": ids, "labels": labels, "shift_labels": shifted(labels, IGNORED_LABEL)}
            if is_weighted:
                # Of every sample in the batch: one with weights makes those without count as ones.
                document["loss_weights"] = _weights_of(labels, weights)
            document |= self._plugin.token_marks(ids)
            for name in beside:
                document[name] = own.get(name, np.full_like(ids, BESIDE[name]))
            documents.append(document)
        return documents


def shifted(tokens_L: np.ndarray, fill: float) -> np.ndarray:
    """What the token behind each one has."""
    return np.append(tokens_L[1:], np.array([fill], dtype=tokens_L.dtype))


def padding_multiple(collate_param: CollateParam) -> int:
    """The number of tokens that rows are padded to a multiple of: as configured, else what this device gains by."""
    if collate_param.pad_to_multiple_of:
        return collate_param.pad_to_multiple_of
    if get_device_type() == "cpu":
        return 1
    return PADDING_ON_ACCELERATORS


def padded_rows(
    documents: Sequence[Mapping[str, np.ndarray]], fills: Mapping[str, float], multiple: int
) -> dict[str, torch.Tensor]:
    """(B, L) tensors, right-padded, and `attention_mask`, unless documents have one.

    Args:
        documents: Arrays along tokens, of each sample.
        fills: Key → what padding has.
        multiple: L is one of it.
    """
    lengths = [len(document["input_ids"]) for document in documents]
    # -(-a // b) is the quotient rounded up.
    width = -(-max(lengths) // multiple) * multiple
    batch = {}
    for name, fill in fills.items():
        rows = np.full((len(documents), width), fill, dtype=documents[0][name].dtype)
        for row, document, length in zip(rows, documents, lengths, strict=True):
            row[:length] = document[name]
        batch[name] = torch.from_numpy(rows)
    if "attention_mask" not in fills:  # else padding has 0 already
        batch["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return batch


def left_padded_questions(
    questions: Sequence[tuple[np.ndarray, Sequence[MediaFeatures]]], plugin: MediaPlugin, pad_id: int
) -> dict[str, torch.Tensor]:
    """Rows that the model is to go on with, without the tensors of their media: `left_padded_rows` of their tokens and
    the plugin's marks.

    Args:
        questions: Of each row its tokens (L,) and its media, in order.
        plugin: The media plugin that encoded them.
        pad_id: The token that pads.
    """
    rows = [{"input_ids": ids, **plugin.token_marks(ids)} for ids, _ in questions]
    return left_padded_rows(rows, dict.fromkeys(rows[0], 0.0) | {"input_ids": pad_id})


def with_media(batch: Batch, plugin: MediaPlugin, media_of_rows: Sequence[Sequence[MediaFeatures]]) -> Batch:
    """A batch with the tensors of its media, and with what the plugin makes of rows and media together.

    Args:
        batch: Rows of tokens, padded on either side.
        plugin: The media plugin that encoded the media.
        media_of_rows: Each row's media, in order.
    """
    media = list(chain.from_iterable(media_of_rows))
    if media:
        batch = batch | plugin.collate(media)
    return completed_by_plugin(batch, plugin, media_of_rows)


def completed_by_plugin(batch: Batch, plugin: MediaPlugin, media_of_rows: Sequence[Sequence[MediaFeatures]]) -> Batch:
    """A batch with what the plugin's `complete` makes, if it has one. Arguments as of `with_media`."""
    complete = complete_of(plugin)
    if complete is None:
        return batch
    return {**batch, **complete(batch, media_of_rows)}


def left_padded_rows(rows: Sequence[Mapping[str, np.ndarray]], fills: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """(B, L) tensors and `attention_mask`, padded on the left: every answer starts at the same place. Arguments as of
    `padded_rows`."""
    # Turned round, padded on the right and turned back.
    turned = []
    for row in rows:
        turned.append({name: values[::-1] for name, values in row.items()})
    return {name: values.flip(-1) for name, values in padded_rows(turned, fills, 1).items()}


@_register_generic("whisper")
class WhisperCollator(GenericCollator):
    """Speech to text by an encoder-decoder: the tokens are the decoder's, right-padded."""

    def __call__(self, samples: Sequence[EncodedSample]) -> Batch:
        """Token n of the decoder gives token n + 1: `labels`, too, stand where they are predicted."""
        batch = super().__call__(samples)
        batch["decoder_input_ids"] = batch.pop("input_ids")
        batch["decoder_attention_mask"] = batch.pop("attention_mask")
        batch["labels"] = batch["shift_labels"]
        return batch


@_register_generic("pairwise", "qwen2vl_dpo")
class PairwiseCollator:
    """Preference pairs: a generic batch of B rows with the better answers, and behind them B with the worse. Media that
    the two rows of every pair share are held once, under their keys in `shared_media`. Arguments as of
    `GenericCollator`.

    Args:
        own: Somebody else's collator of these 2 B rows. It may look at the media of each: nothing is shared.
    """

    def __init__(
        self, processor: object, plugin: MediaPlugin, collate_param: CollateParam, own: Collator | None = None
    ) -> None:
        self._collate = own or GenericCollator(processor, plugin, collate_param)
        self._plugin, self._shares = plugin, own is None

    def check_sample(self, sample: object) -> None:
        """Raise `DataError` for a sample that is no pair of answers that can be joined with others."""
        if not (isinstance(sample, Mapping) and {"chosen", "rejected"} <= sample.keys()):
            told = type(sample).__name__
            if isinstance(sample, Mapping):
                told = ", ".join(map(str, sample))
            way_out = "Let the data set give a dict of two samples, chosen and rejected."
            raise DataError(f"the sample is no preference pair: {told}", key="chosen", way_out=way_out)
        trainable_arrays(sample["chosen"])
        trainable_arrays(sample["rejected"])

    def __call__(self, samples: Sequence[EncodedPair]) -> Batch:
        """Rows n and B + n answer the same prompt."""
        chosen = [sample["chosen"] for sample in samples]
        rejected = [sample["rejected"] for sample in samples]
        # `SampleEncoder.encode` hands the same objects to both answers where their media are equal.
        copies = 2 if self._shares and all(map(_share_media, chosen, rejected)) else 1
        batch = with_media_once(self._collate, self._plugin, [*chosen, *rejected], copies) | {"pairs": len(samples)}
        batch.pop("sample_ids", None)
        return batch | _names(samples)


def with_media_once(collate: Collator, plugin: MediaPlugin, samples: Sequence[Any], copies: int) -> Batch:
    """A batch that holds the media of so many equal blocks of samples once, under their keys in `shared_media`.

    Args:
        collate: Samples → batch.
        plugin: The media plugin that encoded the samples.
        samples: Block after block; sample n of each block shows the same `media`.
        copies: Number of blocks; 1: nothing is shared.
    """
    first = samples[: len(samples) // copies]
    media = _media_of(first)
    if copies == 1 or not media or complete_of(plugin) is not None:  # it needs each row's media with the row
        return collate(samples)
    # Token ids keep the placeholders' tokens; only the tensors of the media are not repeated.
    others: list[Any] = [{**sample, "media": []} for sample in samples[len(first) :]]
    batch = collate([*first, *others])
    return batch | {"shared_media": sorted(plugin.collate(media).keys() & batch.keys()), "media_copies": copies}


def _media_of(samples: Iterable[EncodedSample]) -> list[MediaFeatures]:
    """The items of all samples, in order; a plugin's samples may have none."""
    media: list[MediaFeatures] = []
    for sample in samples:
        media += sample.get("media") or ()
    return media


def _share_media(chosen: EncodedSample, rejected: EncodedSample) -> bool:
    """Whether two rows show the very same media, none left out of either."""
    first, second = chosen.get("media") or [], rejected.get("media") or []
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _names(samples: Sequence[Mapping[str, object]]) -> Batch:
    """`sample_ids`, unless a plugin's samples have no names: the loader gives them its own then."""
    names = [sample["sample_id"] for sample in samples if "sample_id" in sample]
    if len(names) == len(samples):
        return {"sample_ids": names}
    return {}


def _weights_of(labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """(L,) float32 of the token behind each one; 0 where it is not trained."""
    # Weights follow the label: position n holds the loss of token n + 1.
    shift_labels = shifted(labels, IGNORED_LABEL)
    of_next = np.ones(len(labels))
    if weights is not None:
        of_next = shifted(weights, 0.0)
    return np.where(shift_labels == IGNORED_LABEL, 0.0, of_next).astype(np.float32)


def _further_arrays(samples: Sequence[EncodedSample]) -> dict[str, torch.Tensor]:
    """What a plugin's data set adds to its samples. Raises `DataError` for what cannot be joined."""
    found: dict[str, list[Any]] = {}
    for sample in samples:
        for name, value in sample.items():
            if name not in _SAMPLE_KEYS and name not in BESIDE:
                found.setdefault(name, []).append(value)
    joined = {}
    for name, values in found.items():
        try:
            joined[name] = torch.cat([torch.as_tensor(value) for value in values])
        except (RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"the samples' arrays cannot be joined along their first axis: {str(error).splitlines()[0]}",
                key=name,
                way_out="Leave it out of the samples, or give the data set its own `collate_fn(samples) -> batch`.",
            ) from error
    return joined


_SAMPLE_KEYS = EncodedSample.__annotations__.keys()
_FILLS = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL}
