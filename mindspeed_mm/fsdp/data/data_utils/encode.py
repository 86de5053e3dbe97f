"""A `Sample` → token ids, label mask and media tensors.

The rendered text is tokenised once, as a whole; the characters that the model wrote give the trained tokens;
placeholder tokens are replaced by the tokens of their media afterwards, so nothing can be cut or shifted in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import DataError, Problem
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import encode_media, measure_media
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import (
    ItemSize,
    MediaFeatures,
    MediaPlugin,
    tokens_of_media,
)
from mindspeed_mm.fsdp.data.data_utils.rendering.placement import Expansion, MediaPlaces, Placed, write_items_of
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import Span
from mindspeed_mm.fsdp.data.data_utils.rendering.tokens import Encoding, Tokens, token_span, without_marks
from mindspeed_mm.fsdp.data.data_utils.sample import (
    EncodedPair,
    EncodedSample,
    NothingTrainedError,
    Sample,
    SampleSize,
    TooLongError,
    count_media,
    is_usual,
)
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate
from mindspeed_mm.fsdp.params.data_args import PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import tokenizer_of

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.utils.processor import Processor

_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_CUTOFF_KEY = "data.dataset_param.basic_parameters.cutoff_len"
_FOR_CONVERSATIONS = "Raise cutoff_len, lower image_max_pixels, or set truncation: shrink, which removes whole turns."
_FOR_DOCUMENTS = "Raise cutoff_len, or set truncation: split, which cuts documents into pieces (not of streamed rows)."


@dataclass(frozen=True)
class EncodeOptions:
    """What is trained, and how long a sample may be."""

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    mask_empty_thoughts: bool = False
    truncation: Literal["drop", "shrink", "split", "error"] = "drop"
    """`split`: documents are encoded whole, whatever their length; whoever takes them cuts them."""
    train_media: bool = False
    """Placeholders of media in trained turns are trained, too: the model says them, as tokens."""


class Turns(NamedTuple):
    """The beginning of a conversation as tokens. L tokens."""

    text: str
    """What was tokenised."""
    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    """(L,) float32: how much each token counts; 0 where it is not trained."""
    media_spans: list[Span]
    """The tokens of each item, in order of place."""
    has_fractions: bool
    """Whether some turn counts for other than 0 or 1."""


class EncodedQuestion(NamedTuple):
    """A conversation up to the model's next turn. L tokens."""

    input_ids: np.ndarray
    """(L,) int64."""
    media: list[MediaFeatures]


class SampleOutline(NamedTuple):
    """A sample as it will be encoded, with its media known by their headers alone. L tokens."""

    text: str
    """What is tokenised; a document's text."""
    input_ids: np.ndarray
    """(L,) the tokens of an item are those of its placeholder."""
    labels: np.ndarray
    weights: np.ndarray
    """(L,) float32: how much each token counts in the loss; 0: not trained."""
    media_spans: list[Span]
    """The tokens of each item, in order of place."""
    size: SampleSize
    full_tokens: int
    """Before whole turns were left out."""
    messages: int
    """How many of the sample's messages are in it."""

    @property
    def shrunk(self) -> bool:
        """Whether turns were left out, or the end of a document."""
        return self.size.tokens < self.full_tokens


def build_tokens(
    processor: Processor, template: ChatTemplate | None, plugin: MediaPlugin, preprocess: PreprocessParameters
) -> Tokens:
    """The tokenizer of a model, with what is text wherever a row holds it: placeholders of media, and unless
    `split_special_tokens` is false special tokens and the marks of the chat template.

    Args:
        processor: Processor, or tokenizer of a text model.
        template: Renders conversations; None where only documents come.
        plugin: Encodes media.
        preprocess: Its `split_special_tokens`; special tokens that it adds to the vocabulary are for rows to use.
    """
    tokenizer = tokenizer_of(processor)
    return Tokens(
        tokenizer,
        of_processor=tokenizer is not processor,
        split_special=preprocess.split_special_tokens,
        kept=preprocess.add_special_tokens,
        marks=template.turn_marks if template is not None else (),
        placeholders=[*(placeholder.text for placeholder in plugin.placeholders.values()), *tokens_of_media(processor)],
    )


