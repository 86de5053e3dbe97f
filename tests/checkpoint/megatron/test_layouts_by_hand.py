"""One model of each family in Megatron's layout, against every tensor of every file computed here with plain torch.

Two tensor ranks, two stages: text has one layer on the first and four on the second, pictures two and one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.megatron.family import TensorCut
from mindspeed_mm.checkpoint.megatron.folder import divided_files
from mindspeed_mm.checkpoint.megatron.layout import MegatronLayout
from mindspeed_mm.checkpoint.safetensors_folder import open_weights
from tests.helpers.megatron_models import GROUPS, INNER, UNEVEN_HEADS, H, files_of, save_tiny

TP = 2
TEXT_STAGES, PICTURE_STAGES = ((0,), (1, 2, 3, 4)), ((0, 1), (2,))
LAYERS = {"text": ((1, 4),), "vision": ((2, 1),)}
TEXT, PICTURE = "text_decoder.decoder.layers.", "image_encoder.encoder.blocks.layers."


class Files:
    """What every file should hold, filled in by hand."""

    def __init__(self, folder: Path, ep: int = 1) -> None:
        self.hub, self.ep = load_file(folder / "model.safetensors"), ep
        ranks = [(tp, pp, e) for tp in range(TP) for pp in range(2) for e in range(ep)]
        self.files: dict[str, dict[str, torch.Tensor]] = {self.name(*rank): {} for rank in ranks}

    def name(self, tp: int, pp: int, ep: int) -> str:
        return f"mp_rank_{tp:02d}_{pp:03d}" + (f"_{ep:03d}" if self.ep > 1 else "")

    def put(self, stage: int, name: str, pieces: Sequence[torch.Tensor], expert_rank: int | None = None) -> None:
        """One piece for each tensor rank."""
        for tp in range(TP):
            for ep in range(self.ep) if expert_rank is None else [expert_rank]:
                self.files[self.name(tp, stage, ep)][name] = pieces[tp]

    def copy(self, stage: int, names: dict[str, str], hub: str = "", own: str = "") -> None:
        """Tensors that every rank holds whole: hub name → own name."""
        for key, name in names.items():
            self.put(stage, own + name, [self.hub[hub + key]] * TP)


def rows(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.chunk(TP, 0)


def columns(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return tensor.chunk(TP, 1)


def gated(gate: torch.Tensor, up: torch.Tensor) -> Sequence[torch.Tensor]:
    return [torch.cat(pair) for pair in zip(gate.chunk(TP), up.chunk(TP), strict=True)]


def by_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> Sequence[torch.Tensor]:
    """Of each group its queries, its key, its value; whole groups on each rank."""
    parts = [part.view(groups, -1, *part.shape[1:]) for part in (q, k, v)]
    return rows(torch.cat(parts, 1).flatten(0, 1))


def text_ends(want: Files, hub: str, head: str) -> None:
    want.put(0, "text_decoder.embedding.word_embeddings.weight", rows(want.hub[f"{hub}embed_tokens.weight"]))
    want.put(1, "text_decoder.output_layer.weight", rows(want.hub[head]))
    want.copy(1, {f"{hub}norm.weight": "text_decoder.decoder.final_layernorm.weight"})


def text_attention(want: Files, hub: str, more: Sequence[str]) -> None:
    """`more`: the tensors of each projection of queries, keys and values, or norms of the heads."""
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"{hub}layers.{number}.", f"{TEXT}{local}."
            norms = {"input_layernorm.weight": "input_layernorm.weight"}
            norms["post_attention_layernorm.weight"] = "pre_mlp_layernorm.weight"
            want.copy(stage, norms, at, own)
            for part in more:
                if part in ("q_norm", "k_norm"):
                    want.copy(
                        stage, {f"self_attn.{part}.weight": f"self_attention.{part[0]}_layernorm.weight"}, at, own
                    )
                    continue
                q, k, v = (want.hub[f"{at}self_attn.{which}_proj.{part}"] for which in "qkv")
                want.put(stage, f"{own}self_attention.linear_qkv.{part}", by_groups(q, k, v, GROUPS))
            projection = want.hub[f"{at}self_attn.o_proj.weight"]
            want.put(stage, f"{own}self_attention.linear_proj.weight", columns(projection))


def text_mlp(want: Files, hub: str) -> None:
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"{hub}layers.{number}.mlp.", f"{TEXT}{local}.mlp."
            gate, up = want.hub[f"{at}gate_proj.weight"], want.hub[f"{at}up_proj.weight"]
            want.put(stage, f"{own}linear_fc1.weight", gated(gate, up))
            want.put(stage, f"{own}linear_fc2.weight", columns(want.hub[f"{at}down_proj.weight"]))


def picture_attention(want: Files, hub: str, norm_parts: Sequence[str]) -> None:
    """[Q|K|V] becomes each head's query, key and value."""
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"{hub}blocks.{number}.", f"{PICTURE}{local}."
            for part in ("weight", "bias"):
                q, k, v = want.hub[f"{at}attn.qkv.{part}"].chunk(3)
                want.put(stage, f"{own}self_attention.linear_qkv.{part}", by_groups(q, k, v, 4))
            want.put(stage, f"{own}self_attention.linear_proj.weight", columns(want.hub[f"{at}attn.proj.weight"]))
            want.copy(stage, {f"{at}attn.proj.bias": f"{own}self_attention.linear_proj.bias"})
            for part in norm_parts:
                want.copy(stage, {f"norm1.{part}": f"input_layernorm.{part}"}, at, own)
                want.copy(stage, {f"norm2.{part}": f"pre_mlp_layernorm.{part}"}, at, own)


