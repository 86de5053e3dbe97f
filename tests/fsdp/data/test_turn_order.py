"""Conversations in any order of speakers, and answers that learn to stop; the reference is transformers' own
`apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import DataError, ModelFolderError
from mindspeed_mm.fsdp.data.data_utils.template import ChatTemplate
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.sampling.answers.asking import QuestionEncoder
from mindspeed_mm.tasks.serve.limits import Limits, RefusedError
from mindspeed_mm.tasks.serve.text_requests import read_chat
from tests.fsdp.data.conftest import write_jsonl
from tests.helpers.tiny_models import make_tiny_qwen3
from tests.helpers.tiny_processors import byte_tokenizer, save_processor

ROOT = Path(__file__).parents[3]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, ANSWER = said("user", "one?"), said("assistant", "two")
ORDERS: dict[str, list[dict[str, Any]]] = {
    "two results": [
        USER,
        said("assistant", "", tool_calls=[CALL, CALL]),
        said("tool", "19", name="look"),
        said("tool", "20", name="look"),
        ANSWER,
    ],
    "thought, then call": [
        USER,
        said("assistant", "Let me see."),
        said("assistant", "", tool_calls=[CALL]),
        said("tool", "19", name="look"),
        ANSWER,
    ],
    "two questions": [USER, said("user", "And three?"), ANSWER],
    "greeting first": [said("assistant", "Hello!"), USER, ANSWER],
    "two systems": [said("system", "Be brief."), said("system", "Be kind."), USER, ANSWER],
    "a later system": [USER, ANSWER, said("system", "Be kind."), USER, ANSWER],
    "call in words, then result": [USER, said("assistant", "look(Oslo)"), said("tool", "19", name="look"), ANSWER],
    "two answers": [USER, ANSWER, said("assistant", "or three"), USER, ANSWER],
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("families"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_processor(name, root / name)
        return made[name]

    return folder


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Qwen2VLDataset]:
    def make(folder: Path, *rows: dict[str, Any], split: bool = True, **basic: Any) -> Qwen2VLDataset:
        section = DatasetParam.model_validate(
            {
                "attr": basic.pop("attr", {}),
                "basic_parameters": {
                    "dataset": str(write_jsonl(tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", list(rows))),
                    "cutoff_len": 4096,
                    **basic,
                },
                "preprocess_parameters": {"model_name_or_path": str(folder), "split_special_tokens": split},
            }
        )
        return Qwen2VLDataset(section.basic_parameters, section.preprocess_parameters, section)

    return make


def reference(processor: Any, chat: list[dict[str, Any]], **options: Any) -> list[int]:
    if hasattr(processor, "tokenizer"):
        chat = [{**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []} for m in chat]
    made = processor.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"]
    return np.asarray(made).reshape(-1).tolist()


def trained(tokenizer: Any, sample: Any) -> list[str]:
    at = np.flatnonzero(sample["labels"] != IGNORED_LABEL)
    return [tokenizer.decode(sample["input_ids"][run]) for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)]


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.edge("BR10")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_vl"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_template_writes_neighbours_by_its_own_rule(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path], name: str, order: str
) -> None:
    """Rows, and requests up to the answer; each turn of the model is trained to its end."""
    chat = ORDERS[order]
    dataset = build(folders(name), {"messages": chat})
    encoded, tokenizer = dataset[0], dataset.processor.tokenizer
    assert encoded["input_ids"].tolist() == reference(dataset.processor, chat)
    assert dataset.measure(0).tokens == len(encoded["input_ids"])
    answers = [message for message in chat if message["role"] == "assistant"]
    runs = trained(tokenizer, encoded)
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        assert run.startswith(answer["content"]) and run.endswith("<|im_end|>")
    body = json.dumps({"messages": chat[:-1]}).encode()
    encoder = QuestionEncoder(folders(name))
    asked = encoder.encode(read_chat(body, Limits()).sample, encoder.media(Path()))
    assert asked.input_ids.tolist() == reference(dataset.processor, chat[:-1], add_generation_prompt=True)


JOINED = {
    "two questions": [said("user", "one?\n\nAnd three?"), ANSWER],
    "two systems": [said("system", "Be brief.\n\nBe kind."), USER, ANSWER],
    "two answers": [USER, said("assistant", "two\n\nor three"), USER, ANSWER],
}


@pytest.mark.edge("BR10")
@pytest.mark.parametrize("order", JOINED)
def test_a_template_that_refuses_neighbours_has_them_joined(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path], order: str
) -> None:
    """Gemma's: roles must take turns."""
    dataset = build(folders("gemma3"), {"messages": ORDERS[order]})
    processor, encoded = dataset.processor, dataset[0]
    assert encoded["input_ids"].tolist() == reference(processor, JOINED[order])
    assert [run.removesuffix("<end_of_turn>") for run in trained(processor.tokenizer, encoded)] == [
        message["content"] for message in JOINED[order] if message["role"] == "assistant"
    ]
    body = json.dumps({"messages": ORDERS[order][:-1]}).encode()
    encoder = QuestionEncoder(folders("gemma3"))
    asked = encoder.encode(read_chat(body, Limits()).sample, encoder.media(Path()))
    assert asked.input_ids.tolist() == reference(processor, JOINED[order][:-1], add_generation_prompt=True)


