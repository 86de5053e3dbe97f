"""Conversions of setups for language models: methods, adapters, frozen towers, rows, sharding."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.tasks.importing.common_values import key_of, targets, with_lora
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    LORA,
    Outcome,
    PeerSetup,
    conversion,
    default_of,
    idle,
    is_on,
    no,
    texts,
)
from mindspeed_mm.tasks.importing.run_values import processes

_OUT_OF = {"sft": {}, "pretrain": {f"{BASIC}.stage": "pretrain"}, "dpo": {f"{BASIC}.stage": "rm"}, "grpo": {}}


def method_keys(draft: PeerSetup) -> Outcome:
    """What a method is here: the stage of the rows, and `posttrain.method`."""
    keys: dict[str, Any] = dict(_OUT_OF[draft.method])
    if draft.method in ("dpo", "grpo"):
        keys["posttrain.method"] = draft.method
    return keys


@conversion(":stage")
@conversion(":rl")
@conversion(":rlhf")
@conversion(":task_type")
def method(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The method, which has been settled before anything else."""
    return method_keys(draft)


# --- adapters and frozen parts ----------------------------------------------------------------------------------------


@conversion(":finetuning")
@conversion(":tuner")
def finetuning(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Whether adapters or all weights are trained."""
    word = str(value).lower()
    if word in ("lora", "lora_llm"):
        with_lora(draft)
        if draft.tool.name == "llamafactory" and not (draft.has("lora_alpha") or draft.has("peft_config.lora_alpha")):
            rank = draft.get("lora_rank", draft.get("peft_config.r", 8))
            draft.put(f"{LORA}.alpha", 2 * rank, "twice the rank, LLaMA-Factory's default")
        return {f"{LORA}.enable": True}
    if word == "full":
        return {}
    if word == "freeze":
        return no("list what is not trained in model.freeze")
    raise draft.refuse(f"{value} is not built", row.words[0], "training.lora trains LoRA and DoRA adapters.")


@conversion(":adapter")
def adapter(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Adapters of axolotl: lora, and qlora over a base in four bits."""
    word = str(value).lower()
    if word not in ("lora", "qlora"):
        raise draft.refuse(f"{value} is not built", "adapter", "training.lora trains LoRA and DoRA adapters.")
    return {f"{LORA}.enable": True, **({f"{LORA}.quantize": "nf4"} if word == "qlora" else {})}


@conversion(":target_linear")
def target_linear(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """All linear layers, which are our default for models of text."""
    return targets(draft, replace(row, ours=f"{LORA}.target_modules"), "all-linear") if is_on(value) else {}


@conversion(":target_parameters")
def target_parameters(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Fused experts, which are named beside the other modules."""
    others = draft.get("lora_target_modules") or ["all-linear"]
    return {f"{LORA}.target_modules": [*texts(others), *texts(value)]}


@conversion(":quant_bits")
def quant_bits(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Four or eight bits of the frozen weights; bitsandbytes and hqq alone quantize while training."""
    if str(draft.get("quant_method", "bnb")).lower() not in ("bnb", "hqq"):
        return no("train on the model that is not quantized, with training.lora.quantize: nf4")
    names = {4: "nf4", 8: "int8"}
    return {f"{LORA}.quantize": names[value]} if value in names else no("training.lora.quantize has nf4 and int8")


@conversion(":towers")
def towers(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """What a vision-language model trains beside its language model."""
    language, vision, projector = _frozen(draft, row)
    if not draft.sees:
        return idle("the model has no vision tower") if not language else {"model.freeze": ["model"]}
    found = draft.parts
    is_lora = draft.out.get(f"{LORA}.enable", False)
    if is_lora and vision and projector:
        named = draft.out.get(f"{LORA}.target_modules", [])
        if named and found is not None and not language and "visual" not in found[0]:
            # towers of CLIP's and SigLIP's make have layers of the same names
            return {f"{LORA}.target_modules": [f"model.language_model.*.{name}" for name in named]}
        return idle("adapters are on the language model alone")
    if found is None:
        return no("mm models NAME prints the towers: list what is not trained in model.freeze")
    tower, bridge = found
    if is_lora:
        names = [
            *([] if vision else [f"{tower}.*"]),
            *([] if projector or bridge.startswith(tower) else [f"{bridge}.*"]),
        ]
        if draft.get("tuner_type", draft.get("train_type")) == "lora_llm":  # the rest is trained whole
            return {f"{LORA}.modules_to_save": [name.removesuffix(".*") for name in names]}
        base = [] if language else texts(draft.out.get(f"{LORA}.target_modules") or ["all-linear"])
        return {f"{LORA}.target_modules": [*base, *names]} if names else {}
    frozen = []
    if vision:
        inside = bridge.startswith(tower)
        frozen += [f"{tower}.blocks", f"{tower}.patch_embed"] if inside and not projector else [tower]
    if projector and not (vision and bridge.startswith(tower)):
        frozen.append(bridge)
    if language:
        frozen += ["model.language_model", "lm_head"]
    return {"model.freeze": frozen} if frozen else {}


def _frozen(draft: PeerSetup, row: PeerRow) -> tuple[bool, bool, bool]:
    """Whether language model, vision tower and projector are frozen; what is left out is the tool's default."""
    if draft.tool.name == "axolotl":
        return False, is_on(draft.get("freeze_mm_modules", False)), is_on(draft.get("freeze_mm_modules", False))
    defaults = dict(zip(row.words, map(is_on, row.default.split(",")), strict=True))
    state = {word: is_on(draft.get(word, default)) for word, default in defaults.items()}
    language = next(state[word] for word in state if word in ("freeze_language_model", "freeze_llm"))
    vision = next(state[word] for word in state if word in ("freeze_vision_tower", "freeze_vit"))
    projector = next(state[word] for word in state if word in ("freeze_multi_modal_projector", "freeze_aligner"))
    return language, vision, projector


@conversion(":tower_lr")
def tower_lr(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Rates of tower and projector, as factors on the rate of the rest."""
    rate = float(draft.get("learning_rate", draft.get("lr", 0)) or 0)
    found = draft.parts
    if not rate or found is None:
        return no("training.lr_scaling_plan has factors by parameter name")
    plan = []
    for word, name in (("aligner_lr", found[1]), ("vit_lr", found[0])):
        if draft.has(word):
            plan.append({"match": re.escape(name), "scale": round(float(draft.get(word)) / rate, 6)})
    return {"training.lr_scaling_plan": plan}


# --- batch, sharding, recomputation -----------------------------------------------------------------------------------


@conversion(":global_batch")
def global_batch(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Accumulation, from the batch of all processes."""
    if draft.has("gradient_accumulation_steps"):
        return idle("gradient_accumulation_steps is given")
    micro = int(draft.get("micro_batch_size", draft.get("per_device_train_batch_size", 1)))
    ranks = processes(draft)
    for word in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        ranks = max(1, ranks // int(draft.get(word, 1)))
    key = "training.gradient_accumulation_steps"
    draft.note(key, f"{value} rows a step there, on {ranks} data rank{'s' if ranks > 1 else ''}")
    return {key: max(1, math.ceil(int(value) / (micro * ranks)))}


@conversion(":sw_accumulation")
def sw_accumulation(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Micro-batches of a step; with a global batch that follows from it."""
    return {} if draft.has("global_batch_size") else {key_of(row): int(value)}


@default_of("sw_accumulation")
def default_accumulation(draft: PeerSetup) -> int:
    """About 16 rows a step, as ms-swift's TrainArgumentsMixin has it; 1 for GRPO."""
    micro = int(draft.get("per_device_train_batch_size", 1))
    return 1 if draft.method == "grpo" else max(1, math.ceil(16 / micro / processes(draft)))


@default_of("lr_of_swift")
def lr_of_swift(draft: PeerSetup) -> float | None:
    """1e-5 for all weights, 1e-4 for adapters (SftArguments)."""
    if draft.has("lr"):
        return None
    return 1e-5 if draft.get("tuner_type", draft.get("train_type", "lora")) == "full" else 1e-4


@default_of("rlhf_type")
def default_rlhf_type(draft: PeerSetup) -> str | None:
    """`swift rlhf` without a type is DPO."""
    return "dpo" if draft.method == "dpo" else None


@conversion(":sharding")
def sharding(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """ZeRO and FSDP: FSDP2 shards by default; ZeRO-2 and offload to the host are read from names."""
    word = " ".join(texts(value) if isinstance(value, list) else [str(value)]).lower()
    found: dict[str, Any] = {}
    if "offload" in word:
        found["parallel.fsdp_plan.cpu_offload"] = True
    if re.search(r"z(ero)?_?2|shard_grad_op", word):
        found["parallel.fsdp_plan.reshard_after_forward"] = False
    if re.search(r"z(ero)?_?0|no_shard", word):
        found["parallel.fully_shard_parallel_size"] = 1
    return found or idle("FSDP2 shards parameters, gradients and optimizer state by default")


@conversion(":recompute_words")
def recompute_words(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Megatron's words for what is recomputed in the backward pass."""
    word = str(value).lower()
    if word == "full":
        return {"features.recompute": True}
    if word == "selective":
        return {"features.recompute": True, "features.recompute_plan.mode": "selective"}
    return idle("features.recompute and features.recompute_plan say what is recomputed")


@conversion(":ax_bf16")
def ax_bf16(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """axolotl's bf16, where auto is bf16 on devices that have it."""
    if str(value).lower() == "auto" and (is_on(draft.get("fp16", False)) or is_on(draft.get("float16", False))):
        return {}
    return {key_of(row): "bf16"} if str(value).lower() in ("auto", "full", "true") else {}


@conversion(":auto_flag")
def auto_flag(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A switch; auto leaves it to us."""
    return {} if str(value).lower() == "auto" else {key_of(row): is_on(value)}


@conversion(":ax_recompute")
def ax_recompute(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Recomputation, with activations on the host where that is asked for."""
    if str(value).lower().startswith("offload"):
        return {"features.recompute": True, "features.enable_activation_offload": True}
    return {"features.recompute": is_on(value)}


@conversion(":ax_offload")
def ax_offload(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Whether activations wait on the host for the backward pass."""
    return {} if str(value).lower() == "false" else {key_of(row): True}


@conversion(":plugin")
def plugin(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Python files that register something."""
    return no("register rewards and data sets by a plugin of this package, and name it in training.plugin")
