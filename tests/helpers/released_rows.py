"""The families of the tables, each by a released size: what of the size stays, which processor belongs to it, and a
small folder with rows to train on, in the released keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ruamel.yaml import YAML

from tests.helpers import family_templates as templates
from tests.helpers.released_layouts import (
    Config,
    Release,
    Shape,
    merged,
    release,
    require,
    shallow,
    shrunk,
    tiny_layout,
    write_weights,
)
from tests.helpers.tiled_families import idefics3_processor, llava_onevision_processor
from tests.helpers.tiny_deepseek_ocr import make_tiny_deepseek_ocr
from tests.helpers.tiny_deepseek_vl2 import make_tiny_deepseek_vl2
from tests.helpers.tiny_funasr import build_processor
from tests.helpers.tiny_internvl_chat import make_tiny_internvl_chat
from tests.helpers.tiny_kimi_k3 import make_tiny_kimi_k3
from tests.helpers.tiny_kimi_vl import make_tiny_kimi_vl
from tests.helpers.tiny_media import write_video
from tests.helpers.tiny_mimov2_5 import make_tiny_mimov2_5
from tests.helpers.tiny_ming import make_tiny_ming
from tests.helpers.tiny_more_processors import CODES, MORE, chameleon_processor, code_tokens
from tests.helpers.tiny_processors import FAMILIES, byte_tokenizer
from tests.helpers.tiny_run import STEADY
from tests.helpers.tiny_sounds import sound_bytes, tone
from tests.helpers.tiny_speech import (
    COSYVOICE_CODES,
    MOSS_CODEBOOKS,
    MOSS_CODES,
    MOSS_MARKS,
    SMALL_QWEN3TTS,
    moss_tokenizer,
    speech_tokenizer,
    write_cosyvoice_rows,
    write_moss_rows,
    write_qwen3tts_rows,
)
from tests.helpers.tiny_step3_vl_10b import make_tiny_step3_vl_10b

import transformers  # isort: skip  (after the guard of the lines above)

QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


@dataclass(frozen=True)
class Row:
    """One family.

    Args:
        size: Of `tests/released`.
        processor: Makes its processor, or of a text model the tokenizer.
        kinds: Media in its rows.
        tokens: Key of a token's number, anywhere in the configuration → the token.
        small: What of the small configuration the rule does not know.
        both: Settings of the configuration at both widths: what the record lacks.
        base: The configuration at its released widths where the record's is not in transformers' keys.
        adapted: Modules that get adapters, where they are not those of the default.
        files: What else lies in the folder.
        tied: Keys of weights that another key has, too: they are stored once.
        rows: Writes rows of another kind than conversations into a folder, and returns the file.
        dataset: Of `data.dataset_param`, where the rows are of another kind.
        processing: What its processor has to be told beside the conversation to write it as the folder says.
        rate: Samples a second that its processor takes.
    """

    size: str
    processor: Callable[[], Any]
    kinds: tuple[str, ...] = ()
    tokens: Mapping[str, str] = field(default_factory=dict)
    small: Config = field(default_factory=dict)
    both: Config = field(default_factory=dict)
    base: Callable[[Config], Config] = lambda config: config
    adapted: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    rows: Callable[[Path], Path] | None = None
    dataset: Config = field(default_factory=dict)
    processing: Config = field(default_factory=dict)
    rate: int = 16000

    @cached_property
    def release(self) -> Release:
        """What is recorded."""
        return release(self.size)

    @cached_property
    def full(self) -> Config:
        """Two layers of every kind, of the released widths."""
        return merged(shallow(self.base(self.release.config)), self.both)

    def tiny(self, tokenizer: Any) -> Config:
        """The small configuration, with the numbers of a tokenizer."""
        return _numbered(merged(shrunk(self.full), self.small), self.tokens, tokenizer)

    def layout(self, tiny: Config) -> dict[str, Shape]:
        """Key → shape of the small folder."""
        layout = tiny_layout(self.release, self.full, tiny)
        return {key: shape for key, shape in layout.items() if key not in self.tied}

    def write(self, folder: Path) -> Path:
        """The small folder as it is released."""
        require(self.full["model_type"])
        processor = self.processor()
        config = self.tiny(getattr(processor, "tokenizer", processor))
        write_weights(folder, self.layout(config))
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=1), encoding="utf-8")
        processor.save_pretrained(folder)
        for name in self.files:
            (folder / name).write_bytes(name.encode())
        return folder


@dataclass(frozen=True)
class WrittenRow:
    """A family that is built here, whose small folder is written out by hand.

    Args:
        make: Writes the folder.
        lacking: A class of transformers that it is built on; where an older release lacks it, the test is skipped.
    """

    make: Callable[[Path], object]
    lacking: str
    kinds: tuple[str, ...] = ("image",)
    adapted: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    rows: None = None
    rate: int = 16000
    dataset: Config = field(default_factory=dict)
    processing: Config = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The small folder as it is released."""
        if not hasattr(transformers, self.lacking):
            pytest.skip(f"transformers {transformers.__version__} has no {self.lacking}")
        self.make(folder)
        return folder


