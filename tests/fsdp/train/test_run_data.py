"""The loaders of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.train.run.data import build_loader, build_validation_loader
from mindspeed_mm.fsdp.train.run.job import DataShare
from tests.helpers.tiny_run import make_tiny_run

ROWS: list[dict[str, Any]] = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [1], "labels": [1]}]


def test_samples_for_validation_are_joined_by_the_processor_of_their_own_section(tmp_path: Path) -> None:
    """A plugin's data set without a `collate_fn` is padded as the folder says that its section names."""
    yaml = make_tiny_run(tmp_path / "run")
    other = make_tiny_run(tmp_path / "other").parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(other)
    section = f"{{dataset_type: huggingface, preprocess_parameters: {{model_name_or_path: '{other}'}}}}"
    arguments = load_config(yaml, [f"data.val_dataset_param={section}"]).arguments
    share, dataset = DataShare(), as_mm_dataset(ROWS)
    (trained,) = next(iter(build_loader(arguments.data, arguments.training, arguments.posttrain, share, dataset)))
    (held_out,) = next(build_validation_loader(arguments.data, arguments.training, share, dataset).one_pass())
    assert held_out["input_ids"].tolist() == [[1, 2, 3], [1, 5, 5]]
    assert 5 not in trained["input_ids"]
