"""Conversations rendered by a chat template: the model's own, a named one, or a file.

Names stand for the format of a model family; `register_template` adds one from outside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.rendering.spans import Message, Span, TurnFinder
from mindspeed_mm.fsdp.data.data_utils.rendering.templates_builtin import (
    ALPACA,
    COMPLETION,
    EMPTY,
    FORMATS,
    whisper_format,
)
from mindspeed_mm.fsdp.data.data_utils.sample import joined, words_said
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.fsdp.params.rules.path import missing_input
from mindspeed_mm.fsdp.utils.model_parts import setting_of
from mindspeed_mm.fsdp.utils.processor import chat_templates_of, check_chat_template, missing_processor, tokenizer_of
from mindspeed_mm.fsdp.utils.register import Registry

_BASIC = "data.dataset_param.basic_parameters"
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"})
"""What a conversation is rendered from."""
_THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)
MAX_RENDERED_CHARACTERS = 16 * 2**20
Tools = list[dict[str, Any]]
"""Descriptions of the tools that a conversation may call."""

TEMPLATES = Registry(
    f"{_BASIC}.template", advice="Leave it out: rows are then rendered by the model's own chat template. "
)


@dataclass(frozen=True)
class NamedTemplate:
    """What a template name stands for."""

    source: str | None = None
    """Jinja text; None: the chat template of the model's own folder."""
    enable_thinking: bool | None = None
    """Wins over `basic_parameters.enable_thinking`."""
    stand_in: str | None = None
    """Jinja text for a folder without a chat template."""
    ends_turns: bool = True
    """Whether the model's last turn is given an end where the template writes none."""


def register_template(
    name: str, source: str | None = None, *, enable_thinking: bool | None = None, ends_turns: bool = True
) -> None:
    """File a chat template under a name that `basic_parameters.template` can use.

    Args:
        name: The name.
        source: Jinja text, run in a sandbox; None for the template of the model's own folder.
        enable_thinking: Fixes the think block on or off for this name.
        ends_turns: Whether the model's last turn is given an end where the template writes none.
    """
    if source is not None:
        check_chat_template(source, where=f"template '{name}'")
    TEMPLATES.register(name)(NamedTemplate(source, enable_thinking, ends_turns=ends_turns))


