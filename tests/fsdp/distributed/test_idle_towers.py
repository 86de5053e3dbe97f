"""A rank without images trains in step with one that has some: exactly as one process does, and without hanging."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import fsdp_modules
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdlePlan, IdleTowers
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.fsdp.distributed.training_step import Variant, reference_steps, train_steps
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.parity import StepRecord, compare_steps, full

# transformers renamed the method; the old name works in every version that is supported.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")

IMAGES_ON_FIRST_RANK = (1, 0, 2, 0, 0, 0, 0, 0)


def freeze_tower(model: nn.Module) -> None:
    model.model.visual.requires_grad_(False)


def checkpoint_activations(model: nn.Module) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


PREPARATIONS = {"trainable": lambda model: None, "frozen": freeze_tower, "recomputed": checkpoint_activations}


def steps_on_ranks(folder: str) -> dict[str, list[StepRecord]]:
    return {
        name: train_steps(folder, {}, images=IMAGES_ON_FIRST_RANK, variant=Variant(prepare=prepare))
        for name, prepare in PREPARATIONS.items()
    }


def step_without_idle_towers(folder: str) -> list[StepRecord]:
    return train_steps(folder, {}, images=IMAGES_ON_FIRST_RANK, variant=Variant(idle_towers=False))


@pytest.fixture(scope="module")
def measured(tiny_folder: Path) -> list[dict[str, list[StepRecord]]]:
    return run_ranks(2, steps_on_ranks, str(tiny_folder))


@pytest.mark.parametrize("name", PREPARATIONS)
def test_loss_and_gradients_are_exactly_those_of_one_process(name, measured, tiny_folder):
    (expected,) = reference_steps(str(tiny_folder), 2, images=IMAGES_ON_FIRST_RANK, prepare=PREPARATIONS[name])
    for on_rank in measured:
        (found,) = on_rank[name]
        # The norm adds its squares in another order, so it and the weights differ in the last bit.
        compare_steps(expected, {**expected, "loss": found["loss"], "gradients": found["gradients"]}, 0.0)
        compare_steps(expected, found, 1e-10)


def test_without_idle_towers_the_ranks_fail_and_end(tiny_folder):
    started = time.monotonic()
    with pytest.raises(RanksFailed):
        run_ranks(2, step_without_idle_towers, str(tiny_folder), timeout_s=8)
    assert time.monotonic() - started < 25


# A toy model whose tower serves two modalities: each rank has the one that the other lacks.


class Toy(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.tower = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.decoder = ToyDecoder(width)

    def forward(
        self, input_ids: torch.Tensor, image: torch.Tensor | None = None, video: torch.Tensor | None = None
    ) -> torch.Tensor:
        embeds = self.embed(input_ids)
        for pixels in (image, video):
            if pixels is not None:
                embeds = embeds + self.tower(pixels).mean(0)
        return self.decoder(inputs_embeds=embeds)


class ToyDecoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs_embeds).square().sum()


class ToyTower(SimpleNamespace):
    def run_idle(self, model: nn.Module) -> list[torch.Tensor]:
        return [model.tower(torch.zeros(1, 4, dtype=torch.float64))]


TOWERS = [ToyTower(name=name, module="tower", key=name, decoder="decoder", embedding="") for name in ("image", "video")]


def make_toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double()


def toy_batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    pixels = torch.randn(2, 3, 4, dtype=torch.float64)
    return [
        {"input_ids": torch.tensor([1, 2, 3]), "image": pixels[0]},
        {"input_ids": torch.tensor([4, 5]), "video": pixels[1]},
    ]


def toy_gradients_on_ranks() -> dict[str, Any]:
    model = make_toy()
    towers = IdleTowers(model, IdlePlan(tuple(TOWERS)))
    arguments = ParallelArguments()
    init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    ParallelApplier(arguments, shard_modules=["tower.0", "tower.2", "decoder.layer"])(model)
    batch = toy_batches()[dist.get_rank()]
    present = towers.present([batch])
    towers.set_active(["image", "video"])
    model(**batch).backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()
    towers.set_active([])
    model(input_ids=batch["input_ids"]).backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None]
    destroy_parallel_state()
    return {
        "present": dict(present),
        "gradients": gradients,
        "untouched": untouched,
        "wrapped": len(fsdp_modules(model)),
    }


def test_two_modalities_of_one_tower():
    model = make_toy()
    for batch in toy_batches():
        model(**batch).backward()
    results = run_ranks(2, toy_gradients_on_ranks)
    assert [result["present"] for result in results] == [
        {"image": True, "video": False},
        {"image": False, "video": True},
    ]
    for result in results:
        assert result["wrapped"] == 4
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, result["gradients"][name]), name


def test_a_tower_that_no_rank_needs_gets_no_gradients():
    for result in run_ranks(2, toy_gradients_on_ranks):
        assert result["untouched"] == [f"tower.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]


def call_wrong_decoder() -> str:
    model = make_toy()
    tower = ToyTower(name="image", module="tower", key="image", decoder="decoder.layer", embedding="")
    towers = IdleTowers(model, IdlePlan((tower,)))
    towers.set_active(["image"])
    try:
        model(input_ids=torch.tensor([1]))
    except MMError as error:
        return str(error)
    return ""


def test_a_decoder_without_embeds_is_an_error():
    told = run_ranks(2, call_wrong_decoder)[0]
    assert "without inputs_embeds" in told and "Call it with `inputs_embeds=` by name" in told


def test_a_process_on_its_own_runs_no_tower_for_nothing():
    assert run_ranks(1, call_wrong_decoder) == [""]


def mix_media_without_towers(has_them: tuple[tuple[bool, ...], ...]) -> str:
    towers = IdleTowers(make_toy(), IdlePlan(must_agree=("image",)))
    mine = towers.present([{"image": torch.ones(1)} if has else {} for has in has_them[dist.get_rank()]])
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    try:
        towers.set_active({name for each in everybodys for name, is_there in each.items() if is_there})
    except ConfigError as error:
        return str(error)
    return ""


def test_media_that_nothing_stands_in_for_are_on_all_ranks_or_none():
    for mixed in (((True,), (False,)), ((True, False), (True, True))):
        found = run_ranks(2, mix_media_without_towers, mixed)
        assert found[0] == found[1]
        assert "Toy: some micro-batches of this step have image and some have none" in found[0]
    for alike in (((True,), (True,)), ((False,), (False,))):
        assert run_ranks(2, mix_media_without_towers, alike) == ["", ""]
    assert run_ranks(1, mix_media_without_towers, ((True, False),)) == [""]
