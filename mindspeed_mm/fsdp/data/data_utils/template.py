"""Conversations rendered by a chat template, with the character span that each turn of the model produced.

The spans come from the structure: what the template writes for a shorter conversation, or for the same one with a
turn's text exchanged. Marker strings are never searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.fsdp.utils.processor import check_chat_template, tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

Message = dict[str, Any]
Span = tuple[int, int]
"""Start and end in characters of the rendered text."""

_BASIC = "data.dataset_param.basic_parameters"
_STAND_IN = "\ue000turn\ue001"
"""Private-use characters: a text that no row holds and no template changes."""
MAX_RENDERED_CHARACTERS = 16 * 2**20

TEMPLATES = Registry(f"{_BASIC}.template")


@dataclass(frozen=True)
class NamedTemplate:
    """What a template name stands for."""

    source: str | None = None
    """Jinja text; None: the chat template of the model's own folder."""
    enable_thinking: bool | None = None
    """Wins over `basic_parameters.enable_thinking`."""


def register_template(name: str, source: str | None = None, *, enable_thinking: bool | None = None) -> None:
    """File a chat template under a name that `basic_parameters.template` can use.

    Args:
        name: The name.
        source: Jinja text, run in a sandbox; None for the template of the model's own folder.
        enable_thinking: Fixes the think block on or off for this name.
    """
    if source is not None:
        check_chat_template(source, where=f"template '{name}'")
    TEMPLATES.register(name)(NamedTemplate(source, enable_thinking))