class SampleEncoder:
    """Encodes conversations, preference pairs and documents.

    Args:
        tokens: The tokenizer.
        end_of_text: Id that ends a document of plain text.
        template: Renders conversations; None where only documents come.
        plugin: Encodes media.
        media: Opens media.
        options: What is trained, and how long a sample may be.
    """

    def __init__(
        self,
        tokens: Tokens,
        end_of_text: int | None,
        template: ChatTemplate | None,
        plugin: MediaPlugin,
        media: MediaLoader,
        options: EncodeOptions,
    ) -> None:
        self._tokens, self._end_of_text, self._template = tokens, end_of_text, template
        self._plugin, self._media, self._options = plugin, media, options
        self._places = MediaPlaces(plugin.placeholders, write_items_of(plugin))

    def encode(self, sample: Sample) -> EncodedSample | EncodedPair:
        """Encode a sample; both answers of a preference row.

        Raises:
            TooLongError: It does not fit `cutoff_len` and is not to be shrunk, or cannot be.
            DataError: Media, template or label mask are off; the row is named.
        """
        try:
            if sample.text is not None:
                return self._encode_text(sample)
            features = self._features(sample)
            chosen = self._encode_conversation(sample, features)
            if sample.rejected is None:
                return chosen
            # Equal media are decoded once: `PairwiseCollator` shares what is the same object in both answers.
            if sample.rejected.media != sample.media:
                features = self._features(sample.rejected)
            rejected = self._encode_conversation(sample.rejected, features)
            return {"sample_id": str(sample.place), "chosen": chosen, "rejected": rejected}
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    def encode_question(self, sample: Sample) -> EncodedQuestion:
        """A conversation that the model is to go on with: as training encodes it, up to its next turn.

        Raises:
            DataError: Media or template are off; the row is named.
        """
        try:
            features = self._features(sample)
            sample = self._taken(sample, asks=True)
            messages = self._messages(sample, len(sample.messages))
            tools = self._tokens.protect(sample.tools)
            text = self._rendering.render(messages, tools=tools, add_generation_prompt=True)
            expansions = [self._places.expansion_of(item) for item in features]
            placed, encoding = self._tokenised(sample, len(sample.messages), text, expansions)
            ids = np.array(encoding.ids, dtype=np.int64)
            counts = np.zeros(len(ids), dtype=np.float32)
            ids, _, _ = _with_media(ids, counts, self._places.token_places(placed, encoding))
            return EncodedQuestion(ids, features)
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    def outline_question(self, sample: Sample) -> SampleOutline:
        """What `encode_question` makes of a conversation, without decoding media; nothing of it is trained.

        Raises:
            DataError: As `encode_question`.
        """
        try:
            sizes, sample = self._sizes(sample), self._taken(sample, asks=True)
            end, tools = len(sample.messages), self._tokens.protect(sample.tools)
            text = self._rendering.render(self._messages(sample, end), tools=tools, add_generation_prompt=True)
            placed, encoding = self._tokenised(sample, end, text, self._expansions_of_sizes(sample, sizes))
            ids = np.array(encoding.ids, dtype=np.int64)
            counts = np.zeros(len(ids), dtype=np.float32)
            ids, counts, spans = _with_media(ids, counts, self._places.token_places(placed, encoding))
            size = SampleSize(len(ids), _patches(sample, end, sizes))
            labels = np.full(len(ids), IGNORED_LABEL, dtype=np.int64)
            return SampleOutline(without_marks(placed.text), ids, labels, counts, spans, size, len(ids), end)
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    def measure(self, sample: Sample) -> SampleSize:
        """How large a sample will be, its media opened no further than their headers where those tell. Of a preference
        row both answers count, each as long as the longer: they are rows of one batch.

        Raises:
            DataError: As `encode`, as far as it can be told without encoding.
        """
        try:
            if sample.text is not None:
                return SampleSize(len(self._document(sample)[0]), 0)
            size = self._measure_conversation(sample)
            if sample.rejected is None:
                return size
            other = self._measure_conversation(sample.rejected)
            return SampleSize(2 * max(size.tokens, other.tokens), size.patches + other.patches)
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    def outline(self, sample: Sample) -> SampleOutline | tuple[SampleOutline, SampleOutline]:
        """What `encode` makes of a sample, without decoding media; of a preference row, of both answers.

        Raises:
            DataError: As `encode`.
        """
        try:
            if sample.text is not None:
                ids, full = self._document(sample)
                weights = np.ones(len(ids), dtype=np.float32)
                return SampleOutline(sample.text, ids, ids, weights, [], SampleSize(len(ids), 0), full, 0)
            chosen = self._outline_conversation(sample)
            if sample.rejected is None:
                return chosen
            return chosen, self._outline_conversation(sample.rejected)
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    # --- documents ---------------------------------------------------------------------------------------------------

    def _encode_text(self, sample: Sample) -> EncodedSample:
        ids, full = self._document(sample)
        return _encoded(sample, ids, ids.copy(), [], shrunk=len(ids) < full)

    def _document(self, sample: Sample) -> tuple[np.ndarray, int]:
        """A document: every token is trained, its end too. Shrinking takes its end away, for it has no turns or
        items; where documents are split, all of it is kept."""
        ids, _ = self._tokens.encode(self._tokens.protect(sample.text or ""), [])
        if self._end_of_text is not None and (not len(ids) or ids[-1] != self._end_of_text):
            # Some tokenizers add the end themselves: then it is not there twice.
            ids = np.append(ids, self._end_of_text)
        if self._options.truncation == "split":
            return ids, len(ids)
        if len(ids) > self._options.cutoff_len and self._options.truncation != "shrink":
            raise self._too_long(len(ids), _FOR_DOCUMENTS)
        return ids[: self._options.cutoff_len], len(ids)

    # --- media -------------------------------------------------------------------------------------------------------

    def _features(self, sample: Sample) -> list[MediaFeatures]:
        return [self._encoded(sample, index) for index in range(len(sample.media))]

    def _encoded(self, sample: Sample, index: int) -> MediaFeatures:
        """Item `index` of a sample."""
        pictures = sum(item.kind == "image" for item in sample.media)
        is_drawn = self._options.train_media and _is_answer(sample, index)
        return encode_media(self._plugin, self._media, sample.media[index], pictures, drawn=is_drawn)

    def _sizes(self, sample: Sample) -> list[ItemSize]:
        sizes = []
        for index, item in enumerate(sample.media):
            size = measure_media(self._plugin, self._media, item)
            if size is None:
                features = self._encoded(sample, index)
                # No header tells: the item is encoded, and its tokens stand for the work of the encoder.
                size = ItemSize(len(features.token_ids), len(features.token_ids), features.text)
            sizes.append(size)
        return sizes

    def _expansions_of_sizes(self, sample: Sample, sizes: Sequence[ItemSize]) -> list[Expansion]:
        kinds = (item.kind for item in sample.media)
        return list(map(self._places.expansion_for, kinds, sizes))

    # --- conversations -----------------------------------------------------------------------------------------------

    def _encode_conversation(self, sample: Sample, features: list[MediaFeatures]) -> EncodedSample:
        sample = self._taken(sample)
        expansions = [self._places.expansion_of(item) for item in features]
        whole = self._turns(sample, len(sample.messages), expansions)
        if len(whole.ids) <= self._options.cutoff_len:
            self._check_mask(whole, sample, len(sample.messages))
            return _encoded(sample, whole.ids, whole.labels, features, weights=_fractions(whole))
        end = self._shrunk_end(sample, expansions, len(whole.ids))
        turns = self._turns(sample, end, expansions)
        self._check_mask(turns, sample, end)
        kept = features[: _count_media(sample, end)]
        return _encoded(sample, turns.ids, turns.labels, kept, shrunk=True, weights=_fractions(turns))

    def _outline_conversation(self, sample: Sample) -> SampleOutline:
        sample = self._taken(sample)
        sizes = self._sizes(sample)
        expansions = self._expansions_of_sizes(sample, sizes)
        end, full = self._fitting(sample, expansions)
        turns = self._turns(sample, end, expansions)
        self._check_mask(turns, sample, end)
        size = SampleSize(len(turns.ids), _patches(sample, end, sizes))
        return SampleOutline(
            text=without_marks(turns.text),
            input_ids=turns.ids,
            labels=turns.labels,
            weights=turns.weights,
            media_spans=turns.media_spans,
            size=size,
            full_tokens=full,
            messages=end,
        )

    def _measure_conversation(self, sample: Sample) -> SampleSize:
        sample = self._taken(sample)
        sizes = self._sizes(sample)
        expansions = self._expansions_of_sizes(sample, sizes)
        length = self._length(sample, len(sample.messages), expansions)
        end = len(sample.messages)
        if length > self._options.cutoff_len:
            end = self._shrunk_end(sample, expansions, length)
            length = self._length(sample, end, expansions)
        return SampleSize(length, _patches(sample, end, sizes))

    def _fitting(self, sample: Sample, expansions: Sequence[Expansion]) -> tuple[int, int]:
        """How many messages are kept, and the length of all of them."""
        length = self._length(sample, len(sample.messages), expansions)
        if length <= self._options.cutoff_len:
            return len(sample.messages), length
        return self._shrunk_end(sample, expansions, length), length

    def _shrunk_end(self, sample: Sample, expansions: Sequence[Expansion], length: int) -> int:
        """Messages of the longest beginning that fits: whole turns with all their media, ended by the model. Answers
        of a preference row would lose what they are compared in."""
        if self._options.truncation == "shrink" and sample.rejected is None:
            # From the longest beginning down; one that ends with a question would train nothing.
            for end in range(len(sample.messages) - 1, 0, -1):
                ends_well = sample.messages[end - 1]["role"] == "assistant" and any(self._weights(sample, end))
                if (
                    ends_well
                    and self._shows_alike(sample, end)
                    and self._length(sample, end, expansions) <= self._options.cutoff_len
                ):
                    return end
        raise self._too_long(length)

    def _shows_alike(self, sample: Sample, end: int) -> bool:
        """Whether the pictures of the first `end` messages are seen as they are among all of the row's."""
        alone: int | None = getattr(self._plugin, "pictures_seen_alone", None)  # a plugin from outside may not tell
        pictures = [item.kind == "image" for item in sample.media]
        kept = sum(pictures[: _count_media(sample, end)])
        return alone is None or kept == 0 or (kept <= alone) == (sum(pictures) <= alone)

    def _weights(self, sample: Sample, end: int) -> list[float | None]:
        """Of the first `end` messages; those of the model alone, unless prompts are trained too."""
        weights = sample.weights[:end]
        if self._options.mask_history:
            # mask_history: the last message alone; `end` is where shrinking has cut, so its answer counts.
            return [*[0.0] * (end - 1), *weights[-1:]]
        if self._options.train_on_prompt:
            return weights
        of_model: list[float | None] = []
        for message, weight in zip(sample.messages[:end], weights, strict=True):
            of_model.append(weight if message["role"] == "assistant" else None)
        return of_model

    def _length(self, sample: Sample, end: int, expansions: Sequence[Expansion]) -> int:
        """Tokens of the first `end` messages."""
        text = self._rendering.render(self._messages(sample, end), tools=self._tokens.protect(sample.tools))
        placed, encoding = self._tokenised(sample, end, text, expansions)
        places = self._places.token_places(placed, encoding)
        # Each item's placeholder tokens give way to its own: no media and no arrays are made for a length.
        return len(encoding.ids) + sum(len(ids) - (last - first) for (first, last), ids in places)

    def _turns(self, sample: Sample, end: int, expansions: Sequence[Expansion]) -> Turns:
        """The first `end` messages as tokens."""
        weights, messages = self._weights(sample, end), self._messages(sample, end)
        is_told_apart = list(map(self._is_told_apart, messages, weights))
        text, spans = self._rendering.render_with_spans(messages, is_told_apart, self._tokens.protect(sample.tools))
        placed, encoding = self._tokenised(sample, end, text, expansions)
        start = np.ones if self._options.train_on_prompt else np.zeros
        counts = start(len(encoding.ids), dtype=np.float32)
        # A weight of 0 is written too: with train_on_prompt everything counts that no weight takes out.
        for span, weight in zip(spans, compress(weights, is_told_apart), strict=True):
            first, last = token_span(encoding, placed.moved(span))
            counts[first:last] = weight
        # A template may write `<think>` before the turn: the whole text is searched.
        if self._options.mask_empty_thoughts:
            for thought in _EMPTY_THOUGHT.finditer(text):
                first, last = token_span(encoding, placed.moved(thought.span()))
                counts[first:last] = 0
        ids = np.array(encoding.ids, dtype=np.int64)
        places = self._places.token_places(placed, encoding)
        ids, counts, media_spans = _with_media(ids, counts, places, trained=self._options.train_media)
        # -100 where nothing counts; not shifted: the collator shifts once.
        labels = np.where(counts != 0, ids, IGNORED_LABEL)
        has_fractions = any(weight not in (None, 0, 1) for weight in weights)
        return Turns(placed.text, ids, labels, counts, media_spans, has_fractions)

    def _is_told_apart(self, message: Mapping[str, object], weight: float | None) -> bool:
        """Whether a turn counts otherwise than what stands around it."""
        if not self._options.train_on_prompt:
            return bool(weight)
        return weight is not None and (message["role"] == "assistant" or bool(message["content"]))

    def _messages(self, sample: Sample, end: int) -> list[JsonObject]:
        return self._tokens.protect_messages(sample.messages[:end], sample.box_marks)

    def _taken(self, sample: Sample, *, asks: bool = False) -> Sample:
        """The sample in turns that the chat template takes."""
        if is_usual(sample.messages):
            return sample
        messages, weights = self._rendering.taken(
            sample.messages, sample.weights, tools=sample.tools, add_generation_prompt=asks
        )
        return replace(sample, messages=messages, weights=weights)

    def _tokenised(
        self, sample: Sample, end: int, text: str, expansions: Sequence[Expansion]
    ) -> tuple[Placed, Encoding]:
        placed = self._places.place(text, expansions[: _count_media(sample, end)])
        return placed, self._tokens.encoding(placed.text)

    @property
    def _rendering(self) -> ChatTemplate:
        assert self._template is not None  # only documents come without one, and they do not come here
        return self._template

    def _check_mask(self, turns: Turns, sample: Sample, end: int) -> None:
        """Raise when nothing is trained (the shift leaves the first token out), or everything although a prompt is."""
        # The first token is predicted by nothing, so its label cannot count.
        trained = np.count_nonzero(turns.labels[1:] != IGNORED_LABEL)
        if not trained:
            raise NothingTrainedError(
                f"no trainable token in: {without_marks(turns.text)[:2000]!r}",
                key="labels",
                way_out="Train some turn of the model (weight, train, mask_history).",
            )
        if self._options.train_on_prompt:
            return
        has_prompt = any(message["role"] != "assistant" for message in sample.messages[:end])
        untrained = len(turns.labels) - 1 - trained
        if untrained > sum(last - first for first, last in turns.media_spans):
            return
        of_media = sum(np.count_nonzero(turns.labels[first:last] == IGNORED_LABEL) for first, last in turns.media_spans)
        if has_prompt and untrained <= of_media:
            raise DataError(
                f"every token would be trained although there is a prompt in: {without_marks(turns.text)[:2000]!r}",
                key="labels",
                way_out="Check the chat template, or set train_on_prompt: true.",
            )

    def _too_long(self, length: int, way_out: str = _FOR_CONVERSATIONS) -> TooLongError:
        error = TooLongError(
            f"the sample has {length} tokens, more than cutoff_len {self._options.cutoff_len}",
            key=_CUTOFF_KEY,
            way_out=way_out,
        )
        error.tokens = length
        return error


