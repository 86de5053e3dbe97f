"""A `Sample` → token ids, label mask and media tensors.

The rendered text is tokenised once, as a whole; the characters that the model wrote give the trained tokens;
placeholder tokens are replaced by the tokens of their media afterwards, so nothing can be cut or shifted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mindspeed_mm.core.errors import DataError, ModelFolderError, Problem
from mindspeed_mm.fsdp.data.data_utils.media import MediaLoader
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import ImageFeatures, MediaPlugin
from mindspeed_mm.fsdp.data.data_utils.sample import EncodedSample, Sample, TooLongError
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate, Span

IGNORED = -100
_CUTOFF_KEY = "data.dataset_param.basic_parameters.cutoff_len"


@dataclass(frozen=True)
class EncodeOptions:
    """What is trained, and how long a sample may be."""

    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    truncation: Literal["drop", "shrink", "error"] = "drop"


class Tokens:
    """Tokenises with character positions, as the processor or tokenizer itself does after its chat template.

    Args:
        tokenizer: A fast tokenizer.
        of_processor: Whether a processor owns it (it adds its begin token unless the template wrote one).

    Raises:
        ModelFolderError: The tokenizer is of the slow kind, which has no character positions.
    """

    def __init__(self, tokenizer: Any, *, of_processor: bool) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelFolderError(
                "the tokenizer gives no character positions",
                where=str(tokenizer.name_or_path),
                way_out="Save it as a fast tokenizer (tokenizer.json).",
            )
        self._backend = tokenizer.backend_tokenizer
        self._begin = tokenizer.bos_token if of_processor else None
        self._of_processor = of_processor

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, list[Span]]:
        """Token ids, and for each character span the span of the tokens that touch it."""
        add_special = self._of_processor and not (self._begin is not None and text.startswith(self._begin))
        encoding = self._backend.encode(text, add_special_tokens=add_special)
        token_spans = [(_first(encoding, *span), _last(encoding, *span) + 1) for span in spans]
        return np.array(encoding.ids, dtype=np.int64), token_spans


def _first(encoding: Any, start: int, end: int) -> int:
    """The first token that touches the characters [start, end)."""
    found = next((t for c in range(start, end) if (t := encoding.char_to_token(c)) is not None), None)
    return len(encoding.ids) if found is None else found


def _last(encoding: Any, start: int, end: int) -> int:
    """The last token that touches the characters [start, end)."""
    found = next((t for c in range(end - 1, start - 1, -1) if (t := encoding.char_to_token(c)) is not None), None)
    if found is None:
        return -1
    while found + 1 < len(encoding.ids) and encoding.token_to_chars(found + 1) == encoding.token_to_chars(found):
        found += 1  # a character of several tokens: all of them have its position
    return found


class SampleEncoder:
    """Encodes conversations and documents.

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

    def encode(self, sample: Sample) -> EncodedSample:
        """Encode a sample.

        Raises:
            TooLongError: It does not fit `cutoff_len` and is not to be shrunk, or cannot be.
            DataError: Media, template or label mask are off; the row is named.
        """
        try:
            return self._encode_text(sample) if sample.text is not None else self._encode_conversation(sample)
        except DataError as error:
            raise at_place(error, str(sample.place)) from error

    def _encode_text(self, sample: Sample) -> EncodedSample:
        """A document: every token is trained, its end too. Shrinking cuts it, for it has no turns or items."""
        ids, _ = self._tokens.encode(sample.text or "", [])
        if self._end_of_text is not None and (not len(ids) or ids[-1] != self._end_of_text):
            ids = np.append(ids, self._end_of_text)
        too_long = len(ids) > self._options.cutoff_len
        if too_long and self._options.truncation != "shrink":
            raise self._too_long(len(ids))
        ids = ids[: self._options.cutoff_len]
        return _encoded(sample, ids, ids.copy(), [], shrunk=too_long)

    def _encode_conversation(self, sample: Sample) -> EncodedSample:
        pictures = [self._media.load_image(item.source) for item in sample.media]
        features = [self._plugin.encode_image(picture) for picture in pictures]
        encoded = self._encode_turns(sample, len(sample.messages), features)
        length = len(encoded["input_ids"])
        if length <= self._options.cutoff_len:
            return encoded
        if self._options.truncation == "shrink":
            return self._shrink(sample, features, length)
        raise self._too_long(length)

    def _shrink(self, sample: Sample, features: list[ImageFeatures], length: int) -> EncodedSample:
        """The longest beginning of the conversation that fits: whole turns with all their media, ended by the model."""
        for end in range(len(sample.messages) - 1, 0, -1):
            if sample.messages[end - 1]["role"] == "assistant" and any(sample.weights[:end]):
                encoded = self._encode_turns(sample, end, features)
                if len(encoded["input_ids"]) <= self._options.cutoff_len:
                    return {**encoded, "shrunk": True}
        raise self._too_long(length)

    def _encode_turns(self, sample: Sample, end: int, features: list[ImageFeatures]) -> EncodedSample:
        """Encode the first `end` messages."""
        assert self._template is not None  # only documents come without one, and they do not come here
        messages, trained = sample.messages[:end], [weight > 0 for weight in sample.weights[:end]]
        features = features[: sum(_count_images(message) for message in messages)]
        if self._options.mask_history:
            last = len(trained) - 1
            trained = [flag and i == last for i, flag in enumerate(trained)]
        text, spans = self._template.render_with_spans(messages, trained)
        ids, token_spans = self._tokens.encode(text, spans)
        labels = np.full(len(ids), IGNORED, dtype=np.int64)
        if self._options.train_on_prompt:
            labels[:] = ids
        for first, last in token_spans:
            labels[first:last] = ids[first:last]
        at = self._placeholders(ids, features, text)
        ids, labels = _splice(ids, labels, at, features)
        self._check_mask(labels, features, messages, text)
        return _encoded(sample, ids, labels, features)

    def _placeholders(self, ids: np.ndarray, features: list[ImageFeatures], text: str) -> np.ndarray:
        image_id = self._plugin.image_token_id
        at = np.flatnonzero(ids == image_id) if image_id is not None else np.zeros(0, dtype=np.int64)
        if len(at) != len(features):
            raise DataError(
                f"the rendered text has {len(at)} image tokens for {len(features)} images: {text[:2000]!r}",
                way_out="The chat template must write one image token for each image, and no text may hold one.",
            )
        return at

    def _check_mask(
        self, labels: np.ndarray, features: list[ImageFeatures], messages: list[dict[str, Any]], text: str
    ) -> None:
        """Raise when nothing is trained (the shift leaves the first token out), or everything although a prompt is."""
        trained = int((labels[1:] != IGNORED).sum())
        has_prompt = any(message["role"] != "assistant" for message in messages)
        everything = trained >= len(labels) - 1 - sum(len(image.token_ids) for image in features)
        if not trained:
            raise DataError(f"no trainable token in: {text[:2000]!r}", key="labels")
        if everything and has_prompt and not self._options.train_on_prompt:
            raise DataError(
                f"every token would be trained although there is a prompt in: {text[:2000]!r}",
                key="labels",
                way_out="Check the chat template, or set train_on_prompt: true.",
            )

    def _too_long(self, length: int) -> TooLongError:
        return TooLongError(
            f"the sample has {length} tokens, more than cutoff_len {self._options.cutoff_len}",
            key=_CUTOFF_KEY,
            way_out="Raise cutoff_len, lower image_max_pixels, or set truncation.",
        )


