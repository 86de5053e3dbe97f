"""Mechanisms of parallel plans on one device: what of each can run there, against plain computation in fp64 on the CPU.

`python -m benchmarks.accelerator_mechanisms` prints one JSON line; `agrees` says how it went. Groups have one rank; the
ring's ranks are played one after the other. Whether ranks exchange the right things, `mm verify` and the tests say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

ensure_torchvision()  # transformers imports torchvision, whose compiled part a CPU build of torch may refuse

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.accelerator_engine import leave  # noqa: E402
from benchmarks.accelerator_operators import OPERATORS  # noqa: E402
from benchmarks.accelerator_parity import PLANTED, full_precision, on_host  # noqa: E402
from mindspeed_mm.core.batch import Batch  # noqa: E402
from mindspeed_mm.fsdp.distributed.context.apply import apply_to_decoder  # noqa: E402
from mindspeed_mm.fsdp.distributed.expert.dispatch import (  # noqa: E402
    AllGather,
    AllToAll,
    ExpertRanks,
)
from mindspeed_mm.fsdp.distributed.job.launch import initialize_distributed  # noqa: E402
from mindspeed_mm.fsdp.distributed.parallel_state import get_parallel_state, init_parallel_state  # noqa: E402
from mindspeed_mm.fsdp.distributed.pipeline.apply import split_into_stages  # noqa: E402
from mindspeed_mm.fsdp.distributed.pipeline.plan import plan_stages  # noqa: E402
from mindspeed_mm.fsdp.distributed.tensor.apply import apply_tensor_parallel  # noqa: E402
from mindspeed_mm.fsdp.distributed.tensor.collectives import split_vocabulary  # noqa: E402
from mindspeed_mm.fsdp.distributed.tensor.sizes import resolve_tensor_parallel  # noqa: E402
from mindspeed_mm.fsdp.distributed.torch_parallelize import ParallelApplier  # noqa: E402
from mindspeed_mm.fsdp.loss.head_loss import HeadLoss  # noqa: E402
from mindspeed_mm.fsdp.loss.objectives import TokenCrossEntropy  # noqa: E402
from mindspeed_mm.fsdp.models.structure.spec import resolve_spec  # noqa: E402
from mindspeed_mm.fsdp.models.structure.stages import find_cut_points  # noqa: E402
from mindspeed_mm.fsdp.ops.context_attention.layer import ContextGroups  # noqa: E402
from mindspeed_mm.fsdp.ops.context_attention.layout import build_layout  # noqa: E402
from mindspeed_mm.fsdp.ops.context_attention.share import CONTEXT_KEY, ContextShare  # noqa: E402
from mindspeed_mm.fsdp.ops.experts import fused_experts, use_own_experts  # noqa: E402
from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments, TpPlan  # noqa: E402
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes  # noqa: E402
from mindspeed_mm.fsdp.train.step.pipeline import PipelineForwardBackward  # noqa: E402
from mindspeed_mm.fsdp.utils.device import get_device_type, set_local_device  # noqa: E402

Results = dict[str, torch.Tensor]
"""What a computation gives, by name: its output and its gradients, on the CPU."""
TEXT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
ROWS, LENGTH = 4, 48
MODEL_RTOL = 1e-4
"""Of models in fp32."""


def main() -> None:
    """Check each and print."""
    full_precision()
    initialize_distributed(timeout_s=120.0)
    device = set_local_device(0)
    init_parallel_state(resolve_parallel_sizes(ParallelArguments(), 1), get_device_type())
    checks = {name: judged(partial(check, device)) for name, check in OPERATORS.items()}
    checks |= {name: judged(partial(model_check, step, device)) for name, step in MODELS.items()}
    agrees = all(check.get("agrees", False) for check in checks.values())
    print(json.dumps({"agrees": agrees, "device": str(device), "tolerance": TOLERANCE, "checks": checks}))
    leave()


TOLERANCE = (
    "‖ours − reference‖ ≤ rtol · ‖reference‖ + 1e-6 · ‖all‖ of the output and of every gradient; `worst` is the share "
    f"of that which is used, `planted` the same where all is off by {PLANTED:g} (models), or a mistake is made"
)


def judged(check: Callable[[], tuple[Results, Results, Results, float]]) -> dict[str, Any]:
    """The verdict on (found, reference, found with a fault, rtol); an error is a verdict too."""
    try:
        found, reference, faulty, rtol = check()
    except Exception as error:  # noqa: BLE001  one mechanism that fails must not hide the others
        return {"agrees": False, "error": f"{type(error).__name__}: {error}"[-400:]}
    worst, planted = worst_share(found, reference, rtol), worst_share(faulty, reference, rtol)
    return {"agrees": worst <= 1.0 < planted, "worst": worst, "planted": planted, "rtol": rtol}


def worst_share(found: Results, reference: Results, rtol: float) -> float:
    """Largest difference, as a share of what is allowed."""
    if found.keys() != reference.keys():
        raise ValueError(f"only one side has {sorted(found.keys() ^ reference.keys())[:5]}")
    everything = float(torch.stack([each.double().square().sum() for each in reference.values()]).sum().sqrt())
    return max(
        float((found[name].double() - each.double()).norm()) / (rtol * float(each.double().norm()) + 1e-6 * everything)
        for name, each in reference.items()
    )


# --- models ----------------------------------------------------------------------------------------------------------

Step = Callable[[nn.Module, Batch, torch.device], torch.Tensor]
"""Forward and backward of a model that lies on the device; returns the loss. Gradients are left in the parameters."""


def model_check(step: Step, device: torch.device) -> tuple[Results, Results, Results, float]:
    """One step of a small decoder, by a mechanism in fp32 here and plainly in fp64 on the CPU."""
    model = build_model(with_experts=step in (alltoall, allgather))
    batch = make_batch()
    reference = step_results(copy.deepcopy(model).double(), plain, batch, torch.device("cpu"))
    found = step_results(model.to(device), step, batch, device)
    return found, reference, {name: PLANTED * each for name, each in found.items()}, MODEL_RTOL


def build_model(*, with_experts: bool) -> Any:
    """A Qwen3 of transformers with random weights, in fp32 on the CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if with_experts:
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        # Transformers' own loop over the experts is the plain computation, and knows fp64.
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TEXT | experts, experts_implementation="eager")).train()
    return Qwen3ForCausalLM(Qwen3Config(**TEXT)).train()


