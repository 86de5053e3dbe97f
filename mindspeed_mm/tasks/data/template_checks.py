"""Whether the chat template in use fits the model: the marks it writes are tokens, and it is the model's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import Sample
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate, own_template
from mindspeed_mm.fsdp.utils.processor import beginning_of, tokenizer_of
from mindspeed_mm.tasks.data.findings import BASIC, DataFinding, Fix

_MARKS = re.compile(r"<\|[^|<>]{1,40}\|>|<(?:start|end)_of_[a-z]+>|\[/?INST\]|</?think>")
"""What templates write around turns."""
_PROBE = (
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
)


def template_findings(template: ChatTemplate, processor: Any, samples: list[Sample]) -> Iterator[DataFinding]:
    """Warnings about a template.

    Args:
        template: The one in use.
        processor: Of the model's folder.
        samples: A few rows to compare with.
    """
    tokenizer = tokenizer_of(processor)
    beginning = tokenizer.decode(beginning_of(processor))
    own = _own_template(processor, template)
    split = sorted(mark for mark in _marks_written(template) if not _is_one_token(mark, tokenizer))
    if split:
        yield DataFinding(
            "warning",
            "template mismatch",
            f"the chat template writes marks that are not tokens of this model: {', '.join(split)}",
            len(samples),
            fixes=(Fix(_instead(processor, beginning, own), 0),),
        )
    differing: list[Sample] = []
    if own is not None:
        differing = [sample for sample in samples if _differs(template, own, beginning, sample)]
    if differing:
        yield DataFinding(
            "warning",
            "template mismatch",
            f"{len(differing)} of the first {len(samples)} rows render differently than with the model's own template",
            len(differing),
            tuple(str(sample.place) for sample in differing[:3]),
            (Fix(f"{_instead(processor, beginning, own)}, unless the model is to learn another format", 0),),
        )


def _instead(processor: Any, beginning: str, own: ChatTemplate | None) -> str:
    """What to set in the place of a template that does not fit. A beginning that the processor alone writes has to be
    written by a template: `mm check` asks for it where rows lack it."""
    if own is None:
        return f"name a format of this model's tokens in {BASIC}.template or chat_template"
    if not beginning or _begins(own, beginning):
        return f"leave {BASIC}.template and chat_template out: the model's folder has its own"
    return (
        f"set {BASIC}.chat_template to a file with {beginning!r}, which {type(processor).__name__} begins every text "
        "with, and the model's own template behind it"
    )


def _begins(template: ChatTemplate, beginning: str) -> bool:
    try:
        return template.render(_PROBE).startswith(beginning)
    except DataError:
        return False  # it wants another conversation


def _marks_written(template: ChatTemplate) -> set[str]:
    try:
        return set(_MARKS.findall(template.render(_PROBE, add_generation_prompt=True)))
    except DataError:
        return set()  # it wants another conversation


def _is_one_token(mark: str, tokenizer: Any) -> bool:
    return len(tokenizer(mark, add_special_tokens=False)["input_ids"]) == 1


def _own_template(processor: Any, used: ChatTemplate) -> ChatTemplate | None:
    """The template of the model's folder, where another one is in use."""
    source = own_template(processor)
    return ChatTemplate(processor, source) if source and source != used.source else None


def _differs(used: ChatTemplate, own: ChatTemplate, beginning: str, sample: Sample) -> bool:
    """Whether a row is written otherwise than by the model's own template, with or without what its processor begins
    every text with."""
    try:
        written = own.render(sample.messages)
        return used.render(sample.messages) not in (written, beginning + written)
    except DataError:
        return True
