"""What share of the devices' peak a run uses: FLOPs of its steps over seconds, devices and their published peak.

MFU counts what a step needs, HFU also what recomputation does again (Chowdhery et al. 2022, appendix B). By the causal
convention attention counts the pairs that its mask leaves, half of all; by the full one all of them. FLOPs of all
ranks' samples are divided by all devices, however the model is split over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.features.feature_plan import FeaturePlan
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.params.argument import Arguments, ParallelArguments, TrainingArguments
from mindspeed_mm.fsdp.params.rules.distillation import trains_critic
from mindspeed_mm.fsdp.params.rules.posttrain import reference_kind
from mindspeed_mm.fsdp.plan.outline import Outline, build_outline
from mindspeed_mm.fsdp.tools.flops_tool.count import FlopCount
from mindspeed_mm.fsdp.tools.flops_tool.peaks import peak_tflops
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops
from mindspeed_mm.fsdp.tools.flops_tool.units import LATENTS
from mindspeed_mm.fsdp.train.distillation.critic_start import critic_folder, critic_start
from mindspeed_mm.fsdp.train.reference_start import reference_outline
from mindspeed_mm.fsdp.utils.device import get_device_type, get_torch_device

EVERY_KIND = ("linear", "adapter", "convolution", "experts", "attention", "linear attention")
"""Kinds of work whose results selective recomputation keeps."""


@dataclass(frozen=True)
class Utilisation:
    """Knows the FLOPs of a model and the peak of its devices."""

    count: FlopCount | None
    """None where it is not known how the model's modules are fed."""
    devices: int
    peak_tflops: float | None
    """Peak TFLOP/s of one device; None where it is not known."""
    peak_source: str
    """What the peak is of, in words."""

    @classmethod
    def of(cls, outline: Outline, plan: FeaturePlan, arguments: Arguments, *, trains: bool = True) -> Utilisation:
        """For a model that is built and neither split nor sharded.

        Args:
            outline: The model.
            plan: What the features do to it.
            arguments: The whole configuration.
            trains: False for a model that is only compared with.
        """
        count = count_step(outline.model, plan, arguments) if trains else None
        devices = dist.get_world_size() if dist.is_initialized() else 1
        told = arguments.tools.peak_tflops
        if told is not None:
            return cls(count, devices, told, "tools.peak_tflops")
        precision = arithmetic(arguments.parallel, arguments.training)
        device = device_name()
        return cls(count, devices, peak_tflops(device, precision), f"{device}, {precision} dense")

    @property
    def meter(self) -> Callable[[Sequence[Batch]], dict[str, float]] | None:
        """Counts this rank's micro-batches of a step, from host numbers alone."""
        if self.count is not None:
            return self.count.meter()
        return None

    def metrics(self, steps: Iterable[Mapping[str, float]], seconds: float) -> dict[str, float]:
        """What the log says of steps that took so long.

        Args:
            steps: FLOPs of each over all ranks, as `meter` names them.
            seconds: Of all of them.
        """
        found = list(steps)
        if not any(sum(step.values()) for step in found):  # nothing is counted, or the kind of batch is not known
            return {}
        each_s = {}  # TFLOP/s of a device
        for name in found[0]:
            each_s[name] = sum(step[name] for step in found) / seconds / self.devices / 1e12
        achieved = {
            "mfu": each_s["causal"],
            "mfu_full": each_s["full"],
            "hfu": each_s["causal"] + each_s["recompute"],
            "hfu_full": each_s["full"] + each_s["recompute_full"],
        }
        metrics = {"tflops": each_s["causal"], "tflops_full": each_s["full"]}
        if self.peak_tflops:
            metrics |= {name: value / self.peak_tflops for name, value in achieved.items()}
        return metrics

    def describe(self) -> str:
        """One line for the log."""
        if self.count is None:
            return "no MFU: how this model's modules are fed is not known"
        missing = ""
        if self.count.uncounted:
            missing = f"; not counted: {', '.join(self.count.uncounted[:3])}"
        if self.peak_tflops is None:
            return f"no MFU: the peak of {self.peak_source} is not known (tools.peak_tflops sets it){missing}"
        return (
            f"MFU of {self.devices} × {self.peak_tflops:g} TFLOP/s ({self.peak_source}), attention by the pairs "
            f"that its mask leaves; mfu_full in metrics.jsonl: by all pairs{missing}"
        )


