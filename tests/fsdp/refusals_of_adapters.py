"""Refusals of adapters: what they go on, what they start with, what they lie over."""

from __future__ import annotations

from tests.fsdp.refusals_of_plans import TENSOR
from tests.fsdp.refusals_of_settings import with_foreign_adapters
from tests.helpers.refusal import DATA, LORA, Refusal

KEY = "training.lora"
TARGETS, WHOLE, START = f"{KEY}.target_modules", f"{KEY}.modules_to_save", f"{KEY}.init_lora_weights"
EXPERTS = (*LORA, f"{TARGETS}=[experts]")

ADAPTERS = (
    Refusal(
        "a start from rounded weights",
        (*LORA, f"{KEY}.quantize=nf4", f"{START}=pissa"),
        "takes its values from the base weights",
        START,
    ),
    Refusal(
        "lengths of rounded weights",
        (*LORA, f"{KEY}.quantize=nf4", f"{KEY}.use_dora=true"),
        "DoRA needs the norms of the base weights",
        f"{KEY}.use_dora",
    ),
    Refusal("nothing to make up for", (*LORA, f"{START}=loftq"), "nothing is quantised", START),
    Refusal(
        "two starts",
        (*LORA, f"{KEY}.pretrained_lora_path={{folder}}/model", f"{START}=pissa"),
        "already gives the adapters' first values",
        START,
    ),
    Refusal(
        "a look into split layers",
        (*LORA, f"{START}=eva", f"{TENSOR}=2"),
        "reads the inputs of layers",
        START,
        ranks=2,
    ),
    Refusal(
        "quantised weights that are split",
        (*LORA, f"{KEY}.quantize=nf4", f"{TENSOR}=2"),
        "quantised weights can only be sharded",
        f"{KEY}.quantize",
        ranks=2,
    ),
    Refusal(
        "8-bit states of cut adapters",
        (*LORA, f"{KEY}.rank=64", f"{TARGETS}=[down_proj]", "training.optimizer_state_dtype=int8", f"{TENSOR}=2"),
        "are cut between ranks so that",
        "training.optimizer_state_dtype",
        ranks=2,
    ),
    Refusal(
        "adapters that are not there",
        (*LORA, f"{KEY}.pretrained_lora_path=none/ad"),
        "'none/ad' does not exist",
        f"{KEY}.pretrained_lora_path",
        DATA,
    ),
    Refusal(
        "questions that are not there",
        ("training.evaluate.interval=1", "training.evaluate.data=none.jsonl"),
        "'none.jsonl' does not exist",
        "training.evaluate.data",
        DATA,
    ),
    Refusal(
        "adapters frozen",
        (*LORA, "model.freeze=['*']"),
        "the adapters of training.lora.enable included",
        "model.freeze",
    ),
    Refusal("an odd rank", (*LORA, f"{START}=orthogonal", f"{KEY}.rank=3"), "but the rank is 3", START),
    Refusal(
        "more directions than there are", (*LORA, f"{START}=pissa", f"{KEY}.rank=900"), "takes 900 directions", START
    ),
    Refusal(
        "adapters on frozen layers",
        (*LORA, f"{TARGETS}=['model.visual.blocks.{{*}}.attn.qkv']", "model.freeze=[model.visual]"),
        "matches only layers that model.freeze freezes",
        TARGETS,
    ),
    Refusal(
        "layers in both",
        (*LORA, f"{TARGETS}=[q_proj]", f"{WHOLE}=[q_proj]"),
        "is trained whole, as training.lora.modules_to_save says",
        TARGETS,
    ),
    Refusal("adapters on norms", (*LORA, f"{TARGETS}=[norm]"), "none of them a linear layer", TARGETS),
    Refusal("an adapter on a tied head", (*LORA, f"{TARGETS}=[lm_head]"), "shares its weight with", TARGETS),
    Refusal("half of tied weights", (*LORA, f"{WHOLE}=[lm_head]"), "Name all of them, or none", WHOLE),
    Refusal("nothing trained whole", (*LORA, f"{WHOLE}=[nothing]"), "matches no module", WHOLE),
    Refusal(
        "half of an expert's first layer",
        (*LORA, f"{TARGETS}=[gate_proj]", f"{KEY}.disable_peft_moe_conversion=false"),
        "alone cannot be adapted",
        TARGETS,
        base="moe",
    ),
    Refusal(
        "lengths of experts", (*EXPERTS, f"{KEY}.use_dora=true"), "names fused experts", f"{KEY}.use_dora", base="moe"
    ),
    Refusal(
        "dropout of experts", (*EXPERTS, f"{KEY}.dropout=0.1"), "names fused experts", f"{KEY}.dropout", base="moe"
    ),
    Refusal("a start of experts", (*EXPERTS, f"{START}=pissa"), "names fused experts", START, base="moe"),
    Refusal(
        "frozen adapters that are not there",
        (*LORA, f"{KEY}.frozen_adapters=['{{folder}}/none']"),
        "none",
        f"{KEY}.frozen_adapters",
        DATA,
    ),
    Refusal(
        "frozen adapters that are none",
        (*LORA, f"{KEY}.frozen_adapters=['{{folder}}/model']"),
        "no adapters",
        f"{KEY}.frozen_adapters",
        DATA,
    ),
    Refusal(
        "adapters to go on from that are none",
        (*LORA, f"{KEY}.pretrained_lora_path={{folder}}/model"),
        "no adapters",
        f"{KEY}.pretrained_lora_path",
        DATA,
    ),
    Refusal(
        "adapters to go on from that are of another kind",
        (*LORA, f"{KEY}.pretrained_lora_path={{folder}}/adapters"),
        "",
        "",
        DATA,
        with_foreign_adapters,
    ),
)
