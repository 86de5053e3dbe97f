"""Which language and task Whisper's transcripts begin with: those that the folder's generation configuration names,
while training and when the model is asked, so that neither begins otherwise than the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonObject, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_mm.fsdp.utils.processor import Processor

_FILE = "generation_config.json"
_TASKS = ("transcribe", "translate")


def is_whisper(processor: object) -> bool:
    """Whether all tokens of a conversation are those of a decoder, and the sound goes to an encoder of its own."""
    return type(processor).__name__ == "WhisperProcessor"


def tell_language(processor: Processor, folder: Path) -> None:
    """Let Whisper's tokenizer begin transcripts as `generate` does with the folder's generation configuration. Where
    that names neither language nor task, the tokenizer's own stay. Other processors are left alone.

    Args:
        processor: Of the folder.
        folder: The model's.

    Raises:
        ModelFolderError: The tokenizer knows no such language or task.
    """
    if not is_whisper(processor):
        return
    settings = _generation_settings(folder)
    language, task = settings.get("language"), settings.get("task")
    if language is None and task is None:
        language, task = _forced(settings, processor.tokenizer)
    elif task is None:
        task = "transcribe"  # as `generate` takes it
    if language is None and task is None:
        return
    try:
        # Whisper's tokenizer takes "en" and "english"; `generate` takes "<|en|>", too.
        processor.tokenizer.set_prefix_tokens(language=language and language.strip("<|>"), task=task)
    except ValueError as error:
        raise ModelFolderError(
            f"Whisper's tokenizer cannot begin a transcript with language '{language}' and task '{task}': {error}",
            where=str(folder / _FILE),
            way_out="Correct `language` and `task`.",
        ) from error


def detects_language(processor: Processor, folder: Path) -> bool:
    """Whether `generate` finds out the language of each sound by itself, because none is named."""
    if not is_whisper(processor) or processor.tokenizer.language is not None:
        return False
    settings = _generation_settings(folder)
    return "lang_to_id" in settings and settings.get("is_multilingual") is not False


def require_language(processor: object, folder: Path) -> None:
    """Raise `ModelFolderError` for a Whisper that would be trained without a language and asked with one."""
    if detects_language(processor, folder):
        raise ModelFolderError(
            "names no language, so transcripts would be trained without one, and asked for in the language that the "
            "model finds in each sound",
            where=str(folder / _FILE),
            key="language",
            way_out='Add the language and the task of your rows, such as "language": "en", "task": "transcribe".',
        )


def _generation_settings(folder: Path) -> dict[str, Any]:
    path = folder / _FILE
    if path.is_file():
        return read_json_object(path, ModelFolderError)
    return {}


def _forced(settings: JsonObject, tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str | None]:
    """Language and task of older folders: `forced_decoder_ids`, pairs of place and token, such as [[1, 50259], …]. A
    token that is null stands for a language that is to be found out; models of English alone have none at all."""
    forced = dict(settings.get("forced_decoder_ids") or ())
    if forced.get(1) is None:
        return None, None
    names = [tokenizer.convert_ids_to_tokens(token).strip("<|>") for token in forced.values() if token is not None]
    language = task = None
    for name in reversed(names):  # the first of each kind counts
        if name in _TASKS:
            task = name
        elif name != "notimestamps":
            language = name
    return language, task
