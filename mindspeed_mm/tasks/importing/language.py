"""Conversions of setups for language models: methods, adapters, frozen towers, rows, sharding, pairs and rewards."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.posttrain_args import PAIR_LOSSES
from mindspeed_mm.tasks.importing.common_values import key_of, with_lora
from mindspeed_mm.tasks.importing.draft import (
    BASIC,
    LORA,
    Outcome,
    PeerSetup,
    conversion,
    data_fetch,
    default_of,
    idle,
    is_on,
    no,
    texts,
)
from mindspeed_mm.tasks.importing.run_values import processes

_REASONING = re.compile(
    r"^(qwen3|qwen3_vl|qwen3_5|qwen3_6|glm4_moe|glm4v|hunyuan|deepseekr1|ernie|intern_s1|seed_oss|gpt)(?!.*no_?think)"
)
_TOWERS = (
    (r"qwen[\d.]*-?(vl|5-vl)|qwen2\.5-vl|qwen3\.[56]|glm-4\.[15]v", "model.visual", "model.visual.merger"),
    (
        r"internvl.*hf|llava|gemma-?3|mistral-small|magistral|pixtral|gemma-?4",
        "model.vision_tower",
        "model.multi_modal_projector",
    ),
    (r"smolvlm|idefics3", "model.vision_model", "model.connector"),
)
"""Name of a model → its vision tower and the projector behind it."""
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
    """All linear layers, which are our default."""
    return {}


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
    found = _parts(draft)
    is_lora = draft.out.get(f"{LORA}.enable", False)
    if is_lora and vision and projector:
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


def _parts(draft: PeerSetup) -> list[str] | None:
    """Tower and projector of the model, by its name or by the kind that its folder names."""
    name = f"{draft.model_name} {draft.model_type.replace('_', '-')}"
    return next((names for pattern, *names in _TOWERS if re.search(pattern, name, re.IGNORECASE)), None)


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
    found = _parts(draft)
    if not rate or found is None:
        return no("training.lr_scaling_plan has factors by parameter name")
    plan = []
    for word, name in (("aligner_lr", found[1]), ("vit_lr", found[0])):
        if draft.has(word):
            plan.append({"match": re.escape(name), "scale": round(float(draft.get(word)) / rate, 6)})
    return {"training.lr_scaling_plan": plan}


# --- rows -------------------------------------------------------------------------------------------------------------


@conversion(":lf_dataset")
def lf_dataset(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Names of dataset_info.json, which our reader knows, or files."""
    names = texts(value) if isinstance(value, list) else [each.strip() for each in str(value).split(",")]
    return {key_of(row): names[0] if len(names) == 1 else names}


