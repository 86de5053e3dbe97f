"""FLOPs read off a model against what torch counts while the model runs, forward and backward."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.models.behaviour.multi_token import attach_multi_token
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.models.lora.experts import adapt_experts
from mindspeed_mm.fsdp.models.lora.names import ADAPTER
from mindspeed_mm.fsdp.tools.flops_tool.count import Flops
from mindspeed_mm.fsdp.tools.flops_tool.imagined import SampleShape, imagined_batch
from mindspeed_mm.fsdp.tools.flops_tool.products import CHUNK, Reader, delta_sizes
from mindspeed_mm.fsdp.tools.flops_tool.reading import count_flops
from mindspeed_mm.fsdp.tools.flops_tool.units import CUTS, PATCHES
from mindspeed_mm.fsdp.tools.flops_tool.units import MEDIA as MEDIA_TOKENS
from tests.helpers.counted_flops import batched_product
from tests.helpers.llava_next import LLAVA_NEXT
from tests.helpers.packed_families import FAMILIES, IMAGE, TEXT, VIDEO, Family, of, sound
from tests.helpers.packed_more_families import MORE
from tests.helpers.released import FLUX_1_DEV, WAN_2_1_I2V_14B, WAN_2_1_T2V_1_3B, Folder, write_folder
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generator_families import FAMILIES as GENERATORS
from tests.helpers.tiny_generator_families import smaller_pictures

TOKENS = 128
MLA = {
    "moe_intermediate_size": 24, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
OWN = {
    f"deepseek_v3 with {kind} queries": Family(
        of("DeepseekV3Config", **TEXT | MLA, q_lora_rank=rank), "DeepseekV3ForCausalLM"
    )
    for kind, rank in (("short", 20), ("whole", None))
}
ALL = FAMILIES | MORE | OWN | LLAVA_NEXT
MEDIA = ("image", "image2", "video")


def build(name: str) -> Any:
    """A family's model in fp32, attention and experts as plain products, which torch counts."""
    import transformers

    torch.manual_seed(0)
    family = ALL[name]
    config = family.config()
    model = getattr(transformers, family.model)._from_config(config, attn_implementation="eager").train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def batch_of(name: str, kinds: tuple[str, ...] = (), rows: int = 1) -> Batch:
    """Media of these kinds, then text up to `TOKENS`."""
    family, draw = ALL[name], torch.Generator().manual_seed(0)
    ids: list[int] = []
    tensors: dict[str, torch.Tensor] = {}
    for make in (family.media[kind] if isinstance(kind, str) else kind for kind in kinds):
        item, more = make(draw)
        ids += [20, *item]
        for key, value in more.items():
            value = value.float() if value.is_floating_point() else value
            tensors[key] = torch.cat([tensors[key], value]) if key in tensors else value
    filled = torch.tensor([ids + [30] * (TOKENS - len(ids))]).repeat(rows, 1)
    batch = {"input_ids": filled, "attention_mask": torch.ones_like(filled), **tensors}
    if family.marks and kinds:
        batch[family.marks] = ((filled == IMAGE) + 2 * (filled == VIDEO)).int()
    return batch


