"""Requests for a chat completion: OpenAI's fields → a conversation and how to answer it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mindspeed_mm.core.errors import DataError, UsageError
from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.core.whole_text import HALF_CHARACTER, has_lone_surrogate
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.sample import MEDIA_KINDS, RowLocation, Sample
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.questions import question_of
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError

Request = TypeVar("Request", bound="RequestFields")
_PLACE = RowLocation("request", 1)
_MOST_STOPS = 4
_LONGEST_STOP = 200


class RequestFields(BaseModel):
    """A request as JSON has it; a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = ""
    user: Any = None
    metadata: Any = None


class StreamOptions(BaseModel):
    """How an answer comes in pieces."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    include_usage: bool = False


class ChatFields(RequestFields):
    """OpenAI's request for a chat completion, with `top_k`, `min_p` and `repetition_penalty` beside."""

    messages: Annotated[list[Any], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, strict=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100, strict=False)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None
    store: Any = None
    service_tier: Any = None


_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tool_choice": (None, "auto", "none"),
}
"""Fields that this server has nothing for, with the values that ask for nothing. Any other is refused: an answer that
pays no regard to what was asked would look like one that does."""


@dataclass(frozen=True)
class ChatCall:
    """What is asked."""

    model: str
    sample: Sample
    """The conversation; its media are as the client named them."""
    sampling: Sampling
    stop: tuple[str, ...]
    is_streamed: bool
    tells_usage: bool
    """Whether a stream ends with the counts of tokens."""


def read_chat(body: bytes, limits: Limits) -> ChatCall:
    """A request.

    Raises:
        RefusedError: Naming the field.
    """
    fields = read_fields(body, ChatFields)
    for name, harmless in _WITHOUT_EFFECT.items():
        if getattr(fields, name) not in harmless:
            message = f"'{name}': {getattr(fields, name)!r:.60} is not supported here; leave the field out."
            raise RefusedError(400, message, param=name, code="unsupported_value")
    characters = len_of_text([fields.messages, fields.tools])
    limits.check("max_characters", characters, f"the request has {characters:,} characters of text")
    asked = fields.max_completion_tokens or fields.max_tokens or limits.max_new_tokens
    limits.check("max_new_tokens", asked, f"an answer of {asked:,} tokens is asked for")
    try:
        sampling = Sampling(
            asked, fields.temperature, fields.top_p, fields.seed, fields.top_k, fields.min_p, fields.repetition_penalty
        )
    except UsageError as error:
        raise RefusedError.of(error, param="temperature") from error
    return ChatCall(
        model=fields.model,
        sample=_conversation(fields),
        sampling=sampling,
        stop=_stops(fields.stop),
        is_streamed=bool(fields.stream),
        tells_usage=fields.stream_options is not None and fields.stream_options.include_usage,
    )


def read_fields(body: bytes, kind: type[Request]) -> Request:
    """The fields of a request.

    Raises:
        RefusedError: It is not JSON, or a field is off.
    """
    try:
        value = parse_json(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}"[:200], code="invalid_json") from error
    if has_lone_surrogate(value):
        raise RefusedError(400, f"the request holds {HALF_CHARACTER}.", code="invalid_json")
    if not isinstance(value, dict):
        raise RefusedError(400, "the request is JSON, and no object.", code="invalid_json")
    try:
        return kind.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise _refused_field(error, kind) from error


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


def _refused_field(error: ValidationError | RecursionError, kind: type[BaseModel]) -> RefusedError:
    if isinstance(error, RecursionError):
        return RefusedError(400, "the request is nested too deeply.", code="invalid_json")
    first = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in first["loc"])[:100]
    if first["type"] == "extra_forbidden":
        message = f"'{name}' is not a field of this request. {did_you_mean(name, kind.model_fields)}"
        return RefusedError(400, message, param=name, code="unknown_parameter")
    return RefusedError(400, f"'{name}': {first['msg']}.", param=name, code="invalid_value")


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > _MOST_STOPS or any(not 0 < len(text) <= _LONGEST_STOP for text in texts):
        message = f"'stop' takes up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters."
        raise RefusedError(400, message, param="stop", code="invalid_value")
    return texts


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