def make_batch() -> Batch:
    """Rows of random tokens, of which every third has no label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(TEXT["vocab_size"], (ROWS, LENGTH), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((ROWS, 1), -100)], dim=1)
    labels[:, ::3] = -100
    return {"input_ids": ids, "shift_labels": labels, "sample_ids": [str(row) for row in range(ROWS)]}


def step_results(model: nn.Module, step: Step, batch: Batch, device: torch.device) -> Results:
    """Loss and gradients."""
    on_device = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    loss = step(model, on_device, device)
    gradients = {name: on_host(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}


def plain(model: Any, batch: Batch, _device: torch.device) -> torch.Tensor:
    """Transformers' model and torch's cross-entropy."""
    return _summed(model, batch, lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"))


def _summed(model: Any, batch: Batch, token_losses: Callable[..., torch.Tensor], **more: Any) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], use_cache=False, **more).logits
    labels = batch["shift_labels"].reshape(-1)
    kept = labels != -100
    loss = token_losses(logits.reshape(-1, logits.shape[-1])[kept], labels[kept]).sum() / kept.sum()
    loss.backward()
    return loss


def fully_sharded(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """FSDP2 over one rank, all of its hooks at work."""
    spec = resolve_spec(model)
    parallel = ParallelArguments.model_validate({"fsdp_plan": {"param_dtype": "fp32"}})
    ParallelApplier(parallel, shard_modules=spec.shard_modules, tie_groups=spec.tie_groups)(model)
    return plain(model, batch, device)


def tensor_split(model: Any, batch: Batch, _device: torch.device) -> torch.Tensor:
    """Layers split over one rank, and the loss of a vocabulary in one part."""
    mesh = get_parallel_state().axis_mesh("tp")
    apply_tensor_parallel(model, resolve_tensor_parallel(model, TpPlan(), 1), mesh)
    vocabulary = split_vocabulary(model)
    assert vocabulary is not None
    return _summed(model, batch, lambda logits, targets: vocabulary.token_losses(logits, targets)[0])


def context_layer(model: Any, batch: Batch, _device: torch.device) -> torch.Tensor:
    """Every layer's attention through the layer of spread sequences, with one rank."""
    apply_to_decoder(model)
    share = ContextShare(ContextGroups(), build_layout(LENGTH, 1, 1, balanced=True))
    losses = lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum")  # noqa: E731
    return _summed(model, batch, losses, **{CONTEXT_KEY: share})


def alltoall(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """Experts behind the dispatcher that sends each token to its experts."""
    return _dispatched(model, batch, device, AllToAll)


def allgather(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """Experts behind the dispatcher that gathers all tokens."""
    return _dispatched(model, batch, device, AllGather)


def _dispatched(model: Any, batch: Batch, device: torch.device, dispatcher: Any) -> torch.Tensor:
    ranks = ExpertRanks(get_parallel_state().axis_mesh("ep"))
    for module in fused_experts(model).values():
        use_own_experts(module, dispatcher(ranks))
    return plain(model, batch, device)


def two_stages(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """A schedule over two stages that one rank runs in turns, a micro-batch a row."""
    pp_plan = {"schedule": "interleaved1f1b", "virtual_stages": 2}
    parallel = ParallelArguments.model_validate({"pp_plan": pp_plan})
    plan = plan_stages(model, find_cut_points(model), 1, parallel.pp_plan)
    pipeline = split_into_stages(model, plan, parallel, get_parallel_state())
    objective = TokenCrossEntropy(model, HeadLoss(model.lm_head))
    pipeline.build_stages([], casts_inputs=False)
    pipeline.equalise()
    rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(ROWS)]
    prepared = [objective.prepare(row) for row in rows]
    forward_backward = PipelineForwardBackward(pipeline, objective, parallel.pp_plan, device)
    return sum(forward_backward(prepared, objective.count(prepared)).values(), torch.zeros((), device=device))


MODELS: dict[str, Step] = {
    "FSDP2, one rank": fully_sharded,
    "tensor parallelism and the loss over the vocabulary, one rank": tensor_split,
    "attention of spread sequences, one rank": context_layer,
    "experts, alltoall, one rank": alltoall,
    "experts, allgather, one rank": allgather,
    "pipeline, one rank with two stages": two_stages,
}

if __name__ == "__main__":
    main()