def _numbered(config: Config, tokens: Mapping[str, str], tokenizer: Any) -> Config:
    made = {}
    for key, value in config.items():
        if key in ("talker_config", "token2wav_config", "code2wav_config"):
            made[key] = value
        elif isinstance(value, dict):
            made[key] = _numbered(value, tokens, tokenizer)
        elif key == "vocab_size":
            made[key] = len(tokenizer)
        elif key in tokens:
            made[key] = tokenizer.convert_tokens_to_ids(tokens[key])
        elif key in ("eos_token_id", "pad_token_id", "bos_token_id"):
            made[key] = getattr(tokenizer, key)
        elif key.endswith(("_token_id", "_token_index")):
            made[key] = 2  # of no token that occurs
        else:
            made[key] = value
    return made


def rows_of(row: Row | WrittenRow, folder: Path) -> Path:
    """Rows that a family is trained on, in a folder; returns the file."""
    return row.rows(folder) if row.rows is not None else write_rows(folder, row.kinds)


def dataset_of(row: Row | WrittenRow, rows: Path, model: Path) -> Config:
    """`data.dataset_param` for a family's rows and its folder."""
    basic = {"dataset": str(rows), "dataset_dir": str(rows.parent), "cutoff_len": 4096}
    found = {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(model)}}
    return merged(found | {"dataset_type": "huggingface"}, row.dataset)


