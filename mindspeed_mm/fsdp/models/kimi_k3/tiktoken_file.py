"""Kimi-K3's tokenizer, also out of a `tiktoken.model`: lines of a token's bytes in base 64 and its rank, lower ranks
joined first."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typing_extensions import override

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.json_file import JsonMapping, read_json_object

_FILE, _SETTINGS = "tiktoken.model", "tokenizer_config.json"
_RESERVED = 256
"""Tokens behind the words: those that the settings name, and places for more."""
_PIECES = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What no token reaches beyond, as Kimi's published tokenizer has it."""


_MARKUP = {
    "<|open|>think<|sep|>": "<think>",
    "<|close|>think<|sep|>": "</think>",
    "<|open|>response<|sep|>": "",
    "<|close|>response<|sep|>": "",
    "<|close|>message<|sep|>": "",
}
"""What stands around thoughts and words in the model's turns → how they are told apart elsewhere."""


class KimiK3Tokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """Its tokens of markup are no special ones, so that an answer would be full of them: where special tokens are left
    out, thoughts stand in `<think>…</think>`, and words in nothing."""

    @override
    def _decode(self, token_ids: object, skip_special_tokens: bool | None = False, **kwargs: object) -> str:
        text: str = super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs)
        for markup, plain in _MARKUP.items() if skip_special_tokens else ():
            text = text.replace(markup, plain)
        return text


def tiktoken_tokenizer(folder: Path, **options: object) -> KimiK3Tokenizer:
    """The tokenizer of a folder with `tiktoken.model` and `tokenizer_config.json`.

    Args:
        folder: Of the model.
        options: For the tokenizer; they win over the settings.

    Raises:
        ModelFolderError: The file is missing or damaged.
    """
    ranks = _read_ranks(folder / _FILE)
    settings = read_json_object(folder / _SETTINGS, ModelFolderError)
    letters = bytes_to_unicode()
    words = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    merges = [(words[first], words[second]) for first, second in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    named = settings.get("added_tokens_decoder") or {}
    tokenizer.add_tokens([_reserved(named, number) for number in range(len(ranks), len(ranks) + _RESERVED)])
    kept = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "model_max_length")
    known = {name: settings[name] for name in kept if settings.get(name) is not None}
    return KimiK3Tokenizer(
        tokenizer_object=tokenizer,
        name_or_path=str(folder),
        chat_template=settings.get("chat_template"),
        **{"clean_up_tokenization_spaces": False} | known | options,
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    if not path.is_file():
        raise ModelFolderError(
            "the folder has neither tokenizer.json nor tiktoken.model",
            where=str(path.parent),
            way_out="Copy one of them of the original model into the folder.",
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelFolderError(
                f"line {number} is not a token in base 64 and its rank",
                where=str(path),
                way_out="Copy the original model's file.",
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelFolderError(
            f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}",
            where=str(path),
            way_out="Copy the original model's file.",
        )
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair that a token can be joined from, in the order in which pairs are joined."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _reserved(named: JsonMapping, number: int) -> AddedToken:
    given = named.get(str(number)) or {}
    content = given.get("content", f"<|reserved_token_{number}|>")
    return AddedToken(content, normalized=False, special=bool(given.get("special", False)))
