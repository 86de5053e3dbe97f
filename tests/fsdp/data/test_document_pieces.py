"""Long documents in pieces: their tokens are those of the documents, and each piece is a sample like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data import build, build_mm_dataloader, build_mm_dataset, document_pieces
from mindspeed_mm.fsdp.data.document_pieces import in_pieces, piece_counts, piece_lengths, piece_spans
from mindspeed_mm.fsdp.data.sample_cache.cached_samples import CachedSamples
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam, DatasetParam
from mindspeed_mm.fsdp.params.loader import load_config
from tests.fsdp.data.conftest import conversation, write_jsonl

Param = Callable[..., DatasetParam]
MOST = 8
WORDS = (3, 30, 8, 16, 17, 1, 75)
"""Words of each document."""
SPLIT = {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "dp_rank": 0, "dp_size": 1, "seed": 0}


@pytest.fixture
def documents(tmp_path: Path) -> list[str]:
    made = [" ".join(f"word{n * number}" for n in range(words)) for number, words in enumerate(WORDS, 1)]
    write_jsonl(tmp_path / "documents.jsonl", [{"text": text} for text in made])
    return made


@pytest.fixture
def expected(documents: list[str], text_folder: Path) -> list[list[int]]:
    """The tokens of each document by the plain tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in documents]


def opened(param: Param, model: Path, **basic: Any) -> Any:
    asked = {"stage": "pretrain", "cutoff_len": MOST, **basic}
    return build_mm_dataset(param("documents.jsonl", model=model, **asked))[0]


def joined(dataset: Any, ids: list[list[int]]) -> None:
    """The samples are the documents, piece by piece."""
    samples = [dataset[index] for index in range(len(dataset))]
    sizes = dataset.known_sizes()
    for index, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert 1 < length <= MOST
        assert sample["labels"].tolist() == sample["input_ids"].tolist() and not sample["shrunk"]
        assert length == dataset.measure(index).tokens == dataset.outline(index).size.tokens
        assert dataset.outline(index).input_ids.tolist() == sample["input_ids"].tolist()
        assert sizes is None or sizes[index].tolist() == [length, 0]
    assert len(samples) == sum(len(piece_lengths(np.array([len(each)]), MOST)) for each in ids) > len(ids)
    found = [token for sample in samples for token in sample["input_ids"].tolist()]
    assert found == [token for each in ids for token in each]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8])
def test_pieces_cover_a_document_once(most: int) -> None:
    for length in range(1, 40):
        (count,) = piece_counts(np.array([length]), most).tolist()
        starts, ends = piece_spans(np.arange(count), np.full(count, length), most)
        assert starts[0] == 0 and ends[-1] == length and starts[1:].tolist() == ends[:-1].tolist()
        sizes = (ends - starts).tolist()
        assert sizes == piece_lengths(np.array([length]), most).tolist()
        assert max(sizes) <= most and count == -(-length // most)
        assert sizes[:-2] == [most] * (count - 2) if count > 1 else sizes == [length]
        assert min(sizes) > 1 or most <= 2 or length == 1


@pytest.mark.parametrize("kept", [False, True])
def test_pieces_of_documents_are_their_tokens(
    tmp_path: Path,
    param: Param,
    text_folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
) -> None:
    """Where encoded samples are kept, and where they cannot be: lengths are measured then."""
    monkeypatch.setattr(build, "can_keep_samples", lambda basic: kept)
    dataset = opened(param, text_folder)
    joined(dataset, expected)
    assert isinstance(dataset._whole, CachedSamples) == (tmp_path / ".mm-cache").is_dir() == kept
    (second,) = piece_counts(np.array([len(expected[0])]), MOST)
    assert dataset[0]["sample_id"].startswith("documents.jsonl:1") and len(expected[1]) > MOST
    assert dataset[second]["sample_id"].startswith("documents.jsonl:2, piece 1 of ")
    assert dataset.row_notes()[-1].endswith(f"are cut: {len(dataset)} samples")


@pytest.mark.parametrize(
    ("truncation", "stage", "streaming", "policy"),
    [
        (None, "pretrain", False, "split"),
        (None, "pretrain", True, "drop"),
        (None, "sft", False, "drop"),
        ("drop", "pretrain", False, "drop"),
        ("split", "sft", False, "split"),
    ],
)
def test_the_default_follows_the_stage(truncation: str | None, stage: str, streaming: bool, policy: str) -> None:
    basic = BasicParameters.model_validate({"truncation": truncation, "stage": stage, "streaming": streaming})
    assert basic.if_too_long == policy


def test_rows_of_conversations_are_what_they_were(tmp_path: Path, param: Param) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [conversation("one?", "two")])
    settings = build_mm_dataset(param("rows.jsonl"))[0].fingerprint()["settings"]["basic_parameters"]
    assert settings["truncation"] == "drop" and list(settings).index("truncation") == list(settings).index("stage") + 1
    explicit = build_mm_dataset(param("rows.jsonl", truncation="drop"))[0]
    assert explicit.fingerprint() == build_mm_dataset(param("rows.jsonl"))[0].fingerprint()
    assert not (tmp_path / ".mm-cache").exists()