def write_rows(folder: Path, kinds: tuple[str, ...], count: int = 4, rate: int = 16000) -> Path:
    """Questions about a medium of each kind, uneven in size, with uneven answers; returns the JSONL. Sounds have `rate`
    samples a second."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        row: dict[str, Any] = {"id": f"row{number}"}
        marks = ""
        for kind in kinds:
            name = _sound(folder, number, rate) if kind == "audio" else _MEDIA[kind](folder, number)
            row[f"{kind}s"], marks = [name], marks + f"<{kind}>"
        answer = " ".join(["one", "two", "three"][: 1 + number % 3])
        row["messages"] = [
            {"role": "user", "content": f"{marks}Which digit is this?"},
            {"role": "assistant", "content": answer},
        ]
        rows.append(row)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_uneven_rows(folder: Path, kinds: tuple[str, ...], small: tuple[int, int] = (16, 16)) -> Path:
    """Rows that two ranks take in turn, three each, so that one lacks what the other has: every kind of medium, a large
    picture among them, beside text alone; the same the other way round; a small picture beside a large one, or each
    medium on one side only. The large one is cut into tiles where a family has tiles, the small one is not. Returns
    the JSONL."""
    folder.mkdir(parents=True, exist_ok=True)
    last = ((kinds[0],), (kinds[-1],)) if kinds else ((), ())
    rows = []
    for number, held in enumerate([kinds, (), (), kinds, *last]):
        names = {kind: _MEDIA[kind](folder, number) for kind in held if kind != "image"}
        names |= {"image": _picture(folder, number, small if number == 4 else (112, 56))} if "image" in held else {}
        question = "".join(f"<{kind}>" for kind in held) + "Which digit is this?"
        answer = " ".join(["one", "two", "three"][: 1 + number % 3])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        media = {f"{kind}s": [name] for kind, name in names.items()}
        rows.append({"id": f"row{number}", "messages": messages, **media})
    path = folder / "uneven.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _picture(folder: Path, number: int, size: tuple[int, int] | None = None) -> str:
    width, height = size or ((32, 32), (48, 32), (32, 64))[number % 3]
    pixels = bytes((7 * number + 13 * place + place // 29) % 256 for place in range(width * height * 3))
    name = f"{number}.png" if size is None else f"{width}x{height}.png"
    Image.frombytes("RGB", (width, height), pixels).save(folder / name)
    return name


def _sound(folder: Path, number: int, rate: int = 16000) -> str:
    """Longer than a second: Qwen3-Omni's tower fills its chunks of one up to the longest in the batch, and what is
    filled up shows in the result."""
    (folder / f"{number}.wav").write_bytes(sound_bytes(tone(1.05 + 0.15 * number, rate, 300 + 100 * number), rate))
    return f"{number}.wav"


def _clip(folder: Path, number: int) -> str:
    return write_video(folder / f"{number}.mp4", range(40, 160, 15), fps=4).name


_MEDIA = {"image": _picture, "audio": _sound, "video": _clip}


def write_run(row: Row | WrittenRow, folder: Path, **sections: Config) -> Path:
    """Model, rows and `run.yaml` in a folder; returns the YAML. `sections` are merged into it."""
    row.write(folder / "model")
    rows = rows_of(row, folder / "rows")
    config: Config = {
        "model": {"model_name_or_path": str(folder / "model")},
        "data": {
            "dataset_param": dataset_of(row, rows, folder / "model"),
            "dataloader_param": {"num_workers": 0, "shuffle": False},
        },
        "parallel": {},
        "training": {"lr": 1e-3, "micro_batch_size": 2, "train_iters": 2, "log_interval": 1, "seed": 7, **STEADY},
    }
    path = folder / "run.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(merged(config, sections), file)
    return path


def _asr_processor() -> Any:
    """With the extractor of its own, which fills up whole windows."""
    processor = FAMILIES["qwen3_asr"].build()
    processor.feature_extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=16)
    return processor


def _llava_next_processor() -> Any:
    """Tiles of 16 × 16, and the whole in one more."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "image_token": "<image>"}
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=_CLIP_TILES[1:]
    )
    return transformers.LlavaNextProcessor(
        images,
        byte_tokenizer(special, templates.LLAVA),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=templates.LLAVA,
    )


def _of(name: str) -> Callable[[], Any]:
    return (FAMILIES | MORE)[name].build


def _kimi(config: Config) -> Config:
    """In the keys of transformers' class, whose defaults are this size's tower."""
    text = {key: value for key, value in config["text_config"].items() if key not in ("architectures", "model_type")}
    return {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "deepseek_v3"},
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64,
        },
        "projection_hidden_size": 1152,
        "tie_word_embeddings": False,
        **dict.fromkeys(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), 0),
    }  # fmt: skip


