"""The FLOPs of a distillation: drawing, critic and teacher are counted as torch's own counter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.distillation.critic import DistillationForwardBackward
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from tests.helpers.tiny_distillation import make_tiny_distillation
from tests.helpers.tiny_generators import make_tiny_wan

WORDS = (
    "training.train_iters=1",
    "posttrain.dmd.dfake_gen_update_ratio=2",
    "posttrain.dmd.denoising_step_list=[1000, 700, 400]",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a teacher of another depth."""
    folder = tmp_path_factory.mktemp("costs")
    make_tiny_wan(folder / "teacher", num_layers=4)
    make_tiny_distillation(folder, "t2v")
    return folder


def counted(yaml: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[float, float]:
    """FLOPs of a step by torch's counter, and by ours with all pairs of attention."""
    real, theirs, ours = DistillationForwardBackward.__call__, FlopCounterMode(display=False), []

    def watched(self: Any, *arguments: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH), theirs:  # a product of matrices, which it counts
            return real(self, *arguments)

    class Counts(Hook):
        def on_step_end(self, engine: TrainEngine, result: Any) -> None:
            ours.append(result.tally.flops["full"])

    with monkeypatch.context() as patched:
        patched.setattr(DistillationForwardBackward, "__call__", watched)
        config = load_with_plugins(yaml, [*WORDS, *words, "training.save=null"])
        Trainer(config, hooks=[Counts()]).train()
    return float(theirs.get_total_flops()), ours[0]


def test_all_three_models_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update draws to the end, so that nothing is an average."""
    teacher = folder / "teacher"
    words = ("posttrain.dmd.last_step_only=true", f"posttrain.reference.model_name_or_path={teacher}")
    theirs, ours = counted(folder / "run.yaml", monkeypatch, *words)
    assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.slow
def test_blocks_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About: captions are projected for each block, and the last block is not kept, half a pass of eleven."""
    words = ("posttrain.dmd.last_step_only=true", "posttrain.dmd.num_frame_per_block=1")
    theirs, ours = counted(folder / "run.yaml", monkeypatch, *words)
    assert ours == pytest.approx(theirs, rel=0.05)
