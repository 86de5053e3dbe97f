"""Keys that moved: other names for the same thing, keys written under another section, keys that mean nothing here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mindspeed_mm.core.errors import Problem
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.params.tools_args import StaticProfile
from mindspeed_mm.fsdp.params.value_types import Flag, show
from mindspeed_mm.fsdp.params.yaml.tree import Node, find, merge, nest, plain, take

_DATASETS = ("data.dataset_param", "data.val_dataset_param")

ALIASES: tuple[tuple[str, str], ...] = (
    ("tools.profiler", "tools.profile"),
    *((f"tools.profile.{name}", f"tools.profile.static_param.{name}") for name in StaticProfile.model_fields),
    ("tools.memory_profile.record_peak_memory", "tools.memory_profile.mem_info"),
    ("data.dataloader_param.collate_param.collator_id", "data.dataloader_param.collate_param.model_name"),
    ("data.train_data_set_list", "data.dataset_param.basic_parameters.dataset"),
    ("data.valid_data_set_list", "data.dataset_param.basic_parameters.val_dataset"),
    ("moe_grouped_gemm", "model.use_grouped_expert_matmul"),
    ("model.moe_grouped_gemm", "model.use_grouped_expert_matmul"),
    ("parallel.moe_grouped_gemm", "model.use_grouped_expert_matmul"),
    ("ep_dispatcher", "parallel.ep_plan.dispatcher"),
    ("model.ep_dispatcher", "parallel.ep_plan.dispatcher"),
    ("parallel.ep_dispatcher", "parallel.ep_plan.dispatcher"),
    ("parallel.recompute", "features.recompute"),
    ("parallel.recompute_plan", "features.recompute_plan"),
    ("training.quantization_plan.quant_recipe", "training.quantization_plan.recipe_name"),
    ("training.quantization_plan.quant_apply_modules", "training.quantization_plan.apply_modules"),
    ("training.quantization_plan.quant_ignored_modules", "training.quantization_plan.ignored_modules"),
    ("training.quantization_plan.converters", "training.quantization_plan.quant_converters"),
    ("training.quantization_plan.quant_format", "training.quantization_plan.extra_args.quant_format"),
    ("training.quantization_plan.block_size", "training.quantization_plan.extra_args.block_size"),
)
"""(other name, name here), applied from top to bottom without a word."""

SWITCHES: tuple[tuple[str, str, Mapping[bool, object]], ...] = (
    ("model.use_triton_gdn", "model.gdn_implementation", {True: "triton", False: "eager"}),
    *((f"{rows}.attr.packing", f"{rows}.basic_parameters.packing", {True: True}) for rows in _DATASETS),
    *((f"{rows}.attr.pretrain", f"{rows}.basic_parameters.stage", {True: "pretrain"}) for rows in _DATASETS),
)
"""(switch of older files, key here, what the switch says there), applied without a word; a value that is not listed
leaves the key as it is."""

MISPLACED: tuple[tuple[str, str], ...] = tuple(
    (f"model.{name}", f"features.{name}") for name in FeatureArguments.model_fields
)
"""(where older files have it, where it belongs), honoured with a warning."""

RECOMPUTE_SWITCH = "model.enable_gradient_checkpointing"
"""Generators' older files switch recompute on with it, whatever the general key beside it says."""

MEANINGLESS: dict[str, str] = {
    "parallel.context_parallel_size": "ulysses_parallel_size and ring_attention_size split a sequence over ranks",
    "parallel.pregather": "the switch is parallel.fsdp_plan.pregather",
    "parallel.expert_data_parallel_size": "it follows from the other sizes",
    "parallel.moe_impl_type": "model.model_id chooses the model and its expert layers",
    "features.chunkloss_plan.impl_type": "there is one implementation of the chunked loss",
    "features.chunkloss_plan.vocab_tile_size": "there is one implementation of the chunked loss",
    "features.swap_plan": "features.enable_activation_offload moves activations to the host",
    "features.recompute_plan.op_replay_scopes": "model.skip_flash_attn_recompute keeps the results of attention",
    "model.text_decoder": "features.enable_activation_offload moves activations to the host",
    "training.enable_full_determinism": "training.use_deter_comp chooses deterministic kernels",
    "training.ckpt_manager": "training.save_format chooses the layout of checkpoints",
    "training.load_checkpoint_path": "training.load names the checkpoint to start from",
    "training.save_steps": "training.save_interval counts the steps between checkpoints",
    "training.max_steps": "training.train_iters counts the steps",
    "training.lora.save_mode": "checkpoints hold the adapters alone, and mm export --merge writes the whole model",
    "training.profile": "tools.profile switches the profiler on",
    "training.global_batch_size": "it is micro_batch_size × data ranks × gradient_accumulation_steps",
    "training.max_epochs": "training.train_epochs counts passes over the data",
    "training.resume": "a run continues by itself from the newest checkpoint in training.save",
    "training.validate_interval": "training.val_interval counts the steps between validations",
    "training.clip_norm_type": "the gradient norm is the 2-norm",
    "training.scheduler": "training.lr_decay_style names the schedule",
    "training.scheduler_conf": "training.lr_warmup_ratio and lr_decay_ratio shape the schedule",
}
"""Keys of older files that are dropped with one warning each: key → what counts instead."""


