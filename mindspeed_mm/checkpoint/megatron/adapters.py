"""LoRA adapters in Megatron's layout: PEFT's tensors on the hub's side, one piece for each rank on the other.

Only a canonical model's adapters can be exchanged: there every adapted projection is one of the hub's. Of a projection
cut by columns, `lora_B` is cut and `lora_A` whole on every rank; of one cut by rows it is the other way round.

Names: MindSpeed-MM v26.0.0, `lora_hf_to_mm` and `lora_mm_to_hf` of `checkpoint/vlm_model/converters/qwen2_5vl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.megatron.family import MegatronFamily, MegatronModel, TensorCut

PEFT_PREFIX = "base_model.model."
MODULE_NAMES = {"visual.": "model.visual.", "model.": "model.language_model."}
"""Where transformers' modules, and so PEFT's tensors, are called otherwise than the hub's tensors."""


def adapter_model(
    family: MegatronFamily,
    depths: Mapping[str, int],
    *,
    prefix: str = PEFT_PREFIX,
    module_names: Mapping[str, str] = MODULE_NAMES,
) -> MegatronModel:
    """How adapters of a family's models are named and cut.

    Args:
        family: One whose canonical models are known: Qwen2-VL or Qwen2.5-VL.
        depths: Layers of each tower. An adapter's folder does not say them.
        prefix: What PEFT puts before a module's name.
        module_names: Beginnings of hub names, and what they are in the folder; empty: the hub's own.
    """
    base = family.model(_config(family, depths), canonical=True)
    rules: list[KeyRule] = []
    for rule in base.rules:
        if _is_linear(rule):
            rules += [_adapter_rule(rule, part, prefix, module_names) for part in "AB"]
    return replace(
        base,
        rules=rules,
        cuts=dict(_adapter_cut(pattern, cut) for pattern, cut in base.cuts.items()),
        tied_head=False,
        vocabulary=None,
    )


def _config(family: MegatronFamily, depths: Mapping[str, int]) -> dict[str, object]:
    """Depths are all that adapters' names depend on."""
    # Stand-ins that `describe` reads, for numbers that the adapters' names do not show.
    widths = {"hidden_size": 1, "embed_dim": 1, "num_attention_heads": 1, "num_heads": 1, "vocab_size": 1}
    return {
        "model_type": family.model_types[0],
        "text_config": {**widths, "num_hidden_layers": depths["text"]},
        "vision_config": {**widths, "depth": depths["vision"]},
    }


def _is_linear(rule: KeyRule) -> bool:
    return len(rule.sources) == len(rule.targets) == 1 and not rule.ops and rule.sources[0].endswith(".{p}")


def _adapter_rule(rule: KeyRule, part: str, prefix: str, module_names: Mapping[str, str]) -> KeyRule:
    module = rule.sources[0].removesuffix(".{p}")
    for hub, name in module_names.items():
        if module.startswith(hub):
            module = name + module.removeprefix(hub)
            break
    own = rule.targets[0].removesuffix(".{p}")
    return KeyRule(f"{prefix}{module}.lora_{part}.weight", f"{own}.lora_{part}.default.weight")


def _adapter_cut(pattern: str, cut: TensorCut) -> tuple[str, TensorCut]:
    # y = B A x: B has the rows of the weight, A its columns; the other of the two is whole on every rank.
    part = "B" if cut.dim == 0 else "A"
    return f"{pattern.rpartition('.')[0]}.lora_{part}.default.weight", TensorCut(cut.dim)
