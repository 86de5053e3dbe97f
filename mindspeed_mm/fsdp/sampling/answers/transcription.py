"""Transcripts by Whisper, with transformers' own `generate`: an encoder hears, a decoder writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.sampling.answers.live import Ending, Speech
from mindspeed_mm.fsdp.sampling.finite import FiniteScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONGEST_START = 4
"""Tokens that a transcript begins with: start, language, task, no times."""


@dataclass(frozen=True)
class Transcript:
    """The tokens of a transcript up to and including its end token."""

    token_ids: tuple[int, ...]
    ending: Ending


def check_speech(model: PreTrainedModel, processor: Any, speech: Speech) -> None:
    """Raise `UsageError` for a language that the model does not know, or a prompt that is too long."""
    if speech.language is not None:
        known = getattr(model.generation_config, "lang_to_id", None) or {}
        token = _language_token(processor, speech.language)
        if token not in known:
            names = ", ".join(sorted(name.strip("<|>") for name in known)) or "English alone"
            what = f"the model knows no language '{speech.language[:40]}', but {names}"
            raise UsageError(what[:250], key="language", way_out="Name one of these, or leave it out.")
    if speech.prompt:
        most = model.config.max_target_positions // 2 - 1
        try:
            tokens = len(processor.get_prompt_ids(speech.prompt))
        except ValueError as error:  # marks of the tokenizer's own
            raise UsageError(str(error)[:200], key="prompt", way_out="Give words alone.") from error
        if tokens > most:
            what = f"the prompt has {tokens} tokens, and Whisper takes {most}"
            raise UsageError(what, key="prompt", way_out="Give the end of it.")


def _language_token(processor: object, language: str) -> str:
    """`de`, `german` and `<|de|>` are one."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # seconds

    return f"<|{TO_LANGUAGE_CODE.get(language, language).strip('<|>')}|>"


def transcripts(
    model: PreTrainedModel,
    inputs: Mapping[str, object],
    processor: object,
    speech: Speech | None,
    *,
    max_new_tokens: int,
) -> list[Transcript]:
    """The transcript of each sound.

    Language and task stand in the decoder's tokens; without these transformers takes those of the generation
    configuration, or finds out the language of each sound.

    Args:
        model: Whisper.
        inputs: `input_features` (B, mel bins, frames) and perhaps `decoder_input_ids` (B, L).
        processor: Of the model.
        speech: How all of them are heard; None: as the folder says.
        max_new_tokens: Longest transcript; no more than the decoder's places are used.
    """
    inputs, start_tokens = _as_heard(dict(inputs), processor, speech)
    most = min(max_new_tokens, model.config.max_target_positions - start_tokens)
    finite = FiniteScores(len(inputs["input_features"]))
    chosen: JsonObject = {"do_sample": False}
    if speech is not None and speech.temperature:
        chosen = {"do_sample": True, "temperature": speech.temperature}
    with torch.inference_mode():
        # Times are not trained. `generate` leaves the beginning and the end token out of what it returns.
        output_BL = model.generate(
            **inputs, **chosen, max_new_tokens=most, return_timestamps=False, logits_processor=[finite]
        )
    settings = model.generation_config
    found = []
    for *row, good in finite.beside(output_BL).tolist():
        transcript = _ended(row, most, settings.pad_token_id, settings.eos_token_id)
        if good < len(transcript.token_ids):
            transcript = Transcript(transcript.token_ids[:good], "failed")
        found.append(transcript)
    return found


def _as_heard(inputs: dict[str, Any], processor: Any, speech: Speech | None) -> tuple[JsonObject, int]:
    """What `generate` takes, and with how many tokens a transcript begins."""
    starts = inputs.get("decoder_input_ids")
    start_tokens = _LONGEST_START if starts is None else starts.shape[1]
    if speech is None or not (speech.language or speech.prompt):
        return inputs, start_tokens
    inputs.pop("decoder_input_ids", None)
    # Language and task of the folder stand in its tokenizer's prefix, from which training takes them, too.
    language = speech.language or processor.tokenizer.language
    if language is not None:
        inputs |= {"language": _language_token(processor, language), "task": processor.tokenizer.task or "transcribe"}
    if speech.prompt:
        prompt = processor.get_prompt_ids(speech.prompt, return_tensors="pt").to(inputs["input_features"].device)
        inputs["prompt_ids"] = prompt
        start_tokens += len(prompt)
    return inputs, start_tokens


def _ended(row: list[int], most: int, padding: int | None, end: int) -> Transcript:
    """A row without padding, and with its end token where it stopped before the limit."""
    ids = [int(token) for token in row]
    while ids and ids[-1] in (padding, end):
        ids.pop()
    if len(ids) < most:
        return Transcript((*ids, end), "stop")
    return Transcript(tuple(ids), "length")