_FLAG: TypeAdapter[Any] = TypeAdapter(Flag)

OFF_WHEN_EMPTY = ("training.save", "training.load")
"""Paths that files switch off with an empty text."""


@dataclass
class Notes:
    """What was found while a tree was put in order."""

    warnings: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def settle_keys(root: Node, notes: Notes, declared: Collection[str] = ()) -> None:
    """Bring every key to the name and section that it has here.

    Args:
        root: The tree; changed in place.
        notes: Takes warnings, and problems where two names of one key disagree.
        declared: Keys of the model's plugin; they stay under `model` whatever their name.
    """
    for key, reason in MEANINGLESS.items():
        if key.removeprefix("model.") in declared:
            continue
        entry = take(root, key)
        if entry is not None:
            notes.warnings.append(Problem("has no effect here and is ignored", str(entry.key), key, f"{reason}."))
    for key in OFF_WHEN_EMPTY:
        entry = find(root, key)
        if entry is not None and entry.node.value == "":
            entry.node.value = None
            notes.warnings.append(Problem("is empty and read as null", str(entry.key), key, "Write null instead."))
    for old, new in MISPLACED:
        entry = find(root, old)
        if entry is not None and old.removeprefix("model.") not in declared:
            notes.warnings.append(
                Problem("is accepted, but is in the wrong section", str(entry.key), old, f"It belongs at {new}.")
            )
            rename_key(root, old, new, notes)
    for old, new in ALIASES:
        rename_key(root, old, new, notes)
    for old, new, meanings in SWITCHES:
        if old.removeprefix("model.") not in declared:
            _settle_switch(root, old, new, meanings, notes)
    for dataset in _DATASETS:
        _refuse_token_ids(root, dataset, notes)
    # The last: it wins over the general switch, which has arrived from wherever it stood.
    if RECOMPUTE_SWITCH.removeprefix("model.") not in declared:
        _settle_recompute(root, notes)


def _settle_switch(root: Node, old: str, new: str, meanings: Mapping[bool, object], notes: Notes) -> None:
    """Say at one key what a switch of older files says at another."""
    entry = find(root, old)
    if entry is None or entry.node.value is None:
        return
    try:
        is_on = _FLAG.validate_python(plain(entry.node))
    except ValidationError as error:
        notes.problems.append(Problem(error.errors()[0]["msg"], str(entry.node.place), old))
        take(root, old)
        return
    if is_on in meanings:
        entry.node.value = meanings[is_on]
        rename_key(root, old, new, notes)
    else:
        take(root, old)


def _refuse_token_ids(root: Node, dataset: str, notes: Notes) -> None:
    entry = take(root, f"{dataset}.basic_parameters.use_pmcc_data")
    if entry is not None and plain(entry.node) not in (None, False):
        notes.problems.append(
            Problem(
                "turns that hold token ids in place of text are not read",
                str(entry.node.place),
                f"{dataset}.basic_parameters.use_pmcc_data",
                "Write the texts of the turns, and take it out.",
            )
        )


def _settle_recompute(root: Node, notes: Notes) -> None:
    """Either of the two switches of older files switches recompute on."""
    entry = take(root, RECOMPUTE_SWITCH)
    if entry is None or entry.node.value is None:
        return
    is_off = str(plain(entry.node)).lower() in ("false", "no", "off")
    if is_off and find(root, "features.recompute") is not None:
        return
    notes.warnings.append(
        Problem("is read as features.recompute", str(entry.key), RECOMPUTE_SWITCH, "Write that one instead.")
    )
    merge(root, nest("features.recompute", entry))


def rename_key(root: Node, old: str, new: str, notes: Notes) -> None:
    """Bring what stands at one dotted key to another; where that has a value that disagrees, both are named."""
    entry = take(root, old)
    if entry is None or entry.node.value is None:
        return
    held = find(root, new)
    if held is not None and not _nodes_agree(held.node, entry.node):
        notes.problems.append(
            Problem(
                f"{show(plain(entry.node))} here, but {new} is {show(plain(held.node))} at {held.node.place}",
                str(entry.node.place),
                old,
                "They are the same setting: keep one of them.",
            )
        )
        return
    parent = find(root, new.rpartition(".")[0])
    if parent is not None and parent.node.value is None:
        parent.node.value = {}
    if parent is None or isinstance(parent.node.value, dict):
        merge(root, nest(new, entry))


def _nodes_agree(one: Node, other: Node) -> bool:
    """Whether two nodes say nothing different: equal values, or mappings whose common keys agree."""
    if isinstance(one.value, dict) and isinstance(other.value, dict):
        return all(
            _nodes_agree(one.value[name].node, other.value[name].node) for name in one.value.keys() & other.value.keys()
        )
    return bool(plain(one) == plain(other))
