"""One rank sees or hears, the other has other media or text alone: every kind of tower trains as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import fsdp_modules
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.distributed.towers.idle import IdlePlan, IdleTowers
from mindspeed_mm.fsdp.models.structure.towers import find_towers
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.parity import full

FAMILIES = {"qwen3_omni": [["audio"], ["image"]]}
"""Name → the media of each rank's one row. Of omni one hears and the other sees: all must run their towers in one
order, that of the model."""
MORE_FAMILIES = {
    "mistral3": [["image"], []],
    "llava_next": [[], ["image"]],
    "granite4_vision": [[], ["image"]],
    "kimi_k25": [["image", "image2"], []],
    "deepseek_vl": [["image"], []],
    "deepseek_vl_hybrid": [[], ["image"]],
    "qwen3_asr": [[], ["audio"]],
    "lfm2_vl": [["image"], []],
}
LAYOUTS = FAMILIES | MORE_FAMILIES


def family_of(name: str) -> Any:
    from tests.helpers.llava_next import LLAVA_NEXT  # transformers: in the ranks, not when the tests are collected
    from tests.helpers.packed_more_families import MORE

    return {**MORE, **LLAVA_NEXT}[name]


def rows(family: Any, media: list[list[str]]) -> list[dict[str, torch.Tensor]]:
    """A batch of one row for each rank."""
    from tests.helpers.packed_families import Plugin

    batches = []
    for number, kinds in enumerate(media):
        plugin, layout = Plugin(family.marks), [3, *(part for kind in kinds for part in (kind, 2)), 4 + number]
        sample = family._sample("s", layout, torch.Generator().manual_seed(number))
        ids = torch.from_numpy(sample["input_ids"])[None]
        marks = {key: torch.from_numpy(v)[None] for key, v in plugin.token_marks(sample["input_ids"]).items()}
        batches.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), **marks, **plugin.collate(sample["media"])}
        )
    return batches


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, use_cache=False).logits.square().mean()


def sharded_step(name: str, *, keeps_step: bool = True) -> tuple[float, dict[str, torch.Tensor]]:
    family = family_of(name)
    model = family.build()
    blocks = set(model._no_split_modules or ())
    names = [path for path, module in model.named_modules() if type(module).__name__ in blocks]
    found = find_towers(model)
    towers = IdleTowers(model, IdlePlan(tuple(found)))
    arguments = ParallelArguments()
    init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    ParallelApplier(arguments, shard_modules=names)(model)
    assert len(fsdp_modules(model)) > 3
    batch = rows(family, LAYOUTS[name])[dist.get_rank()]
    mine = [kind for kind, is_there in towers.present([batch]).items() if is_there]
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    towers.set_active({kind for kinds in everybodys for kind in kinds} if keeps_step else set())
    loss = loss_of(model, batch)
    loss.backward()
    gradients = {path: full(p.grad) for path, p in model.named_parameters() if p.grad is not None}
    destroy_parallel_state()
    return float(loss.detach()), gradients


def sharded_steps(names: list[str]) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return {name: sharded_step(name) for name in names}


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, tuple[float, dict[str, torch.Tensor]]]]:
    return run_ranks(2, sharded_steps, list(FAMILIES))


@pytest.fixture(scope="module")
def more_on_ranks() -> list[dict[str, tuple[float, dict[str, torch.Tensor]]]]:
    return run_ranks(2, sharded_steps, list(MORE_FAMILIES))


@pytest.mark.parametrize("name", FAMILIES)
def test_as_in_one_process(name: str, on_ranks: Any) -> None:
    check_equals_one_process(name, on_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_FAMILIES)
def test_other_families_as_in_one_process(name: str, more_on_ranks: Any) -> None:
    check_equals_one_process(name, more_on_ranks)


def check_equals_one_process(name: str, on_ranks: Any) -> None:
    family = family_of(name)
    model = family.build()
    losses = []
    for batch in rows(family, LAYOUTS[name]):
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    expected = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    assert [step[name][0] for step in on_ranks] == losses  # exactly: what is added is zero
    for step in on_ranks:
        found = {path: gradient for path, gradient in step[name][1].items() if path in expected or gradient.any()}
        assert found.keys() == expected.keys()
        for path, gradient in expected.items():
            torch.testing.assert_close(found[path], gradient, rtol=1e-10, atol=1e-12, msg=path)


def out_of_step() -> None:
    sharded_step("mistral3", keeps_step=False)


@pytest.mark.slow
def test_without_idle_towers_the_ranks_fail_and_end() -> None:
    with pytest.raises(RanksFailed):
        run_ranks(2, out_of_step, timeout_s=20)
