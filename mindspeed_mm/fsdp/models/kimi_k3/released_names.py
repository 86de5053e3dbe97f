"""How the released weights of Kimi-K3 become those of the classes that it is built on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PermuteForRope,
    WeightConverter,
    WeightRenaming,
)
from typing_extensions import override

_BLOCK, _OWN_BLOCK = r"vision_tower\.encoder\.blocks\.(\d+)\.", r"model.vision_tower.layers.\1."
_NAMES = {
    r"^language_model\.model\.": "model.language_model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^vision_tower\.patch_embed\.proj\.": "model.vision_tower.patch_embed.proj.",
    r"^vision_tower\.patch_embed\.pos_emb\.weight": "model.vision_tower.patch_embed.pos_emb.position_embeddings",
    rf"^{_BLOCK}norm0\.": f"{_OWN_BLOCK}norm1.",
    rf"^{_BLOCK}norm1\.": f"{_OWN_BLOCK}norm2.",
    rf"^{_BLOCK}mlp\.fc0\.": f"{_OWN_BLOCK}mlp.fc1.",
    rf"^{_BLOCK}mlp\.fc1\.": f"{_OWN_BLOCK}mlp.fc2.",
    rf"^{_BLOCK}wo\.": f"{_OWN_BLOCK}attn.proj.",
    rf"^{_BLOCK}wqkv\.": f"{_OWN_BLOCK}wqkv.",
    r"^vision_tower\.encoder\.final_layernorm\.": "model.vision_tower.final_layernorm.",
    r"^mm_projector\.": "model.mm_projector.",
    r"\.self_attn\.f_a_proj\.": ".self_attn.forget_gate.f_a_proj.",
    r"\.self_attn\.f_b_proj\.": ".self_attn.forget_gate.f_b_proj.",
    r"\.self_attn\.dt_bias": ".self_attn.forget_gate.dt_bias",
}
"""Released name → name in the classes here."""


class OnePerHead(ConversionOps):
    """The first numbers of a vector, one for each head. The release fills `A_log` up to the width of a head; its
    published readers cut it. Turned round, zeros fill it up."""

    def __init__(self, *, cuts: bool = True) -> None:
        self.cuts = cuts

    @override
    def convert(
        self, input_dict: Mapping[str, object], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Of one tensor; `config` is the model's."""
        given: Any
        (given,) = input_dict.values()
        if isinstance(given, list):
            given = given[0]
        tensor: torch.Tensor = given
        text = kwargs["config"].text_config
        if self.cuts:
            return {target_patterns[0]: tensor.flatten()[: text.linear_num_heads]}
        return {target_patterns[0]: F.pad(tensor, (0, max(0, text.linear_head_dim - len(tensor))))}

    @property
    @override
    def reverse_op(self) -> ConversionOps:
        return OnePerHead(cuts=False)


def conversion_rules() -> list[Any]:
    """transformers' rules for a folder of this family, in both directions."""
    rules: list[Any] = [WeightRenaming(released, own) for released, own in _NAMES.items()]
    own = r"\.self_attn\.forget_gate\.A_log"
    rules.append(WeightConverter(r"\.self_attn\.A_log", own, operations=[OnePerHead()]))
    heads = [rf"\.attn\.{name}_proj\.weight" for name in "qkv"]
    # Rotary pairs are neighbours in the release, and halves of a head in transformers.
    turned = PermuteForRope(subconfig_key="vision_config", permute_layer_names=["q_proj", "k_proj"])
    rules.append(WeightConverter(r"\.wqkv\.weight", heads, operations=[Chunk(dim=0), turned]))
    convolutions = [rf"\.self_attn\.{name}_conv1d\.weight" for name in "qkv"]
    rules.append(WeightConverter(convolutions, r"\.self_attn\.conv1d\.weight", operations=[Concatenate(dim=0)]))
    experts = r"block_sparse_moe\.experts\."
    gate_and_up = [f"{experts}*.w1.weight", f"{experts}*.w3.weight"]
    join = [MergeModulelist(dim=0), Concatenate(dim=1)]
    rules.append(WeightConverter(gate_and_up, f"{experts}gate_up_proj", operations=join))
    rules.append(WeightConverter(f"{experts}*.w2.weight", f"{experts}down_proj", operations=[MergeModulelist(dim=0)]))
    return rules
