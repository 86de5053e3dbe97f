"""Requests for a completion of text: OpenAI's fields → prompts and how to go on with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from mindspeed_mm.tasks.serve.answer_fields import (
    AnswerCall,
    AnswerFields,
    count_of,
    sampling_of,
    steering_fields,
    stops_of,
)
from mindspeed_mm.tasks.serve.fields import read_fields, refuse_unsupported
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError

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


_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
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
    refuse_unsupported(fields, _WITHOUT_EFFECT)
    given: Any = fields.prompt
    alone = isinstance(given, str) or isinstance(given[0], int)
    prompts = tuple(each if isinstance(each, str) else tuple(each) for each in ([given] if alone else given))
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