def test_documents_beside_conversations(
    tmp_path: Path, param: Param, text_folder: Path, documents: list[str], expected: list[list[int]]
) -> None:
    rows = [conversation("one?", "two"), {"text": documents[1]}, conversation("many? " * 40, "two"), {"text": "a"}]
    write_jsonl(tmp_path / "documents.jsonl", rows)
    dataset = opened(param, text_folder, stage="sft", truncation="split", cutoff_len=24, on_bad_sample="skip")
    lengths = piece_lengths(np.array([len(expected[1])]), 24).tolist()
    assert len(dataset) == 3 + len(lengths)
    pieces = [dataset[1 + number]["input_ids"].tolist() for number in range(len(lengths))]
    assert list(map(len, pieces)) == lengths and list(chain.from_iterable(pieces)) == expected[1]
    with pytest.raises(DataError, match="more than cutoff_len 24"):
        dataset[1 + len(lengths)]
    data = build_mm_dataloader(dataset, DataloaderParam(num_workers=0, shuffle=False, drop_last=False), **SPLIT)
    assert data.steps_per_epoch is not None
    list(islice(data, data.steps_per_epoch))
    assert data.counts.too_long == 1


def test_held_out_documents_are_held_out_whole(param: Param, text_folder: Path, expected: list[list[int]]) -> None:
    section = param("documents.jsonl", model=text_folder, stage="pretrain", cutoff_len=MOST, val_rate=0.4)
    parts = build_mm_dataset(section, seed=3)
    names = []
    for part in parts:
        assert part is not None and part.known_sizes() is not None
        names.append({part[index]["sample_id"].partition(",")[0] for index in range(len(part))})
    assert names[0].isdisjoint(names[1]) and len(names[0] | names[1]) == len(WORDS)
    assert sum(len(part[index]["input_ids"]) for part in parts for index in range(len(part))) == sum(map(len, expected))


def test_packs_hold_every_token_and_a_resumed_loader_goes_on(
    param: Param, text_folder: Path, expected: list[list[int]]
) -> None:
    dataset = opened(param, text_folder, packing=True)
    settings = {**SPLIT, "micro_batch_size": 3}
    loader = DataloaderParam(num_workers=0, drop_last=False)
    data = build_mm_dataloader(dataset, loader, **settings)
    passed = [batch for step in data.one_pass() for batch in step]
    assert sum(batch["input_ids"].numel() for batch in passed) == sum(map(len, expected))
    assert sum(int((batch["labels"] != -100).sum()) for batch in passed) == sum(map(len, expected)) - len(dataset)
    assert max(batch["input_ids"].shape[1] for batch in passed) <= 3 * MOST
    steps = iter(data)
    next(steps)
    again = build_mm_dataloader(dataset, loader, position=data.position, **settings)
    assert [batch["sample_ids"] for batch in next(steps)] == [batch["sample_ids"] for batch in next(iter(again))]


