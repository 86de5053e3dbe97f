"""Generators whose samples are spread over ranks train like one process, fp64, and sample as ever."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.distributed.context.generators import SpreadSample, apply_to_generator
from mindspeed_mm.fsdp.distributed.context.plan import resolve_context_plan
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier
from mindspeed_mm.fsdp.features.memory.recompute import recompute_modules
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.models.behaviour.attention import set_attention_backend
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.spec import find_blocks
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare, _Gathered
from mindspeed_mm.fsdp.optimizer.clip_grad import grad_norm
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import ParityError, StepRecord, compare_steps, record_step
from tests.helpers.tiny_generators import (
    CLIP_WIDTH,
    IMAGE_WIDTH,
    TEXT_TOKENS,
    TEXT_WIDTH,
    make_tiny_flux,
    make_tiny_wan,
)

TOLERANCE = 1e-9
RING = {"ring_attention_size": 2}
ULYSSES = {"ulysses_parallel_size": 2}

# name → (family, ranks, plan, recompute)
CASES: dict[str, tuple[str, int, dict[str, int], bool]] = {
    "flux, ring": ("flux", 2, RING, True),
    "flux, ulysses": ("flux", 2, ULYSSES, False),
    "wan, ring": ("t2v", 2, RING, False),
    "wan, ulysses": ("t2v", 2, ULYSSES, True),
    "wan with an image, ring": ("i2v", 2, RING, True),
    "flux, both": ("flux", 4, RING | ULYSSES, True),
    "wan, both": ("t2v", 4, RING | ULYSSES, False),
    "wan, two data ranks, ring": ("t2v", 4, RING, True),
    "flux, two copies, ulysses": ("flux", 4, ULYSSES | {"fully_shard_parallel_size": 2}, False),
    "wan with an image, both": ("i2v", 4, RING | ULYSSES, True),
}
IN_SHORT = {"flux, ring", "wan, ulysses"}
LATENTS = {"flux": (4, 10, 14), "t2v": (16, 3, 6, 10), "i2v": (16, 3, 6, 10)}
"""35 tokens of an image and 45 of a video: nothing divides."""


def load(folder: str) -> tuple[nn.Module, DenoisingObjective]:
    adapter = find_adapter(Path(folder))
    model = diffusers_class(adapter.transformer_class).from_pretrained(folder, subfolder="transformer").double().train()
    set_attention_backend(model, None)
    facts_of(model).adapter = adapter
    return model, DenoisingObjective(adapter, DiffusionArguments(), seed=1, compute_dtype=torch.float64)


def make_batches(family: str) -> list[dict[str, Any]]:
    """Two, of two samples each."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batches = []
    for number in range(2):
        latents = random(2, *LATENTS[family])
        batch = {
            "sample_ids": [f"{number}a", f"{number}b"],
            "epochs": [0, 0],
            "latents": latents,
            "prompt_embeds": random(2, 512 if family == "i2v" else TEXT_TOKENS - number, TEXT_WIDTH),
        }
        if family == "flux":
            batch["pooled_prompt_embeds"] = random(2, CLIP_WIDTH)
        if family == "i2v":
            batch |= {"condition_latents": torch.randn_like(latents), "image_embeds": random(2, 5, IMAGE_WIDTH)}
        batches.append(batch)
    return batches


def plain_step(folder: str, family: str) -> StepRecord:
    torch.manual_seed(5)
    with keeping_double():
        model, objective = load(folder)
        batches = [objective.prepare(batch) for batch in make_batches(family)]
        losses = [objective.terms(model, batch)["loss"] for batch in batches]
        loss = torch.stack(losses).sum() / objective.count(batches)["loss"]
        loss.backward()
        return record_step(model, loss.detach(), grad_norm(model.parameters()))