def picture_mlp(want: Files, hub: str, fc1: str, fc2: str) -> None:
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            plain_mlp(want, stage, f"{hub}blocks.{number}.mlp.", f"{PICTURE}{local}.mlp.", fc1, fc2)


def plain_mlp(want: Files, stage: int, hub: str, own: str, fc1: str, fc2: str) -> None:
    for part in ("weight", "bias"):
        want.put(stage, f"{own}linear_fc1.{part}", rows(want.hub[f"{hub}{fc1}.{part}"]))
    want.put(stage, f"{own}linear_fc2.weight", columns(want.hub[f"{hub}{fc2}.weight"]))
    want.copy(stage, {f"{hub}{fc2}.bias": f"{own}linear_fc2.bias"})


def gated_picture_mlp(want: Files, hub: str) -> None:
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"{hub}blocks.{number}.mlp.", f"{PICTURE}{local}.mlp."
            for part in [part for part in ("weight", "bias") if f"{at}gate_proj.{part}" in want.hub]:
                gate, up = want.hub[f"{at}gate_proj.{part}"], want.hub[f"{at}up_proj.{part}"]
                want.put(stage, f"{own}linear_fc1.{part}", gated(gate, up))
            want.put(stage, f"{own}linear_fc2.weight", columns(want.hub[f"{at}down_proj.weight"]))
            if f"{at}down_proj.bias" in want.hub:
                want.copy(stage, {f"{at}down_proj.bias": f"{own}linear_fc2.bias"})


def merger(want: Files, hub: str, norm_parts: Sequence[str]) -> None:
    own = "image_encoder.projector."
    want.copy(1, {f"ln_q.{part}": f"layernorm.{part}" for part in norm_parts}, f"{hub}merger.", own)
    plain_mlp(want, 1, f"{hub}merger.", f"{own}encoder.", "mlp.0", "mlp.2")


def qwen2_vl(want: Files) -> None:
    text_ends(want, "model.", "model.embed_tokens.weight")  # the head is the embedding
    text_attention(want, "model.", ("weight", "bias"))
    text_mlp(want, "model.")
    want.copy(0, {"visual.patch_embed.proj.weight": "image_encoder.encoder.patch_embed.proj.weight"})
    picture_attention(want, "visual.", ("weight", "bias"))
    picture_mlp(want, "visual.", "fc1", "fc2")
    merger(want, "visual.", ("weight", "bias"))


def qwen2_5_vl(want: Files) -> None:
    text_ends(want, "model.", "lm_head.weight")
    text_attention(want, "model.", ("weight", "bias"))
    text_mlp(want, "model.")
    want.copy(0, {"visual.patch_embed.proj.weight": "image_encoder.encoder.patch_embed.proj.weight"})
    picture_attention(want, "visual.", ("weight",))
    gated_picture_mlp(want, "visual.")
    merger(want, "visual.", ("weight",))


