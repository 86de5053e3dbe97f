"""Samples → token ids and labels, against the processor's own `apply_chat_template`."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.batch import IGNORED_LABEL
from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.data.datasets.huggingface.qwen2vl_dataset import Qwen2VLDataset
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from tests.fsdp.data.buffered_data import loader
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
    at = np.flatnonzero(sample["labels"] != IGNORED_LABEL)
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
    untrained = everything["input_ids"][everything["labels"] == IGNORED_LABEL]
    assert set(untrained.tolist()) == {processor.image_token_id}
    assert len(untrained) == sum(len(image.token_ids) for image in everything["media"])


def test_image_tokens_of_the_models_own_turn_are_not_trained(build: Build, processor: Any) -> None:
    answer: Any = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "there"}]
    sample = build(conversation("draw", answer))[0]
    assert trained_text(processor.tokenizer, sample) == ["<|vision_start|>", "<|vision_end|>there<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "basic", "message"),
    [
        (LONG | {"messages": [m | {"train": False} for m in LONG["messages"]]}, {}, "no trainable token"),
        (conversation(), {"chat_template": "injecting.jinja"}, "2 image tokens for 0 images"),
        (conversation(images=["a.png"]), {"chat_template": "no_image.jinja"}, "0 image tokens for 1 images"),
        (conversation(images=["a.png"]), {"chat_template": "no_image.jinja"}, "one image token (<|image_pad|>)"),
        (conversation("hi"), {"chat_template": "answer_only.jinja"}, "every token would be trained"),
        (conversation(images=["none.png"]), {}, "'none.png' not found"),
        (conversation(images=["../a.png"]), {}, "outside the media roots"),
    ],
    ids=["all masked", "injected", "image dropped", "token named", "nothing masked", "missing", "outside"],
)
def test_a_bad_sample_names_its_row(
    build: Build, tmp_path: Path, row: dict[str, Any], basic: dict[str, Any], message: str
) -> None:
    (tmp_path / "no_image.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content[-1].text }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "injecting.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: <|image_pad|>{{ m.content[-1].text }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    (tmp_path / "answer_only.jinja").write_text("{{ messages[1].content[0].text if messages|length > 1 else '' }}")
    if "chat_template" in basic:
        basic = {"chat_template": str(tmp_path / basic["chat_template"])}
    with pytest.raises(DataError) as caught:
        build(row, **basic)[0]
    assert message in str(caught.value)
    assert caught.value.problems[0].where == "rows.jsonl:1"


@pytest.mark.edge("S13")
def test_a_chat_template_that_is_no_text_is_named(build: Build, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_bytes(b"{{ messages }}\xff")
    with pytest.raises(DataError, match=r"chat\.jinja' is not text: byte 14 is not UTF-8"):
        build(LONG, chat_template=str(tmp_path / "chat.jinja"))


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


class TestWeights:
    ROW = {
        "messages": [
            *turns("one?", "two"),
            {"role": "user", "content": "three?"},
            {"role": "assistant", "content": "four", "weight": 0.25},
            {"role": "user", "content": "five?"},
            {"role": "assistant", "content": "six", "weight": 0},
        ]
    }

    def test_tokens_count_as_their_message_does(self, build: Build, processor: Any) -> None:
        sample = build(self.ROW)[0]
        weights = sample["loss_weights"]
        assert weights.dtype == np.float32
        assert np.array_equal(weights != 0, sample["labels"] != IGNORED_LABEL)
        said = {w: processor.tokenizer.decode(sample["input_ids"][weights == np.float32(w)]) for w in (1, 0.25)}
        assert said == {1: "two<|im_end|>", 0.25: "four<|im_end|>"}

    def test_whole_weights_need_no_array(self, build: Build) -> None:
        assert "loss_weights" not in build(LONG)[0]
        last = {"messages": [*self.ROW["messages"][:3], {**self.ROW["messages"][3], "weight": 1}]}
        assert "loss_weights" not in build(last)[0]

    def test_the_prompt_counts_one(self, build: Build) -> None:
        weights = build(self.ROW, train_on_prompt=True)[0]["loss_weights"]
        assert set(weights.tolist()) == {1.0, 0.25, 0.0}

    @pytest.mark.edge("N2")
    @pytest.mark.parametrize("taken_out", [{"weight": 0}, {"train": False}, {"mask": True}])
    def test_train_on_prompt_trains_no_answer_that_is_taken_out(
        self, build: Build, processor: Any, taken_out: dict[str, Any]
    ) -> None:
        answered = turns("one?", "two", "three?", "four", "five?", "six")
        answered[3] |= taken_out
        sample = build({"messages": answered}, train_on_prompt=True)[0]
        untrained = sample["input_ids"][sample["labels"] == IGNORED_LABEL]
        assert processor.tokenizer.decode(untrained) == "four<|im_end|>"

    @pytest.mark.edge("N2")
    @pytest.mark.parametrize("taken_out", [{"weight": 0}, {"train": False}, {"mask": True}])
    def test_train_on_prompt_trains_no_turn_that_is_taken_out_whoever_speaks(
        self, build: Build, processor: Any, taken_out: dict[str, Any]
    ) -> None:
        said = [{"role": "system", "content": "Be brief."}, *turns("one?", "two", "<image>three?", "four")]
        said[0] |= taken_out
        said[3] |= taken_out
        sample = build({"messages": said, "images": ["a.png"]}, train_on_prompt=True)[0]
        untrained = processor.tokenizer.decode(sample["input_ids"][sample["labels"] == IGNORED_LABEL])
        words = untrained.replace("<|image_pad|>", "")
        assert words == "Be brief.<|im_end|><|vision_start|><|vision_end|>three?<|im_end|>"

    @pytest.mark.edge("N2")
    def test_a_turn_of_the_user_counts_as_it_says(self, build: Build, processor: Any) -> None:
        said = turns("one?", "two", "three?", "four")
        said[2] |= {"weight": 0.5}
        sample = build({"messages": said}, train_on_prompt=True)[0]
        half = sample["input_ids"][sample["loss_weights"] == 0.5]
        assert processor.tokenizer.decode(half) == "three?<|im_end|>"
        assert set(sample["loss_weights"].tolist()) == {0.5, 1.0}
        alone = build({"messages": said})[0]
        assert "loss_weights" not in alone and trained_text(processor.tokenizer, alone) == [
            "two<|im_end|>",
            "four<|im_end|>",
        ]

    def test_history_is_masked_whatever_its_weight(self, build: Build, processor: Any) -> None:
        sample = build({"messages": self.ROW["messages"][:4]}, mask_history=True)[0]
        assert trained_text(processor.tokenizer, sample) == ["four<|im_end|>"]
        assert set(sample["loss_weights"].tolist()) == {0.0, 0.25}


class TestSizes:
    ROWS = (
        conversation(images=["a.png"]),
        LONG,
        conversation("no picture", "seven " * 9),
        {**LONG, "messages": [*LONG["messages"], *turns("five?", "six")]},
    )

    @pytest.mark.parametrize("options", [{}, {"truncation": "shrink", "cutoff_len": 24}], ids=["whole", "shrunk"])
    def test_equal_what_encoding_gives(self, build: Build, options: dict[str, Any]) -> None:
        dataset = build(*self.ROWS, **options)
        for index in range(len(self.ROWS)):
            try:
                encoded = dataset[index]
            except TooLongError as error:
                with pytest.raises(TooLongError) as caught:
                    dataset.measure(index)
                assert str(caught.value) == str(error)
                assert caught.value.tokens == error.tokens > 24
                continue
            outline = dataset.outline(index)
            assert dataset.measure(index) == outline.size
            assert outline.size.tokens == len(encoded["input_ids"])
            assert outline.size.patches == sum(len(item.tensors["patches"]) for item in encoded["media"])
            assert np.array_equal(outline.input_ids, encoded["input_ids"])
            assert np.array_equal(outline.labels, encoded["labels"])
            assert outline.shrunk == encoded["shrunk"]
            assert len(outline.media_spans) == len(encoded["media"])
            for (first, end), item in zip(outline.media_spans, encoded["media"], strict=True):
                assert np.array_equal(encoded["input_ids"][first:end], item.token_ids)

    def test_pixels_are_not_decoded(self, build: Build, tmp_path: Path) -> None:
        dataset = build(conversation(images=["a.png"]))
        whole = dataset.measure(0)
        path = tmp_path / "a.png"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        assert dataset.measure(0) == whole
        with pytest.raises(DataError, match="broken"):
            dataset[0]

    def test_documents(self, build: Build, text_folder: Path) -> None:
        dataset = build({"text": "one two three"}, model=text_folder, stage="pretrain")
        assert dataset.measure(0).tokens == len(dataset[0]["input_ids"])

    def test_what_encoding_refuses(self, build: Build) -> None:
        dataset = build(conversation(images=["../a.png"]), conversation(images=["none.png"]))
        for index in range(2):
            with pytest.raises(DataError) as refused:
                dataset[index]
            with pytest.raises(DataError) as measured:
                dataset.measure(index)
            assert str(measured.value) == str(refused.value)


class TestPairs:
    ROW = {
        "messages": [{"role": "user", "content": "<image>Which digit is this?"}],
        "images": ["a.png"],
        "chosen": "seven",
        "rejected": "a letter, I think",
    }
    OPTIONS = {"attr": {"ranking": True}, "stage": "rm"}

    def test_both_answers_have_the_same_prompt_and_share_their_media(self, build: Build, processor: Any) -> None:
        pair = build(self.ROW, **self.OPTIONS)[0]
        chosen, rejected = pair["chosen"], pair["rejected"]
        assert trained_text(processor.tokenizer, chosen) == ["seven<|im_end|>"]
        assert trained_text(processor.tokenizer, rejected) == ["a letter, I think<|im_end|>"]
        start = int(np.flatnonzero(chosen["labels"] != IGNORED_LABEL)[0])
        assert np.array_equal(chosen["input_ids"][:start], rejected["input_ids"][:start])
        assert chosen["media"] is rejected["media"]
        assert pair["sample_id"] == "rows.jsonl:1"

    def test_each_equals_the_plain_row(self, build: Build) -> None:
        pair = build(self.ROW, **self.OPTIONS)[0]
        for side in ("chosen", "rejected"):
            plain = build(conversation(self.ROW["messages"][0]["content"], self.ROW[side], images=["a.png"]))[0]
            assert np.array_equal(pair[side]["input_ids"], plain["input_ids"])
            assert np.array_equal(pair[side]["labels"], plain["labels"])

    def test_sizes_are_of_both(self, build: Build) -> None:
        dataset = build(self.ROW, **self.OPTIONS)
        pair, (chosen, rejected) = dataset[0], dataset.outline(0)
        assert dataset.measure(0).tokens == 2 * max(len(pair[side]["input_ids"]) for side in ("chosen", "rejected"))
        assert dataset.measure(0).patches == chosen.size.patches + rejected.size.patches == 2 * chosen.size.patches

    @pytest.mark.parametrize(
        ("keys", "cutoff_len", "most"),
        [
            ({"max_tokens_per_batch": 150, "collate_param": CollateParam(pad_to_multiple_of=8)}, 64, 150),
            ({"sampler_type": "TokenBudgetSampler"}, 44, 2 * 44),  # of a micro-batch of one pair
        ],
        ids=["budget", "cutoff"],
    )
    def test_budgets_count_both_answers_with_their_padding_and_leave_none_out(
        self, build: Build, keys: dict[str, Any], cutoff_len: int, most: int
    ) -> None:
        uneven = [{**self.ROW, "chosen": "7" * (1 + 3 * n % 14), "rejected": "1"} for n in range(12)]
        dataset = build(*uneven, cutoff_len=cutoff_len, **self.OPTIONS)
        batches, met = loader(dataset, **keys), list[str]()
        for [batch] in islice(batches, batches.steps_per_epoch):
            assert batch["input_ids"].numel() <= most
            met += batch["sample_ids"]
        assert set(met) == {f"rows.jsonl:{n}" for n in range(1, 13)}

    def test_pairs_are_not_shrunk(self, build: Build) -> None:
        row = {**self.ROW, "messages": [*turns("one?", "two"), *self.ROW["messages"]]}
        length = len(build(row, **self.OPTIONS)[0]["rejected"]["input_ids"])
        with pytest.raises(TooLongError):
            build(row, truncation="shrink", cutoff_len=length - 1, **self.OPTIONS)[0]

    def test_stage_and_rows_go_together(self, build: Build) -> None:
        with pytest.raises(ConfigError, match="Set stage: rm"):
            build(self.ROW, attr={"ranking": True})
        assert build(self.ROW, stage="rm")[0].keys() == build(self.ROW, **self.OPTIONS)[0].keys()


def test_rows_of_each_entry(build: Build, tmp_path: Path, param: Callable[..., DatasetParam]) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", [conversation("a")] * 3)
    second = write_jsonl(tmp_path / "second.jsonl", [conversation("b")] * 2)
    section = param([first, second])
    dataset = Qwen2VLDataset(section.basic_parameters, section.preprocess_parameters, section)
    assert [(part.first, part.end) for part in dataset.parts] == [(0, 3), (3, 5)]
    assert [part.name for part in dataset.parts] == [str(first), str(second)]
    assert dataset.row(3) == conversation("b")


def test_streamed_rows_are_those_of_the_whole(tmp_path: Path, param: Callable[..., DatasetParam]) -> None:
    """Files of different kinds one after the other, at most so many rows of each entry, asked for in any order."""
    folder = tmp_path / "folder"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [conversation(f"a{i}") for i in range(3)])
    write_jsonl(folder / "b.jsonl", [conversation(f"b{i}") for i in range(4)])
    last = tmp_path / "c.json"
    last.write_text(json.dumps([conversation(f"c{i}") for i in range(6)]))
    for most, count in ((None, 13), (5, 10), (2, 4)):
        section = param([folder, last], max_samples=most)
        whole = Qwen2VLDataset(section.basic_parameters, section.preprocess_parameters, section)
        section = param([folder, last], max_samples=most, streaming=True)
        streamed = Qwen2VLDataset(section.basic_parameters, section.preprocess_parameters, section)
        assert len(whole) == count
        assert (streamed.has(count - 1), streamed.has(count), streamed.has(99)) == (True, False, False)
        for index in [count - 1, *range(count)]:
            assert streamed.row(index) == whole.row(index)
            assert streamed.place(index) == whole.place(index)
            assert streamed[index]["input_ids"].tolist() == whole[index]["input_ids"].tolist()
            assert streamed.measure(index) == whole.measure(index)
        with pytest.raises(IndexError):
            streamed[count]
        with pytest.raises(TypeError):
            len(streamed)
        assert streamed.fingerprint()["hash"] == streamed.fingerprint()["hash"] != whole.fingerprint()["hash"]


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
            build({"text": "one two three four"}, truncation="drop", **options)[0]
        whole = build({"text": "one two three four"}, truncation="drop", **options | {"cutoff_len": 64})[0]
        split = build({"text": "one two three four"}, **options)[0]  # whoever takes documents cuts them
        assert split["input_ids"].tolist() == whole["input_ids"].tolist() and not split["shrunk"]


def test_a_text_model_reads_conversations(build: Build, tokenizer: Any, text_folder: Path) -> None:
    sample = build(conversation("hi", "one"), model=text_folder)[0]
    assert trained_text(tokenizer, sample) == ["one<|im_end|>"]
    with pytest.raises(DataError, match="text only"):
        build(conversation(images=["a.png"]), model=text_folder)[0]


def test_the_pillow_image_processor_gives_the_same_tokens(
    build: Build, tmp_path: Path, param: Callable[..., DatasetParam]
) -> None:
    """`use_fast_tokenizer: false`, as LLaMA-Factory hands it to the processor; tokenizers are all of the fast kind."""
    fast = build(LONG)[0]
    section = param(tmp_path / "rows.jsonl")
    preprocess = section.preprocess_parameters.model_copy(update={"use_fast_tokenizer": False})
    slow = Qwen2VLDataset(section.basic_parameters, preprocess, section)
    assert type(slow.processor.image_processor).__name__.endswith("Pil")
    assert slow[0]["input_ids"].tolist() == fast["input_ids"].tolist()
    assert slow.measure(0).tokens == len(fast["input_ids"])
