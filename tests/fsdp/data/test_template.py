"""The label mask comes from the structure of the conversation, for templates of every make."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.encode import Tokens
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate, build_template, register_template
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from tests.helpers.family_templates import QWEN3_VL
from tests.helpers.tiny_models import CHAT_TEMPLATE, build_tokenizer
from tests.helpers.tiny_processors import build_processor

LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
DROPS_THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
NO_MARKS = (
    "{% for m in messages %}{{ m.role.upper() + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
NEXT_TURN_IS_THE_END = (
    "{% for m in messages %}{{ '<|endoftext|>' if m.role == 'assistant' else '<|im_start|>' }}"
    "{{ '|' + m.content.strip() }}{% endfor %}{% if add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
)
OTHER_LAST_MARK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '|' + m.content }}"
    "{{ '<|endoftext|>' if m.role == 'assistant' and loop.last else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
MIXES_ENDS = OTHER_LAST_MARK.replace("<|endoftext|>", "!").replace("<|im_end|>", "?")
MIXES = "{{ messages | map(attribute='content') | sort | join(' ') }}"

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": " two "},
    {"role": "user", "content": "assistant: three?"},
    {"role": "assistant", "content": "four"},
]
WANTED = [False, False, True, False, True]


def spoken(tokenizer: Any, source: str, chat: list[dict[str, Any]] = CHAT, **options: Any) -> list[str]:
    template = ChatTemplate(tokenizer, source, **options)
    text, spans = template.render_with_spans(chat, [m["role"] == "assistant" for m in chat])
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (CHAT_TEMPLATE, {}, [" two <|im_end|>", "four<|im_end|>"]),
        (LLAMA2, {}, [" two <|im_end|>", " four <|im_end|>"]),
        (DROPS_THOUGHTS, {}, [" two <|im_end|>", "<think>\n\n</think>\n\nfour<|im_end|>"]),
        (DROPS_THOUGHTS, {"enable_thinking": False}, [" two <|im_end|>", "four<|im_end|>"]),
        (NO_MARKS, {}, ["  two \n", " four<|im_end|>"]),
        (NO_MARKS, {"ends_turns": False}, ["  two \n", " four\n"]),
        (NEXT_TURN_IS_THE_END, {}, ["|two<|im_start|>", "|four<|im_start|>"]),
        (OTHER_LAST_MARK, {}, ["| two <|im_end|>", "|four<|endoftext|>"]),
    ],
    ids=["chatml", "llama2", "thoughts", "no thoughts", "no end mark", "none wanted", "next turn", "another last mark"],
)
def test_spans_hold_what_the_model_says_and_its_end_mark(
    tokenizer: Any, source: str, options: dict[str, Any], expected: list[str]
) -> None:
    assert spoken(tokenizer, source, **options) == expected


@pytest.mark.parametrize(
    ("source", "end"), [(NO_MARKS, "<|im_end|>"), (NEXT_TURN_IS_THE_END, "<|im_start|>"), (CHAT_TEMPLATE, "<|im_end|>")]
)
def test_what_is_measured_is_what_is_trained_and_prompts_stay_open(tokenizer: Any, source: str, end: str) -> None:
    template = ChatTemplate(tokenizer, source)
    assert template.turn_end == end
    assert template.render(CHAT) == template.render_with_spans(CHAT, WANTED)[0]
    assert template.render(CHAT).rstrip().endswith("four" + end)
    assert not template.render(CHAT[:4]).endswith(end)
    assert template.render(CHAT[:4], add_generation_prompt=True) == template._render(CHAT[:4], True)


def test_earlier_thoughts_that_the_template_drops_are_not_trained(tokenizer: Any) -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think>hm</think>two"}, *CHAT[3:]]
    assert spoken(tokenizer, DROPS_THOUGHTS, chat)[0] == "two<|im_end|>"


def test_turns_of_the_model_in_a_row(tokenizer: Any) -> None:
    """Each is its own turn with its own end."""
    chat = [*CHAT[1:3], {"role": "assistant", "content": "again"}, *CHAT[3:]]
    assert spoken(tokenizer, CHAT_TEMPLATE, chat) == [" two <|im_end|>", "again<|im_end|>", "four<|im_end|>"]


def test_thoughts_in_the_text_are_the_models_own_where_the_template_keeps_them(tokenizer: Any) -> None:
    chat = [*CHAT[1:4], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfour"}]
    assert spoken(tokenizer, CHAT_TEMPLATE, chat)[-1] == "<think>\nhm\n</think>\n\nfour<|im_end|>"
    assert spoken(tokenizer, CHAT_TEMPLATE, chat, enable_thinking=False)[-1] == "four<|im_end|>"
    assert spoken(tokenizer, CHAT_TEMPLATE, chat, enable_thinking=None)[-1] == "<think>\nhm\n</think>\n\nfour<|im_end|>"


def test_calls_are_trained_to_their_end_and_results_are_not(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    chat = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    template = ChatTemplate(tokenizer, QWEN3_VL)
    text, spans = template.render_with_spans(chat, [m["role"] == "assistant" for m in chat])
    first = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert [text[start:end] for start, end in spans] == [first, "three<|im_end|>"]


def test_long_conversations_are_rendered_a_fixed_number_of_times(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole twice, and each turn once alone."""
    rendered: list[int] = []
    plain = ChatTemplate._render
    monkeypatch.setattr(
        ChatTemplate,
        "_render",
        lambda self, messages, *a, **k: (rendered.append(len(messages)), plain(self, messages, *a, **k))[1],
    )
    template = ChatTemplate(tokenizer, CHAT_TEMPLATE)
    chat = CHAT[1:] * 20
    template.render(CHAT)  # how the template ends turns is probed once
    rendered.clear()
    template.render_with_spans(chat, [m["role"] == "assistant" for m in chat])
    assert rendered.count(len(chat)) == 2
    assert max(count for count in rendered if count != len(chat)) == 2
    rendered.clear()
    template.render_with_spans(chat, [False] * (len(chat) - 1) + [True])
    assert rendered.count(len(chat)) == 1


