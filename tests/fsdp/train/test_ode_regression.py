"""A student that is fitted to trajectories of its teacher: they are Euler's steps of the guided flow, the loss is the
paper's, and a run reads what `mm posttrain reference` stored for it and nothing else."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.velocity import Denoiser, GuidedDenoiser
from mindspeed_mm.fsdp.sampling.few_steps import StudentDrawing
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.distillation import trajectories as trajectories_module
from mindspeed_mm.fsdp.train.distillation.regression import ODE, TrajectoryRegression
from mindspeed_mm.fsdp.train.distillation.trajectories import (
    TrajectoryFolder,
    draw_trajectories,
    identities,
    teacher_grid,
)
from mindspeed_mm.fsdp.train.memory.forecast import forecast
from mindspeed_mm.tasks.posttrain.reference import run as run_reference
from mindspeed_mm.tasks.requests.train import ReferenceRequest
from tests.helpers.distributed import run_ranks
from tests.helpers.measured_memory import measured
from tests.helpers.runs import lines, mm, tensors, train
from tests.helpers.tiny_distillation import make_tiny_distillation
from tests.helpers.tiny_generators import TEXT_TOKENS, TEXT_WIDTH, make_tiny_wan

SHAPE = (16, 2, 2, 2)
SCALE = 2.5
FEW = FewSteps((1000, 600), 3.0, 1.0, num_frame_per_block=1)
LEVELS = (1.0, 3 * 0.6 / (1 + 2 * 0.6), 0.0)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_wan(tmp_path_factory.mktemp("wan") / "model")


def model_of(folder: Path) -> Any:
    model = diffusers_class("WanTransformer3DModel").from_pretrained(folder / "transformer").double()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_text() -> dict[str, torch.Tensor]:
    shape = (2, TEXT_TOKENS, TEXT_WIDTH)
    return {"prompt_embeds": normal(1, *shape), "_blank/prompt_embeds": normal(2, *shape)}


def gap_of_trajectories(wan: Path) -> float:
    """Largest difference from the flow's Euler steps, written again."""
    model, text, start = model_of(wan), some_text(), normal(3, 2, *SHAPE)
    guided = GuidedDenoiser(find_adapter(wan), torch.float64, 1.0, SCALE)
    levels, kept = teacher_grid(FEW, 4, 3.0)
    found = draw_trajectories(guided, model, text, start, levels, kept)
    x, wanted = start, []
    shares = (1.0, 0.75, 0.6, 0.5, 0.25, 0.0)
    with torch.no_grad():
        for share, following in itertools.pairwise(shares):
            now, then = (3 * each / (1 + 2 * each) for each in (share, following))
            if share in (1.0, 0.6):
                wanted.append(x)
            time = torch.full((2,), 1000 * now, dtype=torch.float64)
            with_prompt = model(x, time, text["prompt_embeds"], return_dict=False)[0]
            without = model(x, time, text["_blank/prompt_embeds"], return_dict=False)[0]
            x = x - (now - then) * (without + SCALE * (with_prompt - without))
    return float((found - torch.stack([*wanted, x], dim=1)).abs().max())


