"""`mm train` on one simulated device: no races, and the figures of the CPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.fsdp.data.data_utils import byte_pixels
from mindspeed_mm.fsdp.features.memory import activation_offload
from mindspeed_mm.fsdp.optimizer import muon
from tests.helpers.runs import differing, mm, tensors, train
from tests.helpers.simulated_device import NAME, differing_figures, on_the_cpu
from tests.helpers.tiny_generator_run import make_tiny_generator_run
from tests.helpers.tiny_run import make_tiny_run

STEPS = "training.train_iters=3"
ACCUMULATED = "training.gradient_accumulation_steps=2"
ACTIVATIONS = "features.enable_activation_offload=true"
GRADIENTS = "features.enable_gradient_offload=true"
RECOMPUTE = "features.recompute=true"
PACKED = (
    "data.dataset_param.basic_parameters.packing=true",
    "data.dataset_param.basic_parameters.cutoff_len=128",
    "training.micro_batch_size=1",
)
AVERAGE = ("training.ema.enable=true", "training.ema.decay=0.5")
LORA = ("training.lora.enable=true", "training.lora.rank=4")
WAYS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "recompute": (RECOMPUTE,),
    "preloaded batches": ("data.dataloader_param.enable_preload=true",),
    "pixels as bytes": ("data.dataloader_param.num_workers=1",),
    "preloaded pixels as bytes": ("data.dataloader_param.num_workers=1", "data.dataloader_param.enable_preload=true"),
    "activations on the host": (ACTIVATIONS,),
    "recompute, inputs on the host": (ACTIVATIONS, RECOMPUTE, ACCUMULATED),
    "gradients on the host": (GRADIENTS, ACCUMULATED),
    "moments on the host": ("training.optimizer=adamw_swap",),
    "moments and gradients on the host": ("training.optimizer=adamw_swap", GRADIENTS),
    "parameters on the host": ("parallel.fsdp_plan.cpu_offload=true",),
    "muon": ("training.optimizer=muon",),
    "average": AVERAGE,
    "adapters": (*LORA, ACTIVATIONS),
    "packed": (*PACKED, ACTIVATIONS),
    "sliced loss": ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=8"),
}


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(byte_pixels, "LEAST_BYTES", 1)


@pytest.fixture(autouse=True)
def matrices_keep_their_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon's products are in bf16 on every accelerator, which is not a question of this room."""
    monkeypatch.setattr(muon, "_iteration_dtype", lambda matrices: matrices.dtype)


def assert_as_on_the_cpu(yaml: Path, folder: Path, *words: str) -> None:
    said = train(yaml, folder / "device", STEPS, *words)
    assert f"{NAME} × 1" in said
    with on_the_cpu():
        assert "cpu × 1" in train(yaml, folder / "cpu", STEPS, *words)
    assert differing_figures(folder / "device", folder / "cpu") == []


@pytest.mark.edge("D1", "D3")
@pytest.mark.parametrize("way", WAYS)
def test_training_is_as_on_the_cpu(way: str, yaml: Path, tmp_path: Path) -> None:
    assert_as_on_the_cpu(yaml, tmp_path, *WAYS[way])


@pytest.mark.edge("D3")
def test_the_host_waits_for_few_numbers(yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a packed step: the lengths by which transformers cuts the features of pictures; its own numbers have arrived
    when they are read. Once, before the first: whether the optimizer's kernel can leave an update out."""
    readers: Counter[str] = Counter()
    for name in ("tolist", "item"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), readers))
    train(yaml, None, STEPS, *PACKED)
    assert {name: count for name, count in readers.items() if "torch" not in name} == {
        "modeling_qwen3_vl.py get_image_features": 3,
        "adamw.py _kernel_leaves_out": 2,
    }


def counted(real: Callable[..., Any], readers: Counter[str]) -> Callable[..., Any]:
    def reading(tensor: torch.Tensor) -> Any:
        if tensor.device.type == NAME:
            code = sys._getframe(1).f_code
            package = "torch " if "/torch/" in code.co_filename else ""
            readers[f"{package}{Path(code.co_filename).name} {code.co_name}"] += 1
        return real(tensor)

    return reading


@pytest.mark.parametrize("way", [(ACTIVATIONS, RECOMPUTE), (*LORA, *AVERAGE)], ids=["offloaded", "adapters, average"])
@pytest.mark.parametrize("family", ["flux", "t2v"])
def test_generators_train_as_on_the_cpu(family: str, way: tuple[str, ...], tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path, family)
    assert_as_on_the_cpu(yaml, tmp_path, *way)