@conversion(":media_dir")
def media_dir(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The folder that relative paths of media start in."""
    if value == draft.get("dataset_dir", "data"):
        return {}
    return no("relative media start in basic_parameters.dataset_dir: put rows and media below one folder")


@conversion(":template")
def template(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The chat template of the folder is used; `default` and `empty` are ours, too."""
    if str(value) in ("default", "empty", "vanilla") and draft.tool.name == "llamafactory" and draft.method == "sft":
        return {key_of(row): "default"}
    return idle("the model's own chat template is used; basic_parameters.template names another")


@conversion(":thinking")
def thinking(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """LLaMA-Factory's switch, which its reasoning templates obey."""
    if not _REASONING.match(str(draft.get("template", ""))):
        return idle("the template has no thoughts")
    return {key_of(row): is_on(value)}


@conversion(":loss_scale")
def loss_scale(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """What of a conversation is trained on."""
    word = str(value)
    if word in ("default", "react", "ignore_empty_think", "default+ignore_empty_think"):
        return {}
    if word == "all":
        return {f"{BASIC}.train_on_prompt": True}
    if word.startswith("last_round"):
        return {f"{BASIC}.mask_history": True}
    return no("mark turns of rows with weight: 0, or set basic_parameters.mask_history")


@conversion(":truncation")
def truncation(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """What happens to samples that are too long."""
    names = {"delete": {}, "raise": {f"{BASIC}.truncation": "error"}, "none": {}}
    if str(value).lower() in names:
        return names[str(value).lower()]
    return (
        {f"{BASIC}.truncation": "shrink"}
        if value == "left"
        else no("tokens are never cut off; basic_parameters.truncation: shrink removes whole turns")
    )


@conversion(":hub_dataset")
def hub_dataset(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A data set of a hub, which is downloaded first, or a path."""
    return {key_of(row): draft.folder_of(str(value), "data", data_fetch)}


@conversion(":split")
def split(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The part of a data set that is trained on."""
    return (
        idle("the files of the data set that are trained on are named")
        if value == "train"
        else no(f"name the files of the part {value} in basic_parameters.dataset")
    )


@conversion(":test_split")
def test_split(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The part that is held out."""
    return no(f"name the files of the part {value} in basic_parameters.val_dataset")


@conversion(":trl_mixture")
def trl_mixture(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """TRL's list of data sets."""
    entries = draft.given.tree.get("datasets")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "path" in entry for entry in entries):
        return no("name files or folders in basic_parameters.dataset")
    return {f"{BASIC}.dataset": [draft.folder_of(str(entry["path"]), "data", data_fetch) for entry in entries]}


@conversion(":sw_dataset")
def sw_dataset(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """ms-swift's names: `HF::owner/name:subset#1000`, or a file."""
    entries: list[Any] = []
    for word in value if isinstance(value, list) else [value]:
        name, _, most = str(word).partition("#")
        name = name.removeprefix("HF::").removeprefix("MS::").removeprefix("hf::").removeprefix("ms::")
        if not re.match(r"[A-Za-z]:[\\/]", name):
            name, colon, subset = name.partition(":")
            if colon:
                draft.note(key_of(row), f"the part {subset} there: name its files")
        folder = draft.folder_of(name, "data", data_fetch)
        entries.append({"path": folder, "max_samples": int(most)} if most.isdigit() else folder)
    return {key_of(row): entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries}


@conversion(":ax_datasets")
def ax_datasets(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """axolotl's entries, with the columns that they name."""
    holder = "test_datasets" if row.words[0].startswith("test_") else "datasets"
    entries = [_ax_entry(draft, entry) for entry in _entries(draft.given.tree.get(holder))]
    if holder == "datasets" and all(
        "completion" in str(each.get("type", "")) for each in _entries(draft.given.tree.get(holder))
    ):
        draft.put(f"{BASIC}.stage", "pretrain", "type: completion")
    return {key_of(row): entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries}


@conversion(":ax_pretraining")
def ax_pretraining(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """axolotl's streamed documents, which are trained on whole."""
    given = draft.given.tree.get("pretraining_dataset")
    entries = [_ax_entry(draft, entry) for entry in _entries(given)]
    entries = entries or ([draft.folder_of(str(given), "data", data_fetch)] if isinstance(given, str) else [])
    draft.put(f"{BASIC}.streaming", True)
    return {f"{BASIC}.dataset": entries[0] if len(entries) == 1 else entries, f"{BASIC}.stage": "pretrain"}


def _entries(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _ax_entry(draft: PeerSetup, entry: dict[str, Any]) -> Any:
    path = draft.folder_of(str(entry.get("path", "")), "data", data_fetch)
    files = entry.get("data_files")
    if path in ("json", "parquet", "csv", "text") and files:
        path = str(files[0] if isinstance(files, list) else files)
    elif isinstance(files, str):
        path = str(Path(path) / files)
    cut = re.fullmatch(r"(\w+)\[:(\d+)(%?)\]", str(entry.get("split", "")))
    made: dict[str, Any] = {"path": path}
    if cut and not cut[3]:
        made["max_samples"] = int(cut[2])
    elif cut or str(entry.get("split", "train")) != "train":
        draft.note(f"{BASIC}.dataset", f"split: {entry['split']} there: name the files you want, or set max_samples")
    if attr := _columns(entry):
        made["attr"] = attr
    return path if len(made) == 1 else made


def _columns(entry: dict[str, Any]) -> dict[str, str]:
    """Columns and tags of an entry whose names our reader would not find by itself."""
    mappings = entry.get("message_property_mappings") or {}
    named = {
        "messages": entry.get("field_messages"),
        "role_tag": mappings.get("role", entry.get("message_field_role")),
        "content_tag": mappings.get("content", entry.get("message_field_content")),
        "chosen": entry.get("field_chosen"),
        "rejected": entry.get("field_rejected"),
        "prompt": entry.get("field_instruction", entry.get("field")),
        "response": entry.get("field_output"),
        "query": entry.get("field_input"),
        "system": entry.get("field_system"),
    }
    found_by_name = {
        "conversations", "messages", "conversation", "from", "value", "role", "content", "chosen", "rejected", "text",
        "instruction", "output", "input", "system", "prompt", "response", "question", "answer",
    }  # fmt: skip
    return {key: str(name) for key, name in named.items() if name and name not in found_by_name}


@conversion(":mix_strategy")
def mix_strategy(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """How several data sets are mixed."""
    if value == "concat":
        return {}
    return (
        idle("basic_parameters.mix.weights takes the shares")
        if draft.has("interleave_probs")
        else no("write the shares into basic_parameters.mix.weights")
    )


@conversion(":mix_weights")
def mix_weights(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The shares of several data sets."""
    names = [each.strip() for each in str(draft.get("dataset", "")).split(",")]
    shares = [float(each) for each in texts(value)]
    if len(names) != len(shares):
        return no("write the shares into basic_parameters.mix.weights")
    return {f"{BASIC}.mix.weights": dict(zip(names, shares, strict=True))}


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


# --- preferences and rewards ------------------------------------------------------------------------------------------


@conversion(":beta")
def beta(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The β of pairs, or of the divergence in GRPO."""
    if draft.method == "grpo":
        is_given = "beta" in draft.settings or draft.tool.name == "ms-swift"
        return {"posttrain.grpo.beta": float(value)} if is_given else {}
    return {"posttrain.dpo.beta": float(value)}


@conversion(":pairloss")
@conversion(":loss_type")
def loss_type(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The loss of pairs, or of a group of answers."""
    names = texts(value)
    if draft.method == "grpo":
        known = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")
        return {"posttrain.grpo.loss_type": names[0]} if names[0] in known else no(f"{names[0]} is not built")
    if draft.method != "dpo":
        return {} if names[0] in ("nll", "none", "default") else no("features.loss_cfg.loss_type chooses the loss")
    unknown = [name for name in names if name not in PAIR_LOSSES]
    if unknown:
        return no(f"{unknown[0]} is not built; posttrain.dpo.loss_type takes {', '.join(PAIR_LOSSES)}")
    return {"posttrain.dpo.loss_type": names}


@conversion(":sync_ref")
def sync_ref(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The reference follows the policy (TR-DPO)."""
    return {key_of(row): int(draft.get("ref_model_sync_steps", 512))} if is_on(value) else {}


_REWARDS = {"accuracy_reward": "exact_match", "think_format_reward": "think_format", "accuracy": "exact_match"}


@conversion(":rewards")
def rewards(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Rewards by name; functions of one's own are registered by a plugin."""
    prefix = "trl." if row.words[0].startswith("trl.") else ""
    weights = draft.get(f"{prefix}reward_weights", [])
    weights = weights if isinstance(weights, list) else [weights]
    made: list[dict[str, Any]] = []
    for number, name in enumerate(texts(value)):
        entry: dict[str, Any] = {"name": _REWARDS.get(name, name)}
        if number < len(weights):
            entry["weight"] = float(weights[number])
        made.append(entry)
    draft.note("posttrain.rewards", "a function of yours is registered by a plugin: docs/posttrain.md")
    return {"posttrain.rewards": made}


@conversion(":vllm")
def vllm(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """A server that draws; inside the training process our own model draws."""
    prefix = "trl." if row.words[0].startswith("trl.") else ""
    host = draft.get(f"{prefix}vllm_server_host")
    if not is_on(value) or (host is None and not draft.has("vllm_server_base_url")):
        return idle("the trained model draws its own samples; posttrain.rollout.base_url names a server")
    found: dict[str, Any] = {"posttrain.rollout.backend": "vllm"}
    if host is not None:
        found["posttrain.rollout.base_url"] = f"http://{host}:{draft.get(f'{prefix}vllm_server_port', 8000)}"
    return found


@conversion(":plugin")
def plugin(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Python files that register something."""
    return no("register rewards and data sets by a plugin of this package, and name it in training.plugin")
