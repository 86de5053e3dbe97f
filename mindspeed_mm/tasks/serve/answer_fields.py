"""Fields that chat completions and completions share: how many answers, and how their tokens are chosen.

The names are OpenAI's and vLLM's; so are the values that ask for nothing: `top_k: -1` for all tokens, `seed: -1` for
none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.steering import Steering
from mindspeed_mm.tasks.serve.fields import RequestFields
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError

MOST_LOG_PROBS = 20
_MOST_STOPS = 4
_LONGEST_STOP = 200
_MOST_BIASES = 1024


def _no_flag(value: object) -> object:
    """Raise `ValueError` for true and false, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("Input should be a valid number")
    return value


_PENALTY = Annotated[float, BeforeValidator(_no_flag), Field(ge=-2, le=2, strict=False)]


class StreamOptions(BaseModel):
    """How an answer comes in pieces."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(BaseModel):
    """OpenAI's description of a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str | None = None
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Answers always follow the schema."""


class ResponseFormat(BaseModel):
    """Form that a request demands of an answer: free text, a JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class AnswerFields(RequestFields):
    """Of a request for answers."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, BeforeValidator(_no_flag), Field(ge=0, le=100, strict=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    repetition_penalty: Annotated[float, BeforeValidator(_no_flag), Field(ge=0.01, le=100, strict=False)] | None = None
    frequency_penalty: _PENALTY | None = None
    presence_penalty: _PENALTY | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, strict=False)]] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class AnswerCall:
    """What is asked of an answer."""

    model: str
    sampling: Sampling
    stop: tuple[str, ...] = ()
    is_streamed: bool = False
    tells_usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    count: int = 1
    """Answers."""
    steered_by: tuple[str, ...] = ()
    """Fields that say how tokens are chosen."""

    def sampling_of(self, number: int) -> Sampling:
        """Of one of the answers: with a seed, each has its own, the next number (as vLLM's)."""
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        return replace(self.sampling, seed=(seed + number) % 2**63)


_STEERING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "seed", "ignore_eos", "logprobs", "response_format", "n",
)  # fmt: skip


def steering_fields(fields: AnswerFields) -> tuple[str, ...]:
    """Fields of a request that say how tokens are chosen, other than the likeliest one."""
    given = [name for name in _STEERING if getattr(fields, name, None) not in (None, False, {})]
    return tuple(name for name in given if (name, getattr(fields, name)) not in (("temperature", 0), ("n", 1)))


def sampling_of(
    fields: AnswerFields, limits: Limits, *, asked: int | None, log_probs: int | None, grammar: str | None = None
) -> Sampling:
    """How tokens are chosen.

    Args:
        fields: Of the request.
        limits: Of the server.
        asked: Tokens that an answer may have; None: as many as the server lets it.
        log_probs: As `Steering` has it.
        grammar: As `Steering` has it.

    Raises:
        RefusedError: Naming the field.
    """
    most = asked or limits.max_new_tokens
    limits.check("max_new_tokens", most, f"an answer of {most:,} tokens is asked for")
    steering = Steering(
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=_biases(fields.logit_bias or {}),
        ignores_end=bool(fields.ignore_eos),
        log_probs=log_probs,
        grammar=grammar,
    )
    try:
        return Sampling(
            most,
            fields.temperature,
            fields.top_p,
            None if fields.seed == -1 else fields.seed,
            0 if fields.top_k == -1 else fields.top_k,
            fields.min_p,
            fields.repetition_penalty,
            steering=steering,
        )
    except UsageError as error:
        raise RefusedError.of(error, param="temperature") from error


def count_of(fields: AnswerFields, limits: Limits) -> int:
    """How many answers are asked for. Raises `RefusedError` for more than may be."""
    count = fields.n or 1
    limits.check("max_samples", count, f"{count} answers are asked for")
    return count


def stops_of(fields: AnswerFields) -> tuple[str, ...]:
    """Texts that end an answer. Raises `RefusedError` for too many or too long ones."""
    texts = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(texts) > _MOST_STOPS or any(not 0 < len(text) <= _LONGEST_STOP for text in texts):
        message = f"'stop' takes up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters."
        raise RefusedError(400, message, param="stop", code="invalid_value")
    return texts


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    wrong = next((token for token in given if not re.fullmatch(r"[0-9]{1,9}", token)), None)
    if wrong is not None or len(given) > _MOST_BIASES:
        message = f"'logit_bias' takes up to {_MOST_BIASES} ids of tokens with a number of -100 to 100"
        message += "." if wrong is None else f", and '{wrong[:40]}' is not an id."
        raise RefusedError(400, message, param="logit_bias", code="invalid_value")
    return tuple((int(token), added) for token, added in sorted(given.items()))
