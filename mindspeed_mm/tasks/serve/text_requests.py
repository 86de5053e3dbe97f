"""Requests that are answered in text: OpenAI's fields → a conversation, prompts or a sound, and how to answer it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from mindspeed_mm.core.errors import DataError, MachineError, MMError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, RowLocation, Sample
from mindspeed_mm.fsdp.sampling.answers.questions import question_of
from mindspeed_mm.fsdp.sampling.answers.steering import json_grammar
from mindspeed_mm.tasks.serve.answer_fields import (
    MOST_LOG_PROBS,
    AnswerCall,
    AnswerFields,
    ResponseFormat,
    count_of,
    sampling_of,
    steering_fields,
    stops_of,
)
from mindspeed_mm.tasks.serve.fields import read_fields, refuse_unsupported
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError

_PLACE = RowLocation("request", 1)


class ChatFields(AnswerFields):
    """OpenAI's request for a chat completion, with vLLM's fields beside."""

    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOG_PROBS)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    store: bool | None = None
    service_tier: Any = None


_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_choice": ((None, "auto", "none"), "Leave it out, and tell the model in a message to call the tool."),
    "parallel_tool_calls": ((None, True), "Leave it out, and use the first call alone."),
    "store": ((None, False), "Leave it out: nothing is stored here."),
    "service_tier": ((None, "auto", "default"), "Leave it out."),
}
"""Fields that this server has nothing for, with the values that ask for nothing, and what to do instead. Any other is
refused: an answer that pays no regard to what was asked would look like one that does."""


@dataclass(frozen=True)
class ChatCall(AnswerCall):
    """A checked request for a chat completion: the conversation, and how to answer it."""

    sample: Sample = field(kw_only=True)
    """The conversation; its media are as the client named them."""
    template: JsonObject = field(default_factory=dict)
    """Variables of the chat template."""


def read_chat(body: bytes, limits: Limits) -> ChatCall:
    """A request.

    Raises:
        RefusedError: Naming the field.
    """
    fields = read_fields(body, ChatFields)
    refuse_unsupported(fields, _WITHOUT_EFFECT)
    characters = len_of_text([fields.messages, fields.tools])
    limits.check("max_characters", characters, f"the request has {characters:,} characters of text")
    if fields.top_logprobs and not fields.logprobs:
        message = "'top_logprobs' adds to 'logprobs': set that to true."
        raise RefusedError(400, message, param="top_logprobs", code="invalid_value")
    template = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        template["reasoning_effort"] = fields.reasoning_effort
    return ChatCall(
        model=fields.model,
        sample=_conversation(fields),
        sampling=sampling_of(
            fields,
            limits,
            asked=fields.max_completion_tokens or fields.max_tokens,
            log_probs=(fields.top_logprobs or 0) if fields.logprobs else None,
            grammar=_grammar(fields.response_format),
        ),
        stop=stops_of(fields),
        is_streamed=bool(fields.stream),
        tells_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        count=count_of(fields, limits),
        template=template,
        steered_by=steering_fields(fields),
    )


def _grammar(asked: ResponseFormat | None) -> str | None:
    """What an answer follows.

    Raises:
        RefusedError: It cannot.
    """
    if asked is None or asked.type == "text":
        return None
    schema = None
    if asked.type == "json_schema":
        if asked.json_schema is None:
            message = "'response_format.json_schema' is missing."
            raise RefusedError(400, message, param="response_format", code="invalid_value")
        schema = asked.json_schema.schema_
    try:
        return json_grammar(schema)
    except MachineError as error:
        raise RefusedError.of(error, param="response_format") from error
    except MMError as error:
        problem = error.problems[0]
        message = f"'response_format': {problem.what.rstrip('.')}. {problem.way_out}"
        raise RefusedError(400, message, param="response_format", code="unsupported_value") from error


def len_of_text(value: object) -> int:
    """How many characters of text there are in messages; the sources of media are not text."""
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, dict):
            # `image_url`, `input_audio`: OpenAI's names of parts
            is_medium = str(part.get("type")).removeprefix("input_").removesuffix("_url") in MEDIA_KINDS
            if not is_medium:
                waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return total


def _conversation(fields: ChatFields) -> Sample:
    last = fields.messages[-1]
    if isinstance(last, dict) and last.get("role") == "assistant":
        message = "the last message is the assistant's, and nothing is asked."
        raise RefusedError(400, message, param="messages", code="invalid_value")
    # Marks of media are those of rows; what a person writes is text, whatever it looks like.
    messages = []
    for said in fields.messages:
        if isinstance(said, dict) and isinstance(said.get("content"), str):
            said = {**said, "content": [{"type": "text", "text": said["content"]}]}
        messages.append(said)
    tools = fields.tools
    if fields.tool_choice == "none":
        tools = None
    try:
        sample, _ = question_of({"messages": messages, "tools": tools or None}, RowFormat(), _PLACE, needs_answer=False)
    except DataError as error:
        raise RefusedError.of(error) from error
    except RecursionError as error:
        raise RefusedError(400, "the request is nested too deeply.", code="invalid_json") from error
    return sample


# --- a completion -----------------------------------------------------------------------------------------------------

_USUAL_TOKENS = 16
"""OpenAI's default."""
_MOST_LOG_PROBS = 5
_IDS = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionFields(AnswerFields):
    """OpenAI's request for a completion, with vLLM's fields beside."""

    prompt: str | _IDS | Annotated[list[str | _IDS], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=_MOST_LOG_PROBS)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


