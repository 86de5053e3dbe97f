"""Pictures in tiles of different number train: one batch, or one pack, gives the loss of plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.tasks import train
from mindspeed_mm.tasks.data import check as data_check
from mindspeed_mm.tasks.requests.data import DataCheckRequest
from tests.fsdp.data.conftest import conversation, picture, write_jsonl
from tests.helpers.tiled_families import TILED, save_tiled
from tests.helpers.tiny_run import tiny_config

pytestmark = pytest.mark.edge("N9")

SIZES = [(64, 64), (64, 32), (20, 48)]


@pytest.fixture(scope="module", params=TILED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with model, pictures and rows; the model in fp64."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiled(request.param, folder / "model").double().eval()
    rows = [conversation(answer="seven " * (n + 1), images=[f"{n}.png"]) for n in range(3)]
    for number, size in enumerate(SIZES):
        picture(*size, seed=number).save(folder / f"{number}.png")
    write_jsonl(folder / "rows.jsonl", [*rows, conversation("How much is one?", "one")])
    return folder, model


def data_set(folder: Path, rows: str = "rows.jsonl", **basics: Any) -> Any:
    basic = {"dataset": str(folder / rows), "dataset_dir": str(folder), "cutoff_len": 4096, **basics}
    param = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(folder / "model")}}
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def summed_loss(model: Any, given: dict[str, Any], shift_labels: torch.Tensor) -> float:
    """Of plain cross-entropy."""
    wide = {name: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for name, v in given.items()}
    with torch.no_grad():
        logits = model(**wide, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum"))


def plain_loss(folder: Path, model: Any, dataset: Any, number: int) -> float:
    """Of one row, by the processor's own call."""
    from transformers import AutoProcessor

    processor, sample = AutoProcessor.from_pretrained(folder / "model"), dataset[number]
    messages = [
        turn | {"content": [{"type": "text", "text": said}]} if isinstance(said := turn["content"], str) else turn
        for turn in dataset.sample(number).messages
    ]
    text = processor.apply_chat_template(messages, tokenize=False)
    named = [item.source for item in dataset.sample(number).media]
    images = [[Image.open(folder / name).convert("RGB") for name in named]] if named else None
    options = {"add_special_tokens": not text.startswith("<s>")}
    given = dict(processor(text=[text], images=images, return_tensors="pt", text_kwargs=options))
    assert given["input_ids"][0].tolist() == sample["input_ids"].tolist()
    shift_labels = torch.cat([torch.tensor(sample["labels"])[1:], torch.tensor([-100])])[None]
    return summed_loss(model, given, shift_labels)


def inputs_of(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in batch.items() if k not in ("labels", "shift_labels", "sample_ids", "pad_tokens")}


def test_a_batch_of_different_numbers_of_tiles_gives_plain_transformers_loss(made: tuple[Path, Any]) -> None:
    folder, model = made
    dataset = data_set(folder)
    alone = [plain_loss(folder, model, dataset, number) for number in range(4)]
    for rows in ([0], [0, 1], [1, 3, 2, 0]):
        batch = dataset.build_collator(CollateParam())([dataset[row] for row in rows])
        found = summed_loss(model, inputs_of(batch), batch["shift_labels"])
        assert found == pytest.approx(sum(alone[row] for row in rows), rel=1e-10)
    batch["pixel_values"] = batch["pixel_values"].roll(1, dims=0)  # the planted fault
    swapped = summed_loss(model, inputs_of(batch), batch["shift_labels"]) if made[0].name.startswith("idefics3") else 0
    assert swapped != pytest.approx(sum(alone), rel=1e-10)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_mm_train_reports_plain_transformers_loss(made: tuple[Path, Any], tmp_path: Path, packing: bool) -> None:
    folder, model = made
    dataset = data_set(folder)
    labels = sum(int((dataset[number]["labels"][1:] != -100).sum()) for number in range(4))
    expected = sum(plain_loss(folder, model, dataset, number) for number in range(4)) / labels
    config = tiny_config(folder)
    config["training"] |= {"train_iters": 1, "micro_batch_size": 4, "save": str(tmp_path / "run")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    train.run(tmp_path / "run.yaml", packs=packing)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert next(line["loss"] for line in lines if "loss" in line) == pytest.approx(expected, rel=2e-5)


def test_a_check_says_that_pictures_were_decoded(made: tuple[Path, Any]) -> None:
    """These processors do not tell from a header how many tokens a picture has."""
    folder, _ = made
    (folder / "look.yaml").write_text(yaml.safe_dump(tiny_config(folder)))
    found = data_check.run(DataCheckRequest(folder / "look.yaml", workers=0))
    assert (found.errors, found.media_read, found.to_dict()["decoded"]) == (0, "measured", True)


SEVERAL = [
    conversation("<image><image>Which?", "one", images=["0.png", "1.png"]),
    conversation("<image>What?", "two", images=["2.png"]),
    conversation("<image>And<image>this<image>?", "three", images=["2.png", "0.png", "0.png"]),
    conversation("How much is one?", "one"),
]
"""Rows of several pictures, and of one, which LLaVA-OneVision alone cuts into tiles."""


def test_rows_of_several_pictures_give_plain_transformers_loss(made: tuple[Path, Any]) -> None:
    folder, model = made
    write_jsonl(folder / "several.jsonl", SEVERAL)
    dataset = data_set(folder, "several.jsonl")
    alone = [plain_loss(folder, model, dataset, number) for number in range(len(SEVERAL))]
    for rows in ([0], [0, 2], [1, 0, 3, 1, 2]):
        batch = dataset.build_collator(CollateParam())([dataset[row] for row in rows])
        found = summed_loss(model, inputs_of(batch), batch["shift_labels"])
        assert found == pytest.approx(sum(alone[row] for row in rows), rel=1e-10)
    if folder.name.startswith("llava"):
        batch["batch_num_images"] = torch.ones(8, dtype=torch.long)  # the planted fault
        with pytest.raises((ValueError, RuntimeError)):
            summed_loss(model, inputs_of(batch), batch["shift_labels"])


def test_turns_are_not_left_out_where_their_pictures_would_be_seen_otherwise(made: tuple[Path, Any]) -> None:
    """One picture alone is cut into tiles, beside others it is not: what is kept of a row must be seen as before."""
    folder, _ = made
    turns = []
    for number in range(3):
        turns += conversation(f"<image>{'long ' * 5}{number}?", "one")["messages"]
    write_jsonl(folder / "long.jsonl", [{"messages": turns, "images": ["0.png", "1.png", "2.png"]}])
    whole = len(data_set(folder, "long.jsonl")[0]["input_ids"])
    kept = set()
    for cutoff in range(whole - 1, 20, -10):
        dataset = data_set(folder, "long.jsonl", cutoff_len=cutoff, truncation="shrink")
        try:
            kept.add(len(dataset[0]["media"]))
        except TooLongError:
            break
    assert kept == ({2} if folder.name.startswith("llava") else {1, 2})
