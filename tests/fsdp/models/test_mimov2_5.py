"""MiMo-V2.5 against its published formulas in plain torch, in fp64, on weights under the released names; what its
processor writes; and what its folders may be."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mindspeed_mm.checkpoint.hf_folder import asset_files
from mindspeed_mm.core.errors import ConfigError, DataError, ModelFolderError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.params.data_args import DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.processor import load_processor
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import mimov2_5_by_hand as by_hand
from tests.helpers.decoder_logits import Weights
from tests.helpers.recorded_sizes import billions, model_of_record
from tests.helpers.released_rows import write_rows
from tests.helpers.tiny_mimov2_5 import (
    CODEBOOKS,
    GROUP,
    KINDS,
    MARKS,
    SOUND,
    make_tiny_mimov2_5,
    rows_of_attention,
    sound_shapes,
    value,
)
from tests.helpers.written_families import loaded, random_pictures

import transformers  # isort: skip  (after the guard of the lines above)

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "MiMoV2FlashConfig"),
    reason=f"transformers {transformers.__version__} lacks what it is built on",
)
SIZES = [(24, 16), (8, 8), (40, 24)]
PICTURE = MARKS["vision_start"] + MARKS["image"] + MARKS["vision_end"]
CLIP = MARKS["vision_start"] + MARKS["video"] + MARKS["vision_end"]
HEARD = MARKS["audio_start"] + MARKS["audio"] + MARKS["audio_end"]


@cache
def released(root: str) -> tuple[Path, Weights]:
    folder = Path(root) / "model"
    return folder, {name: tensor.double() for name, tensor in make_tiny_mimov2_5(folder).items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("mimov2_5"))


def sound_of(seconds: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(1).normal(size=int(24000 * seconds)).astype(np.float32) * 0.1


def asked(folder: Path) -> dict[str, Any]:
    """Pictures, a clip and a sound among words, as the processor has them."""
    processor: Any = load_processor(folder)
    clip = np.random.default_rng(2).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=150, fps=1.0, frames_indices=[0, 1, 59, 60, 125])
    made = processor(
        images=random_pictures(SIZES), videos=[clip], audio=[sound_of(0.3)],
        text=[f"one {PICTURE} two {PICTURE} {CLIP} and {HEARD} or {PICTURE}?"], return_tensors="pt",
        videos_kwargs={"do_sample_frames": False, "video_metadata": [metadata]},
    )  # fmt: skip
    return {name: value for name, value in made.items() if name not in ("num_audio_tokens", "attention_mask")}


def media_by_hand(w: Weights, inputs: dict[str, Any], config: Any) -> list[tuple[int, torch.Tensor]]:
    seen = []
    for pixels, grids in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        rows = inputs[pixels].double().split(inputs[grids].prod(1).tolist())
        parts = [by_hand.seen(w, own, tuple(grid)) for own, grid in zip(rows, inputs[grids].tolist(), strict=True)]
        seen.append(torch.cat(parts))
    tokens = (config.image_token_id, config.video_token_id, config.audio_token_id)
    return list(zip(tokens, [*seen, by_hand.heard(w, inputs["audio_codes"])], strict=True))


@pytest.mark.parametrize("attention", ["ours", "eager"])
def test_equals_the_formulas(attention: str, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    if attention == "eager":
        model.set_attn_implementation("eager")
    ids = inputs["input_ids"][0]
    embeddings = by_hand.embedded(w, ids, media_by_hand(w, inputs, model.config))
    with torch.no_grad(), keeping_double():
        expected = by_hand.text_hidden(w, embeddings) @ w["lm_head.weight"].T
        found = model(**inputs, labels=inputs["input_ids"])
    assert (found.logits[0] - expected).abs().max() < 1e-9
    # transformers' own loss comes in fp32
    assert found.loss.item() == pytest.approx(F.cross_entropy(expected[:-1], ids[1:]).item(), rel=1e-6)


def _transposed_squares(model: Any) -> None:
    weight = model.visual.merger.mlp[0].weight
    weight.data = weight.data.unflatten(1, (4, -1))[:, [0, 2, 1, 3]].flatten(1)


def _without_sinks(model: Any) -> None:
    for layer in model.model.layers:
        if layer.self_attn.sinks is not None:
            layer.self_attn.sinks = None


def _without_tower_sinks(model: Any) -> None:
    for block in model.visual.blocks:
        block.attn.sinks = None


def _text_window(model: Any) -> None:
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window += 1


def _tower_window(model: Any) -> None:
    for block in model.visual.blocks:
        if block.attn.window is not None:
            block.attn.window += 1


def _rows_for_columns(model: Any) -> None:
    model.config.vision_config.vit_window_attn_types = [0] * model.config.vision_config.depth


@pytest.mark.parametrize(
    "fault",
    [_transposed_squares, _without_sinks, _without_tower_sinks, _text_window, _tower_window, _rows_for_columns],
)
def test_a_planted_fault_is_seen(fault: Any, root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    embeddings = by_hand.embedded(w, inputs["input_ids"][0], media_by_hand(w, inputs, model.config))
    fault(model)
    with torch.no_grad(), keeping_double():
        expected = by_hand.text_hidden(w, embeddings) @ w["lm_head.weight"].T
        assert (model(**inputs).logits[0] - expected).abs().max() > 1e-6


# --- what the processor writes ----------------------------------------------------------------------------------------


def test_frames_stand_behind_their_times(root: str) -> None:
    """Frames at 0, 1, 59, 60 and 125 seconds, two of them a patch, of which the last is repeated: 3 × (4 × 6 / 4)."""
    folder, _ = released(root)
    processor: Any = load_processor(folder)
    written = processor.tokenizer.decode(asked(folder)["input_ids"][0])
    frame = MARKS["vision_start"] + 6 * MARKS["video"] + MARKS["vision_end"]
    clip = "".join(f"{time}{frame}" for time in ("00:00", "00:59", "02:05"))
    assert MARKS["video_start"] + clip + MARKS["video_end"] in written
    # The marks of a picture that a template writes around a video are gone.
    assert f"{MARKS['vision_start']}{MARKS['video_start']}" not in written


def test_sizes_are_those_of_config_json(root: str) -> None:
    """The file of picture sizes, which names another family's processor, has other bounds."""
    processor: Any = load_processor(released(root)[0])
    assert type(processor).__name__ == "MiMoV2Processor"
    assert dict(processor.image_processor.size) == {"shortest_edge": 64, "longest_edge": 1024}
    assert list(processor.image_processor.image_mean) == [0.48, 0.46, 0.41]