def spread_step(
    folder: str,
    family: str,
    parallel: dict[str, int],
    recompute: bool = False,
    fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> StepRecord:
    torch.manual_seed(5)
    model, objective = load(folder)
    arguments = ParallelArguments.model_validate(parallel | {"fsdp_plan": {"cast_forward_inputs": False}})
    state = init_parallel_state(resolve_parallel_sizes(arguments, dist.get_world_size()), "cpu")
    applier = ParallelApplier(arguments, shard_modules=find_blocks(model))
    applier.pre_fully_shard_apply(model)
    context = applier.context
    assert context is not None
    if recompute:
        recompute_modules(model, find_blocks(model))
    applier.fully_shard_apply(model)
    prepared = [objective.prepare(batch) for batch in make_batches(family)]
    losses = torch.zeros((), dtype=torch.float64)
    with fault():
        for batch in prepared[state.data_rank :: state.data_size]:
            spread = context.split(batch)
            # As the objective has to do it.
            call: Any = lambda **inputs: model(**inputs, **{CONTEXT_KEY: spread[CONTEXT_KEY]})  # noqa: B023, E731
            loss = objective.terms(call, batch)["loss"] / objective.count(prepared)["loss"]
            loss.backward()
            losses += loss.detach()
    dist.all_reduce(losses, group=state.axis_group("dp"))
    record = record_step(model, context.sum_losses(losses), grad_norm(model.parameters()))
    destroy_parallel_state()
    return record


def summed_over_ranks() -> AbstractContextManager[Any]:
    """The gradient of a gathered output summed, as if each rank went on differently with it."""
    real = _Gathered.backward

    def summed(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.all_reduce(gradient := gradient.clone())
        return real(ctx, gradient)

    return mock.patch.object(_Gathered, "backward", staticmethod(summed))


def own_keys_only() -> AbstractContextManager[Any]:
    """Each rank attends to what it holds."""

    def attend(self: ContextShare, q: Any, k: Any, v: Any, *, scale: float | None, **_: Any) -> torch.Tensor:
        tensors = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*tensors, scale=scale).transpose(1, 2)

    return mock.patch.object(ContextShare, "attend", attend)


FAULTS = {"gathered gradient summed": summed_over_ranks, "attention to own tokens": own_keys_only}


def run_on_ranks(folders: dict[str, str], in_short: bool) -> dict[str, StepRecord]:
    here = dist.get_world_size()
    records = {}
    with keeping_double():
        for name, (family, ranks, plan, recompute) in CASES.items():
            if ranks == here and (name in IN_SHORT) == in_short:
                records[name] = spread_step(folders[family], family, plan, recompute)
        if here == 2 and in_short:
            for name, fault in FAULTS.items():
                records[name] = spread_step(folders["flux"], "flux", RING, fault=fault)
    return records


@cache
def results(ranks: int, in_short: bool, folders: tuple[tuple[str, str], ...]) -> list[dict[str, StepRecord]]:
    return run_ranks(ranks, run_on_ranks, dict(folders), in_short)


@cache
def reference(folder: str, family: str) -> StepRecord:
    return plain_step(folder, family)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("generators")
    made = {"flux": make_tiny_flux(root / "flux")}
    made |= {task: make_tiny_wan(root / task, task=task) for task in ("t2v", "i2v")}
    return {family: str(folder) for family, folder in made.items()}


@pytest.mark.parametrize(
    "name", [name if name in IN_SHORT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_spread_samples_train_like_one_process(name: str, folders: dict[str, str]) -> None:
    family, ranks, *_ = CASES[name]
    for measured in results(ranks, name in IN_SHORT, tuple(folders.items())):
        compare_steps(reference(folders[family], family), measured[name], TOLERANCE)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_seen(name: str, folders: dict[str, str]) -> None:
    with pytest.raises(ParityError):
        compare_steps(reference(folders["flux"], "flux"), results(2, True, tuple(folders.items()))[0][name], TOLERANCE)


def test_a_call_without_a_share_and_other_models_stay_as_they_were(folders: dict[str, str]) -> None:
    spread, objective = load(folders["flux"])
    other, _ = load(folders["flux"])
    apply_to_generator(spread, ContextGroups())
    batch = objective.prepare(make_batches("flux")[0])
    torch.testing.assert_close(objective.terms(spread, batch), objective.terms(other, batch), rtol=0, atol=0)
    processors = [type(module.processor) for module in other.modules() if hasattr(module, "processor")]
    assert processors and all(each.__module__.startswith("diffusers.") for each in processors)


def test_a_family_that_does_not_say_where_it_is_cut_is_refused(folders: dict[str, str]) -> None:
    model, _ = load(folders["flux"])
    facts_of(model).adapter.sample_plan = None
    with pytest.raises(
        ConfigError, match=r"FluxTransformer2DModel cannot .* over ranks: its adapter has no sample_plan"
    ):
        apply_to_generator(model, ContextGroups())


def test_fewer_tokens_than_ranks_are_refused() -> None:
    groups: Any = SimpleNamespace(ring_size=2, ulysses_size=3)
    with pytest.raises(DataError, match=r"a sample of 5 tokens \(text\) cannot be spread over 6 ranks"):
        SpreadSample(groups).place("text", 5)


def test_a_processor_that_attends_otherwise_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    model, _ = load(str(make_tiny_flux(tmp_path)))
    assert resolve_context_plan(model, ring=2, ulysses=1) is not None

    class Other:
        def __call__(self, attn: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    model.transformer_blocks[0].attn.processor = Other()
    with pytest.raises(ConfigError, match="Other attends neither by"):
        resolve_context_plan(model, ring=2, ulysses=1)