class ChatTemplate:
    """Renders conversations as the model's own `apply_chat_template` does, in transformers' sandbox.

    Args:
        processor: Processor, or tokenizer of a text model.
        source: Jinja text.
        enable_thinking: Handed to the template. False also takes the thoughts out of the rows, None leaves all as it
            is.
        ends_turns: Whether the model's last turn is given an end where the template writes none.
    """

    def __init__(
        self, processor: object, source: str, *, enable_thinking: bool | None = True, ends_turns: bool = True
    ) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template  # after the processor, which is heavy

        self.source, self.enable_thinking = source, enable_thinking
        self._render_jinja = render_jinja_template
        tokenizer = tokenizer_of(processor)
        self._takes_parts = tokenizer is not processor
        self._variables = {**tokenizer.special_tokens_map}
        self._drops_thoughts = enable_thinking is False
        if enable_thinking is not None:
            self._variables |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
        added = list(tokenizer.added_tokens_decoder.values())
        marks = tuple(token.content for token in added if token.special)
        self._finder = TurnFinder(self._render, self._for_template, marks, tuple(token.content for token in added))
        self._ends_turns, self._eos_token = ends_turns, tokenizer.eos_token
        self._name = setting_of(tokenizer, str, "name_or_path") or ""

    @cached_property
    def turn_end(self) -> str | None:
        """The token by which the model tells that its turn is over; None: there is none."""
        if not self._ends_turns:
            return None
        return self._finder.turn_end or self._eos_token

    @property
    def turn_marks(self) -> frozenset[str]:
        """Added tokens of the tokenizer that the template writes around turns."""
        return self._finder.turn_marks

    def check_end(self) -> None:
        """Raise where training would teach the model no end of its turns.

        Raises:
            ModelFolderError: The template writes no end mark, and the tokenizer has no end token.
        """
        if self._ends_turns and self.turn_end is None and not self._finder.end_marks:
            raise ModelFolderError(
                "the chat template writes no end mark after the model's turns and the tokenizer has no end token, so "
                "the model would never learn to stop",
                where=self._name,
                key="eos_token",
                way_out='Add "eos_token" to tokenizer_config.json, or give a template with an end mark in '
                f"{_BASIC}.chat_template; {_BASIC}.template: empty trains answers without an end.",
            )

    def taken(
        self,
        messages: Sequence[Message],
        weights: Sequence[float | None],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[list[Message], list[float | None]]:
        """The conversation in turns that the template takes: as it is, or with neighbouring messages of one speaker
        joined where the template refuses them or leaves one out.

        Args:
            messages: The conversation, in any order of speakers.
            weights: Of each message; those that differ are not joined.
            tools: Descriptions of the tools.
            add_generation_prompt: The model is to answer.

        Raises:
            DataError: The template does not take it either way.
        """
        try:
            self._check_written(messages, tools, add_generation_prompt)
        except DataError:
            together, counts = joined(messages, weights)
            if len(together) == len(messages):
                raise
            self._check_written(together, tools, add_generation_prompt)
            return together, counts
        return list(messages), list(weights)

    def _check_written(self, messages: Sequence[Message], tools: Tools | None, add_generation_prompt: bool) -> None:
        """Raise unless the template writes every message; results of tools aside, which templates quote."""
        text = self._render(self._for_template(messages), add_generation_prompt, tools=tools)
        for number, message in enumerate(messages):
            if message["role"] != "tool" and not all(words in text for words in words_said(message)):
                raise DataError(
                    f"the chat template leaves out the turn of the {message['role']}",
                    key=f"message {number}",
                    way_out=f"Put its words into another turn, or give a template that takes it in "
                    f"{_BASIC}.chat_template.",
                )

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as text, media as the template's placeholder tokens; a last turn of the model's has an end,
        which some templates (GLM's, LLaVA's) do not write.

        Raises:
            DataError: The template refuses the conversation, or cannot write what is in it.
        """
        self._check_tools(messages, tools)
        text = self._render(self._for_template(messages), add_generation_prompt, tools=tools)
        if add_generation_prompt:
            return text
        return self._ended(messages, text)

    def render_with_spans(
        self, messages: Sequence[Message], wanted: Sequence[bool], tools: Tools | None = None
    ) -> tuple[str, list[Span]]:
        """The text and the span of each wanted turn: from the end of the prompt that opens it to its end mark, or where
        the template writes none, to the token that stands for it: the mark of the next turn, or what is added to the
        last.

        Args:
            messages: The conversation.
            wanted: Per message, whether its span is asked for.
            tools: Descriptions of the tools.

        Raises:
            DataError: The template refuses the conversation, or mixes turns so that spans cannot be told.
        """
        self._check_tools(messages, tools)
        prepared = self._for_template(messages)
        text = self._render(prepared, tools=tools)
        numbers = [i for i, flag in enumerate(wanted) if flag]
        spans = self._finder.find(prepared, numbers, text, tools=tools)
        ended = self._ended(messages, text)
        for k, (start, end) in enumerate(spans):
            if messages[numbers[k]]["role"] != "assistant" or self._is_ended(text[start:end]):
                continue
            if end == len(text):
                spans[k] = (start, len(ended))
            elif self._ends_turns and self._finder.turn_end:
                spans[k] = (start, end + len(self._finder.mark_at(text, end) or ""))  # the next turn may be a tool's
        return ended, spans

    def with_variables(self, variables: Mapping[str, object]) -> ChatTemplate:
        """The same, with further variables, for prompts that are to be answered.

        Raises:
            DataError: The template does not read one of them.
        """
        for name in variables:
            if name in _OWN_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", self.source):
                raise DataError(
                    f"the model's chat template reads no '{name}'",
                    key="reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name}",
                    way_out="Leave it out.",
                )
        found = copy(self)
        found._variables = self._variables | dict(variables)
        return found

    def _ended(self, messages: Sequence[Message], text: str) -> str:
        is_over = bool(messages) and messages[-1]["role"] == "assistant"
        if not is_over or self.turn_end is None or self._is_ended(text):
            return text
        return text.rstrip() + self.turn_end

    def _is_ended(self, text: str) -> bool:
        """Whether it closes with an end mark of the format, or with the very one that would be added."""
        return self._finder.is_ended(text) or (self.turn_end is not None and text.rstrip().endswith(self.turn_end))

    def _render(self, messages: list[Message], add_generation_prompt: bool = False, **context: object) -> str:
        try:
            rendered, _ = self._render_jinja(
                conversations=[messages],
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self._variables | context,
            )
        except (jinja2.TemplateError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        if len(rendered[0]) > MAX_RENDERED_CHARACTERS:
            raise DataError(f"the rendered conversation has {len(rendered[0])} characters")
        return rendered[0]

    def _for_template(self, messages: Sequence[Message]) -> list[Message]:
        """Templates of multimodal models read lists of typed parts, those of text models read strings."""
        if self._drops_thoughts:
            messages = [without_thoughts(message) for message in messages]
        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        return list(messages)

    def _check_tools(self, messages: Sequence[Message], tools: Tools | None) -> None:
        """Raise where tools would be left out without a word."""
        calls = any("tool_calls" in message for message in messages)
        if (tools and "tools" not in self.source) or (calls and "tool_calls" not in self.source):
            raise DataError(
                "the row has tools, but the chat template does not write any",
                key=f"{_BASIC}.chat_template",
                way_out="Give a template that writes tools, or take such rows out.",
            )


def _in_parts(message: Message) -> Message:
    """The message with a list of parts as its content."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}] if content else []}


def without_thoughts(message: Message) -> Message:
    """The model's turn without what it thought."""
    if message["role"] != "assistant":
        return message
    message = {key: value for key, value in message.items() if key != "reasoning_content"}
    if isinstance(message["content"], str):
        message["content"] = _THOUGHT.sub("", message["content"])
        return message
    parts = []
    for part in message["content"]:
        if part["type"] == "text":
            part = {**part, "text": _THOUGHT.sub("", part["text"])}
        parts.append(part)
    message["content"] = parts
    return message


def build_template(processor: object, basic: BasicParameters) -> ChatTemplate:
    """The template asked for: the file `chat_template`, else the name `template`, else the model's own.

    Args:
        processor: Processor or tokenizer.
        basic: `basic_parameters`.

    Raises:
        ConfigError: Unknown name.
        DataError: The file is missing.
        ModelFolderError: The model's own template is asked for and there is none.
    """
    named = TEMPLATES.get(basic.template) if basic.template else NamedTemplate()
    if basic.chat_template:
        source = _read_template(Path(basic.chat_template))
    else:
        source = named.source or own_template(processor) or named.stand_in or whisper_format(processor) or ""
    if not source:
        raise _no_template(processor, basic.template)
    if basic.default_system:
        source = _with_system(source, basic.default_system, in_parts=tokenizer_of(processor) is not processor)
    thinking = basic.enable_thinking if named.enable_thinking is None else named.enable_thinking
    return ChatTemplate(processor, source, enable_thinking=thinking, ends_turns=named.ends_turns)


def _with_system(source: str, system: str, *, in_parts: bool) -> str:
    """A template that begins conversations without a system prompt with this one; `in_parts`: contents are lists."""
    text = system.encode("unicode_escape").decode("ascii").replace('"', "\\x22").replace("{", "\\x7b")
    content = f'[{{"type": "text", "text": "{text}"}}]' if in_parts else f'"{text}"'
    begins = '{%- if not messages or messages[0].role not in ["system", "developer"] %}'
    begins += (
        f'{{%- set messages = [{{"role": "system", "content": {content}}}] + messages %}}{{%- endif %}}{{{{- "" }}}}'
    )
    if source.startswith(begins):
        return source
    return begins + source


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise missing_input(path, f"{_BASIC}.chat_template", DataError)
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"'{path}' is not text: byte {error.start} is not UTF-8",
            key=f"{_BASIC}.chat_template",
            way_out="Give a jinja file.",
        ) from error
    check_chat_template(source, where=str(path))
    return source