def device_name() -> str:
    """What this process's device calls itself."""
    if get_device_type() == "cpu":
        return "a CPU"
    device = get_torch_device()
    if hasattr(device, "get_device_name"):
        return str(device.get_device_name())
    return get_device_type()


def count_step(model: nn.Module, plan: FeaturePlan, arguments: Arguments) -> FlopCount | None:
    """FLOPs of a training step: head, recomputation, what is kept, and the passes of what the policy is compared with.
    Samples that the model draws itself are in it for distillation alone.

    Args:
        model: Whole, with adapters.
        plan: What the features do to it.
        arguments: The whole configuration.
    """
    # With `raw` alone the head sees tokens without labels.
    count = _of_training(model, plan, on_labels=arguments.features.loss_cfg.loss_type != "raw")
    if count is None:
        return None
    policy = count
    if arguments.posttrain.method == "dmd":
        adapter = facts_of(model).adapter
        return _of_distillation(count, plan, arguments, takes_guidance=adapter is not None and adapter.takes_guidance)
    if arguments.posttrain.method == "nft":
        count = count.beside(policy, "the policy that drew")
    if reference_kind(arguments) in ("adapters_off", "frozen"):
        folder = arguments.posttrain.reference.model_name_or_path
        other = count_flops(reference_outline(arguments).model) if folder else policy
        count = count.beside(other, "reference") if other is not None else count
    return count


def _of_training(model: nn.Module, plan: FeaturePlan, *, on_labels: bool = True) -> FlopCount | None:
    kept = EVERY_KIND if plan.kept_kinds == ("all",) else plan.kept_kinds
    return count_flops(model, head_on_labels=on_labels, recompute=list(plan.recomputed), keeps=kept)


def _of_distillation(student: FlopCount, plan: FeaturePlan, arguments: Arguments, *, takes_guidance: bool) -> FlopCount:
    """Of a batch on the average of a step: `dfake_gen_update_ratio` of them train the critic, and one the student. Each
    step of a drawing ends it as often as any other. The keys and values of blocks that later ones see are a pass
    of their own, less that of the last block, which is not known here: it is counted, too.
    """
    dmd, teacher, critic = arguments.posttrain.dmd, student, student
    draws_blocks = dmd.num_frame_per_block is not None
    if draws_blocks:
        student = student.in_order(LATENTS)
    if not trains_critic(arguments.posttrain):
        return student
    own = 1 / (dmd.dfake_gen_update_ratio + 1)
    steps = len(dmd.denoising_step_list)
    before = steps - 1.0 if dmd.last_step_only else (steps - 1) / 2
    if arguments.posttrain.reference.model_name_or_path:
        teacher = count_flops(reference_outline(arguments).model) or teacher
    if critic_folder(arguments.posttrain):
        critic = _of_training(build_outline(critic_start(arguments)).model, plan) or critic
    whole = FlopCount((), student.lengths, tuple(dict.fromkeys((*student.uncounted, *critic.uncounted))))
    whole = whole.with_part(student, "student", own)
    whole = whole.with_part(student.forward_alone(), "drawing", before + draws_blocks + 1 - own)
    whole = whole.with_part(critic, "critic", 1 - own)
    whole = whole.with_part(critic.forward_alone(), "critic of the student's samples", own)
    passes = 1 if takes_guidance or dmd.guidance_scale == 1 else 2
    return whole.with_part(teacher.forward_alone(), "teacher", passes * own)


def arithmetic(parallel: ParallelArguments, training: TrainingArguments) -> str:
    """In which format the plan multiplies, by the names of `peaks`; what quantised layers do faster is measured by the
    same peak."""
    dtype = parallel.fsdp_plan.computed_in
    short = training.allow_hf32 and get_device_type() == "cuda"
    if dtype == "fp32" and short:
        return "tf32"
    return dtype