@pytest.mark.usefixtures("documents")
def test_shares_of_a_mixture_count_pieces(tmp_path: Path, param: Param, text_folder: Path) -> None:
    write_jsonl(tmp_path / "more.jsonl", [{"text": "a b c"}] * 3)
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "name": name} for name in ("documents", "more")]
    section = param("unused", model=text_folder, stage="pretrain", cutoff_len=MOST).model_dump()
    section["basic_parameters"] |= {"dataset": entries, "mix": {"weights": {"documents": 1, "more": 1}}}
    dataset: Any = build_mm_dataset(DatasetParam.model_validate(section))[0]
    first, second = dataset.parts
    assert (first.first, first.end, second.end) == (0, second.first, len(dataset)) and first.end > len(WORDS)
    assert str(dataset.place(second.first)) == "more.jsonl:1"


def test_a_look_at_many_documents_measures_some(
    tmp_path: Path, param: Param, text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_pieces, "MEASURED_ROWS", 10)
    monkeypatch.setattr(document_pieces, "_PROBED_ROWS", 4)
    write_jsonl(tmp_path / "documents.jsonl", [{"text": "word " * (20 + n % 3)} for n in range(40)])
    section = param("documents.jsonl", model=text_folder, stage="pretrain", cutoff_len=MOST)
    look, _ = build_mm_dataset(section, encode_ahead=False)
    whole, _ = build_mm_dataset(section)
    assert look.known_sizes() is None and whole.known_sizes() is not None
    assert abs(len(look) - len(whole)) <= len(whole) // 4 and look.row_notes()[-1].endswith(
        f"about {len(look)} samples"
    )
    assert all(1 < len(look[index]["input_ids"]) <= MOST for index in range(len(look)))
    assert in_pieces(whole) is whole


def test_a_row_that_cannot_be_used_is_one_sample(
    tmp_path: Path, param: Param, text_folder: Path, documents: list[str]
) -> None:
    lines = [json.dumps({"text": documents[1]}), json.dumps({"text": 5}), json.dumps({"text": documents[3]})]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines) + "\n")
    dataset = opened(param, text_folder, on_bad_sample="skip", max_bad_fraction=0.5)
    bad = [index for index in range(len(dataset)) if "jsonl:2" in str(dataset.place(index))]
    assert len(bad) == 1
    for ask in (dataset.__getitem__, dataset.measure):
        with pytest.raises(DataError, match="is not a document"):
            ask(bad[0])


@pytest.mark.parametrize(
    ("basic", "told"),
    [({"streaming": True, "stage": "pretrain"}, "streamed rows are not measured"), ({"stage": "rm"}, "conversations")],
)
def test_what_cannot_be_cut_is_refused(tmp_path: Path, basic: dict[str, Any], told: str) -> None:
    sections: dict[str, Any] = {"data": {"dataset_param": {"basic_parameters": {"truncation": "split", **basic}}}}
    sections["training"] = {"train_iters": 1}
    if basic["stage"] == "rm":
        sections["posttrain"] = {"method": "dpo"}
    with pytest.raises(Exception, match=told):
        load_config(sections)


@pytest.mark.usefixtures("documents")
def test_streamed_documents_that_are_left_out_are_told(tmp_path: Path, param: Param, text_folder: Path) -> None:
    """Nothing is set: streamed documents cannot be cut, and the log says what can be done."""
    file = tmp_path / "documents.jsonl"
    dataset_param = param(file, text_folder, stage="pretrain", streaming=True, cutoff_len=MOST)
    dataset, _ = build_mm_dataset(dataset_param)
    (note,) = dataset.row_notes()
    assert f"documents of more than cutoff_len {MOST} tokens are left out" in note and "streaming: false" in note
    shrunk = param(file, text_folder, stage="pretrain", streaming=True, truncation="shrink")
    assert build_mm_dataset(shrunk)[0].row_notes() == []