def _encoded(
    sample: Sample, ids: np.ndarray, labels: np.ndarray, images: list[ImageFeatures], shrunk: bool = False
) -> EncodedSample:
    return {"sample_id": str(sample.place), "input_ids": ids, "labels": labels, "media": images, "shrunk": shrunk}


def _count_images(message: dict[str, Any]) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _splice(
    ids: np.ndarray, labels: np.ndarray, at: np.ndarray, features: list[ImageFeatures]
) -> tuple[np.ndarray, np.ndarray]:
    """Put the tokens of each image where its placeholder stands; they are never trained."""
    if not features:
        return ids, labels
    id_pieces, label_pieces, position = [], [], 0
    for place, image in zip(at.tolist(), features, strict=True):
        id_pieces += [ids[position:place], image.token_ids]
        label_pieces += [labels[position:place], np.full(len(image.token_ids), IGNORED, dtype=np.int64)]
        position = place + 1
    return np.concatenate([*id_pieces, ids[position:]]), np.concatenate([*label_pieces, labels[position:]])


def at_place(error: DataError, where: str) -> DataError:
    """The same error with the row named, where it does not name one."""
    problems = [Problem(p.what, p.where or where, p.key, p.way_out) for p in error.problems]
    if error.headline:
        return type(error)(error.headline, problems=problems)
    only = problems[0]
    return type(error)(only.what, where=only.where, key=only.key, way_out=only.way_out)
