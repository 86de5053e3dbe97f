"""Conversions of setups for language models: methods, adapters, frozen towers, rows, sharding."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.yaml.config_text import read_config_text
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
    keys: JsonObject = dict(_OUT_OF[draft.method])
    if draft.method in ("dpo", "grpo"):
        keys["posttrain.method"] = draft.method
    return keys


@conversion(":stage")
@conversion(":rl")
@conversion(":rlhf")
@conversion(":task_type")
def method(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The method, which has been settled before anything else."""
    return method_keys(draft)


# --- adapters and frozen parts ----------------------------------------------------------------------------------------


@conversion(":finetuning")
@conversion(":tuner")
def finetuning(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether adapters or all weights are trained."""
    word = str(value).lower()
    if word in ("lora", "lora_llm"):
        with_lora(draft)
        is_first = draft.tool.name == "llamafactory" and not draft.is_second_program
        if is_first and not draft.has("lora_alpha"):
            draft.put(f"{LORA}.alpha", 2 * draft.get("lora_rank", 8), "twice the rank, LLaMA-Factory's default")
        if word == "lora_llm" and not draft.is_second_program:
            draft.put(f"{LORA}.dropout", 0.0, "lora_llm of ms-swift has none")
        return {f"{LORA}.enable": True}
    if word == "full":
        return {}
    if word == "freeze":
        return _all_but_some_layers(draft)
    raise draft.refuse(f"{value} is not built", row.words[0], "training.lora trains LoRA and DoRA adapters.")


def _all_but_some_layers(draft: PeerSetup) -> Outcome:
    """LLaMA-Factory's freeze: the last layers are trained, or the first ones where their number is below 0."""
    prefix = "peft_config." if draft.is_second_program else ""
    count = int(draft.get(f"{prefix}freeze_trainable_layers", 2))
    layers = draft.text_facts().get("num_hidden_layers")
    is_all = str(draft.get(f"{prefix}freeze_trainable_modules", "all")) == "all"
    if not is_all or draft.get(f"{prefix}freeze_extra_modules") or draft.sees or not layers or abs(count) >= layers:
        which = f"the {'last' if count > 0 else 'first'} {abs(count)} layers are trained there"
        return no(f"{which}: list all else in model.freeze, e.g. model.embed_tokens, model.layers.{{0-9}}, lm_head")
    frozen = f"0-{layers - count - 1}" if count > 0 else f"{-count}-{layers - 1}"
    return {"model.freeze": ["model.embed_tokens", f"model.layers.{{{frozen}}}", "model.norm", "lm_head"]}


@conversion(":loftq")
def loftq(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The start of adapters that makes up for quantising the base, to so many bits (LoftQ, arXiv:2310.08659)."""
    if value not in (4, 8):
        return no("training.lora.quantize has nf4 and int8, which init_lora_weights: loftq makes up for")
    return {key_of(row): "loftq", f"{LORA}.quantize": {4: "nf4", 8: "int8"}[value]}


@conversion(":adapter")
def adapter(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Adapters of axolotl: lora, and qlora over a base in four bits."""
    word = str(value).lower()
    if word not in ("lora", "qlora"):
        raise draft.refuse(f"{value} is not built", "adapter", "training.lora trains LoRA and DoRA adapters.")
    return {f"{LORA}.enable": True, **({f"{LORA}.quantize": "nf4"} if word == "qlora" else {})}


@conversion(":target_linear")
def target_linear(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """All linear layers, which are our default for models of text."""
    if is_on(value):
        return targets(draft, replace(row, ours=f"{LORA}.target_modules"), "all-linear")
    return {}


@conversion(":target_parameters")
def target_parameters(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Fused experts, which are named beside the other modules."""
    others = draft.get("lora_target_modules") or ["all-linear"]
    return {f"{LORA}.target_modules": [*texts(others), *texts(value)]}


@conversion(":quant_bits")
def quant_bits(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Four or eight bits of the frozen weights; bitsandbytes and hqq alone quantize while training."""
    if str(draft.get("quant_method", "bnb")).lower() not in ("bnb", "hqq"):
        return no("train on the model that is not quantized, with training.lora.quantize: nf4")
    names = {4: "nf4", 8: "int8"}
    if value in names:
        return {f"{LORA}.quantize": names[value]}
    return no("training.lora.quantize has nf4 and int8")


@conversion(":towers")
def towers(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """What a vision-language model trains beside its language model."""
    language, vision, projector = _frozen(draft, row)
    if not draft.sees:
        if not language:
            return idle("the model has no vision tower")
        return {"model.freeze": ["model"]}
    found = draft.parts
    is_lora = draft.out.get(f"{LORA}.enable", False)
    if draft.get("tuner_type", draft.get("train_type")) == "lora_llm" and found is not None:
        # tower and projector are trained whole, whatever else is said of them (tuner_plugin/lora_llm.py)
        tower, bridge = found
        return {f"{LORA}.modules_to_save": [tower, *([] if bridge.startswith(tower) else [bridge])]}
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
        base = [] if language else texts(draft.out.get(f"{LORA}.target_modules") or ["all-linear"])
        if names:
            return {f"{LORA}.target_modules": [*base, *names]}
        return {}
    frozen = []
    if vision:
        inside = bridge.startswith(tower)
        frozen += [f"{tower}.blocks", f"{tower}.patch_embed"] if inside and not projector else [tower]
    if projector and not (vision and bridge.startswith(tower)):
        frozen.append(bridge)
    if language:
        frozen += ["model.language_model", "lm_head"]
    if frozen:
        return {"model.freeze": frozen}
    return {}


def _frozen(draft: PeerSetup, row: PeerRow) -> tuple[bool, bool, bool]:
    """Whether language model, vision tower and projector are frozen; what is left out is the tool's default."""
    if draft.tool.name == "axolotl":
        return False, is_on(draft.get("freeze_mm_modules", False)), is_on(draft.get("freeze_mm_modules", False))
    defaults = dict(zip(row.words, map(is_on, draft.default_of(row).split(",")), strict=True))
    state = {word: is_on(draft.get(word, default)) for word, default in defaults.items()}
    language = next(state[word] for word in state if word in ("freeze_language_model", "freeze_llm"))
    vision = next(state[word] for word in state if word in ("freeze_vision_tower", "freeze_vit"))
    projector = next(state[word] for word in state if word in ("freeze_multi_modal_projector", "freeze_aligner"))
    return language, vision, projector


@conversion(":tower_lr")
def tower_lr(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
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


# --- ms-swift's tokens and lengths ------------------------------------------------------------------------------------


@conversion(":sw_tokens")
def sw_tokens(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """New tokens, or text files of them (ModelArguments._init_new_special_tokens)."""
    tokens: list[str] = []
    for word in value if isinstance(value, list) else [value]:
        if not str(word).endswith(".txt"):
            tokens.append(str(word))
            continue
        file = draft.file_of(str(word))
        if file is None:
            return no(f"{word} is not here: list its tokens in {key_of(row)}")
        tokens += read_config_text(file).split()
    if tokens:
        return {key_of(row): tokens}
    return {}


@conversion(":token_area")
def token_area(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Pixels of a picture or frame, from its tokens (qwen_vl_utils)."""
    side = draft.patch_side()
    if side is None:
        return no(f"tokens of a picture there: write their number × the pixels of one into {key_of(row)}")
    return {key_of(row): int(value) * side**2}


@default_of("length_of_swift")
def length_of_swift(draft: PeerSetup) -> int:
    """The longest sample that the model takes, where `max_length` is not given (BaseArguments)."""
    known = draft.text_facts().get("max_position_embeddings")
    draft.note(f"{BASIC}.cutoff_len", "the model's own limit there" + ("" if known else ": write it here"))
    return int(known or 32768)


# --- axolotl's pictures -----------------------------------------------------------------------------------------------


_KNOWS_ROLES = (
    "qwen2_vl", "qwen3_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama3_2_vision", "llama4", "pixtral",
    "mistral_v7_tekken",
)  # fmt: skip
"""Chat templates in which axolotl finds answers of rows with pictures (processing_strategies.py)."""


@conversion(":ax_inputs")
def ax_inputs(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether questions are trained on. Of rows with pictures all but padding and pictures is, unless the setup's
    template or `role_boundaries` say where answers are."""
    is_multimodal = draft.has("processor_type") and draft.sees
    knows = str(draft.get("chat_template")) in _KNOWS_ROLES or draft.has("role_boundaries[].role")
    if is_multimodal and not knows and not is_on(value):
        draft.note(key_of(row), "axolotl finds no answers in this model's rows with pictures, and trains on all")
        return {key_of(row): True}
    return {key_of(row): is_on(value)}


@default_of("inputs_of_axolotl")
def inputs_of_axolotl(draft: PeerSetup) -> bool | None:
    """Off in a supervised setup, where pictures may turn it on (`ax_inputs`); other methods have no such setting."""
    if draft.method == "sft":
        return False
    return None


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
    if draft.has("global_batch_size"):
        return {}
    return {key_of(row): int(value)}


@default_of("sw_accumulation")
def default_accumulation(draft: PeerSetup) -> int:
    """About 16 rows a step, as ms-swift's TrainArgumentsMixin has it; 1 for GRPO."""
    micro = int(draft.get("per_device_train_batch_size", 1))
    if draft.method == "grpo":
        return 1
    return max(1, math.ceil(16 / micro / processes(draft)))


@default_of("lr_of_swift")
def lr_of_swift(draft: PeerSetup) -> float | None:
    """1e-5 for all weights, 1e-4 for adapters (SftArguments)."""
    if draft.has("lr"):
        return None
    usual = "full" if draft.is_second_program else "lora"
    if draft.get("tuner_type", draft.get("train_type", usual)) == "full":
        return 1e-5
    return 1e-4


@default_of("rlhf_type")
def default_rlhf_type(draft: PeerSetup) -> str | None:
    """`swift rlhf` without a type is DPO."""
    if draft.method == "dpo":
        return "dpo"
    return None


@conversion(":sharding")
def sharding(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """ZeRO and FSDP: FSDP2 shards by default; ZeRO-2 and offload to the host are read from names."""
    word = " ".join(texts(value) if isinstance(value, list) else [str(value)]).lower()
    found: JsonObject = {}
    if "offload" in word:
        found["parallel.fsdp_plan.cpu_offload"] = True
    if re.search(r"z(ero)?_?2|shard_grad_op", word):
        found["parallel.fsdp_plan.reshard_after_forward"] = False
    if re.search(r"z(ero)?_?0|no_shard", word):
        found["parallel.fully_shard_parallel_size"] = 1
    return found or idle("FSDP2 shards parameters, gradients and optimizer state by default")


@conversion(":recompute_words")
def recompute_words(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Megatron's words for what is recomputed in the backward pass."""
    word = str(value).lower()
    if word == "full":
        return {"features.recompute": True}
    if word == "selective":
        return {"features.recompute": True, "features.recompute_plan.mode": "selective"}
    return idle("features.recompute and features.recompute_plan say what is recomputed")


@conversion(":ax_bf16")
def ax_bf16(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """axolotl's bf16, where auto is bf16 on devices that have it."""
    if str(value).lower() == "auto" and (is_on(draft.get("fp16", False)) or is_on(draft.get("float16", False))):
        return {}
    if str(value).lower() in ("auto", "full", "true"):
        return {key_of(row): "bf16"}
    return {}


@conversion(":auto_flag")
def auto_flag(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A switch; auto leaves it to us."""
    if str(value).lower() == "auto":
        return {}
    return {key_of(row): is_on(value)}


@conversion(":ax_recompute")
def ax_recompute(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Recomputation, with activations on the host where that is asked for."""
    if str(value).lower().startswith("offload"):
        return {"features.recompute": True, "features.enable_activation_offload": True}
    return {"features.recompute": is_on(value)}


@conversion(":ax_offload")
def ax_offload(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Whether activations wait on the host for the backward pass."""
    if str(value).lower() == "false":
        return {}
    return {key_of(row): True}


@conversion(":plugin")
def plugin(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Python files that register something."""
    return no("register rewards and data sets by a plugin of this package, and name it in training.plugin")
