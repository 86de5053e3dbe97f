"""Folders are told apart by what lies in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.errors import CheckpointError


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["config.json", "model.safetensors"], "hf"),
        (["config.json", "diffusion_pytorch_model.safetensors"], "hf"),
        (["model_index.json", "transformer/config.json"], "hf"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapters"),
        (["pytorch_lora_weights.safetensors", "README.md"], "adapters"),
        ([".metadata", "__0_0.distcp"], "dcp"),
        (["MANIFEST.json"], "dcp"),
        (["iter_0000010/MANIFEST.json", "config.yaml"], "run"),
        (["latest_checkpointed_iteration.txt", "release/.metadata"], "run"),
        (["run.json"], "run"),
        (["latest_checkpointed_iteration.txt", "config.json", "model.safetensors"], "hf"),
        (["run.json", "config.json", "iter_0000010/.metadata"], "run"),
        (["mp_rank_00/model_optim_rng.pt"], "megatron"),
        (["latest_checkpointed_iteration.txt", "release/mp_rank_00_000/model_optim_rng.pt"], "megatron"),
        (["latest_checkpointed_iteration.txt", "iter_0000010/mp_rank_00/model_optim_rng.pt"], "megatron"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_kinds(files: list[str], kind: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert recognise(tmp_path) == kind


def test_neither(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds nothing"):
        recognise(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        recognise(tmp_path / "file")
