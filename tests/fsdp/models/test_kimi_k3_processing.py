"""What Kimi-K3's processor writes: conversations and pictures as the published code writes them, and tokens out of a
tiktoken.model."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.sampling.answers.spoken import words_of
from mindspeed_mm.fsdp.utils.processor import load_processor
from tests.helpers.tiny_kimi_k3 import make_tiny_kimi_k3
from tests.helpers.tiny_processors import byte_tokenizer
from tests.helpers.written_families import random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "KimiLinearConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kimi_k3") / "model"
    make_tiny_kimi_k3(path)
    return path


SAYS = '<|open|>message role="{}"<|sep|>{}<|close|>message<|sep|><|end_of_msg|>'
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your '
    "thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and "
    "`max`.\nNow the system is invoked with `thinking_effort={}`.<|close|>message<|sep|><|end_of_msg|>"
)
"""As the published code writes it."""


def answer(said: str, thought: str | None = None) -> str:
    spoken = f"<|open|>response<|sep|>{said}<|close|>response<|sep|>"
    return spoken if thought is None else f"<|open|>think<|sep|>{thought}<|close|>think<|sep|>{spoken}"


def rendered(folder: Path, messages: list[dict[str, Any]], **given: Any) -> str:
    processor: Any = load_processor(folder)
    text: str = processor.apply_chat_template(messages, tokenize=False, **given)
    return text


def test_conversations_are_written_as_published(folder: Path) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": 'A "&" B', "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]},
        {"role": "assistant", "content": "Seven", "reasoning_content": "7?"},
        {"role": "user", "content": "And?"},
    ]
    named = '<|open|>message role="user" name="A &quot;&amp;&quot; B"<|sep|><|media_pad|>Which?'
    before = SAYS.format("system", "Be brief.") + f"{named}<|close|>message<|sep|><|end_of_msg|>"
    plain = before + SAYS.format("assistant", answer("Seven")) + SAYS.format("user", "And?")
    opened = '<|open|>message role="assistant"<|sep|>'
    assert rendered(folder, turns, enable_thinking=False) == plain
    assert rendered(folder, turns, enable_thinking=False, add_generation_prompt=True) == (
        f"{plain}{opened}<|open|>response<|sep|>"
    )
    thoughtful = before + SAYS.format("assistant", answer("Seven", "7?")) + SAYS.format("user", "And?")
    assert rendered(folder, turns, add_generation_prompt=True) == (
        f"{EFFORT.format('max')}{thoughtful}{opened}<|open|>think<|sep|>"
    )
    assert rendered(folder, turns, thinking_effort="low") == EFFORT.format("low") + thoughtful
    within = [*turns[:2], {"role": "assistant", "content": "<think>7?</think>\n\nSeven"}, turns[3]]
    assert rendered(folder, within, thinking_effort=None) == thoughtful
    with pytest.raises(Exception, match="thinking_effort is low, high or max"):
        rendered(folder, turns, thinking_effort="medium")


def test_tools_are_written_as_published(folder: Path) -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"b": 1, "a": "é"}}}
    called = {"n": 3, "on": True, "none": None, "list": [1, "x"], "at": {"k": "v"}, "text": "hi"}
    calls = [{"id": "c1", "function": {"name": "look", "arguments": called}}, {"id": "c2", "function": {"name": "f"}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "name": "other", "content": "43"},
    ]
    declared = (
        '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in '
        'JSONSchema.\n\n```json\n[{"function":{"description":"d","name":"look","parameters":{"a":"é","b":1}},'
        '"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
    )
    written = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in (
            ("n", "number", "3"), ("on", "boolean", "true"), ("none", "null", "null"), ("list", "array", '[1, "x"]'),
            ("at", "object", '{"k": "v"}'), ("text", "string", "hi"),
        )
    )  # fmt: skip
    asks = (
        f'{answer("")}<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|>{written}<|close|>call<|sep|>'
        '<|open|>call tool="f" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    )
    results = "".join(
        f'<|open|>message role="tool" tool="{name}" index="{number}"<|sep|>{said}<|close|>message<|sep|><|end_of_msg|>'
        for name, number, said in (("look", 1, "42"), ("other", 2, "43"))
    )
    expected = declared + SAYS.format("user", "Go") + SAYS.format("assistant", asks) + results
    assert rendered(folder, turns, tools=[tool], enable_thinking=False) == expected
    turns[2]["tool_call_id"] = "c2"
    with pytest.raises(Exception, match="another order than their calls"):
        rendered(folder, turns, enable_thinking=False)


def test_answers_are_told_apart_from_their_markup(folder: Path) -> None:
    """What follows a prompt, as it is shown, scored and answered over HTTP: thoughts by the usual marks."""
    tokenizer = load_processor(folder).tokenizer
    ended = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    for said, shown in (
        (f"Seven{ended}", "Seven"),
        (f"7?<|close|>think<|sep|><|open|>response<|sep|>Seven{ended}", "7?</think>Seven"),
        ("<|open|>think<|sep|>", "<think>"),
    ):
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == said
        assert tokenizer.decode(ids, skip_special_tokens=True) == shown
    assert words_of("7?</think>Seven") == "Seven"


def test_pictures_are_told_with_their_sizes(folder: Path) -> None:
    processor: Any = load_processor(folder)
    text = "one <|media_pad|> two <|media_pad|>"
    made = processor(images=random_pictures([(62, 15), (16, 8)]), text=[text], return_tensors="pt")
    written = processor.tokenizer.decode(made["input_ids"][0])
    for width, height, tokens in ((62, 15, 16), (16, 8, 2)):
        pads = "<|media_pad|>" * tokens
        assert f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>" in written


def join_bytes(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The pair of the lowest rank, the leftmost one of it, until none is known."""
    parts = [bytes([byte]) for byte in piece]
    if piece in ranks:
        return [ranks[piece]]
    while True:
        known = [(ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not known:
            return [ranks[part] for part in parts]
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tiktoken_file_is_read_without_running_code(tmp_path: Path, folder: Path) -> None:
    """Pieces by hand: spaces go with the word behind them, digits by threes, han by themselves."""
    whole, folder = folder, tmp_path / "model"
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("tokenizer*", "special*", "*.safetensors"))
    words = [bytes([byte]) for byte in range(256)]
    words += [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"12", "你".encode()[:2], "你".encode(), b"ld"]
    ranks = {word: rank for rank, word in enumerate(words)}
    lines = b"".join(base64.b64encode(word) + f" {rank}\n".encode() for word, rank in ranks.items())
    (folder / "tiktoken.model").write_bytes(lines)
    first = len(words)
    named = {"[BOS]": True, "[EOS]": True, "<|end_of_msg|>": True, "<|open|>": False, "<|media_pad|>": True}
    added = {str(first + at): {"content": content, "special": kind} for at, (content, kind) in enumerate(named.items())}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    processor: Any = load_processor(folder)
    tokenizer = processor.tokenizer
    assert len(tokenizer) == first + 256
    said = "hello world12345 你们<|open|>ok<|end_of_msg|>"
    pieces = [b"hello", b" world", b"123", b"45", b" ", "你们".encode()]
    expected = [token for piece in pieces for token in join_bytes(piece, ranks)]
    expected += [first + 3, *join_bytes(b"ok", ranks), first + 2]
    assert tokenizer(said, add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.decode(expected) == said
    assert tokenizer.decode(expected, skip_special_tokens=True) == said.removesuffix("<|end_of_msg|>")
    assert tokenizer.convert_tokens_to_ids(f"<|reserved_token_{first + 9}|>") == first + 9
    (folder / "tiktoken.model").write_bytes(lines[:-3] + b"?? 9\n")
    with pytest.raises(ModelFolderError, match=f"line {first} is not a token"):
        load_processor(folder)
    (folder / "tiktoken.model").unlink()
    with pytest.raises(ModelFolderError, match=r"neither tokenizer\.json nor tiktoken\.model"):
        load_processor(folder)


def test_a_tokenizer_without_the_token_of_pictures_is_refused(tmp_path: Path, folder: Path) -> None:
    whole, folder = folder, tmp_path / "model"
    shutil.copytree(whole, folder)
    byte_tokenizer({"eos_token": "[EOS]"}, None).save_pretrained(folder)
    with pytest.raises(ModelFolderError, match=r"the tokenizer has no token <\|media_pad\|>"):
        load_processor(folder)
