"""Language models alone: Llama and its kin, dense or with routed experts, and those with latent attention.

Names: Megatron-Core 0.16.1, `models/gpt/gpt_layer_specs.py` (its local layers), `transformer/moe/` and
`transformer/multi_latent_attention.py`. Nothing stands before them: the whole file is the language model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mindspeed_mm.checkpoint.key_ops import Concat
from mindspeed_mm.checkpoint.keymap import KeyRule, renamings
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    LAYER,
    attention_rules,
    end_rules,
    gated_mlp_cuts,
    gated_mlp_rules,
    norm_rules,
    text_cuts,
)
from mindspeed_mm.checkpoint.megatron.family import (
    EMBEDDING,
    HEAD,
    TEXT,
    Config,
    MegatronFamily,
    MegatronModel,
    TensorCut,
)
from mindspeed_mm.core.errors import ModelFolderError

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_ROUTED = ("qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v3")
_HUB, _HUB_LAYER = "model.", "model.layers.{n}."
_ATTENTION, _MLP = f"{LAYER}self_attention.", f"{LAYER}mlp."
_EXPERT = f"{_MLP}experts.local_experts.{{e}}."
_LATENT = {
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_a_layernorm": "q_layernorm",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_a_layernorm": "kv_layernorm",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
"""Hub → Megatron, in latent attention."""


def _describe(config: Config) -> MegatronModel:
    depth, routed = config["num_hidden_layers"], config["model_type"] in _ROUTED
    rules = [*end_rules(_HUB, "lm_head"), *norm_rules(_HUB), *gated_mlp_rules(f"{_HUB_LAYER}mlp.", _MLP)]
    if config["model_type"] in ("deepseek_v2", "deepseek_v3"):
        rules += renamings(_LATENT, f"{_HUB_LAYER}self_attn.", _ATTENTION)
        cuts = _latent_cuts(config)
    else:
        rules += attention_rules(config, _HUB)
        cuts = text_cuts(config)
    for mlp in (_MLP, f"{_MLP}shared_experts.", _EXPERT):
        cuts |= gated_mlp_cuts(mlp)
    sparse: Collection[int] = ()
    experts = 0
    if routed:
        rules += _expert_rules(config["model_type"])
        sparse = _sparse_layers(config)
        experts = _experts(config)
    dense = [layer for layer in range(depth) if layer not in sparse]
    model = MegatronModel(
        towers=(TEXT,),
        depths={"text": depth},
        rules=rules,
        cuts=cuts,
        tied_head=bool(config.get("tie_word_embeddings")),
        vocabulary=config["vocab_size"],
        experts=experts,
        parts_of_layers={
            "mlp.linear_fc": dense,
            "mlp.router": sparse,
            "mlp.shared_experts": sparse,
            "mlp.experts": sparse,
        },
        not_carried=_predicting_layers(config, depth),
    )
    return _alone(model)


def _alone(model: MegatronModel) -> MegatronModel:
    """The model without `text_decoder.` before every name, as no other tower stands beside it."""
    tower = replace(
        TEXT,
        prefix="",
        layers=_bare_name(TEXT.layers),
        first=tuple(map(_bare_name, TEXT.first)),
        last=tuple(map(_bare_name, TEXT.last)),
    )
    rules = [KeyRule(rule.sources, list(map(_bare_name, rule.targets)), rule.ops) for rule in model.rules]
    cuts = {_bare_name(name): cut for name, cut in model.cuts.items()}
    return replace(model, towers=(tower,), rules=rules, cuts=cuts)


def _bare_name(name: str) -> str:
    return name.removeprefix(TEXT.prefix)


def _experts(config: Config) -> int:
    """Mixtral has `num_local_experts`, Qwen `num_experts`, DeepSeek and GLM `n_routed_experts`."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    for name in names:
        if config.get(name):
            return int(config[name])
    raise ModelFolderError("is missing in config.json: it does not say how many experts a layer has", key=names[0])


def _sparse_layers(config: Config) -> Collection[int]:
    """Numbers of the layers with routed experts."""
    depth, kind = config["num_hidden_layers"], config["model_type"]
    if kind == "mixtral":
        return range(depth)
    if kind in ("qwen2_moe", "qwen3_moe"):
        dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
        # As transformers counts: the layer before each multiple of the step, from 1.
        return [n for n in range(depth) if n not in dense and (n + 1) % step == 0]
    return range(config.get("first_k_dense_replace") or 0, depth)


def _predicting_layers(config: Config, depth: int) -> tuple[str, ...]:
    """Behind the last layer, DeepSeek's and GLM's folders hold layers that predict further tokens in training."""
    more = config.get("num_nextn_predict_layers") or 0
    return tuple(f"{_HUB}layers.{n}." for n in range(depth, depth + more))


def _expert_rules(kind: str) -> list[KeyRule]:
    if kind == "mixtral":
        hub, own = f"{_HUB_LAYER}block_sparse_moe.", f"{_EXPERT}linear_fc"
        gate, up = f"{hub}experts.{{e}}.w1.weight", f"{hub}experts.{{e}}.w3.weight"
        return [
            KeyRule(f"{hub}gate.weight", f"{_MLP}router.weight"),
            KeyRule([gate, up], f"{own}1.weight", (Concat(0),)),
            KeyRule(f"{hub}experts.{{e}}.w2.weight", f"{own}2.weight"),
        ]
    hub = f"{_HUB_LAYER}mlp."
    shared = f"{hub}shared_expert." if kind == "qwen2_moe" else f"{hub}shared_experts."
    return [
        KeyRule(f"{hub}gate.weight", f"{_MLP}router.weight"),
        KeyRule(f"{hub}gate.e_score_correction_bias", f"{_MLP}router.expert_bias"),
        KeyRule(f"{hub}shared_expert_gate.weight", f"{_MLP}shared_experts.gate_weight"),
        *gated_mlp_rules(shared, f"{_MLP}shared_experts."),
        *gated_mlp_rules(f"{hub}experts.{{e}}.", _EXPERT),
    ]


def _latent_cuts(config: Config) -> dict[str, TensorCut]:
    """What leads down to the latents is whole on every rank, as Megatron-Core's layers with Transformer Engine have
    it."""
    heads = config["num_attention_heads"]
    by_head = TensorCut(0, units=heads)
    return {
        EMBEDDING: TensorCut(0, padded=True),
        HEAD: TensorCut(0, padded=True),
        f"{_ATTENTION}linear_q_proj.{{p}}": by_head,
        f"{_ATTENTION}linear_q_up_proj.{{p}}": by_head,
        f"{_ATTENTION}linear_kv_up_proj.{{p}}": by_head,
        f"{_ATTENTION}linear_proj.weight": TensorCut(1, units=heads),
    }


LANGUAGE_MODEL = MegatronFamily("a language model alone", (*_DENSE, *_ROUTED), _describe)
