"""The numbers of tokens that a folder's tokenizer has beside its vocabulary, read without building it."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object


def added_token_id(folder: Path, token: str) -> int:
    """The number of an added token, out of whichever of the tokenizer's files says it.

    Raises:
        ModelFolderError: None of the files has the token, or one is broken.
    """
    found = _in_files(folder)
    if token not in found:
        raise ModelFolderError(
            f"no file of the tokenizer has the token {token}",
            where=str(folder),
            way_out="Copy tokenizer_config.json, and tokenizer.json or added_tokens.json, of the original model.",
        )
    return found[token]


def _in_files(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    if (path := folder / "added_tokens.json").is_file():
        found |= read_json_object(path, ModelFolderError)
    if (path := folder / "tokenizer_config.json").is_file():
        by_number = read_json_object(path, ModelFolderError).get("added_tokens_decoder") or {}
        found |= {entry["content"]: int(number) for number, entry in by_number.items()}
    if (path := folder / "tokenizer.json").is_file():
        entries = read_json_object(path, ModelFolderError).get("added_tokens") or ()
        found |= {entry["content"]: entry["id"] for entry in entries}
    return found