def codes_by_hand(w: Weights, samples: torch.Tensor) -> torch.Tensor:
    """(frames, codebooks): spectra in pieces of 40 frames, each through the encoder by itself."""
    size, hop = int(SOUND["nfft"]), int(SOUND["hop_length"])  # type: ignore[call-overload]
    filled = F.pad(samples[None], (size // 2, size // 2), mode="reflect")[0]
    window = 0.5 - 0.5 * torch.cos(2 * torch.pi * torch.arange(size, dtype=torch.float64) / size)
    spectrum = torch.fft.rfft(filled.unfold(0, size, hop) * window, dim=1).abs()
    tops = torch.linspace(0, 2595 * float(np.log10(1 + 12000 / 700)), 10, dtype=torch.float64)
    corners = 700 * (10 ** (tops / 2595) - 1)
    places = torch.linspace(0, 12000, size // 2 + 1, dtype=torch.float64)
    up = (places[:, None] - corners[:-2]) / (corners[1:-1] - corners[:-2])
    down = (corners[2:] - places[:, None]) / (corners[2:] - corners[1:-1])
    bands = torch.minimum(up, down).clamp(min=0)
    pieces = (spectrum @ bands).clamp(min=1e-7).log().split(40)
    return torch.cat([_codes_of(w, piece) for piece in pieces])


def _codes_of(w: Weights, piece: torch.Tensor) -> torch.Tensor:
    e = "encoder."
    hidden = F.gelu(F.conv1d(piece.T[None], w[f"{e}conv1.weight"], w[f"{e}conv1.bias"], padding=1))
    hidden = F.gelu(F.conv1d(hidden, w[f"{e}conv2.weight"], w[f"{e}conv2.bias"], stride=2, padding=1))[0].T
    place = torch.arange(len(hidden))
    angles = place[:, None] * (1 / 10000 ** (torch.arange(0, 8, 2) / 8))
    kept: list[torch.Tensor] = []
    for number in range(3):
        layer = f"{e}layers.{number}"
        normed = layer_norm(w, f"{layer}.self_attn_layer_norm", hidden)
        q, k, v = (by_hand.linear(w, f"{layer}.self_attn.{name}_proj", normed).split(8, dim=1) for name in "qkv")
        before = place[:, None] - place
        unseen = before < 0
        if number != 1:  # of two layers the first has a window
            unseen = unseen | (before > 6)
        heads = []
        for own_q, own_k, own_v in zip(q, k, v, strict=True):
            scores = by_hand.turn(own_q, angles) @ by_hand.turn(own_k, angles).T / 8**0.5
            heads.append(scores.masked_fill(unseen, -torch.inf).softmax(1) @ own_v)
        hidden = hidden + by_hand.linear(w, f"{layer}.self_attn.out_proj", torch.cat(heads, dim=1))
        normed = layer_norm(w, f"{layer}.final_layer_norm", hidden)
        hidden = hidden + by_hand.linear(w, f"{layer}.fc2", F.gelu(by_hand.linear(w, f"{layer}.fc1", normed)))
        kept.append(hidden)
    hidden = layer_norm(w, f"{e}layer_norm", hidden + kept[1])
    hidden = F.pad(hidden, (0, 0, 0, len(hidden) % 2))
    pooled = F.gelu(F.conv1d(hidden.T[None], w[f"{e}down_sample_layer.0.weight"], stride=2))[0].T
    left, codes = layer_norm(w, f"{e}down_sample_norm", pooled), []
    for number in range(3):
        table = w[f"{e}quantizer.vq.layers.{number}._codebook.embed"]
        codes.append(torch.cdist(left, table).argmin(dim=1))
        left = left - table[codes[-1]]
    return torch.stack(codes, dim=1)


def layer_norm(w: Weights, name: str, rows: torch.Tensor) -> torch.Tensor:
    centred = rows - rows.mean(dim=-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


@pytest.mark.parametrize("seconds", [0.1, 0.55, 1.0])
def test_codes_of_sound_equal_the_formulas(seconds: float, root: str) -> None:
    processor: Any = load_processor(released(root)[0])
    samples = sound_of(seconds)
    made = processor.feature_extractor([samples], sampling_rate=24000)
    w = {name: value(name, shape).double() for name, shape in sound_shapes().items()}
    expected = codes_by_hand(w, torch.from_numpy(samples).double())
    found = made["audio_codes"]
    assert len(found) % GROUP == 0 and made["num_audio_tokens"] == [len(found) // GROUP]
    assert torch.equal(found[: len(expected)], expected)
    # The last frame is repeated until the groups are full.
    assert (found[len(expected) :] == expected[-1]).all()


def test_a_sound_that_is_too_short_is_refused(root: str) -> None:
    processor: Any = load_processor(released(root)[0])
    assert processor.feature_extractor([sound_of(0.1)[:481]])["num_audio_tokens"] == [1]
    with pytest.raises(ValueError, match="480 samples are fewer than the 481 that a frame needs"):
        processor.feature_extractor([sound_of(0.1)[:480]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"audio_group_size": 2},
            "^[^ ]*config.json  processor_config.audio_group_size  is 2, audio_config.group_size is 4",
        ),
        ({"image_token_id": 99999}, "the tokenizer has no token 99999, processor_config.image_token_id"),
    ],
)
def test_a_processor_of_another_model_is_refused(change: dict[str, Any], says: str, tmp_path: Path, root: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(released(root)[0], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["processor_config"] |= change
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=says):
        load_processor(folder)


def test_codes_of_fewer_codebooks_are_refused(root: str) -> None:
    model = loaded(released(root)[0])
    codes = torch.zeros(GROUP, CODEBOOKS - 1, dtype=torch.long)
    with pytest.raises(DataError, match=f"codes of {CODEBOOKS - 1} codebooks, and the model has {CODEBOOKS}"):
        model.get_audio_features(codes)


def test_sound_without_its_encoder_is_refused(tmp_path: Path, root: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(released(root)[0], folder, ignore=shutil.ignore_patterns("audio_tokenizer"))
    processor: Any = load_processor(folder)
    with pytest.raises(ModelFolderError, match="has no audio_tokenizer"):
        processor.feature_extractor([sound_of(0.1)])


def test_rows_of_clips_are_what_the_processor_makes_of_them(root: str, tmp_path: Path) -> None:
    folder, _ = released(root)
    path = write_rows(tmp_path, ("video",), count=1)
    basic = {"dataset": str(path), "dataset_dir": str(tmp_path), "cutoff_len": 4096}
    param = DatasetParam.model_validate(
        {"basic_parameters": basic, "preprocess_parameters": {"model_name_or_path": str(folder)}}
    )
    dataset = build_mm_dataset(param)[0]
    row, processor = dataset[0], dataset.processor
    shown = dataset.plugin.collate(row["media"])
    time, height, width = shown["video_grid_thw"][0].tolist()
    written = processor.tokenizer.decode(row["input_ids"])
    frame = MARKS["vision_start"] + height * width // 4 * MARKS["video"] + MARKS["vision_end"]
    assert written.count(frame) == time > 1
    assert f"{MARKS['video_start']}00:00{frame}" in written and f"{frame}{MARKS['video_end']}" in written
    assert len(shown["pixel_values_videos"]) == time * height * width


def test_the_sound_of_clips_is_refused(root: str) -> None:
    processor: Any = load_processor(released(root)[0])
    with pytest.raises(ConfigError, match="MiMoV2Processor does not take the sound of videos"):
        build_mm_plugin(processor, PreprocessParameters(use_audio_in_video=True))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_a_loop_without_a_cache(root: str) -> None:
    folder, w = released(root)
    model, inputs = loaded(folder), asked(folder)
    ids, media = inputs["input_ids"][0], media_by_hand(w, inputs, model.config)
    with torch.no_grad(), keeping_double():
        said = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, len(ids) :]
        for _ in range(8):
            hidden = by_hand.text_hidden(w, by_hand.embedded(w, ids, media))
            ids = torch.cat([ids, (hidden[-1] @ w["lm_head.weight"].T).argmax()[None]])
    assert said.tolist() == ids[-8:].tolist()


# --- the folder -------------------------------------------------------------------------------------------------------


def test_what_makes_codes_of_sound_is_exported_with_the_model(root: str) -> None:
    assert "audio_tokenizer" in asset_files(released(root)[0])


def test_released_size() -> None:
    """Everything but the heads for further tokens, which are built where they are asked for, and scales of 8 bits."""
    from mindspeed_mm.fsdp.models.mimov2_5.modeling_mimov2_5 import MiMoV2ForCausalLM, tell_transformers

    tell_transformers()
    model, differing = model_of_record(MiMoV2ForCausalLM, "mimo-v2-5")
    assert billions(model) == pytest.approx(309.8, rel=0.001)
    assert billions(model.visual) == pytest.approx(0.729, rel=0.001)  # as its card says
    keys = [entry["key"] for entry in differing]
    assert keys == [key for key in keys if key.endswith("_scale_inv") or ".mtp." in key]


BLOCK = 8


def in_8_bits(key: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix whose rows lie as two ranks of tensor parallelism hold them, each with blocks of its own; and the
    numbers that it stands for, in order."""
    windowed = ".mtp." in key or bool(KINDS[int(key.split(".")[2])])
    parts = tensor.split(rows_of_attention(windowed))
    codes, scales, shards = [], [], []
    for rank in range(2):
        shard = torch.cat([part.chunk(2)[rank] for part in parts])
        filled = F.pad(shard, (0, 0, 0, -len(shard) % BLOCK))
        blocks = filled.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        code = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stands_for = (code.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)[: len(shard)]
        codes.append(code.flatten(2).flatten(0, 1)[: len(shard)])
        scales.append(scale)
        shards.append(stands_for.split([len(part) // 2 for part in parts]))
    in_order = torch.cat([shard[number] for number in range(3) for shard in shards])
    return {key: torch.cat(codes), f"{key}_scale_inv": torch.cat(scales)}, in_order


@pytest.mark.parametrize("layout", ["of ranks", "in order"])
def test_one_matrix_in_8_bits_is_put_in_order(layout: str, tmp_path: Path, root: str) -> None:
    """As released; and a folder whose blocks are of the matrix as a whole has its rows in order."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(released(root)[0], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    expected, path = {}, folder / "model.safetensors"
    stored = load_file(path)
    for key in [key for key in stored if key.endswith("qkv_proj.weight")]:
        tensor = stored.pop(key)
        if layout == "of ranks":
            few, expected[key] = in_8_bits(key, tensor)
        else:
            scale = torch.full((-(-len(tensor) // BLOCK), tensor.shape[1] // BLOCK), 0.5)
            codes = (tensor / 0.5).to(torch.float8_e4m3fn)
            few, expected[key] = {key: codes, f"{key}_scale_inv": scale}, codes.float() * 0.5
        stored |= few
    save_file(stored, path, metadata={"format": "pt"})
    model = loaded(folder, torch.float32)
    for number in range(len(KINDS)):
        key = f"model.layers.{number}.self_attn.qkv_proj.weight"
        torch.testing.assert_close(model.get_parameter(key).data, expected[key], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_projection_layout": "split"}, "attention_projection_layout is 'split'; known is 'fused_qkv' only"),
        ({"swa_num_key_value_heads": 2}, "swa_num_key_value_heads is not twice num_key_value_heads"),
        ({"vision_config": None}, "without vision_config and audio_config"),
    ],
)
def test_what_was_never_released_is_refused(change: dict[str, Any], says: str, tmp_path: Path, root: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(released(root)[0], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=says):
        loaded(folder)