_WITHOUT_EFFECT_ON_TEXT: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "Ask for several answers with 'n'."),
    "echo": ((None, False), "Put the prompt before the answer yourself."),
    "suffix": ((None, ""), "Leave it out: nothing is inserted here."),
}


@dataclass(frozen=True)
class CompletionCall(AnswerCall):
    """A checked request for completions of text: the prompts, and how to go on with them."""

    prompts: tuple[str | tuple[int, ...], ...] = ()


def read_completion(body: bytes, limits: Limits) -> CompletionCall:
    """A request.

    Raises:
        RefusedError: Naming the field.
    """
    fields = read_fields(body, CompletionFields)
    refuse_unsupported(fields, _WITHOUT_EFFECT_ON_TEXT)
    given: Any = fields.prompt
    if isinstance(given, str) or isinstance(given[0], int):  # one text, or the ids of one
        given = [given]
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in given)
    characters = sum(len(each) for each in prompts)
    limits.check("max_characters", characters, f"the request has {characters:,} characters of text")
    count = count_of(fields, limits)
    limits.check("max_requests", len(prompts) * count, f"{len(prompts) * count} answers are asked for")
    if not all(prompts):
        raise RefusedError(400, "'prompt' is empty.", param="prompt", code="invalid_value")
    return CompletionCall(
        model=fields.model,
        sampling=sampling_of(fields, limits, asked=fields.max_tokens or _USUAL_TOKENS, log_probs=fields.logprobs),
        stop=stops_of(fields),
        is_streamed=bool(fields.stream),
        tells_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        count=count,
        steered_by=steering_fields(fields),
        prompts=prompts,
    )


# --- a transcript -----------------------------------------------------------------------------------------------------

_FIELDS = ("model", "language", "prompt", "response_format", "temperature", "stream")
_FORMATS = ("json", "text")
_WAYS_OUT = {
    "timestamp_granularities[]": "Leave it out: transcripts have no times here.",
    "timestamp_granularities": "Leave it out: transcripts have no times here.",
    "include[]": "Leave it out: transcripts come without log-probabilities here.",
    "chunking_strategy": "Leave it out, and send parts of the sound one by one.",
}
"""Fields of OpenAI's that this server has nothing for."""


@dataclass(frozen=True)
class TranscriptionCall:
    """A checked request for a transcript: the sound file, and how to transcribe it."""

    file: bytes
    model: str = ""
    language: str | None = None
    prompt: str = ""
    temperature: float | None = None
    is_plain: bool = False
    """The answer is the text alone, not JSON."""


def read_transcription(form: Mapping[str, str], files: Mapping[str, bytes]) -> TranscriptionCall:
    """A request.

    Raises:
        RefusedError: Naming the field.
    """
    check_fields(form, files)
    kind = form.get("response_format", "json")
    if kind not in _FORMATS:
        message = f"'{kind[:40]}' is not a format of this server: {' or '.join(_FORMATS)}."
        raise RefusedError(400, message, param="response_format", code="unsupported_value")
    if form.get("stream", "false").lower() not in ("false", "0", ""):
        message = "'stream': transcripts come whole; leave it out."
        raise RefusedError(400, message, param="stream", code="unsupported_value")
    return TranscriptionCall(
        file=files["file"],
        model=form.get("model", ""),
        language=form.get("language", "").strip().lower() or None,
        prompt=form.get("prompt", ""),
        temperature=_temperature(form.get("temperature", "")),
        is_plain=kind == "text",
    )


def check_fields(form: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    """Raise `RefusedError` for a form without its file, or with a field that is not known."""
    if "file" not in files:
        raise RefusedError(400, "there is no 'file'.", param="file", code="invalid_value")
    for name in (*form, *files):
        if name in _WAYS_OUT:
            raise RefusedError(
                400, f"'{name}' is not supported here. {_WAYS_OUT[name]}", param=name, code="unsupported_value"
            )
    unknown = [name for name in form if name not in _FIELDS] + [name for name in files if name != "file"]
    if unknown:
        shown = unknown[0][:100]
        message = f"'{shown}' is not a field of this request. {did_you_mean(shown, (*_FIELDS, 'file'))}"
        raise RefusedError(400, message, param=shown, code="unknown_parameter")


def _temperature(given: str) -> float | None:
    if not given.strip():
        return None
    try:
        found = float(given)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        message = f"'temperature' is a number from 0 to 1, not '{given[:40]}'."
        raise RefusedError(400, message, param="temperature", code="invalid_value")
    return found