def own_template(processor: object) -> str | None:
    """The chat template that a processor, or the tokenizer inside it, brings; None: it brings none."""
    return chat_templates_of(processor).get("default")


def _no_template(processor: object, name: str | None) -> ModelFolderError:
    folder = setting_of(tokenizer_of(processor), str, "name_or_path") or ""
    missing = missing_processor(Path(folder))  # it may be what has the template
    if missing is not None:
        return missing
    known = ", ".join(sorted(name for name, source in FORMATS.items() if source and name != "default"))
    what = "the model's folder has no chat template"
    if name:
        what += f", and '{name}' is a format that only such a template knows"
    return ModelFolderError(
        what,
        where=folder,
        key=f"{_BASIC}.template",
        way_out=f"For a base model, set {_BASIC}.template: default, a plain format of any model, or {_BASIC}.stage: "
        "pretrain to train on plain text. Otherwise copy chat_template.jinja of the original model, give a jinja file "
        f"in {_BASIC}.chat_template, or name the format of its family: {known}.",
    )


def _register_builtin() -> None:
    for name, source in FORMATS.items():
        thinking = False if name.endswith("_nothink") else None
        TEMPLATES.register(name)(NamedTemplate(None, thinking, stand_in=source))
    register_template("empty", EMPTY, ends_turns=False)
    register_template("completion", COMPLETION)
    register_template("alpaca", ALPACA)


_register_builtin()
