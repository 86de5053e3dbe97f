"""Requests for a chat completion: OpenAI's fields → a conversation and how to answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from mindspeed_mm.core.errors import DataError, MachineError, MMError
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
    template: dict[str, Any] = field(default_factory=dict)
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


def len_of_text(value: Any) -> int:
    """How many characters of text there are in messages; the sources of media are not text."""
    total, waiting = 0, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, dict):
            is_medium = str(part.get("type")).removeprefix("input_").removesuffix("_url") in MEDIA_KINDS
            waiting += [] if is_medium else list(part.values())
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
    tools = None if fields.tool_choice == "none" else fields.tools
    try:
        sample, _ = question_of({"messages": messages, "tools": tools or None}, RowFormat(), _PLACE, needs_answer=False)
    except DataError as error:
        raise RefusedError.of(error) from error
    except RecursionError as error:
        raise RefusedError(400, "the request is nested too deeply.", code="invalid_json") from error
    return sample
