"""Tokens for people to look at: what each one says, which message and which item it belongs to, how much it counts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm.fsdp.data.data_utils.encode import Outline, SampleEncoder
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.data_utils.spans import Span


class Explanation(NamedTuple):
    """A sample's L tokens, explained. Numbers of messages and items count from 0; -1: none."""

    outline: Outline
    pieces: list[str]
    """What each token says; a character of several tokens stands at the first of them."""
    messages: np.ndarray
    """(L,) the message that a token belongs to, with the template's words around it; -1 where a template changes what
    messages say."""
    items: np.ndarray
    """(L,) the picture, video or sound that a token stands for."""


def explain(sample: Sample, encoder: SampleEncoder, tokenizer: Any) -> Explanation:
    """Explain what an encoder makes of a sample.

    Raises:
        DataError: As encoding.
    """
    outline = encoder.outline(sample)
    pieces = token_texts(tokenizer, outline.input_ids)
    items = np.full(len(pieces), -1, dtype=np.int64)
    for number, (first, end) in enumerate(outline.media_spans):
        items[first:end] = number
    messages = np.full(len(pieces), -1, dtype=np.int64)
    if sample.text is None:
        _own(messages, encoder.words(sample, outline), outline.input_ids, set(tokenizer.all_special_ids))
    return Explanation(outline, pieces, messages, items)


def token_texts(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """What each token says. Tokens are decoded together, as far as they hold parts of one character."""
    texts: list[str] = []
    waiting: list[int] = []
    for token in ids.tolist():
        waiting.append(token)
        said = tokenizer.decode(waiting, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in said and len(waiting) < 8:
            continue
        texts += [said, *[""] * (len(waiting) - 1)]
        waiting = []
    return texts + [""] * len(waiting)


def _own(messages: np.ndarray, words: dict[int, Span], ids: np.ndarray, special: set[int]) -> None:
    """The template's words between two messages: up to the first special token they are the former's, then the
    latter's."""
    previous, position = -1, 0
    for message in sorted(words):
        first, end = words[message]
        border = next((k + 1 for k in range(position, first) if int(ids[k]) in special), position)
        messages[position : border if previous >= 0 else position] = previous
        messages[border if previous >= 0 else position : end] = message
        previous, position = message, max(position, end)
    messages[position:] = previous