def _minimax(config: Config) -> Config:
    """The record has the text model alone; the tower is the class's."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
            "num_key_value_heads", "num_experts_per_tok", "num_local_experts", "dense_intermediate_size",
            "shared_intermediate_size", "rotary_dim", "rope_theta", "rms_norm_eps")  # fmt: skip
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {key: config[key] for key in kept}
        | {"mlp_layer_types": ["dense" if not moe else "sparse" for moe in config["moe_layer_freq"]]}
        | {"index_n_heads": 4, "index_head_dim": 128},
        "vision_config": {
            "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
            "patch_size": 14, "image_size": 2016,
        },
        "projector_hidden_size": 6144,
        "image_token_index": 0,
        "video_token_index": 0,
    }  # fmt: skip


def _janus(config: Config) -> Config:
    """In the keys of transformers' class, as deepseek-community's folder has them; the towers are the class's own."""
    width = config["language_config"]["hidden_size"]
    return {
        "architectures": ["JanusForConditionalGeneration"],
        "model_type": "janus",
        "text_config": config["language_config"] | {"tie_word_embeddings": False},
        "vision_config": {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 384,
            "patch_size": 16, "projection_dim": width, "num_image_tokens": 576,
        },
        "vq_config": {
            "base_channels": 128, "latent_channels": 256, "num_embeddings": 16384, "embed_dim": 8,
            "projection_dim": width, "image_token_embed_dim": width,
        },
        "tie_word_embeddings": False,
        "image_token_id": 0,
    }  # fmt: skip


def _asr(config: Config) -> Config:
    """Flat, as transformers' class has it."""
    inner = config["thinker_config"]
    return {
        "architectures": ["Qwen3ASRForConditionalGeneration"],
        "model_type": "qwen3_asr",
        "audio_config": inner["audio_config"] | {"model_type": "qwen3_asr_encoder"},
        "text_config": inner["text_config"] | {"model_type": "qwen3"},
        "tie_word_embeddings": True,
        **dict.fromkeys(("audio_token_id", "timestamp_token_id", "pad_token_id", "eos_token_id"), 0),
    }


def _ocr2(config: Config) -> Config:
    """In the keys of transformers' class; sizes that the record lacks are the class's own."""
    sam, encoder = config["vision_config"]["sam"], config["vision_config"]["encoder"]
    text = {key: value for key, value in config["language_config"].items() if key != "first_k_dense_replace"}
    dense, depth = config["language_config"]["first_k_dense_replace"], text["num_hidden_layers"]
    return {
        "architectures": ["DeepseekOcr2ForConditionalGeneration"],
        "model_type": "deepseek_ocr2",
        "text_config": text | {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (depth - dense)},
        "vision_config": {
            "sam_config": {
                "hidden_size": sam["width"], "num_hidden_layers": sam["layers"], "num_attention_heads": sam["heads"],
                "downsample_channels": sam["downsample_channels"], "image_size": 1024, "patch_size": 16,
            },
            "encoder_config": {
                "hidden_size": encoder["dim"], "num_hidden_layers": encoder["layers"],
                "num_attention_heads": encoder["heads"], "num_key_value_heads": encoder["kv_heads"],
                "intermediate_size": encoder["intermediate_size"],
            },
        },
        "image_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _hybrid(config: Config) -> Config:
    """In the keys of transformers' class, as deepseek-community's folder has them; the towers are those of the script
    that made it."""
    return {
        "architectures": ["DeepseekVLHybridForConditionalGeneration"],
        "model_type": "deepseek_vl_hybrid",
        "text_config": config["language_config"],
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
            "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 384, "patch_size": 16,
            "vision_use_head": False,
        },
        "high_res_vision_config": {
            "model_type": "sam_vision_model", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 1024, "patch_size": 16, "output_channels": 256, "window_size": 14,
        },
        "tie_word_embeddings": False,
        "image_token_id": 0,
    }  # fmt: skip


def _step3(config: Config) -> Config:
    """The record has the text model at the top; the tower's sizes are the class's own."""
    apart = ("architectures", "model_type", "num_experts", "first_k_dense_replace")
    dense, depth = config["first_k_dense_replace"], config["num_hidden_layers"]
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "model_type": "step3p7",
        "text_config": {key: value for key, value in config.items() if key not in apart}
        | {"n_routed_experts": config["num_experts"]}
        | {"mlp_layer_types": ["dense"] * dense + ["sparse"] * (depth - dense)},
        "vision_config": {
            "hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16, "image_size": 728,
            "patch_size": 14, "mlp_ratio": 8960 / 1536,
        },
        "image_token_id": 0,
    }  # fmt: skip