class ChatTemplate:
    """Renders conversations as the model's own `apply_chat_template` does, in transformers' sandbox.

    Args:
        processor: Processor, or tokenizer of a text model.
        source: Jinja text.
        enable_thinking: Handed to the template.
    """

    def __init__(self, processor: Any, source: str, *, enable_thinking: bool | None = True) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template  # after the processor, which is heavy

        self.source = source
        self._render_jinja = render_jinja_template
        tokenizer = tokenizer_of(processor)
        self._takes_parts = tokenizer is not processor
        self._variables = {**tokenizer.special_tokens_map}
        if enable_thinking is not None:
            self._variables["enable_thinking"] = enable_thinking
        self._marks = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._opens_turns = self._writes_generation_prompt()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The conversation as text, media as the template's placeholder tokens.

        Raises:
            DataError: The template refuses the conversation.
        """
        return self._render(self._for_template(messages), add_generation_prompt)

    def render_with_spans(self, messages: Sequence[Message], wanted: Sequence[bool]) -> tuple[str, list[Span]]:
        """The text and the span of each wanted turn: from the end of the prompt that opens it to its end mark.

        Args:
            messages: The conversation.
            wanted: Per message, whether its span is asked for.

        Raises:
            DataError: The template mixes turns so that spans cannot be told.
        """
        prepared = self._for_template(messages)
        text = self._render(prepared)
        spans = [self._span(prepared, i, text) for i, is_wanted in enumerate(wanted) if is_wanted]
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise self._mixed_turns(text)
        return text, spans

    # --- spans -------------------------------------------------------------------------------------------------------

    def _span(self, messages: list[Message], i: int, text: str) -> Span:
        start = self._start_by_prefix(messages, i, text)
        end = self._end_by_prefix(messages, i, text)
        if start is None or end is None:
            by_exchange = self._span_by_exchange(messages, i, text)
            start = by_exchange[0] if start is None else start
            end = by_exchange[1] if end is None else end
        if not start < end:
            raise self._mixed_turns(text)
        return start, self._without_blanks_after_mark(text, start, end)

    def _start_by_prefix(self, messages: list[Message], i: int, text: str) -> int | None:
        if i == 0 or not self._opens_turns:
            return None
        prompt = self._render(messages[:i], add_generation_prompt=True)
        return len(prompt) if text.startswith(prompt) else None

    def _end_by_prefix(self, messages: list[Message], i: int, text: str) -> int | None:
        if i == len(messages) - 1:
            return len(text)
        so_far = self._render(messages[: i + 1])
        return len(so_far) if text.startswith(so_far) else None

    def _span_by_exchange(self, messages: list[Message], i: int, text: str) -> Span:
        """For templates that write a turn differently once others follow (Qwen3 drops earlier thoughts, GPT-OSS ends
        the last turn with another mark): exchange the turn's text, and what stays the same is not the turn's."""
        content = [{"type": "text", "text": _STAND_IN}] if self._takes_parts else _STAND_IN
        exchanged = [*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]]
        before, found, after = self._render(exchanged).partition(_STAND_IN)
        fits = len(before) + len(after) <= len(text) and text.startswith(before) and text.endswith(after)
        closing = self._closing(exchanged[: i + 1], after)
        if not found or not fits or closing is None:
            raise self._mixed_turns(text)
        return len(before), len(text) - len(after) + len(closing)

    def _closing(self, exchanged: list[Message], after: str) -> str | None:
        """What ends a turn: what follows it when it is the last, or else the mark right behind it."""
        alone = self._render(exchanged).partition(_STAND_IN)[2]
        if after.startswith(alone):
            return alone
        return next((mark for mark in self._marks if after.startswith(mark)), None)

    def _without_blanks_after_mark(self, text: str, start: int, end: int) -> int:
        """The model stops at its end mark: the line break that a template writes after it is not the model's."""
        trimmed = text[start:end].rstrip()
        return start + len(trimmed) if trimmed.endswith(self._marks) else end

    def _mixed_turns(self, text: str) -> DataError:
        return DataError(
            f"the chat template writes turns so that the model's own words cannot be told apart in: {text[:2000]!r}",
            way_out=f"Set {_BASIC}.mask_history: true, or give a simpler template in {_BASIC}.chat_template.",
        )

    # --- rendering ---------------------------------------------------------------------------------------------------

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        try:
            rendered, _ = self._render_jinja(
                conversations=[messages],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        if len(rendered[0]) > MAX_RENDERED_CHARACTERS:
            raise DataError(f"the rendered conversation has {len(rendered[0])} characters")
        return rendered[0]

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Templates of multimodal models read lists of typed parts, those of text models read strings."""
        if not self._takes_parts:
            return list(messages)
        return [
            {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
            for m in messages
        ]

    def _writes_generation_prompt(self) -> bool:
        probe = self._for_template([{"role": "user", "content": "?"}])
        try:
            return self._render(probe) != self._render(probe, add_generation_prompt=True)
        except DataError:
            return True  # it wants another conversation; rows will tell


def build_template(processor: Any, basic: Any) -> ChatTemplate:
    """The template asked for: the file `chat_template`, else the name `template`, else the model's own.

    Args:
        processor: Processor or tokenizer.
        basic: `basic_parameters`.

    Raises:
        ConfigError: Unknown name or missing file.
        ModelFolderError: The model's own template is asked for and there is none.
    """
    named = TEMPLATES.get(basic.template) if basic.template else NamedTemplate()
    if basic.chat_template:
        source = _read_template(Path(basic.chat_template))
    else:
        source = named.source if named.source is not None else _own_template(processor)
    thinking = basic.enable_thinking if named.enable_thinking is None else named.enable_thinking
    return ChatTemplate(processor, source, enable_thinking=thinking)


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"'{path}' does not exist", key=f"{_BASIC}.chat_template", way_out="Give a jinja file.")
    source = path.read_text(encoding="utf-8")
    check_chat_template(source, where=str(path))
    return source


def _own_template(processor: Any) -> str:
    source = getattr(processor, "chat_template", None) or getattr(tokenizer_of(processor), "chat_template", None)
    source = source.get("default") if isinstance(source, dict) else source
    if not source:
        raise ModelFolderError(
            "the model's folder has no chat template",
            where=str(getattr(tokenizer_of(processor), "name_or_path", "")),
            key=f"{_BASIC}.template",
            way_out=f"Give a jinja file in {_BASIC}.chat_template.",
        )
    return source


_CONCATENATION = (
    "{%- for m in messages -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{{- p.text if p.type == 'text' else '' -}}{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
_OWN = (
    "default",
    "qwen2vl",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_6",
    "qwen2_omni",
    "qwen3_omni",
    "qwen3_asr",
    "kimi_k25",
    "kimi_k3",
    "glm4.1v",
    "glm4v_moe",
    "step3_vl",
)
"""Names that stand for the format of a model family; its authority is the chat template in the model's folder."""


def _register_builtin(register: Callable[..., None] = register_template) -> None:
    for name in _OWN:
        register(name)
    for name in ("qwen3_vl_nothink", "qwen3_6_nothink", "qwen3_omni_nothink"):
        register(name, enable_thinking=False)
    register("empty", _CONCATENATION)


_register_builtin()