def solved(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
    """torch counts no triangular systems; here one counts as the product that it replaces."""
    return 2 * math.prod(matrix) * right[-1]


def counted(run: Callable[[], torch.Tensor]) -> int:
    """FLOPs of a forward and a backward pass by torch's counter."""
    formulas = {torch.ops.aten.linalg_solve_triangular: solved, torch.ops.aten.bmm: batched_product}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def ours(model: nn.Module, batch: Batch, **options: Any) -> Flops:
    count = count_flops(model, **{"head_on_labels": False, **options})
    assert count is not None
    return count.of(count.lengths(batch)).full


def run_of(model: Any, batch: Batch) -> Callable[[], torch.Tensor]:
    return lambda: model(**batch, use_cache=False).logits


@pytest.mark.parametrize(
    "name",
    [
        "llama", "qwen3 with a window", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3 with short queries",
        "deepseek_v3 with whole queries", "mimo_v2_flash",
    ],
)  # fmt: skip
def test_language_models(name: str) -> None:
    model, batch = build(name), batch_of(name, rows=2)
    assert ours(model, batch).model == counted(run_of(model, batch))


@pytest.mark.parametrize("frozen", ["", "tower", "decoder"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_models_that_see(name: str, frozen: str) -> None:
    model, batch = build(name), batch_of(name, MEDIA)
    model.model.visual.requires_grad_(frozen != "tower")
    model.model.language_model.requires_grad_(frozen != "decoder")
    assert ours(model, batch).model == counted(run_of(model, batch))


@pytest.mark.parametrize("name", ["llava", "internvl", "glm4v", "gemma3", "deepseek_vl", "kimi_k25", "janus"])
def test_other_towers(name: str) -> None:
    model, batch = build(name), batch_of(name, ("image", "image2"))
    assert ours(model, batch).model == counted(run_of(model, batch))


def test_sounds_of_whole_windows() -> None:
    """A window that a sound does not fill is convolved with its padding, which is no work of ours."""
    model = build("omni")
    batch = batch_of("omni", ("image2", sound(64, 16), sound(48, 12)))  # type: ignore[arg-type]
    assert ours(model, batch).model == counted(run_of(model, batch))


@pytest.mark.parametrize("frozen", [False, True])
def test_encoder_of_sounds(frozen: bool) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=256, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=48, num_mel_bins=16, max_source_positions=50,
        pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").train()
    model.model.encoder.requires_grad_(not frozen)
    batch = {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": torch.full((2, 40), 3)}
    assert ours(model, batch).model == counted(run_of(model, batch))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "bailing_hybrid"])
def test_linear_attention(name: str) -> None:
    """Chunks of 64 tokens as in transformers' reference; what it saves, computes by elements or pads stands below."""
    model, batch = build(name), batch_of(name, rows=2)
    count = count_flops(model, head_on_labels=False)
    assert count is not None
    parts = count.by_module(count.lengths(batch))
    own = sum(flops.full.model for (_, kind), flops in parts.items() if kind != "convolution")
    expected = counted(run_of(model, batch)) - _convolutions(run_of(model, batch))
    for net in (module for module in model.modules() if hasattr(module, "conv1d")):
        heads, key, value = delta_sizes(net, dict(net.named_children()))  # type: ignore[misc]
        # The state is zero before the first chunk and nobody reads it behind the last: four gradients are not formed.
        expected += 2 * heads * 4 * 2 * CHUNK * key * value
        if hasattr(net, "forget_gate"):  # K·Kᵀ and Q·Kᵀ with a decay for each channel: multiplied by elements
            expected += 3 * 2 * heads * 2 * 2 * TOKENS * CHUNK * key
    assert own == expected


@pytest.mark.parametrize("name", LLAVA_NEXT)
def test_tiles_that_fill_up_a_picture_are_not_counted(name: str) -> None:
    """Two tiles of zeros behind each picture's own: the model leaves them out. What stands between tower and decoder
    and mixes tokens by attention is told to be missing, not counted as if all tokens saw each other."""
    model, batch = build(name), batch_of(name, ("image", "image2"))
    pixels = batch["pixel_values"]
    batch["pixel_values"] = torch.cat([pixels, torch.zeros_like(pixels)], dim=1)
    count = count_flops(model, head_on_labels=False)
    assert count is not None
    between = ["multi_modal_projector"]
    if name == "granite4_vision":
        between = ["layerwise_projectors", "spatial_projectors"]
        assert count.uncounted == tuple(f"model.{part}" for part in between)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run_of(model, batch)()
    theirs = counter.get_total_flops()
    for path, flops in counter.get_flop_counts().items():
        if re.fullmatch(rf"\w+\.model\.({'|'.join(between)})(\.\d)?", path):
            theirs -= sum(flops.values())
    found = count.by_module(count.lengths(batch))
    assert theirs == sum(flops.full.forward for (module, _), flops in found.items() if "projector" not in module)


def test_short_convolutions_and_flat_patches() -> None:
    """LFM2-VL: two pictures of unlike sizes; patches that only fill up the smaller one are no work of ours."""
    model = build("lfm2_vl")

    def pictures(_: torch.Generator) -> tuple[list[int], Batch]:
        shapes = torch.tensor([[4, 4], [2, 4]])
        real = (torch.arange(16) < shapes.prod(dim=-1, keepdim=True)).int()
        pixels = torch.randn(2, 16, 3 * model.config.vision_config.patch_size**2)
        return [IMAGE] * 6, {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": real}

    batch = batch_of("lfm2_vl", (pictures,))  # type: ignore[arg-type]
    count = count_flops(model, head_on_labels=False)
    assert count is not None
    lengths = count.lengths(batch)
    assert (lengths[PATCHES], lengths[MEDIA_TOKENS]) == ([16, 8], [6])
    filled = {**lengths, PATCHES: [16, 16], CUTS: [16, 16]}  # what eager attention runs
    own = sum(flops.full.model for (_, kind), flops in count.by_module(filled).items() if kind != "convolution")
    assert own == counted(run_of(model, batch)) - _convolutions(run_of(model, batch))


@pytest.mark.parametrize("name", ["llava", "internvl", "gemma3", "lfm2_vl", "qwen3_vl"])
def test_an_imagined_picture_has_a_real_ones_tokens(name: str) -> None:
    model, real = build(name), batch_of(name, ("image",))
    height, width = 16, 16
    if name in ("lfm2_vl", "qwen3_vl"):  # pictures of any size
        patch = model.config.vision_config.patch_size
        *_, rows, columns = real.get("spatial_shapes", real.get("image_grid_thw"))[0].tolist()
        height, width = rows * patch, columns * patch
    imagined = imagined_batch(model, SampleShape(tokens=TOKENS, images=1, height=height, width=width), 1)
    count = count_flops(model)
    assert count is not None
    found, expected = count.lengths(imagined), count.lengths(real)
    for unit in (CUTS, PATCHES, MEDIA_TOKENS):
        assert list(found[unit]) == list(expected[unit]) != []


def _convolutions(run: Callable[[], torch.Tensor]) -> int:
    """What torch counts of depthwise convolutions: over padding, and their gradient as if they were not depthwise."""
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    totals = counter.get_flop_counts()["Global"]
    return sum(flops for operation, flops in totals.items() if "convolution" in str(operation))


@pytest.mark.parametrize(
    "targets",
    [["q_proj", "v_proj"], ["o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]],
)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_adapters(name: str, targets: list[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = build(name)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=rf".*\.layers\..*\.({'|'.join(targets)})"), model)
    batch = batch_of(name, MEDIA if name == "qwen3_vl" else ())
    assert ours(model, batch).model == counted(run_of(model, batch))


def test_adapters_of_fused_experts() -> None:
    """Their product is added to the weights: the experts' own gradient is formed on the way to theirs."""
    from peft import LoraConfig, inject_adapter_in_model

    model, batch = build("qwen3_moe"), batch_of("qwen3_moe")
    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapt_experts(model)
    assert ours(model, batch).model == counted(run_of(model, batch))


def test_heads_for_further_tokens() -> None:
    """Two depths: the layers of each, their common projection twice, the output head twice more."""
    model, batch = build("qwen3"), batch_of("qwen3")
    plain = ours(model, batch)
    attach_multi_token(model, 2)
    layer = 2 * sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() > 1) * TOKENS
    layer += 4 * TEXT["num_attention_heads"] * 8 * TOKENS**2
    more = 2 * (layer + 2 * 2 * 32 * 32 * TOKENS)
    assert ours(model, batch).model - plain.model == 3 * more
    head = 2 * 32 * 256 * TOKENS
    assert ours(model, batch, head_on_labels=True).model - ours(model, batch).model == 3 * 2 * head


def test_below_what_is_trained_nothing_is_differentiated() -> None:
    model, batch = build("qwen3"), batch_of("qwen3", rows=2)
    whole = ours(model, batch).model
    model.model.embed_tokens.requires_grad_(False)
    assert ours(model, batch).model == whole == counted(run_of(model, batch))  # the first norm is trained
    model.model.layers[0].requires_grad_(False)
    assert ours(model, batch).model == counted(run_of(model, batch)) < whole


def test_recomputation_is_the_forward_pass_of_the_blocks() -> None:
    """torch's re-entrant checkpoint runs the whole block again."""
    model, batch = build("qwen3"), batch_of("qwen3", rows=2)
    names = [f"model.layers.{number}" for number in range(2)]
    plain = ours(model, batch, recompute=names)
    assert plain.hardware > plain.model == ours(model, batch).hardware
    for layer in model.model.layers:
        forward = layer.forward
        layer.forward = (
            lambda *args, _forward=forward, **kwargs: checkpoint(  # type: ignore[misc]
                lambda hidden: _forward(hidden, *args[1:], **kwargs), args[0], use_reentrant=True
            )
        )
    assert plain.hardware == counted(run_of(model, batch))


def test_recomputation_that_keeps_attention() -> None:
    model, batch = build("qwen3"), batch_of("qwen3")
    names = ["model.layers.0", "model.layers.1"]
    whole, kept = (ours(model, batch, recompute=names, keeps=kinds) for kinds in ((), ("attention",)))
    attention = 2 * 4 * TEXT["num_attention_heads"] * 8 * TOKENS**2
    assert whole.recompute - kept.recompute == attention


@pytest.mark.parametrize("trained", ["all", "adapters", "blocks"])
@pytest.mark.parametrize(
    ("content", "changes", "size", "image_tokens"),
    [
        (FLUX_1_DEV, {"num_layers": 2, "num_single_layers": 3}, MediaSize(1, 1024, 768), 0),
        (WAN_2_1_T2V_1_3B, {"num_layers": 2}, MediaSize(17, 480, 832), 0),
        (WAN_2_1_I2V_14B, {"num_layers": 2}, MediaSize(17, 480, 832), 257),
    ],
    ids=["FLUX.1-dev", "Wan2.1 t2v 1.3B", "Wan2.1 i2v 14B"],
)
def test_generators_of_released_widths(
    tmp_path: Path, content: Folder, changes: dict[str, int], size: MediaSize, image_tokens: int, trained: str
) -> None:
    """On the meta device, where torch counts as well."""
    adapter = find_adapter(write_folder(tmp_path, content), transformer=changes)
    batch = denoised(adapter, size, image_tokens)
    with torch.device("meta"):
        model = diffusers_class(adapter.transformer_class).from_config(adapter.transformer_config)
        train_part_of(model, trained)
        inputs = adapter.inputs(batch["latents"], torch.empty(2), batch, 3.5)
        expected = counted(lambda: model(**inputs, return_dict=False)[0])
    facts_of(model).adapter = adapter
    assert ours(model, batch).model == expected


def denoised(adapter: Any, size: MediaSize, image_tokens: int = 0) -> Batch:
    """Two samples without values."""
    config, shape = adapter.transformer_config, adapter.geometry.latent_shape(size)
    width = config["joint_attention_dim" if adapter.task == "t2i" else "text_dim"]
    with torch.device("meta"):
        batch = {"latents": torch.empty(2, *shape), "prompt_embeds": torch.empty(2, adapter.text_tokens, width)}
        if adapter.task == "t2i":
            batch["pooled_prompt_embeds"] = torch.empty(2, config["pooled_projection_dim"])
        if adapter.task == "i2v":
            batch["condition_latents"] = torch.empty(2, *shape)
            batch["image_embeds"] = torch.empty(2, image_tokens, config["image_dim"])
    return batch


def train_part_of(model: nn.Module, part: str) -> None:
    if part == "all":
        return
    model.requires_grad_(False)
    if part == "blocks":
        for block in getattr(model, "single_transformer_blocks", None) or model.blocks:  # type: ignore[union-attr]
            block.requires_grad_(True)
        return
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]), model)


def test_the_published_rule_for_a_released_size() -> None:
    """PaLM, appendix B: (6 N + 12 · layers · heads · width · length) a token in full, half of the second term when
    attention is causal; N without the embedding, which multiplies nothing, and norms."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    )  # fmt: skip
    with parameters_on_meta():
        model = LlamaForCausalLM._from_config(config)
    multiplied = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)
    assert multiplied == pytest.approx(7.5e9, rel=0.01)
    length = 8192
    count = count_flops(model)
    assert count is not None
    found = count.of({"text": [length, length], "labels": [2 * length]})
    attention = 12 * 32 * 4096 * length**2
    assert found.full.model == 2 * (6 * multiplied * length + attention)
    assert found.causal.model == 2 * (6 * multiplied * length + attention / 2)
    assert found.full.model / found.causal.model == pytest.approx(1.125, abs=0.001)


def test_the_head_costs_its_rows_alone() -> None:
    model, batch = build("llama"), batch_of("llama")
    count = count_flops(model)
    assert count is not None
    parts = count.by_module(count.lengths(batch | {"_rows": torch.arange(5)}))
    assert parts["lm_head", "linear"].full == Flops(2.0 * 5 * 32 * 256, 4.0 * 5 * 32 * 256, 0.0)


def faulty_experts(self: Reader, name: str, experts: nn.Module) -> int:
    return 4  # all of them


def test_a_count_of_all_experts_is_found_out() -> None:
    model, batch = build("qwen3_moe"), batch_of("qwen3_moe")
    expected = counted(run_of(model, batch))
    assert ours(model, batch).model == expected
    with mock.patch.object(Reader, "_experts_a_token", faulty_experts):
        assert ours(model, batch).model > expected


@pytest.mark.parametrize(
    "name", ["sd3", "lumina2", "qwen_image", "flux2", "z_image", "cogvideox", "hunyuan_video", "ltx_video"]
)
def test_other_generators(name: str, tmp_path: Path) -> None:
    """Of full captions, in sizes that no model pads."""
    GENERATORS[name].make(tmp_path / "model")
    adapter = find_adapter(tmp_path / "model")
    size = MediaSize(GENERATORS[name].frames, 32, 32)
    config, shape = adapter.transformer_config, adapter.geometry.latent_shape(size)
    widths = ("joint_attention_dim", "text_embed_dim", "cap_feat_dim", "caption_channels")
    width = next(config[key] for key in widths if config.get(key))
    batch: Batch = {
        "latents": torch.randn(2, *shape),
        "prompt_embeds": torch.randn(2, adapter.text_tokens if name == "cogvideox" else 32, width),
        "pooled_prompt_embeds": torch.randn(2, config.get("pooled_projection_dim") or 1),
    }
    batch["prompt_mask"] = torch.ones(batch["prompt_embeds"].shape[:2], dtype=torch.int64)
    model = diffusers_class(adapter.transformer_class).from_config(config)
    inputs = adapter.inputs(batch["latents"], torch.full((2,), 0.5), batch, 3.5)
    with sdpa_kernel(SDPBackend.MATH):
        expected = counted(lambda: adapter.prediction(model(**inputs, return_dict=False), batch["latents"].shape))
    if name == "qwen_image":  # nobody goes on from the last block's captions: a backward pass that we count
        last = [(n, m) for n, m in model.transformer_blocks[-1].named_modules() if isinstance(m, nn.Linear)]
        spared = sum(m.weight.numel() for n, m in last if n.startswith(("attn.to_add_out", "txt_mlp")))
        expected += 4 * spared * 2 * 32
    facts_of(model).adapter = adapter
    # Z-Image lists its last layer before what feeds it: one small gradient is missed.
    assert ours(model, batch).model == pytest.approx(expected, rel=1e-3 if name == "z_image" else 0)


@pytest.mark.parametrize("name", ["kontext", "fill", "vace_references", "qwen_image_edit_plus"])
def test_given_pictures_in_the_sequence_are_counted(name: str, tmp_path: Path) -> None:
    """Those of FLUX Fill stand in the channels of the noise. What is not trained needs nothing but a forward pass."""
    if name in GENERATORS:
        GENERATORS[name].make(tmp_path / "model")
    else:
        make_tiny_conditioned(tmp_path / "model", name)
    adapter = find_adapter(tmp_path / "model", task={"kontext": "edit", "fill": "fill"}.get(name))
    config, shape = (
        adapter.transformer_config,
        adapter.geometry.latent_shape(MediaSize(9 if name.startswith("vace") else 1, 32, 32)),
    )
    width = config["text_dim" if name.startswith("vace") else "joint_attention_dim"]
    roles = [role.name for role in adapter.roles[adapter.task]]
    with smaller_pictures():
        conditions = adapter.condition_shapes(shape, roles)
    batch: Batch = {
        "latents": torch.randn(2, *shape),
        "prompt_embeds": torch.randn(2, 32, width),
        "pooled_prompt_embeds": torch.randn(2, config.get("pooled_projection_dim") or 1),
        "prompt_mask": torch.ones(2, 32, dtype=torch.int64),
        **{key: torch.randn(2, *sides) for key, sides in conditions.items()},
    }
    model = diffusers_class(adapter.transformer_class).from_config(config).requires_grad_(False)
    inputs = adapter.inputs(batch["latents"], torch.full((2,), 0.5), batch, 3.5)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs, return_dict=False)
    facts_of(model).adapter = adapter
    assert ours(model, batch).forward == counter.get_total_flops()
    assert (adapter.given_tokens(batch) > 0) is (name != "fill")
