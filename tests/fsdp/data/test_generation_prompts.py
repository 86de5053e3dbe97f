"""Prompts that generators draw from: lines, rows and extracted embeddings; what is no prompt is refused by place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.data.datasets.generation_prompts.prompt_dataset import PromptDataset
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.tiny_generators import make_tiny_flux


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_flux(tmp_path_factory.mktemp("prompts") / "model")


def opened(model: Path, path: Path, **basic: Any) -> PromptDataset:
    sizes = {"model_name_or_path": str(model), "height": 16, "width": 16} | basic.pop("sizes", {})
    param = DatasetParam.model_validate(
        {
            "dataset_type": "generation_prompts",
            "basic_parameters": {"dataset": str(path), "stage": "prompt", **basic},
            "preprocess_parameters": sizes,
        }
    )
    return PromptDataset(param.basic_parameters, param.preprocess_parameters, param)


def test_lines_and_rows(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n", encoding="utf-8")
    dataset = opened(model, tmp_path / "a.txt")
    assert [prompt.text for prompt in dataset.prompts] == ["one", "two"]
    assert dataset.prompts[1].place == "a.txt:3"
    assert dataset.item(1, 2)["sample_id"] != dataset.item(1, 3)["sample_id"]
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "three", "tag": "x"}) + "\n", encoding="utf-8")
    (row,) = opened(model, tmp_path / "b.jsonl").prompts
    assert (row.text, row.row["tag"], row.stored_features()) == ("three", "x", None)


def test_embeddings_of_older_tools(model: Path, tmp_path: Path) -> None:
    rows = [{"caption": "a", "prompt_embed_path": "0.pt", "pooled_prompt_embeds_path": "0.pt", "text_ids": "0.pt"}]
    (tmp_path / "videos2caption.json").write_text(json.dumps(rows), encoding="utf-8")
    for name, shape in (("prompt_embed", (3, 5)), ("pooled_prompt_embeds", (4,))):
        (tmp_path / name).mkdir()
        torch.save(torch.ones(shape), tmp_path / name / "0.pt")
    (row,) = opened(model, tmp_path / "videos2caption.json").prompts
    features = row.stored_features()
    assert features is not None
    assert {name: tuple(each.shape) for name, each in features.items()} == {
        "prompt_embeds": (3, 5),
        "pooled_prompt_embeds": (4,),
    }
    torch.save({"no": "tensor"}, tmp_path / "prompt_embed" / "0.pt")
    with pytest.raises(MMError, match="holds no tensor"):
        row.stored_features()
    torch.save(Path("/"), tmp_path / "prompt_embed" / "0.pt")  # a pickled object
    with pytest.raises(MMError, match="cannot be read"):
        row.stored_features()
    row.row["prompt_embed_path"] = "../secret.pt"  # type: ignore[index]
    with pytest.raises(MMError, match="leads out of"):
        row.stored_features()


@pytest.mark.parametrize(
    ("content", "basic", "said"),
    [
        ("", {}, "no prompts"),
        ("a\n", {"sizes": {"height": None}}, "no default size"),
        ("a\n", {"sizes": {"height": 17}}, "17"),
    ],
)
def test_what_cannot_be_drawn(content: str, basic: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with pytest.raises(MMError) as caught:
        opened(model, tmp_path / "a.txt", **basic)
    assert said in str(caught.value)


def test_a_row_without_a_prompt_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"words": "b"}\n', encoding="utf-8")
    with pytest.raises(MMError, match="has no prompt: its columns are words"):
        opened(model, tmp_path / "a.jsonl")
