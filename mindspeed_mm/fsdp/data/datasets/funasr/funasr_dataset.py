"""Transcripts as FunASR's recipes lay them out: `dataset_type: funasr`."""

from __future__ import annotations

import re
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.utils.register import data_register

_SPEECH = re.compile(r"<\|startofspeech\|>!?(.*?)<\|endofspeech\|>", re.DOTALL)


@data_register.register("funasr")
class FunAsrDataset(Qwen2VLDataset):
    """Rows of two layouts, beside those that every data set reads:

    `{"messages": [{"role": "user", "content": "Transcribe: <|startofspeech|>!a.wav<|endofspeech|>"}, …]}` and
    `{"key": "a", "source": "a.wav", "target": "hello"}`, the latter perhaps with a `prompt`.

    What they say of lengths (`speech_length`, `source_len` …) is not read: lengths are measured.
    """

    is_deterministic = True
    own_columns = frozenset({"source_len", "speech_length", "target_len", "text_len", "text_length"})

    def conversation(self, index: int) -> JsonObject:
        """Row `index` with its sound in a column."""
        return conversation_of(super().conversation(index))


def conversation_of(row: JsonObject) -> JsonObject:
    """A row as a conversation with `audios`; one of another layout as it is."""
    if isinstance(row.get("source"), str) and isinstance(row.get("target"), str):
        asked, said = f"{row.get('prompt') or ''}<audio>", row["target"]
        told = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        return {"id": row.get("key"), "messages": told, "audios": [row["source"]]}
    turns = row.get("messages")
    if not isinstance(turns, list):
        return row
    sounds: list[str] = []
    told = [_without_paths(turn, sounds) for turn in turns]
    if sounds:
        return {**row, "messages": told, "audios": sounds}
    return row


def _without_paths(turn: object, sounds: list[str]) -> Any:
    """A turn with marks where it named sounds, which are added to `sounds`."""
    if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
        return turn
    sounds += [path.strip() for path in _SPEECH.findall(turn["content"])]
    return {**turn, "content": _SPEECH.sub("<audio>", turn["content"])}
