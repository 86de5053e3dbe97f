"""A distributed checkpoint, a run's, divided among ranks: the same as the model's folder divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mindspeed_mm.checkpoint.common.config import HfConfig
from mindspeed_mm.checkpoint.fsdp.generic_dcp_converter import GenericDCPConverter
from mindspeed_mm.checkpoint.ptd.config import ResplitConfig
from mindspeed_mm.cli.main import run
from mindspeed_mm.core.errors import CheckpointError, UsageError
from tests.checkpoint.ptd.test_converters import CONVERTERS, FLAT, assert_same, division, to_hf
from tests.helpers.megatron_models import save_tiny
from tests.helpers.runs import train
from tests.helpers.tiny_run import make_tiny_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: save_tiny(name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_distributed_checkpoint_is_divided_as_its_folder(
    name: str, saved: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, dcp, divided, back = saved(name), tmp_path / "dcp", tmp_path / "divided", tmp_path / "hf"
    GenericDCPConverter().hf_to_dcp(hf, dcp)
    cfg = ResplitConfig(source_dir=dcp, target_dir=divided, target_parallel_config=division(name, FLAT))
    with pytest.raises(UsageError, match="does not say which model it holds"):
        CONVERTERS[name]().resplit(cfg)
    said = {"hf_config": HfConfig(hf_dir=hf), "source_parallel_config": division(name, FLAT)}
    CONVERTERS[name]().resplit(cfg.model_copy(update=said))
    assert "source_parallel_config has no effect" in capsys.readouterr().err
    to_hf(name, divided, hf, back)
    assert_same(back, hf)


def test_a_run_is_divided_by_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run says which model it trained; weights are written in the types of its folder."""
    yaml = make_tiny_run(tmp_path)
    train(yaml, tmp_path / "run", "training.train_iters=1")
    name = "qwen3_vl"
    words = {"source_dir": tmp_path / "run", "target_parallel_config": {"tp_size": 2}}
    CONVERTERS[name]().resplit(ResplitConfig(target_dir=tmp_path / "divided", **words))
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "again"), "--to", "megatron", "--tp", "2"]) == 0
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "exported"), "--to", "hf"]) == 0
    for divided in ("divided", "again"):
        back = tmp_path / f"{divided}-hf"
        to_hf(name, tmp_path / divided, tmp_path / "exported", back)
        assert_same(back, tmp_path / "exported")


def test_adapters_are_not_divided_alone(tmp_path: Path) -> None:
    yaml = make_tiny_run(tmp_path)
    train(yaml, tmp_path / "run", "training.train_iters=1", "training.lora.enable=true")
    cfg = ResplitConfig(source_dir=tmp_path / "run", target_dir=tmp_path / "out", target_parallel_config={})
    with pytest.raises(CheckpointError, match="holds adapters") as caught:
        CONVERTERS["qwen3_vl"]().resplit(cfg)
    assert "mm merge" in caught.value.problems[0].way_out and not (tmp_path / "out").exists()