def _encoded(
    sample: Sample,
    ids: np.ndarray,
    labels: np.ndarray,
    media: list[MediaFeatures],
    *,
    shrunk: bool = False,
    weights: np.ndarray | None = None,
) -> EncodedSample:
    encoded: EncodedSample = {
        "sample_id": str(sample.place),
        "input_ids": ids,
        "labels": labels,
        "media": media,
        "shrunk": shrunk,
    }
    if weights is not None:
        encoded["loss_weights"] = weights
    return encoded


def _is_answer(sample: Sample, index: int) -> bool:
    """Whether item `index` stands in a turn of the model."""
    end = next(end for end in range(1, len(sample.messages) + 1) if _count_media(sample, end) > index)
    return bool(sample.messages[end - 1]["role"] == "assistant")


def _fractions(turns: Turns) -> np.ndarray | None:
    if turns.has_fractions:
        return turns.weights
    return None


def _count_media(sample: Sample, end: int) -> int:
    """Items of the first `end` messages."""
    if not sample.media or end == len(sample.messages):
        return len(sample.media)
    return count_media(sample.messages[:end])


def _patches(sample: Sample, end: int, sizes: Sequence[ItemSize]) -> int:
    return sum(size.patches for size in sizes[: _count_media(sample, end)])


def _with_media(
    ids: np.ndarray, weights: np.ndarray, places: list[tuple[Span, np.ndarray]], *, trained: bool = False
) -> tuple[np.ndarray, np.ndarray, list[Span]]:
    """Put the tokens of each item where it stands; they count as their placeholder does, or for nothing."""
    if not places:
        return ids, weights, []
    id_pieces, weight_pieces, spans, position, length = [], [], [], 0, 0
    for (first, last), item_ids in places:
        id_pieces += [ids[position:first], item_ids]
        # An item without a placeholder token in the text (first == last) has no weight to take over.
        of_item = np.zeros(len(item_ids), dtype=np.float32)
        if trained and last > first:
            of_item.fill(weights[first])
        weight_pieces += [weights[position:first], of_item]
        length += max(first - position, 0) + len(item_ids)
        spans.append((length - len(item_ids), length))
        position = last
    return np.concatenate([*id_pieces, ids[position:]]), np.concatenate([*weight_pieces, weights[position:]]), spans


def at_place(error: DataError, where: str) -> DataError:
    """The same error with the row named, where it does not name one."""
    problems = [Problem(without_marks(p.what), p.where or where, p.key, p.way_out) for p in error.problems]
    if error.headline:
        placed = type(error)(error.headline, problems=problems)
    else:
        only = problems[0]
        placed = type(error)(only.what, where=only.where, key=only.key, way_out=only.way_out)
    if isinstance(error, TooLongError) and isinstance(placed, TooLongError):
        placed.tokens = error.tokens
    return placed