def qwen2_5_omni(want: Files) -> None:
    text_ends(want, "model.", "lm_head.weight")
    text_attention(want, "model.", ("weight", "bias"))
    text_mlp(want, "model.")
    want.copy(0, {"visual.patch_embed.proj.weight": "image_encoder.encoder.patch_embed.proj.weight"})
    for number in range(3):  # queries, keys and values stand apart: fused as the other models have them
        for part in ("weight", "bias"):
            at = f"visual.blocks.{number}.attn."
            want.hub[f"{at}qkv.{part}"] = torch.cat([want.hub[f"{at}{which}.{part}"] for which in "qkv"])
    picture_attention(want, "visual.", ("weight",))
    gated_picture_mlp(want, "visual.")
    merger(want, "visual.", ("weight",))
    sounds(want)


def sounds(want: Files) -> None:
    """All four layers on the first stage, with what stands before and behind them."""
    for number in range(4):
        at, own = f"audio_tower.layers.{number}.", f"audio_encoder.encoder.blocks.layers.{number}."
        q, k, v = (want.hub[f"{at}self_attn.{which}_proj.weight"] for which in "qkv")
        want.put(0, f"{own}self_attention.linear_qkv.weight", by_groups(q, k, v, 4))
        q, v = (want.hub[f"{at}self_attn.{which}_proj.bias"] for which in "qv")
        want.put(0, f"{own}self_attention.linear_qkv.bias", by_groups(q, torch.zeros(H), v, 4))
        want.put(0, f"{own}self_attention.linear_proj.weight", columns(want.hub[f"{at}self_attn.out_proj.weight"]))
        copied = {"self_attn.out_proj.bias": "self_attention.linear_proj.bias"}
        for part in ("weight", "bias"):
            copied[f"self_attn_layer_norm.{part}"] = f"input_layernorm.{part}"
            copied[f"final_layer_norm.{part}"] = f"pre_mlp_layernorm.{part}"
        want.copy(0, copied, at, own)
        plain_mlp(want, 0, at, f"{own}mlp.", "fc1", "fc2")
    ends = [f"{name}.{part}" for name in ("conv1", "conv2", "ln_post", "proj") for part in ("weight", "bias")]
    ends.append("audio_bos_eos_token.weight")
    want.copy(0, {name: name for name in ends}, "audio_tower.", "audio_encoder.encoder.")


def qwen3_vl(want: Files) -> None:
    text_ends(want, "model.language_model.", "model.language_model.embed_tokens.weight")
    text_attention(want, "model.language_model.", ("weight", "q_norm", "k_norm"))
    text_mlp(want, "model.language_model.")
    qwen3_pictures(want)


def qwen3_vl_moe(want: Files) -> None:
    text_ends(want, "model.language_model.", "lm_head.weight")
    text_attention(want, "model.language_model.", ("weight", "q_norm", "k_norm"))
    qwen3_pictures(want)
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"model.language_model.layers.{number}.mlp.", f"{TEXT}{local}.mlp."
            want.copy(stage, {"gate.weight": "router.weight"}, at, own)
            gate_up, down = want.hub[f"{at}experts.gate_up_proj"], want.hub[f"{at}experts.down_proj"]
            for expert in range(4):
                rank, there = divmod(expert, 2)
                gate, up = gate_up[expert].chunk(2)
                name = f"{own}experts.local_experts.{there}."
                want.put(stage, f"{name}linear_fc1.weight", gated(gate, up), rank)
                want.put(stage, f"{name}linear_fc2.weight", columns(down[expert]), rank)


def qwen3_pictures(want: Files) -> None:
    hub, own = "model.visual.", "image_encoder.encoder."
    first = ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
    want.copy(0, {name: name for name in first}, hub, own)
    picture_attention(want, hub, ("weight", "bias"))
    picture_mlp(want, hub, "linear_fc1", "linear_fc2")
    places = {"merger.": (1, "image_encoder.projector.")}
    places["deepstack_merger_list.0."] = (0, f"{PICTURE}0.deepstack_layer.")  # after layer 0, on the first stage
    places["deepstack_merger_list.1."] = (1, f"{PICTURE}0.deepstack_layer.")  # after layer 2, the second's layer 0
    for name, (stage, at) in places.items():
        want.copy(stage, {f"norm.{part}": f"layernorm.{part}" for part in ("weight", "bias")}, hub + name, at)
        plain_mlp(want, stage, hub + name, f"{at}encoder.", "linear_fc1", "linear_fc2")


def internvl_chat(want: Files) -> None:
    internvl_text(want)
    internvit(want, lambda number, part: want.hub[f"vision_model.encoder.layers.{number}.attn.qkv.{part}"], _ORIGINAL)