def test_a_turn_that_repeats_the_prompt_is_found_where_it_stands(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "two"}]
    template = ChatTemplate(tokenizer, CHAT_TEMPLATE)
    text, [(start, end)] = template.render_with_spans(chat, [False, True])
    assert text[:start].endswith("<|im_start|>assistant\n")
    assert text[start:end] == "two<|im_end|>"


@pytest.mark.parametrize("source", [MIXES, MIXES_ENDS])
def test_a_template_that_mixes_turns_is_refused(tokenizer: Any, source: str) -> None:
    with pytest.raises(DataError, match="cannot be told from the others"):
        spoken(tokenizer, source)


def test_what_the_template_refuses_is_an_error_of_the_row(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="refuses the conversation: no systems here"):
        spoken(tokenizer, "{{ raise_exception('no systems here') }}")


def test_the_sandbox_holds(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="refuses the conversation"):
        spoken(tokenizer, "{{ messages.__class__.__mro__ }}")
    path = tmp_path / "bad.jinja"
    path.write_text("{{ 'a' * 300000000 }}")
    with pytest.raises(ModelFolderError, match="unsafe"):
        build_template(tokenizer, BasicParameters(chat_template=str(path)))


@pytest.mark.parametrize("add_system", [False, True])
@pytest.mark.parametrize("of_processor", [False, True])
def test_ids_equal_those_of_the_models_own_chat_template(
    processor: Any, tokenizer: Any, of_processor: bool, add_system: bool
) -> None:
    owner = processor if of_processor else tokenizer
    chat = CHAT if add_system else CHAT[1:]
    template = build_template(owner, BasicParameters())
    text = template.render(chat)
    ids, _ = Tokens(getattr(owner, "tokenizer", owner), of_processor=of_processor).encode(text, [])
    expected = owner.apply_chat_template(chat, tokenize=True)
    expected = expected["input_ids"] if hasattr(expected, "keys") else expected
    assert ids.tolist() == (expected[0] if isinstance(expected[0], list) else expected)


def test_file_beats_name_beats_own(tokenizer: Any, tmp_path: Path) -> None:
    register_template("shout-for-test", "{{ messages[0].content | upper }}")
    (tmp_path / "t.jinja").write_text("{{ messages[0].content | lower }}")
    chat = [{"role": "user", "content": "Hi"}]

    def rendered(**basic: Any) -> str:
        return build_template(tokenizer, BasicParameters(**basic)).render(chat)

    assert rendered() == "<|im_start|>user\nHi<|im_end|>\n"
    assert rendered(template="qwen3_vl") == rendered()
    assert rendered(template="empty") == "Hi"
    assert rendered(template="shout-for-test") == "HI"
    assert rendered(template="shout-for-test", chat_template=str(tmp_path / "t.jinja")) == "hi"
    with pytest.raises(ConfigError, match=r"Did you mean 'qwen3_vl'.* Leave it out: rows are"):
        rendered(template="qwen3_vll")
    with pytest.raises(DataError, match="does not exist"):
        rendered(chat_template=str(tmp_path / "none.jinja"))


