"""Processors of every model family, made without a download: the real classes with tiny sizes, a tokenizer trained in
milliseconds, and a chat template in the family's format. `build_processor("gemma3")` takes hundredths of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.helpers import family_templates as templates

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor  # noqa: E402

PATCH_SIZE = 8
MERGE_SIZE = 2
MEL_BINS = 16
VOCAB_SIZE = 512
_SIDE = PATCH_SIZE * MERGE_SIZE
_AREA = {"shortest_edge": _SIDE**2, "longest_edge": 64 * 64}
_PATCHES = {"patch_size": PATCH_SIZE, "merge_size": MERGE_SIZE, "temporal_patch_size": 2}

_CORPUS = (
    "system\nuser\nassistant\nYou are a helpful assistant. # Tools\n<tools>\n</tools>",
    'Which digit is this? What is shown in the image? Answer with one word. {"name": "look", "arguments": {}}',
    "zero one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9 0.5 seconds Frame1: \n\n",
    "10 100 100 1000 00:00:00.000 00:00:01.500",
)
_CHATML = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "turn_start_token": "<|im_start|>"}
_VISION = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_SOUND = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}


class Family(NamedTuple):
    """A model family: how its processor is made and what conversations it takes."""

    build: Callable[[], Any]
    kinds: tuple[str, ...] = ()
    """Media that its processor takes."""
    tools: bool = False
    thinks: bool = False
    """Its template tells thoughts from answers."""


def build_processor(name: str) -> Any:
    """The processor (of a text model: the tokenizer) of a family."""
    return FAMILIES[name].build()


def save_processor(name: str, folder: Path) -> Path:
    """Write a family's processor or tokenizer into a folder, as a model's folder holds it."""
    build_processor(name).save_pretrained(folder)
    return folder


def byte_tokenizer(
    special: Mapping[str, str], template: str | None, *, begins: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the given special tokens.

    Args:
        special: Attribute → token.
        template: Chat template.
        begins: It puts its begin token in front of every text, as Llama's and Gemma's do.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(dict.fromkeys(special.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _wrapped(tokenizer, special, template, begins)


def word_tokenizer(special: Mapping[str, str], template: str | None) -> PreTrainedTokenizerFast:
    """A BPE that writes spaces as `▁` and puts one in front of every text, as SentencePiece models do."""
    special = {"unk_token": "<unk>", **special}
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special.values()),
        initial_alphabet=[chr(code) for code in range(10, 127)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _wrapped(tokenizer, special, template, begins=True)


def _wrapped(
    tokenizer: Tokenizer, special: Mapping[str, str], template: str | None, begins: bool
) -> PreTrainedTokenizerFast:
    if begins:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    named = ("eos_token", "bos_token", "pad_token", "unk_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: special[name] for name in named if name in special},
        extra_special_tokens={name: token for name, token in special.items() if name not in named},
        chat_template=template,
        model_max_length=8192,
        padding_side="right",
    )


# --- families --------------------------------------------------------------------------------------------------------


def _qwen_vl(processor: str, video: str, template: str) -> Callable[[], Any]:
    def build() -> Any:
        return getattr(transformers, processor)(
            image_processor=transformers.Qwen2VLImageProcessor(size=dict(_AREA), **_PATCHES),
            tokenizer=byte_tokenizer(_CHATML | _VISION, template),
            video_processor=getattr(transformers, video)(size=_AREA | {"longest_edge": 8 * 64 * 64}, **_PATCHES),
            chat_template=template,
        )

    return build


def _qwen_omni(processor: str, special: Mapping[str, str], template: str) -> Callable[[], Any]:
    def build() -> Any:
        return getattr(transformers, processor)(
            image_processor=transformers.Qwen2VLImageProcessor(size=dict(_AREA), **_PATCHES),
            video_processor=transformers.Qwen2VLVideoProcessor(size=dict(_AREA), **_PATCHES),
            feature_extractor=WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=2),
            tokenizer=byte_tokenizer(_CHATML | special, template),
            chat_template=template,
        )

    return build


def _qwen3_asr() -> Any:
    return transformers.Qwen3ASRProcessor(
        feature_extractor=transformers.Qwen3ASRFeatureExtractor(feature_size=MEL_BINS, chunk_length=2),
        tokenizer=byte_tokenizer(_CHATML | _SOUND, templates.QWEN3_ASR),
        chat_template=templates.QWEN3_ASR,
    )


def _internvl() -> Any:
    special = _CHATML | {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
        ),
        tokenizer=byte_tokenizer(special, templates.INTERNVL),
        video_processor=transformers.InternVLVideoProcessor(size={"height": 16, "width": 16}),
        image_seq_length=4,
        chat_template=templates.INTERNVL,
    )


def _glm4v() -> Any:
    roles = {f"{role}_token": f"<|{role}|>" for role in ("system", "user", "assistant", "observation")}
    borders = {
        f"{edge}_{kind}_token": f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")
    }
    special = {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "mask_token_": "[gMASK]",
        "sop_token": "<sop>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        **roles,
        **borders,
    }
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(size=dict(_AREA), **_PATCHES),
        tokenizer=byte_tokenizer(special, templates.GLM4V),
        video_processor=transformers.Glm4vVideoProcessor(
            size=_AREA | {"longest_edge": 8 * 64 * 64}, max_image_size={"longest_edge": 8 * 64 * 64}, **_PATCHES
        ),
        chat_template=templates.GLM4V,
    )


def _llava() -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=word_tokenizer(special, templates.LLAVA),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=templates.LLAVA,
    )


def _gemma3() -> Any:
    special = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
        "turn_start_token": "<start_of_turn>",
        "turn_end_token": "<end_of_turn>",
    }
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=byte_tokenizer(special, templates.GEMMA3, begins=True),
        image_seq_length=4,
        chat_template=templates.GEMMA3,
    )


def _pixtral() -> Any:
    marks = ("INST", "/INST", "IMG", "IMG_BREAK", "IMG_END", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_CALLS")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | {
        f"mark_{number}_token": f"[{mark}]" for number, mark in enumerate((*marks, "TOOL_RESULTS", "/TOOL_RESULTS"))
    }
    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={"longest_edge": 64}, patch_size={"height": PATCH_SIZE, "width": PATCH_SIZE}
        ),
        tokenizer=byte_tokenizer(special, templates.PIXTRAL, begins=True),
        patch_size=PATCH_SIZE,
        spatial_merge_size=MERGE_SIZE,
        chat_template=templates.PIXTRAL,
    )


def _kimi_k25() -> Any:
    roles = [f"<|im_{role}|>" for role in ("system", "user", "assistant", "middle")]
    calls = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"]
    calls += ["<|tool_call_argument_begin|>", "<|tool_call_end|>"]
    media = ["<|media_begin|>", "<|media_content|>", "<|media_end|>"]
    special = {
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "image_token": "<|media_pad|>",
        "video_token": "<|kimi_k25_video_placeholder|>",
        **{f"mark_{number}_token": mark for number, mark in enumerate(roles + calls + media)},
    }
    side = {"max_height": 8, "max_width": 8}
    return transformers.Kimi_K25Processor(
        image_processor=transformers.Kimi_K25ImageProcessor(size=dict(side), patch_size=PATCH_SIZE, max_patches=64),
        tokenizer=byte_tokenizer(special, templates.KIMI_K25),
        video_processor=transformers.Kimi_K25VideoProcessor(size=dict(side), patch_size=PATCH_SIZE, max_patches=64),
        chat_template=templates.KIMI_K25,
    )


def _whisper() -> Any:
    special = {
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "start_token": "<|startoftranscript|>",
        "language_token": "<|en|>",
        "task_token": "<|transcribe|>",
        "notimestamps_token": "<|notimestamps|>",
    }
    base = byte_tokenizer(special, None)
    tokenizer = transformers.WhisperTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|pad|>",
    )
    return transformers.WhisperProcessor(WhisperFeatureExtractor(feature_size=MEL_BINS, chunk_length=2), tokenizer)


def _text_qwen3() -> Any:
    return byte_tokenizer(_CHATML, templates.QWEN3)


def _text_llama3() -> Any:
    special = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "pad_token": "<|finetune_right_pad_id|>",
        "header_start_token": "<|start_header_id|>",
        "header_end_token": "<|end_header_id|>",
    }
    return byte_tokenizer(special, templates.LLAMA3, begins=True)


def _text_gpt_oss() -> Any:
    marks = ("start", "end", "message", "channel", "call")
    special = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"} | {
        f"{mark}_mark_token": f"<|{mark}|>" for mark in marks
    }
    return byte_tokenizer(special, templates.GPT_OSS)


_OMNI25 = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_OMNI3 = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    **_SOUND,
}
_SEES = ("image", "video")

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(_qwen_vl("Qwen2VLProcessor", "Qwen2VLVideoProcessor", templates.QWEN2_VL), _SEES, tools=True),
    "qwen2_5_vl": Family(
        _qwen_vl("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", templates.QWEN2_VL), _SEES, tools=True
    ),
    "qwen3_vl": Family(_qwen_vl("Qwen3VLProcessor", "Qwen3VLVideoProcessor", templates.QWEN3_VL), _SEES, tools=True),
    "qwen3_5": Family(
        _qwen_vl("Qwen3VLProcessor", "Qwen3VLVideoProcessor", templates.QWEN3_5), _SEES, tools=True, thinks=True
    ),
    "internvl": Family(_internvl, _SEES, tools=True),
    "glm4v": Family(_glm4v, _SEES, tools=True, thinks=True),
    "llava": Family(_llava, ("image",)),
    "gemma3": Family(_gemma3, ("image",)),
    "pixtral": Family(_pixtral, ("image",), tools=True),
    "kimi_k25": Family(_kimi_k25, _SEES, tools=True, thinks=True),
    "qwen2_5_omni": Family(
        _qwen_omni("Qwen2_5OmniProcessor", _OMNI25, templates.QWEN2_5_OMNI), (*_SEES, "audio"), tools=True
    ),
    "qwen3_omni": Family(
        _qwen_omni("Qwen3OmniMoeProcessor", _OMNI3, templates.QWEN3_OMNI), (*_SEES, "audio"), tools=True, thinks=True
    ),
    "qwen3_asr": Family(_qwen3_asr, ("audio",)),
    "whisper": Family(_whisper, ("audio",)),
    "qwen3": Family(_text_qwen3, tools=True, thinks=True),
    "llama3": Family(_text_llama3, tools=True),
    "gpt_oss": Family(_text_gpt_oss, tools=True, thinks=True),
}
"""GLM-4.5V has GLM-4.1V's processor, Mistral3 that of Pixtral, Qwen3.5 that of Qwen3-VL, all MoE siblings likewise."""
