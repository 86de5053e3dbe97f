"""The thinker of Qwen2.5-Omni: text, pictures and sound. Talker and token2wav are not part of this layout.

Names: MindSpeed-MM v26.0.0, `checkpoint/vlm_model/converters/qwen2_5omni.py`.
"""

from __future__ import annotations

from mindspeed_mm.checkpoint.key_ops import InsertZeros, Interleave
from mindspeed_mm.checkpoint.keymap import KeyRule
from mindspeed_mm.checkpoint.megatron.families.shared_towers import (
    BLOCK,
    VISION,
    attention_cuts,
    block_rules,
    gated_mlp_cuts,
    gated_mlp_rules,
    has_tied_head,
    merger_rules,
    mlp_cuts,
    text_cuts,
    text_rules,
)
from mindspeed_mm.checkpoint.megatron.family import (
    TEXT,
    Config,
    MegatronFamily,
    MegatronModel,
    PipelineTower,
    TensorCut,
)

_ENCODER = "audio_encoder.encoder."
_LAYER = f"{_ENCODER}blocks.layers.{{n}}."
AUDIO = PipelineTower(
    name="audio",
    prefix="audio_encoder.",
    layers=f"{_ENCODER}blocks.layers.",
    first=(f"{_ENCODER}conv1.", f"{_ENCODER}conv2.", f"{_ENCODER}audio_bos_eos_token."),
    last=(f"{_ENCODER}ln_post.", f"{_ENCODER}proj."),
)

_LAYER_NAMES = {
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "pre_mlp_layernorm",
    "self_attn.out_proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
"""Hub → Megatron, in a layer of the sound encoder."""
_ENDS = ("conv1", "conv2", "audio_bos_eos_token", "ln_post", "proj")


def _describe(config: Config) -> MegatronModel:
    hub, thinker = "", config
    not_carried: tuple[str, ...] = ()
    if "thinker_config" in config:  # the whole model, of which the thinker is a part
        hub, thinker = "thinker.", config["thinker_config"]
        not_carried = ("talker.", "token2wav.")
    text, vision, audio = thinker["text_config"], thinker["vision_config"], thinker["audio_config"]
    depths = {
        "text": text["num_hidden_layers"],
        "vision": vision["depth"],
        "audio": audio.get("encoder_layers") or audio["num_hidden_layers"],
    }
    return MegatronModel(
        towers=(TEXT, VISION, AUDIO),
        depths=depths,
        rules=[
            *text_rules(text, f"{hub}model.", f"{hub}lm_head"),
            *_vision_rules(f"{hub}visual.", vision),
            *_audio_rules(f"{hub}audio_tower.", audio),
        ],
        cuts={
            **text_cuts(text),
            **attention_cuts(vision["num_heads"]),
            **gated_mlp_cuts(f"{BLOCK}mlp."),
            **_audio_cuts(audio),
        },
        tied_head=has_tied_head(thinker),
        vocabulary=text["vocab_size"],
        not_carried=not_carried,
    )


def _vision_rules(hub: str, vision: Config) -> list[KeyRule]:
    queries = [f"{hub}blocks.{{n}}.attn.{part}.{{p}}" for part in "qkv"]
    interleave = Interleave(0, vision["num_heads"], (vision["hidden_size"],) * 3)
    return [
        *block_rules(hub),
        KeyRule(queries, f"{BLOCK}self_attention.linear_qkv.{{p}}", (interleave,)),
        *gated_mlp_rules(f"{hub}blocks.{{n}}.mlp.", f"{BLOCK}mlp."),
        *merger_rules(hub),
    ]


def _audio_rules(hub: str, audio: Config) -> list[KeyRule]:
    """Keys have no bias on the hub; Megatron's fused tensor has zeros there, which take no part in the attention."""
    attention = f"{hub}layers.{{n}}.self_attn."
    interleave = Interleave(0, audio["encoder_attention_heads"], (audio["d_model"],) * 3)
    qkv = f"{_LAYER}self_attention.linear_qkv"
    query, key, value = (f"{attention}{part}_proj" for part in "qkv")
    weights = [f"{query}.weight", f"{key}.weight", f"{value}.weight"]
    rules = [
        KeyRule(weights, f"{qkv}.weight", (interleave,)),
        # The zeros go between the two, where Megatron has the bias of the keys.
        KeyRule([f"{query}.bias", f"{value}.bias"], f"{qkv}.bias", (InsertZeros(1), interleave)),
    ]
    for theirs, ours in _LAYER_NAMES.items():
        rules.append(KeyRule(f"{hub}layers.{{n}}.{theirs}.{{p}}", f"{_LAYER}{ours}.{{p}}"))
    for name in _ENDS:
        rules.append(KeyRule(f"{hub}{name}.{{p}}", f"{_ENCODER}{name}.{{p}}"))
    return rules


def _audio_cuts(audio: Config) -> dict[str, TensorCut]:
    heads = audio["encoder_attention_heads"]
    return {
        f"{_LAYER}self_attention.linear_qkv.{{p}}": TensorCut(0, units=heads),
        f"{_LAYER}self_attention.linear_proj.weight": TensorCut(1, units=heads),
        **mlp_cuts(f"{_LAYER}mlp."),
    }


QWEN2_5_OMNI = MegatronFamily("Qwen2.5-Omni", ("qwen2_5_omni", "qwen2_5_omni_thinker"), _describe)
