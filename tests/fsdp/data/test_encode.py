"""Samples → token ids and labels, against the processor's own `apply_chat_template`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.encode import IGNORED
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from tests.fsdp.data.conftest import conversation, picture, write_jsonl

Build = Callable[..., Qwen2VLDataset]


@pytest.fixture
def build(tmp_path: Path, param: Callable[..., DatasetParam]) -> Build:
    """A data set of the given rows; `a.png` and `b.png` are there."""

    def make(*rows: dict[str, Any], **options: Any) -> Qwen2VLDataset:
        picture(32, 48, seed=1).save(tmp_path / "a.png")
        picture(64, 32, seed=2).save(tmp_path / "b.png")
        section = param(write_jsonl(tmp_path / "rows.jsonl", list(rows)), **options)
        return Qwen2VLDataset(section.basic_parameters, section.preprocess_parameters, section)

    return make


def trained_text(tokenizer: Any, sample: Any) -> list[str]:
    """What is trained, in runs."""
    at = np.flatnonzero(sample["labels"] != IGNORED)
    runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    assert np.array_equal(sample["labels"][at], sample["input_ids"][at])
    return [tokenizer.decode(sample["input_ids"][run]) for run in runs]


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


LONG = {
    "messages": turns("<image> and <image>?", "seven", "<image>Again? 中文", "one 😀"),
    "images": ["a.png", "b.png", "a.png"],
}


@pytest.mark.parametrize(
    "row",
    [conversation(images=["a.png"]), LONG, conversation("no picture"), {**LONG, "system": "Be brief."}],
    ids=["one", "several turns and images", "text", "system"],
)
def test_ids_and_tensors_equal_those_of_the_processor(build: Build, processor: Any, row: dict[str, Any]) -> None:
    dataset = build(row)
    sample, converted = dataset[0], dataset.sample(0)
    images = [dataset._encoder._media.load_image(item.source) for item in converted.media]
    remaining = iter(images)
    chat = [
        {
            "role": m["role"],
            "content": [p if p["type"] == "text" else {**p, "image": next(remaining)} for p in m["content"]]
            if isinstance(m["content"], list)
            else [{"type": "text", "text": m["content"]}],
        }
        for m in converted.messages
    ]
    expected = processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt")
    assert sample["input_ids"].tolist() == expected["input_ids"][0].tolist()
    collated = dataset.build_collator(CollateParam())([sample])
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
        assert (name in expected) == (name in collated)
        if name in expected:
            width = len(sample["input_ids"]) if name == "mm_token_type_ids" else None
            assert np.array_equal(expected[name].numpy(), collated[name].numpy()[:, :width])


def test_the_answers_and_their_end_marks_are_trained_and_nothing_else(build: Build, processor: Any) -> None:
    assert trained_text(processor.tokenizer, build(LONG)[0]) == ["seven<|im_end|>", "one 😀<|im_end|>"]


def test_mask_options(build: Build, processor: Any) -> None:
    spoken = processor.tokenizer
    assert trained_text(spoken, build(LONG, mask_history=True)[0]) == ["one 😀<|im_end|>"]
    left_out = {**LONG, "messages": [*LONG["messages"][:3], {**LONG["messages"][3], "train": False}]}
    assert trained_text(spoken, build(left_out)[0]) == ["seven<|im_end|>"]
    everything = build(LONG, train_on_prompt=True)[0]
    untrained = everything["input_ids"][everything["labels"] == IGNORED]
    assert set(untrained.tolist()) == {processor.image_token_id}
    assert len(untrained) == sum(len(image.token_ids) for image in everything["media"])


def test_image_tokens_of_the_models_own_turn_are_not_trained(build: Build, processor: Any) -> None:
    sample = build(conversation("draw", "<image>there", images=["a.png"]))[0]
    assert trained_text(processor.tokenizer, sample) == ["<|vision_start|>", "<|vision_end|>there<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "basic", "message"),
    [
        (LONG | {"messages": [m | {"train": False} for m in LONG["messages"]]}, {}, "no trainable token"),
        (conversation("Say <|image_pad|>"), {}, "1 image tokens for 0 images"),
        (conversation(images=["a.png"]), {"chat_template": "no_image.jinja"}, "0 image tokens for 1 images"),
        (conversation("hi"), {"chat_template": "answer_only.jinja"}, "every token would be trained"),
        (conversation(images=["none.png"]), {}, "'none.png' not found"),
        (conversation(images=["../a.png"]), {}, "outside the media roots"),
    ],
    ids=["all masked", "injected", "image dropped", "nothing masked", "missing", "outside"],
)
def test_a_bad_sample_names_its_row(
    build: Build, tmp_path: Path, row: dict[str, Any], basic: dict[str, Any], message: str
) -> None:
    (tmp_path / "no_image.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content[-1].text }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "answer_only.jinja").write_text("{{ messages[1].content[0].text if messages|length > 1 else '' }}")
    if "chat_template" in basic:
        basic = {"chat_template": str(tmp_path / basic["chat_template"])}
    with pytest.raises(DataError) as caught:
        build(row, **basic)[0]
    assert message in str(caught.value)
    assert caught.value.problems[0].where == "rows.jsonl:1"


class TestTruncation:
    def length(self, build: Build, messages: int = 4) -> int:
        row = {"messages": LONG["messages"][:messages], "images": LONG["images"][: 2 if messages == 2 else 3]}
        return len(build(row)[0]["input_ids"])

    def test_a_sample_that_fits_exactly_is_kept(self, build: Build) -> None:
        length = self.length(build)
        sample = build(LONG, cutoff_len=length)[0]
        assert len(sample["input_ids"]) == length
        assert not sample["shrunk"]

    @pytest.mark.parametrize("truncation", ["drop", "error"])
    def test_drop_and_error_name_both_lengths(self, build: Build, truncation: str) -> None:
        length = self.length(build)
        with pytest.raises(
            TooLongError, match=rf"rows.jsonl:1 .*has {length} tokens, more than cutoff_len {length - 1}"
        ):
            build(LONG, cutoff_len=length - 1, truncation=truncation)[0]

    def test_shrink_takes_whole_turns_with_their_images(self, build: Build, processor: Any) -> None:
        whole, first = self.length(build), self.length(build, messages=2)
        for cutoff in (whole - 1, first):
            sample = build(LONG, cutoff_len=cutoff, truncation="shrink")[0]
            assert sample["shrunk"]
            assert len(sample["media"]) == 2
            assert (sample["input_ids"] == processor.image_token_id).sum() == sum(
                len(image.token_ids) for image in sample["media"]
            )
            assert trained_text(processor.tokenizer, sample) == ["seven<|im_end|>"]
        with pytest.raises(TooLongError):
            build(LONG, cutoff_len=first - 1, truncation="shrink")[0]


class TestDocuments:
    def test_every_token_is_trained_and_the_end_is_marked(
        self, build: Build, tokenizer: Any, text_folder: Path
    ) -> None:
        sample = build({"text": "one two three"}, model=text_folder, stage="pretrain")[0]
        assert sample["input_ids"].tolist() == [*tokenizer("one two three")["input_ids"], tokenizer.eos_token_id]
        assert np.array_equal(sample["labels"], sample["input_ids"])

    def test_long_documents(self, build: Build, text_folder: Path) -> None:
        options = {"model": text_folder, "stage": "pretrain", "cutoff_len": 3}
        sample = build({"text": "one two three four"}, truncation="shrink", **options)[0]
        assert len(sample["input_ids"]) == 3
        assert sample["shrunk"]
        with pytest.raises(TooLongError):
            build({"text": "one two three four"}, **options)[0]


def test_a_text_model_reads_conversations(build: Build, tokenizer: Any, text_folder: Path) -> None:
    sample = build(conversation("hi", "one"), model=text_folder)[0]
    assert trained_text(tokenizer, sample) == ["one<|im_end|>"]
    with pytest.raises(DataError, match="text only"):
        build(conversation(images=["a.png"]), model=text_folder)[0]
