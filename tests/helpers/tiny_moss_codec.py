"""A small model folder of MOSS-TTS that speaks: the model, its tokenizer, and its codec beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.released_rows import ROWS
from tests.helpers.tiny_speech import MOSS_CODEBOOKS, MOSS_CODES, MOSS_MARKS, moss_tokenizer

FRAME_SAMPLES, RATE = 12, 2400
"""Of the small codec."""
_LAYERS: dict[str, Any] = {
    "module_type": "Transformer", "causal": True, "norm": "layer_norm", "gating": "none", "num_heads": 2,
    "positional_embedding": "rope", "max_period": 10000, "layer_scale": 0.01, "conv_layout": True, "d_model": 16,
    "dim_feedforward": 20,
}  # fmt: skip


def _fold(count: int) -> dict[str, Any]:
    return {"module_type": "PatchedPretransform", "patch_size": count}


def _layers(given: int, made: int, count: int) -> dict[str, Any]:
    return _LAYERS | {"input_dimension": given, "output_dimension": made, "num_layers": count}


CODEC: dict[str, Any] = {
    "architectures": ["MossAudioTokenizerModel"], "model_type": "speech_tokenizer", "sampling_rate": RATE,
    "downsample_rate": FRAME_SAMPLES, "causal_transformer_context_duration": 0.05, "quantizer_type": "rlfq",
    "encoder_kwargs": [_fold(6), _layers(6, 10, 2), _fold(2), _layers(20, 12, 1)],
    "decoder_kwargs": [_layers(12, 20, 1), _fold(2), _layers(10, 6, 2), _fold(6)],
    "quantizer_kwargs": {
        "codebook_dim": 4, "codebook_size": MOSS_CODES, "input_dim": 12, "num_quantizers": MOSS_CODEBOOKS,
        "output_dim": 12, "quantizer_type": "rlfq", "rvq_dim": 8,
    },
}  # fmt: skip
"""In the keys of the released config.json."""


def codec_shapes() -> dict[str, tuple[int, ...]]:
    """Every name of the codec's weights with its shape, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {}
    for way in ("encoder", "decoder"):
        for number, part in enumerate(CODEC[f"{way}_kwargs"]):
            if part["module_type"] != "Transformer":
                continue
            width, name = part["d_model"], f"{way}.{number}"
            if part["input_dimension"] != width:
                shapes[f"{name}.input_proj.weight"] = (width, part["input_dimension"])
            if part["output_dimension"] != width:
                shapes[f"{name}.output_proj.weight"] = (part["output_dimension"], width)
            for layer in range(part["num_layers"]):
                own = f"{name}.transformer.layers.{layer}"
                shapes |= {f"{own}.self_attn.in_projs.0.weight": (3 * width, width)}
                shapes |= {f"{own}.self_attn.out_projs.0.weight": (width, width)}
                shapes |= {f"{own}.norm{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
                shapes |= {f"{own}.linear1.weight": (part["dim_feedforward"], width)}
                shapes |= {f"{own}.linear2.weight": (width, part["dim_feedforward"])}
                shapes |= {f"{own}.layer_scale_{n}.scale": (width,) for n in (1, 2)}

    def projection(name: str, given: int, made: int) -> None:
        shapes[f"{name}.bias"] = (made,)
        shapes[f"{name}.parametrizations.weight.original0"] = (made, 1, 1)
        shapes[f"{name}.parametrizations.weight.original1"] = (made, given, 1)

    sizes = CODEC["quantizer_kwargs"]
    width, inner = sizes["rvq_dim"], sizes["codebook_dim"]
    projection("quantizer.input_proj", sizes["input_dim"], width)
    projection("quantizer.output_proj", width, sizes["output_dim"])
    for book in range(sizes["num_quantizers"]):
        name = f"quantizer.quantizers.{book}"
        projection(f"{name}.in_proj", width, inner)
        projection(f"{name}.out_proj", inner, width)
        shapes[f"{name}.codebook.weight"] = (sizes["codebook_size"], inner)
    return shapes


def write_moss_codec(folder: Path) -> Path:
    """The codec's folder, with random weights."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in codec_shapes().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CODEC), encoding="utf-8")
    return folder


def write_moss_speaker(root: Path) -> Path:
    """The model's folder, with its codec beside it. Its head of text knows nothing but the marks that speech is made
    of: where it would not begin a sound it ends the answer, and where it would not go on it begins to end the sound."""
    folder = ROWS["moss_tts_delay"].write(root / "model")
    weights = load_file(folder / "model.safetensors")
    generator, tokenizer = torch.Generator().manual_seed(52), moss_tokenizer()
    head = weights["lm_heads.0.weight"].zero_()
    for pair in (("audio_start", "im_end"), ("audio_assistant_gen_slot", "audio_assistant_delay_slot")):
        likes = torch.randn(head.shape[1], generator=generator)
        for key, sign in zip(pair, (1, -1), strict=True):
            head[tokenizer.convert_tokens_to_ids(MOSS_MARKS[f"{key}_token_id"])] = 4 * sign * likes
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_moss_codec(root / "MOSS-Audio-Tokenizer")
    return folder