_SEES = ("image",)
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_CLIP_TILES = [[16, 16], [16, 32], [32, 16], [32, 32]]

ROWS: dict[str, Row | WrittenRow] = {
    "qwen2vl": Row("qwen2-vl-2b", _of("qwen2_vl"), _SEES, QWEN_IDS, {"vision_config": {"hidden_size": 32}}),
    "qwen2_5vl": Row("qwen2.5-vl-7b", _of("qwen2_5_vl"), _SEES, QWEN_IDS),
    "qwen3vl": Row("qwen3-vl-2b", _of("qwen3_vl"), _SEES, QWEN_IDS),
    "qwen3_vl_moe": Row("qwen3-vl-30b-a3b", _of("qwen3_vl"), _SEES, QWEN_IDS),
    "qwen3_5": Row("qwen3.5-9b", _of("qwen3_5"), _SEES, QWEN_IDS, {"text_config": {"head_dim": 32}}),
    "qwen3_5_moe": Row("qwen3.5-35b-a3b", _of("qwen3_5"), _SEES, QWEN_IDS, {"text_config": {"head_dim": 32}}),
    "glm4v": Row(
        "glm-4.1v-9b", _of("glm4v"), _SEES,
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
         "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
         "video_end_token_id": "<|end_of_video|>"},
        {"text_config": {"head_dim": 16}},
    ),
    "glm4v_moe": Row(
        "glm-4.5v-106b", _of("glm4v"), _SEES,
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
         "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
         "video_end_token_id": "<|end_of_video|>"},
        {"text_config": {"head_dim": 16}},
    ),
    "internvl": Row(
        "internvl3-8b-hf", _of("internvl"), _SEES, {"image_token_id": "<IMG_CONTEXT>"},
        {"vision_config": {"image_size": [16, 16], "patch_size": [4, 4]}, "image_seq_length": 4},
    ),
    "kimik2_5": Row(
        "kimi-k2.5-bf16", _of("kimi_k25"), _SEES,
        {"image_token_id": "<|media_pad|>", "video_token_id": "<|kimi_k25_video_placeholder|>"},
        {"text_config": {"num_key_value_heads": 4}, "projection_hidden_size": 48}, base=_kimi,
        adapted=("q_b_proj", "o_proj"),
    ),
    "minimax_m3_vl": Row(
        "minimax-m3-vl", _of("minimax_m3_vl"), _SEES,
        {"image_token_index": "]<]image[>[", "video_token_index": "]<]video[>["},
        {"text_config": {"dense_intermediate_size": 64, "shared_intermediate_size": 24, "rotary_dim": 4,
                         "index_n_heads": 2, "index_head_dim": 8}, "projector_hidden_size": 40}, base=_minimax,
    ),
    "step3_vl": Row(
        "step-3.7-flash", _of("step3p7"), _SEES, {"image_token_id": "<im_patch>"},
        {"text_config": {"share_expert_dim": 40}, "vision_config": {"patch_size": 4, "mlp_ratio": 2.0}}, base=_step3,
    ),
    "qwen3_asr": Row(
        "qwen3-asr-0.6b", _asr_processor, ("audio",), {"audio_token_id": "<|audio_pad|>"},
        {"audio_config": {"n_window_infer": 100}}, base=_asr,
    ),
    "qwen2_5omni": Row(
        "qwen2.5-omni-7b", _of("qwen2_5_omni"), ("image", "audio"),
        {"image_token_index": "<|IMAGE|>", "video_token_index": "<|VIDEO|>", "audio_token_index": "<|AUDIO|>",
         "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>",
         "vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>"},
        files=("spk_dict.pt",),
    ),
    "qwen3omni": Row(
        "qwen3-omni-30b-a3b", _of("qwen3_omni"), ("image", "audio"),
        QWEN_IDS | {"audio_token_id": "<|audio_pad|>", "audio_start_token_id": "<|audio_start|>",
                    "audio_end_token_id": "<|audio_end|>"},
    ),
    "janus": Row(
        "janus-pro-1b", _of("janus"), _SEES, {"image_token_id": "<image_placeholder>"},
        {"vision_config": {"num_image_tokens": 16},
         "vq_config": {"base_channels": 32, "latent_channels": 32, "num_embeddings": 48, "image_token_embed_dim": 32}},
        base=_janus,
    ),
    "mistral3": Row("mistral-small-3.1-24b", _of("pixtral"), _SEES, {"image_token_index": "[IMG]"}),
    "gemma3": Row(
        "gemma3-4b", _of("gemma3"), _SEES,
        {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
         "eoi_token_index": "<end_of_image>"},
        {"mm_tokens_per_image": 4, "text_config": {"sliding_window_pattern": 2}},  # else no answer sees its picture
    ),
    "gemma4": Row(
        "gemma4-26b-a4b", _of("gemma4"), _SEES,
        {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "boi_token_id": "<|image>",
         "eoi_token_id": "<image|>", "audio_token_id": "<|audio|>"},
        {"vision_config": {"pooling_kernel_size": 2, "position_embedding_size": 64, "default_output_length": 70},
         "vision_soft_tokens_per_image": 70},
    ),
    "llava": Row("llava-1.5-7b", _of("llava"), _SEES, {"image_token_index": "<image>"}),
    "llava_next": Row(
        "llava-next-mistral-7b", _llava_next_processor, _SEES, {"image_token_index": "<image>"},
        {"vision_config": {"image_size": 16, "patch_size": 4}, "image_grid_pinpoints": _CLIP_TILES[1:]},
    ),
    "llava_onevision": Row(
        "llava-onevision-0.5b", llava_onevision_processor, _SEES,
        {"image_token_index": "<image>", "video_token_index": "<video>"},
        {"vision_config": {"image_size": 16, "patch_size": 4}, "image_grid_pinpoints": _CLIP_TILES},
    ),
    "idefics3": Row("idefics3-8b", idefics3_processor, _SEES, {"image_token_id": "<image>"}),
    "smolvlm": Row("smolvlm2-256m", idefics3_processor, _SEES, {"image_token_id": "<image>"}, {"scale_factor": 2}),
    "deepseek_vl": Row("deepseek-vl-1.3b", _of("deepseek_vl"), _SEES, {"image_token_id": "<image_placeholder>"}),
    "deepseek_vl_hybrid": Row(
        "deepseek-vl-7b", _of("deepseek_vl_hybrid"), _SEES, {"image_token_id": "<image_placeholder>"},
        {"high_res_vision_config": {"image_size": 48, "patch_size": 4, "window_size": 4, "output_channels": 16}},
        {"high_res_vision_config": {"global_attn_indexes": [1]}}, base=_hybrid,
    ),
    "deepseek_ocr2": Row(
        "deepseek-ocr2", _of("deepseek_ocr2"), _SEES, {"image_token_id": "<image>"},
        {"text_config": {"num_key_value_heads": 4},
         "vision_config": {"sam_config": {"image_size": 48, "patch_size": 4, "window_size": 4, "output_channels": 16,
                                          "downsample_channels": [24, 32]}}},
        {"vision_config": {"sam_config": {"global_attn_indexes": [1]}}}, base=_ocr2,
    ),
    "chameleon": Row(
        "lumina-mgpt-7b-768", chameleon_processor, _SEES,
        {name: name for name in ("<image>", *code_tokens())},
        {"num_key_value_heads": 4,
         "vq_config": {"embed_dim": 8, "num_embeddings": CODES, "latent_channels": 32, "base_channels": 32,
                       "resolution": 64}},
        {"vocabulary_map": dict.fromkeys(("<image>", *code_tokens()), 0),
         "vq_config": {"base_channels": 128, "embed_dim": 256, "num_embeddings": 8192, "latent_channels": 256,
                       "resolution": 512, "channel_multiplier": [1, 1, 2, 2, 4], "num_res_blocks": 2}},
        processing={"return_for_text_completion": True},
    ),
    "deepseek_vl2": WrittenRow(make_tiny_deepseek_vl2, "DeepseekOcr2TextModel"),
    "deepseek_ocr": WrittenRow(make_tiny_deepseek_ocr, "UnlimitedOcrModel"),
    "kimi_vl": WrittenRow(make_tiny_kimi_vl, "Kimi_K25Config"),
    "kimi_k3": WrittenRow(make_tiny_kimi_k3, "KimiLinearConfig"),
    "ming": WrittenRow(make_tiny_ming, "FunAsrNanoConfig", ("image", "audio")),
    "step3_vl_10b": WrittenRow(make_tiny_step3_vl_10b, "Step3p7Config"),
    "mimov2_5": WrittenRow(
        make_tiny_mimov2_5, "MiMoV2FlashConfig", ("image", "audio"), adapted=("qkv_proj", "o_proj"), rate=24000),
    "internvl_chat": WrittenRow(make_tiny_internvl_chat, "InternVLConfig"),
    "whisper": Row("whisper-large-v3", _of("whisper"), ("audio",), small={"max_source_positions": 100}),
    "funasr": Row(
        "fun-asr-nano", build_processor, ("audio",), {"audio_token_id": "<|object_ref_start|>"},
        {"adaptor_config": {"projector_hidden_size": 48, "intermediate_size": 8}},
        {"audio_config": {"num_timestamp_prediction_layers": 1, **NO_DROPOUT}, "adaptor_config": NO_DROPOUT},
    ),
    "cosyvoice3": Row(
        "cosyvoice3-0.5b-llm", speech_tokenizer, small={"speech_token_size": COSYVOICE_CODES, "extra_speech_rows": 8},
        tied=("llm.model.lm_head.weight",), rows=write_cosyvoice_rows, dataset={"dataset_type": "cosyvoice"},
    ),
    "qwen3tts": Row(
        "qwen3-tts-1.7b", speech_tokenizer,
        tokens={"tts_pad_token_id": "<|endoftext|>", "tts_bos_token_id": "<|im_start|>",
                "tts_eos_token_id": "<|im_end|>"},
        small=SMALL_QWEN3TTS, rows=write_qwen3tts_rows,
        dataset={"dataset_type": "qwen3tts"},
    ),
    "moss_tts_delay": Row(
        "moss-tts-8b", moss_tokenizer, tokens=MOSS_MARKS,
        small={"n_vq": MOSS_CODEBOOKS, "audio_vocab_size": MOSS_CODES, "audio_pad_code": MOSS_CODES},
        rows=write_moss_rows, dataset={"dataset_type": "mosstts_delay"},
    ),
    "qwen3": Row("qwen3-0.6b", _of("qwen3")),
    "qwen3_moe": Row("qwen3-30b-a3b", _of("qwen3")),
    "qwen3_next": Row("qwen3-next-80b-a3b", _of("qwen3")),
    "llama": Row("llama-3.1-8b", _of("llama3")),
    "gpt_oss": Row("gpt-oss-20b", _of("gpt_oss")),
    "deepseek_v3": Row("deepseek-v3", _of("qwen3"), small={"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
                       adapted=("q_b_proj", "o_proj")),
    "mimo_v2_flash": Row("mimo-v2-flash", _of("qwen3")),
}  # fmt: skip
"""Name of the family's card → its row."""
ANSWERING = tuple(name for name, row in ROWS.items() if row.rows is None)
"""Those that answer in text."""
