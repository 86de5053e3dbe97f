"""Tokens that a tokenizer has in addition to its vocabulary: their numbers, read without building it, and new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def extend_tokenizer(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], special: Sequence[str], *, where: str
) -> dict[str, int]:
    """Add tokens in place, as `add_tokens` of transformers does, and return the new ones with their numbers. Tokens
    that the tokenizer has already stay as they are.

    Args:
        tokenizer: The tokenizer.
        tokens: To add as ordinary tokens.
        special: To add as special tokens.
        where: The tokenizer's folder.

    Raises:
        ModelFolderError: The tokenizer is not one of the `tokenizers` library, the only kind whose file can be written
            with the tokens.
    """
    if not (tokens or special):
        return {}
    if not tokenizer.is_fast:
        raise ModelFolderError(
            f"a {type(tokenizer).__name__} has no tokenizer.json that new tokens could be written to",
            where=where,
            key="model.add_tokens" if tokens else "model.add_special_tokens",
            way_out="Write the folder with a fast tokenizer (AutoTokenizer.from_pretrained(…).save_pretrained(…)).",
        )
    known = tokenizer.get_vocab()
    new = [token for token in tokens if token not in known]
    new_special = [token for token in special if token not in known and token not in new]
    tokenizer.add_tokens(new)
    tokenizer.add_tokens(new_special, special_tokens=True)
    return {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (*new, *new_special)}


def holds_tokens(folder: Path, ids: Mapping[str, int]) -> bool:
    """Whether the files of a folder's tokenizer have all of these added tokens under these numbers."""
    found = _in_files(folder)
    return all(found.get(token) == number for token, number in ids.items())


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