def test_trajectories_are_eulers_steps_of_the_guided_flow(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the grid without the student's own level, so that a neighbour's state is kept in its place."""
    assert gap_of_trajectories(wan) < 1e-11
    real = teacher_grid

    def without_own(few: FewSteps, steps: int, shift: float) -> tuple[list[float], list[int]]:
        levels, _ = real(FewSteps((1000,), few.shift, few.guidance), steps, shift)
        return levels, [0, 2, len(levels) - 1]

    monkeypatch.setitem(globals(), "teacher_grid", without_own)
    assert gap_of_trajectories(wan) > 1e-3


def test_the_students_levels_are_states_of_the_trajectory() -> None:
    levels, kept = teacher_grid(FewSteps((1000, 960, 500), 3.0, 1.0), 48, 3.0)
    assert len(levels) == 50 and levels == sorted(levels, reverse=True)
    assert [levels[index] for index in kept] == pytest.approx([*FewSteps((1000, 960, 500), 3.0, 1.0).levels(3.0), 0.0])


def regression(wan: Path, folder: TrajectoryFolder, seed: int = 5) -> TrajectoryRegression:
    student = StudentDrawing(Denoiser(find_adapter(wan), torch.float64, 1.0), FEW)
    return TrajectoryRegression(student, folder, seed=seed, encode=dict)


def stored_batch(folder: TrajectoryFolder, samples: int) -> tuple[dict[str, Any], torch.Tensor]:
    """A batch of features, and its states (B, 3, …), which are written."""
    states = normal(7, samples, 3, *SHAPE)
    batch = {
        "sample_ids": [f"s{number}" for number in range(samples)], "epochs": [0] * samples,
        "latents": torch.zeros(samples, *SHAPE), "prompt_embeds": normal(1, samples, TEXT_TOKENS, TEXT_WIDTH),
    }  # fmt: skip
    folder.path.mkdir()
    for name, of_sample in zip(identities(batch), states, strict=True):
        folder.write(name, of_sample)
    return batch, states


def test_the_loss_is_the_error_of_blocks_that_have_noise(wan: Path, tmp_path: Path) -> None:
    """Each frame at a level of its own, the first of them sometimes clean: such frames count nothing."""
    folder = TrajectoryFolder(tmp_path / "stored", {})
    batch, states = stored_batch(folder, 16)
    model, objective = model_of(wan), regression(wan, folder)
    prepared = objective.prepare(batch)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    at = (prepared["_time"].unsqueeze(-1) - levels).abs().argmin(dim=-1)
    assert torch.allclose(prepared["_time"], levels[at]) and set(at[:, 0].tolist()) == {0, 1, 2}
    assert set(at[:, 1].tolist()) == {0, 1}  # nobody would look at a last frame that is clean
    found = float(objective.terms(model, prepared)[ODE].detach())
    wanted, counted = 0.0, 0
    for row in range(16):
        text = {"prompt_embeds": batch["prompt_embeds"][row : row + 1]}
        frames = torch.stack([states[row, at[row, frame], :, frame] for frame in range(2)], dim=1)[None]
        x0 = regression(wan, folder)._student.predicted(model, text, frames, levels[at[row]][None])
        for frame in range(2):
            if at[row, frame] < 2:
                wanted += float((x0[0, :, frame] - states[row, 2, :, frame]).square().mean().detach())
                counted += 1
    assert found == pytest.approx(wanted, rel=1e-12)
    assert objective.count([prepared]) == {ODE: counted} and counted < 32


def test_levels_are_drawn_anew_in_each_epoch_and_by_the_seed(wan: Path, tmp_path: Path) -> None:
    folder = TrajectoryFolder(tmp_path / "stored", {})
    batch, _ = stored_batch(folder, 8)
    first = regression(wan, folder).prepare(batch)["_time"]
    assert torch.equal(first, regression(wan, folder).prepare(batch)["_time"])
    assert not torch.equal(first, regression(wan, folder).prepare({**batch, "epochs": [1] * 8})["_time"])
    assert not torch.equal(first, regression(wan, folder, seed=6).prepare(batch)["_time"])


def test_a_first_frame_tells_raw_samples_apart() -> None:
    """What a clip goes on from counts, its own pixels do not; a text alone keeps its name."""
    frame = torch.zeros(1, 3, 1, 4, 4, dtype=torch.uint8)
    batch: dict[str, Any] = {"sample_ids": ["a"], "captions": ["a box"], "pixels": frame}
    told = batch | {"pixels_first_frame": frame}
    others = [batch, told, told | {"pixels_first_frame": frame + 1}, batch | {"captions": ["a ball"]}]
    assert len({*itertools.chain.from_iterable(map(identities, others))}) == 4
    assert identities(told) == identities(told | {"pixels": frame + 1})


# --- runs -------------------------------------------------------------------------------------------------------------

WORDS = ("posttrain.dmd.objective=ode_regression", "posttrain.dmd.num_inference_steps=3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration of blocks, and the folder of its trajectories."""
    folder = tmp_path_factory.mktemp("ode")
    yaml = make_tiny_distillation(folder, "t2v")
    stored = folder / "stored"
    words = (*WORDS, "posttrain.dmd.num_frame_per_block=1", f"posttrain.reference.path={stored}")
    said = mm("posttrain", "reference", yaml, *words)
    assert said.code == 0 and "4 trajectories" in said.out, said.err
    return yaml, stored


def words_of(stored: Path) -> tuple[str, ...]:
    return (*WORDS, "posttrain.dmd.num_frame_per_block=1", f"posttrain.reference.path={stored}")


def test_a_run_reads_what_was_stored_and_has_no_critic(run: tuple[Path, Path], tmp_path: Path) -> None:
    """A state of each of the student's two steps, and the end; nothing is drawn twice."""
    yaml, stored = run
    files = sorted(stored.glob("*.safetensors"))
    (states,) = load_file(files[0]).values()
    assert len(files) == 4 and states.shape[0] == 3 and states.isfinite().all()
    before = [file.stat().st_mtime_ns for file in files]
    files[0].unlink()
    assert mm("posttrain", "reference", yaml, *words_of(stored)).code == 0
    after = [file.stat().st_mtime_ns for file in files]
    assert after[0] != before[0] and after[1:] == before[1:]
    assert torch.equal(states, *load_file(files[0]).values())  # chance is the sample's own
    assert mm("check", yaml, *words_of(stored)).code == 0
    train(yaml, tmp_path / "run", *words_of(stored), "training.train_iters=1")
    assert not [name for name in tensors(tmp_path / "run") if name.startswith("critic")]


def test_trajectories_of_something_else_are_refused(run: tuple[Path, Path], tmp_path: Path) -> None:
    """Before training: none at all, and another guidance; while training: another caption."""
    yaml, stored = run
    nothing = mm("check", yaml, *words_of(tmp_path / "nothing"))
    assert nothing.code == 2 and "there are no trajectories" in nothing.err + nothing.out
    for verb in (("check",), ("posttrain", "reference")):
        said = mm(*verb, yaml, *words_of(stored), "posttrain.dmd.guidance_scale=2")
        assert said.code == 2 and "of other posttrain.dmd.guidance_scale (3.0, and" in said.err + said.out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("something else\n" * 4)
    changed = f"data.dataset_param.basic_parameters.dataset={prompts}"
    said = mm("train", yaml, *words_of(stored), changed, f"training.save={tmp_path / 'run'}")
    assert said.code == 4 and "has no trajectory with this caption" in said.err


def test_only_what_can_be_stored_is(run: tuple[Path, Path]) -> None:
    yaml, stored = run
    said = mm("posttrain", "reference", yaml)
    assert said.code == 2 and "posttrain.dmd.objective: ode_regression" in said.err
    said = mm("check", yaml, *words_of(stored), "posttrain.reference.kind=frozen", "--config-only")
    assert said.code == 2 and "reads what mm posttrain reference stored" in said.err + said.out


def test_a_trajectory_that_is_damaged_is_told(run: tuple[Path, Path], tmp_path: Path) -> None:
    yaml, stored = run
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in stored.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content if file.suffix == ".json" else content[:-8])
    said = mm("train", yaml, *words_of(copy), f"training.save={tmp_path / 'run'}")
    assert said.code == 4 and "cannot be read" in said.err
    assert json.loads((copy / trajectories_module._FACTS).read_text())


