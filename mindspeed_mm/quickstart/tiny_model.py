"""A Qwen3-VL of 398,016 parameters with its real processor: configuration, locally trained tokenizer, chat template;
and the same as a mixture of experts.

The folder holds no weights: training starts from scratch (`model.train_from_scratch: true`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

prepare_for_transformers()  # its processors import torchvision, which may be built for another torch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import (  # noqa: E402
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

VOCABULARY = 344
PATCH, MERGE = 16, 2
LAYERS = 2
"""Of the text model, unless told otherwise."""
SECTIONS = ("text_config", "vision_config")
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_model_folder(folder: Path, texts: Sequence[str], experts: int = 0, layers: int = LAYERS) -> None:
    """Write configuration, processor and generation configuration; `texts` teach the tokenizer its merges.

    The text model has `layers` layers. With `experts`, each of them has so many instead of one inner layer, and a token
    goes through two.
    """
    tokenizer = train_tokenizer(texts)
    config = build_config(tokenizer, layers)
    (mixture_of_experts(config, experts) if experts else config).save_pretrained(folder)
    build_processor(tokenizer).save_pretrained(folder)
    build_generation_config(tokenizer).save_pretrained(folder)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCABULARY` tokens, special ones first."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Qwen3-VL's own processor; one digit of 32×32 pixels becomes 4 patches and 1 token."""
    common: JsonObject = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 8 * 32 * 32},  # areas in pixels
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**common),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**common),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, layers: int = LAYERS) -> Qwen3VLConfig:
    """Hidden width 64, two vision layers (the first feeds the text through deepstack), tied head; 0.4 M parameters with
    two text layers."""
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=True,
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "pad_token_id": token_ids["<|endoftext|>"],
            "eos_token_id": token_ids["<|im_end|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 4,
            "deepstack_visual_indexes": [0],
        },
    )


def mixture_of_experts(config: Qwen3VLConfig, experts: int) -> Qwen3VLMoeConfig:
    """The same model with experts of half the inner width."""
    inner = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    sections = config.to_dict()
    text, vision = ({k: v for k, v in sections[name].items() if k != "model_type"} for name in SECTIONS)
    tokens = {name: value for name, value in sections.items() if name.endswith("_token_id")}
    return Qwen3VLMoeConfig(
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        dtype="float32",
        tie_word_embeddings=True,
        text_config=text | inner,
        vision_config=vision,
        **tokens,
    )


def build_generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """Greedy decoding that stops at the end of the assistant's turn."""
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
