"""Rank 0 reads the weights for all: the others open no file, and train the very same."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.fsdp.models.loading import source as weight_source
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.plan_matrix import EP, FP64, GPIPE, PP, TP
from tests.helpers.planned_steps import overrides, train_steps
from tests.helpers.tiny_models import make_tiny_qwen3_vl_moe
from tests.helpers.tiny_run import make_tiny_run

FROM_0 = "training.load_rank0_and_broadcast=true"


@pytest.fixture(scope="module")
def yamls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("from_first")
    make_tiny_qwen3_vl_moe(folder / "vlm moe" / "model", initializer_range=0.3)
    return {name: str(make_tiny_run(folder / name, **FP64)) for name in ("vlm", "vlm moe")}


def only_rank_0(folder: Path, config: Any) -> Any:
    assert dist.get_rank() == 0, "another rank opens the weights"
    return opened(folder, config)


opened = weight_source.open_stored


def steps(yaml: str, words: list[str]) -> Any:
    reads = mock.patch.object(weight_source, "open_stored", only_rank_0)
    with keeping_double(), reads if FROM_0 in words else mock.MagicMock():
        return train_steps(yaml, words)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("vlm moe", overrides(2, 1, EP)),
        ("vlm", overrides(1, 2, PP, GPIPE)),
        pytest.param("vlm", overrides(2, 1), marks=pytest.mark.slow),
        pytest.param("vlm moe", overrides(1, 1, TP), marks=pytest.mark.slow),
    ],
)
def test_sent_weights_are_those_that_each_would_read(yamls: dict[str, str], family: str, words: list[str]) -> None:
    read = run_ranks(2, steps, yamls[family], words)
    sent = run_ranks(2, steps, yamls[family], [*words, FROM_0])
    for own, received in zip(read, sent, strict=True):
        compare_steps(own, received, 0.0)


def told(yaml: str, words: list[str]) -> str:
    try:
        train_steps(yaml, words)
    except ModelFolderError as error:
        return str(error)
    return ""


def test_what_rank_0_finds_wrong_all_ranks_say(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path, **FP64)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    both = run_ranks(2, told, str(yaml), overrides(2, 1, FROM_0))
    assert both[0] == both[1] and "Git LFS pointer" in both[0]