def internvl_hf(want: Files) -> None:
    internvl_text(want)

    def fused(number: int, part: str) -> torch.Tensor:
        at = f"vision_tower.encoder.layer.{number}.attention."
        return torch.cat([want.hub[f"{at}{which}_proj.{part}"] for which in "qkv"])

    internvit(want, fused, _HF)


def internlm2(want: Files) -> None:
    hub = "language_model.model."
    want.put(0, "text_decoder.embedding.word_embeddings.weight", rows(want.hub[f"{hub}tok_embeddings.weight"]))
    want.put(1, "text_decoder.output_layer.weight", rows(want.hub["language_model.output.weight"]))
    want.copy(1, {f"{hub}norm.weight": "text_decoder.decoder.final_layernorm.weight"})
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"{hub}layers.{number}.", f"{TEXT}{local}."
            norms = {"attention_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "pre_mlp_layernorm.weight"}
            want.copy(stage, norms, at, own)
            want.put(stage, f"{own}self_attention.linear_qkv.weight", rows(want.hub[f"{at}attention.wqkv.weight"]))
            want.put(stage, f"{own}self_attention.linear_proj.weight", columns(want.hub[f"{at}attention.wo.weight"]))
            gate, up, down = (want.hub[f"{at}feed_forward.w{i}.weight"] for i in (1, 3, 2))
            want.put(stage, f"{own}mlp.linear_fc1.weight", gated(gate, up))
            want.put(stage, f"{own}mlp.linear_fc2.weight", columns(down))
    internvit(want, lambda number, part: want.hub[f"vision_model.encoder.layers.{number}.attn.qkv.{part}"], _ORIGINAL)


def internvl_text(want: Files) -> None:
    text_ends(want, "language_model.model.", "language_model.lm_head.weight")
    text_attention(want, "language_model.model.", ("weight", "bias"))
    text_mlp(want, "language_model.model.")


_ORIGINAL = {
    "embeddings": "vision_model.embeddings.{}",
    "first": ("class_embedding", "position_embedding", "patch_embedding"),
    "layer": "vision_model.encoder.layers.{}.",
    "names": ("ls1", "ls2", "norm1", "norm2", "attn.proj"),
    "projector": ("mlp1.0", "mlp1.1", "mlp1.3"),
}
_HF = {
    "embeddings": "vision_tower.embeddings.{}",
    "first": ("cls_token", "position_embeddings", "patch_embeddings.projection"),
    "layer": "vision_tower.encoder.layer.{}.",
    "names": ("lambda_1", "lambda_2", "layernorm_before", "layernorm_after", "attention.projection_layer"),
    "projector": tuple(f"multi_modal_projector.{name}" for name in ("layer_norm", "linear_1", "linear_2")),
}


def internvit(want: Files, fused: Callable[[int, str], torch.Tensor], names: dict) -> None:
    """Each third of [Q|K|V] by heads: three on the first rank, two on the second."""
    heads = [slice(0, 3), slice(3, UNEVEN_HEADS)]
    own = "image_encoder.encoder."
    token, position, patches = (names["embeddings"].format(name) for name in names["first"])
    want.copy(0, {token: f"{own}embeddings.class_embedding", position: f"{own}embeddings.position_embedding"})
    projector = dict(zip(names["projector"], ("norm", "linear_fc1", "linear_fc2"), strict=True))
    for part in ("weight", "bias"):
        want.copy(0, {f"{patches}.{part}": f"{own}embeddings.patch_embedding.{part}"})
        want.copy(1, {f"{key}.{part}": f"image_encoder.projector.{name}.{part}" for key, name in projector.items()})
    ls1, ls2, norm1, norm2, proj = names["names"]
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            at, layer = names["layer"].format(number), f"{own}encoder.layers.{local}."
            for part in ("weight", "bias"):
                thirds = fused(number, part).unflatten(0, (3, UNEVEN_HEADS, 8))
                qkv = [thirds[:, which].flatten(0, 2) for which in heads]
                want.put(stage, f"{layer}self_attention.linear_qkv.{part}", qkv)
                norms = {f"{norm1}.{part}": f"input_layernorm.{part}", f"{norm2}.{part}": f"pre_mlp_layernorm.{part}"}
                want.copy(stage, norms, at, layer)
            out = want.hub[f"{at}{proj}.weight"].unflatten(1, (UNEVEN_HEADS, 8))
            want.put(stage, f"{layer}self_attention.linear_proj.weight", [out[:, which].flatten(1) for which in heads])
            copied = {f"{proj}.bias": "self_attention.linear_proj.bias", ls1: "ls1", ls2: "ls2"}
            if f"{at}attn.q_norm.weight" in want.hub:
                copied |= {f"attn.{x}_norm.weight": f"self_attention.{x}_layernorm.weight" for x in "qk"}
            want.copy(stage, copied, at, layer)
            plain_mlp(want, stage, f"{at}mlp.", f"{layer}mlp.", "fc1", "fc2")


def glm4v(want: Files) -> None:
    text, pictures, own = "model.language_model.", "model.visual.", "image_encoder.encoder."
    text_ends(want, text, "lm_head.weight")
    text_attention(want, text, ("weight", "bias"))
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, layer = f"{text}layers.{number}.", f"{TEXT}{local}."
            gate, up = want.hub[f"{at}mlp.gate_up_proj.weight"].chunk(2)
            want.put(stage, f"{layer}mlp.linear_fc1.weight", gated(gate, up))
            want.put(stage, f"{layer}mlp.linear_fc2.weight", columns(want.hub[f"{at}mlp.down_proj.weight"]))
            kept = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")
            want.copy(stage, {name: name for name in kept}, at, layer)
    first = ("patch_embed.proj.weight", "patch_embed.proj.bias", "post_conv_layernorm.weight")
    want.copy(0, {name: name for name in (*first, "embeddings.position_embedding.weight")}, pictures, own)
    last = {"post_layernorm.weight": "blocks.final_layernorm.weight"}
    want.copy(1, last | {f"downsample.{part}": f"downsample.{part}" for part in ("weight", "bias")}, pictures, own)
    projector = [key.removeprefix("model.visual.merger.") for key in want.hub if "visual.merger." in key]
    want.copy(1, {key: key for key in projector}, f"{pictures}merger.", "image_encoder.projector.")
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            names = {"norm1.weight": "input_layernorm.weight", "norm2.weight": "pre_mlp_layernorm.weight"}
            names |= {f"attn.{name}.weight": f"self_attention.{name}.weight" for name in ("qkv", "proj")}
            want.copy(stage, names, f"{pictures}blocks.{number}.", f"{PICTURE}{local}.")
    gated_picture_mlp(want, pictures)


def deepseek_vl(want: Files) -> None:
    text_ends(want, "model.language_model.", "lm_head.weight")
    text_attention(want, "model.language_model.", ("weight",))
    text_mlp(want, "model.language_model.")
    hub, own = "model.vision_model.", "image_encoder.encoder."
    for key in [key for key in want.hub if key.startswith(hub) and ".encoder.layers." not in key]:
        name = key.removeprefix(hub)
        want.copy(0 if name.startswith("embeddings.") else 1, {key: own + name})
    projector = [key for key in want.hub if key.startswith("model.aligner.")]
    want.copy(1, {key: key.replace("model.aligner.", "image_encoder.projector.") for key in projector})
    for stage, numbers in enumerate(PICTURE_STAGES):
        for local, number in enumerate(numbers):
            at = f"{hub}encoder.layers.{number}."
            of_layer = [key for key in want.hub if key.startswith(at)]
            want.copy(stage, {key: key.replace(at, f"{own}encoder.layers.{local}.") for key in of_layer})


def deepseek_vl2(want: Files) -> None:
    text_ends(want, "language.model.", "language.lm_head.weight")
    for stage, numbers in enumerate(TEXT_STAGES):
        for local, number in enumerate(numbers):
            at, own = f"language.model.layers.{number}.", f"{TEXT}{local}."
            q, kv = (want.hub[f"{at}self_attn.{name}.weight"] for name in ("q_proj", "kv_a_proj_with_mqa"))
            want.put(stage, f"{own}self_attention.linear_qkv.weight", [torch.cat([q, kv])] * TP)
            want.put(stage, f"{own}self_attention.linear_kvb.weight", rows(want.hub[f"{at}self_attn.kv_b_proj.weight"]))
            want.put(
                stage, f"{own}self_attention.linear_proj.weight", columns(want.hub[f"{at}self_attn.o_proj.weight"])
            )
            copied = {"self_attn.kv_a_layernorm.weight": "self_attention.k_layernorm.weight"}
            copied["input_layernorm.weight"] = "input_layernorm.weight"
            copied["post_attention_layernorm.weight"] = "pre_mlp_layernorm.weight"
            want.copy(stage, copied, at, own)
            deepseek_mlp(want, stage, number, f"{at}mlp.", f"{own}mlp.")
    ends = [key.removeprefix("vision.") for key in want.hub if key.startswith("vision.") and ".blocks." not in key]
    first = [key for key in ends if key.startswith(("patch_embed.", "pos_embed"))]
    want.copy(0, {key: key for key in first}, "vision.", "image_encoder.encoder.")
    want.copy(1, {key: key for key in ends if key not in first}, "vision.", "image_encoder.encoder.")
    projector = [key for key in want.hub if key.startswith("projector.")]
    want.copy(1, {key: f"image_encoder.{key}" for key in projector})
    for stage, numbers in enumerate(PICTURE_STAGES):
        want.copy(stage, {key: key for key in ("image_newline", "view_seperator")})
        for local, number in enumerate(numbers):
            names = [f"{name}.{part}" for name in ("attn.qkv", "mlp.fc1") for part in ("weight", "bias")]
            at = f"vision.blocks.{number}."
            want.copy(stage, {name: name for name in names}, at, f"image_encoder.encoder.blocks.{local}.")


def deepseek_mlp(want: Files, stage: int, number: int, at: str, own: str) -> None:
    """The first layer is dense, the others are routed."""

    def three(hub: str, name: str, rank: int | None = None) -> None:
        gate, up, down = (want.hub[f"{hub}{part}_proj.weight"] for part in ("gate", "up", "down"))
        want.put(stage, f"{name}linear_fc1.weight", gated(gate, up), rank)
        want.put(stage, f"{name}linear_fc2.weight", columns(down), rank)

    if number == 0:
        three(at, own)
        return
    names = {"gate.weight": "router.weight", "gate.e_score_correction_bias": "router.expert_bias"}
    want.copy(stage, names, at, own)
    three(f"{at}shared_experts.", f"{own}shared_experts.")
    for expert in range(4):
        rank, there = divmod(expert, 2)
        three(f"{at}experts.{expert}.", f"{own}experts.local_experts.{there}.", rank)


MODELS: dict[str, Callable[[Files], None]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "internvl_chat": internvl_chat,
    "internvl_hf": internvl_hf,
    "internlm2": internlm2,
    "glm4v": glm4v,
    "deepseek_vl": deepseek_vl,
    "deepseek_vl2": deepseek_vl2,
}
WITH_EXPERTS = ("qwen3_vl_moe", "deepseek_vl2")


@pytest.mark.parametrize("name", MODELS)
def test_every_file_holds_what_was_computed_by_hand(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    want = Files(folder, ep=2 if name in WITH_EXPERTS else 1)
    MODELS[name](want)
    layers = {**LAYERS, "audio": ((4, 0),)} if name == "qwen2_5_omni" else LAYERS
    layout = MegatronLayout(layers, tp=TP, ep=want.ep)
    config = json.loads((folder / "config.json").read_text())
    with open_weights(folder) as stored:
        found = files_of(stored, family_of(config), config, layout)
        assert found.keys() == {f"{rank}/model_optim_rng.pt" for rank in want.files}
        for rank, expected in want.files.items():
            held = found[f"{rank}/model_optim_rng.pt"]["model"]
            assert held.keys() == expected.keys(), rank
            for key, tensor in held.items():
                assert torch.equal(tensor.read(), expected[key]), f"{rank} {key}"


def test_a_gated_projection_cut_as_one_matrix_is_not_what_was_computed_by_hand(tmp_path: Path) -> None:
    """The comparison sees a cut that gives one rank the gates and the other the ups."""
    folder = save_tiny("internvl_chat", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = family_of(config).model(config)
    name = "text_decoder.decoder.layers.{n}.mlp.linear_fc1.{p}"
    wrong = replace(model, cuts={**model.cuts, name: TensorCut(0)})
    want = Files(folder)
    internvl_chat(want)
    with open_weights(folder) as stored:
        whole = {key: tensor for step in wrong.key_map.steps(stored) for key, tensor in step.targets.items()}
        found = divided_files(whole, wrong, MegatronLayout(LAYERS, tp=TP))
        key = "text_decoder.decoder.layers.0.mlp.linear_fc1.weight"
        held = found["mp_rank_00_000/model_optim_rng.pt"]["model"][key].read()
        assert held.shape == (INNER, H)
        assert not torch.equal(held, want.files["mp_rank_00_000"][key])