@pytest.mark.edge("BR10")
def test_a_turn_that_a_template_leaves_out_is_joined_or_named(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path]
) -> None:
    """GPT-OSS writes the first system message alone."""
    dataset = build(folders("gpt_oss"), {"messages": ORDERS["two systems"]}, {"messages": ORDERS["a later system"]})
    assert dataset[0]["input_ids"].tolist() == reference(dataset.processor, JOINED["two systems"])
    with pytest.raises(DataError, match="leaves out the turn of the system"):
        dataset[1]


@pytest.mark.edge("BR10")
def test_turns_that_count_differently_stay_apart(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path]
) -> None:
    chat = [USER, said("assistant", "no", weight=0), said("assistant", "two"), USER, ANSWER]
    dataset = build(folders("qwen3_vl"), {"messages": chat})
    assert trained(dataset.processor.tokenizer, dataset[0]) == ["two<|im_end|>", "two<|im_end|>"]
    with pytest.raises(DataError, match="roles must take turns"):
        build(folders("gemma3"), {"messages": chat})[0]
    with pytest.raises(DataError, match="roles must take turns"):
        build(folders("gemma3"), {"messages": ORDERS["greeting first"]})[0]


@pytest.mark.edge("BR10")
def test_joined_calls_thoughts_and_pictures_are_kept(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path], tmp_path: Path
) -> None:
    from mindspeed_mm.fsdp.data.data_utils.sample import joined

    picture = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    chat = [
        said("user", "Look."),
        {"role": "user", "content": picture},
        said("assistant", "Hm.", reasoning_content="a"),
        said("assistant", "", reasoning_content="b", tool_calls=[CALL]),
        said("tool", "1"),
        said("tool", "2"),
        said("assistant", "c"),
    ]
    messages, weights = joined(chat, [None, None, 1.0, 1.0, None, None, 1.0])
    looked = [{"type": "text", "text": "Look."}, {"type": "text", "text": "\n\n"}, *picture]
    assert messages == [
        {"role": "user", "content": looked},
        said("assistant", "Hm.", reasoning_content="a\n\nb", tool_calls=[CALL]),
        *chat[4:],
    ]
    assert weights == [None, 1.0, None, None, 1.0]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([said("tool", "x"), USER], "a result of a tool follows nothing"),
        ([USER, said("tool", "x")], "a result of a tool follows the turn of the user"),
        ([said("system", "x")], "no turn of the user"),
    ],
)
def test_what_no_order_is(chat: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        read_chat(json.dumps({"messages": chat}).encode(), Limits())


# --- ends ------------------------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.edge("BR4")
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("last", ["<|end_of_image|>", "<|begin_of_video|>\n", "[gMASK]"])
def test_an_answer_that_ends_with_a_special_token_is_taught_to_stop(
    build: Callable[..., Qwen2VLDataset], folders: Callable[[str], Path], last: str, split: bool
) -> None:
    """GLM's format writes no end mark: its models stop at the mark of the user's next turn."""
    chat = [USER, said("assistant", f"a {last}"), USER, said("assistant", f"b {last}")]
    dataset = build(folders("glm4v"), {"messages": chat}, split=split)
    tokenizer, encoded = dataset.processor.tokenizer, dataset[0]
    assert encoded["input_ids"][-1] == encoded["labels"][-1] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert [run.count("<|user|>") for run in trained(tokenizer, encoded)] == [1, 1]
    assert all(last.strip() in run for run in trained(tokenizer, encoded))
    alone = ChatTemplate(dataset.processor, dataset.template.source).render(chat)
    assert alone.endswith(f"{last.strip()}<|user|>")


@pytest.mark.edge("BR4")
def test_a_format_without_marks_ends_with_the_end_token(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer, PLAIN)
    assert template.render([USER, said("assistant", "b<|endoftext|>")]).endswith("b<|endoftext|><|im_end|>")
    assert template.render([USER, said("assistant", "b<|im_end|>")]).rstrip().endswith("b<|im_end|>")  # once
    chatml = ChatTemplate(tokenizer, tokenizer.chat_template)
    assert chatml.render([USER, ANSWER]) == tokenizer.apply_chat_template([USER, ANSWER], tokenize=False)


@pytest.mark.edge("BR20")
def test_no_end_mark_and_no_end_token_is_refused(build: Callable[..., Qwen2VLDataset], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer({"pad_token": "<pad>", "mark_token": "<|im_end|>"}, PLAIN)
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"messages": [USER, ANSWER]}
    with pytest.raises(ModelFolderError, match=r"writes no end mark .* no end token.*eos_token.*template: empty"):
        build(tmp_path / "model", row)
    ended = tmp_path / "ended.jinja"
    ended.write_text(PLAIN.replace("+ '\n'", "+ ' <|im_end|>'"))
    assert trained(tokenizer, build(tmp_path / "model", row, chat_template=str(ended))[0]) == [" two <|im_end|>"]
    assert trained(tokenizer, build(tmp_path / "model", row, template="empty")[0]) == ["two"]


# --- folders as released ---------------------------------------------------------------------------------------------


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """As Llama 3.1's base model: neither a padding token nor a chat template."""
    special = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "turn_token": "<|eot_id|>",
        "start_token": "<|start_header_id|>",
        "end_token": "<|end_header_id|>",
    }
    byte_tokenizer(special, None, begins=True).save_pretrained(tmp_path / "released")
    config = json.loads((tmp_path / "released" / "tokenizer_config.json").read_text())
    assert "pad_token" not in config and config.get("chat_template") is None
    return tmp_path / "released"


