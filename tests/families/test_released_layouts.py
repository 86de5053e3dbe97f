"""Every family from a folder in its released keys and shapes: its weights and its forward pass are those that
transformers has of it, and what is exported bears the released names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mindspeed_mm.core.batch import ENGINE_KEYS
from mindspeed_mm.fsdp.checkpoint.hf import save_hf
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.models.loading.folder import OTHERS
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.packed_families import InDouble
from tests.helpers.released_layouts import class_of
from tests.helpers.released_rows import ROWS, dataset_of, rows_of
from tests.helpers.written_families import loaded


def reference(folder: Path) -> Any:
    """By transformers itself, which has a place for all that is stored, and misses nothing."""
    whole = transformers.AutoConfig.from_pretrained(folder)
    kind = class_of(getattr(whole, "thinker_config", whole))
    model, told = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    # Releases before 5.23 do not know what lies beside a thinker.
    told["unexpected_keys"] = [key for key in told["unexpected_keys"] if not re.match(OTHERS, key)]
    assert not any(told.values()), told
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no fp64
    if hasattr(model.config, "adaptor_config"):  # transformers 5.23 chooses no kernel there, and padding is heard
        model.config.adaptor_config._attn_implementation = "sdpa"
    return model.eval()


def batch_of(name: str, folder: Path, rows: Path) -> dict[str, Any]:
    """Two rows as training gives them to the model."""
    param = DatasetParam.model_validate(dataset_of(ROWS[name], rows, folder))
    dataset = build_mm_dataset(param)[0]
    return dataset.build_collator(CollateParam())([dataset[0], dataset[1]])


def run(model: Any, batch: dict[str, Any]) -> Any:
    """The model's output for a batch, without a cache."""
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items() if k not in ENGINE_KEYS}
    return model(**inputs, **({} if "codec_ids" in inputs else {"use_cache": False}))


def answer(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Logits of all that is no padding."""
    with torch.no_grad(), keeping_double(), InDouble():
        logits: torch.Tensor = run(model, batch).logits
    mask = batch.get("attention_mask")
    return logits if mask is None or mask.shape != logits.shape[:2] else logits[mask.bool()]


@pytest.mark.parametrize("name", ROWS)
def test_a_released_folder_gives_the_forward_pass_of_transformers_and_comes_back(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    folder = row.write(tmp_path / "model")
    ours, theirs = loaded(folder), reference(folder)
    wanted = theirs.state_dict()
    assert {key: value.shape for key, value in ours.state_dict().items()} == {k: v.shape for k, v in wanted.items()}
    assert [key for key, value in ours.state_dict().items() if not torch.equal(value, wanted[key])] == []
    batch = batch_of(name, folder, rows_of(row, tmp_path / "rows"))
    assert (batch["labels"] != -100).any()
    expected = answer(theirs, batch)
    torch.testing.assert_close(answer(ours, batch), expected, rtol=1e-10, atol=1e-10)

    save_hf(ours, tmp_path / "exported", folder)
    stored, exported = load_file(folder / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert {k: tuple(v.shape) for k, v in exported.items()} == {k: tuple(v.shape) for k, v in stored.items()}
    assert [key for key, value in stored.items() if not torch.equal(value, exported[key])] == []