def test_a_trajectory_that_is_damaged_is_drawn_again(run: tuple[Path, Path], tmp_path: Path) -> None:
    yaml, stored = run
    copy = shutil.copytree(stored, tmp_path / "copy")
    cut, whole, *_ = sorted(copy.glob("*.safetensors"))
    content, before = cut.read_bytes(), whole.stat().st_mtime_ns
    cut.write_bytes(content[:-8])
    assert mm("posttrain", "reference", yaml, *words_of(copy)).code == 0
    assert cut.read_bytes() == content and whole.stat().st_mtime_ns == before


def test_all_epochs_read_the_caption_that_was_drawn(tmp_path: Path) -> None:
    """Rows with several captions, of which an epoch of plain training takes another one."""
    yaml = make_tiny_distillation(tmp_path, "flux")
    rows = []
    for number in range(2):
        Image.new("RGB", (16, 16), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"path": f"{number}.png", "cap": [f"caption {each} of {number}" for each in range(6)]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows_of = ("dataset_type=generation", f"basic_parameters.dataset={tmp_path / 'rows.jsonl'}")
    words = (*WORDS, *(f"data.dataset_param.{word}" for word in rows_of), f"training.save={tmp_path / 'run'}")
    assert mm("posttrain", "reference", yaml, *words).code == 0
    said = mm("train", yaml, *words, "training.train_iters=8")
    assert said.code == 0, said.err
    losses = [line["loss"] for line in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert len(losses) == 8 and len(set(losses)) == 8  # levels are drawn anew all the same


def regression_of_ranks(yaml: str, save: str, *words: str) -> list[tuple[float, float]]:
    """Losses and norms of the student's gradients, of each step."""
    train(yaml, save, *words)
    found = [line for line in lines(Path(save) / "metrics.jsonl") if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in found]


def stored_by_ranks(yaml: str, *words: str) -> int:
    """As `mm posttrain reference`, in each of the ranks."""
    return run_reference(ReferenceRequest(Path(yaml), words)).trajectories


@pytest.mark.slow
def test_ranks_equal_one_process(tmp_path: Path) -> None:
    """FSDP over two ranks in fp64: the same trajectories, losses and gradients, with recomputation. A rank that has
    nothing to draw draws with the one that has."""
    fp64 = {"fsdp_plan": {"param_dtype": "fp64", "reduce_dtype": "fp64"}}
    yaml = str(make_tiny_distillation(tmp_path, "t2v", parallel=fp64))
    alone, spread = words_of(tmp_path / "alone"), words_of(tmp_path / "spread")
    stored_by_ranks(yaml, *alone)
    assert run_ranks(2, stored_by_ranks, yaml, *spread)[0] == 4
    files = sorted((tmp_path / "alone").glob("*.safetensors"))
    (tmp_path / "spread" / files[0].name).unlink()
    run_ranks(2, stored_by_ranks, yaml, *spread)
    assert len(files) == 4
    for file in files:
        (own,), (other,) = load_file(file).values(), load_file(tmp_path / "spread" / file.name).values()
        assert float((own - other).abs().max()) < 1e-9
    common = (*alone, "training.train_iters=2", "features.recompute=true")
    wanted = regression_of_ranks(yaml, str(tmp_path / "one"), *common, "training.gradient_accumulation_steps=2")
    found = run_ranks(2, regression_of_ranks, yaml, str(tmp_path / "two"), *common)[0]
    for one, other in zip(wanted, found, strict=True):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12)


def test_the_forecast_goes_through_the_blocks(run: tuple[Path, Path]) -> None:
    """Within 10 % of what a step holds, of a prepared batch and of a raw one; there is no second model."""
    yaml, stored = run
    real = measured(yaml, words_of(stored))
    assert real.peak is not None and "_time" in real.batches[-1]
    arguments = load_with_plugins(yaml, words_of(stored)).arguments
    predicted = forecast(arguments, real.batches[-1])
    assert predicted.critic == predicted.reference == 0
    assert predicted.peak == pytest.approx(real.peak.total_bytes, rel=0.1)
    raw = {key: value for key, value in real.batches[-1].items() if not key.startswith("_")}
    assert forecast(arguments, raw).peak == pytest.approx(predicted.peak, rel=0.01)