@pytest.mark.edge("BR5")
@pytest.mark.parametrize("packs", [False, True])
def test_padding_of_a_tokenizer_without_one_reaches_no_loss(
    build: Callable[..., Qwen2VLDataset], tmp_path: Path, packs: bool
) -> None:
    folder = make_tiny_qwen3(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rows = [{"messages": [USER, said("assistant", "seven " * count)]} for count in (1, 9)]
    dataset = build(folder, *rows, packing=packs)
    samples = [dataset[0], dataset[1]]
    batch = dataset.build_collator(CollateParam.model_validate({"pad_to_multiple_of": 64}))(samples)
    real = sum(len(sample["input_ids"]) for sample in samples)
    trained_tokens = sum(int((sample["labels"][1:] != IGNORED_LABEL).sum()) for sample in samples)
    ids, shifted = batch["input_ids"], batch["shift_labels"]
    assert ids.numel() > real and (ids == dataset.processor.eos_token_id).sum() > ids.numel() - real
    assert int((shifted != IGNORED_LABEL).sum()) == trained_tokens
    assert int(batch["attention_mask"].sum()) == real if not packs else batch["pad_tokens"] == ids.numel() - real


@pytest.mark.edge("BR5")
def test_the_example_of_llama_takes_the_base_models_folder(
    build: Callable[..., Qwen2VLDataset], released: Path
) -> None:
    """In the format of Llama 3's model card."""
    written = yaml.safe_load((ROOT / "examples/llama3.1/llama3.1_8B_config.yaml").read_text())
    basic = written["data"]["dataset_param"]["basic_parameters"]
    row = {"messages": [said("system", "Be brief."), USER, ANSWER]}
    dataset = build(released, row, **{key: basic[key] for key in basic if key != "dataset"})
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    text = "<|begin_of_text|>" + head.format("system") + "Be brief.<|eot_id|>" + head.format("user") + "one?<|eot_id|>"
    text += head.format("assistant") + "two<|eot_id|>"
    assert dataset[0]["input_ids"].tolist() == dataset.processor(text, add_special_tokens=False)["input_ids"]
    assert trained(dataset.processor, dataset[0]) == ["two<|eot_id|>"]


@pytest.mark.edge("BR5")
def test_a_base_model_has_a_plain_format_or_is_trained_on_text(
    build: Callable[..., Qwen2VLDataset], released: Path
) -> None:
    row = {"messages": [USER, ANSWER]}
    with pytest.raises(ModelFolderError, match=r"no chat template\. .*template: default.*stage: pretrain"):
        build(released, row)
    tokenizer = (dataset := build(released, row, template="default")).processor
    assert tokenizer.decode(dataset[0]["input_ids"]).startswith("Human: one?\nAssistant:two<|end_of_text|>")
    assert trained(tokenizer, dataset[0]) == ["two<|end_of_text|>"]
    document = build(released, {"text": "once"}, stage="pretrain")[0]
    assert tokenizer.decode(document["input_ids"]) == "once<|end_of_text|>"