def test_a_completion_is_behind_its_prompt(tokenizer: Any) -> None:
    """As TRL's SFTTrainer tokenises a prompt and a completion that are texts: no marks, and the end token behind."""
    template = build_template(tokenizer, BasicParameters(template="completion"))
    chat = [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": " blue."}]
    text, [(start, end)] = template.render_with_spans(chat, [False, True])
    assert text == "The sky is blue." + tokenizer.eos_token and text[start:end] == " blue." + tokenizer.eos_token
    with_first = copy.deepcopy(tokenizer)
    with_first.add_special_tokens({"bos_token": "<|endoftext|>"})
    assert (
        build_template(with_first, BasicParameters(template="completion")).render(chat[:1]) == "<|endoftext|>The sky is"
    )


def test_a_nothink_name_turns_thinking_off(tokenizer: Any) -> None:
    template = build_template(tokenizer, BasicParameters(template="qwen3_vl_nothink"))
    template.source = "{{ enable_thinking }}"
    assert template.render(CHAT[:2]) == "False"


class TestTokenSpans:
    """Characters → tokens, at the hard edges of a byte-level tokenizer."""

    def pieces(self, tokenizer: Any, before: str, inside: str, after: str) -> str:
        tokens = Tokens(tokenizer, of_processor=False)
        ids, [(first, last)] = tokens.encode(before + inside + after, [(len(before), len(before) + len(inside))])
        return tokenizer.decode(ids[first:last])

    @pytest.mark.parametrize("inside", ["zero", " one", "é", "中文", "😀", "a😀", "<|im_end|>", "😀<|im_end|>"])
    @pytest.mark.parametrize("after", ["", "<|im_start|>", "😀"])
    def test_whole_characters_and_nothing_else(self, tokenizer: Any, inside: str, after: str) -> None:
        assert self.pieces(tokenizer, "😀<|im_start|>", inside, after) == inside

    def test_a_token_across_the_border_belongs_to_the_turn(self, tokenizer: Any) -> None:
        assert self.pieces(tokenizer, "z", "ero", "") == "zero"
        assert self.pieces(tokenizer, "", "ze", "ro") == "zer"
        assert self.pieces(tokenizer, "z", "e", "ro") == "zer"

    def test_slow_tokenizers_are_refused(self) -> None:
        class Slow:
            is_fast, name_or_path = False, "slow"

        with pytest.raises(ModelFolderError, match="no character positions"):
            Tokens(Slow(), of_processor=False)


@pytest.mark.parametrize("system", ["Be brief.", 'Say "no" to {{ all }}\n\\ \U0001f600 {% if %}'])
def test_a_system_prompt_of_rows_without_one(system: str) -> None:
    """The same tokens and spans as rows with the prompt; rows with one of their own keep it."""
    tokenizer = build_tokenizer()
    given = [{"role": "system", "content": system}, *CHAT[1:]]
    plain = build_template(tokenizer, BasicParameters())
    added = build_template(tokenizer, BasicParameters(default_system=system))
    marks = [message["role"] == "assistant" for message in given]
    expected = plain.render_with_spans(given, marks)
    assert added.render_with_spans(CHAT[1:], marks[1:]) == expected
    assert added.render_with_spans(given, marks) == expected
    tokenizer.chat_template = added.source  # what an export writes: no second prompt
    assert build_template(tokenizer, BasicParameters(default_system=system)).source == added.source


def test_a_system_prompt_in_parts() -> None:
    """Templates of processors read contents as lists of parts."""
    processor = build_processor("qwen3_vl")
    added = build_template(processor, BasicParameters(default_system="Be brief."))
    given = [{"role": "system", "content": "Be brief."}, *CHAT[1:]]
    marks = [message["role"] == "assistant" for message in given]
    expected = build_template(processor, BasicParameters()).render_with_spans(given, marks)
    assert added.render_with_spans(CHAT[1:], marks[1:]) == expected


def test_the_prompts_of_alpaca() -> None:
    """Of a base model: the format of LLaMA-Factory's template and of axolotl's `type: alpaca`."""
    tokenizer = build_tokenizer()
    template = build_template(tokenizer, BasicParameters(template="alpaca"))
    text, spans = template.render_with_spans(CHAT[1:3], [False, True])
    begins = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    assert text == f"{begins}\n\n### Instruction:\none?\n\n### Response:\n two {tokenizer.eos_token}\n\n"
    assert [text[start:end] for start, end in spans] == [f" two {tokenizer.eos_token}"]