def test_a_generator_trains_on_features_as_on_the_cpu(tmp_path: Path) -> None:
    yaml = make_tiny_generator_run(tmp_path, "t2v")
    assert mm("extract", yaml, "--out", tmp_path / "features").code == 0
    assert_as_on_the_cpu(yaml, tmp_path, f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}")


@pytest.mark.parametrize("saving", ["save_async=false", "save_async=true"])
def test_a_resumed_run_is_the_uninterrupted_one(saving: str, yaml: Path, tmp_path: Path) -> None:
    words = ("training.save_interval=2", f"training.{saving}", *AVERAGE, "training.train_iters=4")
    train(yaml, tmp_path / "whole", *words)
    train(yaml, tmp_path / "cut", *words, "--steps", 2)
    train(yaml, tmp_path / "cut", *words)
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "cut")) == []


@pytest.mark.edge("R17")
def test_memory_is_profiled_without_a_history(yaml: Path, tmp_path: Path) -> None:
    said = train(
        yaml, tmp_path / "run", STEPS, "tools.memory_profile.enable=true", "tools.memory_profile.mem_info=true"
    )
    assert "memory of step" in said
    assert sorted(path.suffix for path in (tmp_path / "run" / "memory_snapshot").iterdir()) == [".json", ".png"]


@pytest.mark.edge("D4", "R17")
@pytest.mark.parametrize("level", [1, 2])
def test_a_profile_ends(level: int, yaml: Path, tmp_path: Path) -> None:
    at = "tools.profile.static_param"
    words = (f"{at}.level={level}", f"{at}.start_step=1", f"{at}.end_step=3", "parallel.fsdp_plan.param_dtype=bf16")
    said = train(yaml, tmp_path / "run", STEPS, "tools.profile.enable=true", *words, *PACKED)
    assert "could not be analysed" not in said and "parts of a step" in said
    (trace,) = (tmp_path / "run" / "profiling").glob("*.gz")
    assert trace.stat().st_size < 20e6


def everywhere(folder: Path, *words: object) -> tuple[Path, Path]:
    """`mm WORDS --out` on the device and on the CPU: where each has written."""
    ended = mm(*words, "--out", folder / "device")
    assert ended.code == 0, ended.err
    with on_the_cpu():
        ended = mm(*words, "--out", folder / "cpu")
    assert ended.code == 0, ended.err
    return folder / "device", folder / "cpu"


@pytest.mark.parametrize("command", ["infer", "evaluate"])
def test_answers_are_those_of_the_cpu(command: str, yaml: Path, tmp_path: Path) -> None:
    words = (command, yaml.parent / "model", "--data", yaml.parent / "rows.jsonl", "--max-new-tokens", 4)
    said = [
        out.read_text() if out.is_file() else next(out.glob("*.jsonl")).read_text()
        for out in everywhere(tmp_path, *words)
    ]
    assert said[0] == said[1] and said[0]


def test_a_run_answers_with_its_average_as_on_the_cpu(yaml: Path, tmp_path: Path) -> None:
    train(yaml, tmp_path / "run", STEPS, *AVERAGE)
    words = ("infer", tmp_path / "run", "--data", yaml.parent / "rows.jsonl", "--max-new-tokens", 4)
    said = [out.read_text() for out in everywhere(tmp_path, *words)]
    assert said[0] == said[1] and said[0]


@pytest.mark.parametrize("family", ["flux", "t2v"])
def test_extracted_features_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    device, cpu = everywhere(tmp_path, "extract", make_tiny_generator_run(tmp_path, family))
    shards = sorted(path.relative_to(cpu) for path in cpu.rglob("*.safetensors"))
    assert shards
    for shard in shards:
        ours, theirs = load_file(device / shard), load_file(cpu / shard)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["flux", "t2v"])
def test_samples_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    model = make_tiny_generator_run(tmp_path, family).parent / "model"
    words = ("infer", model, "--prompt", "a red box", "--steps", 2, "--size", "16x16")
    folders = everywhere(tmp_path, *words, *(("--frames", 5) if family == "t2v" else ()))
    ours, theirs = (samples(folder) for folder in folders)
    assert ours.shape == theirs.shape and ours.size
    assert abs(ours - theirs).max() <= 2


def samples(folder: Path) -> np.ndarray:
    """The pixels of the one picture or clip that a folder holds."""
    (path,) = (path for path in folder.iterdir() if path.suffix in {".png", ".mp4"})
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)])
