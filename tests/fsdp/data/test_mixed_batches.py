"""Pictures, clips, sounds and text alone in one batch: each row as its own processor and the model alone make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.media import MediaLimits, MediaLoader
from mindspeed_mm.fsdp.data.data_utils.plugins.processor_plugin import video_metadata
from mindspeed_mm.fsdp.params.data_args import CollateParam, DatasetParam
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from tests.fsdp.data.conftest import picture, write_jsonl
from tests.helpers.packed_families import PATCH_IDS, ROPE3, TEXT, VISION
from tests.helpers.tiny_processors import MEL_BINS, MERGE_SIZE, PATCH_SIZE, VOCAB_SIZE, build_processor, save_processor
from tests.helpers.tiny_sounds import sound_bytes, tone, write_container

prepare_for_transformers()

import transformers  # noqa: E402  (the guard comes first)

_TEXT = TEXT | {"vocab_size": VOCAB_SIZE, "rope_parameters": ROPE3, "max_position_embeddings": 8192}
_VISION = VISION | {"patch_size": PATCH_SIZE, "spatial_merge_size": MERGE_SIZE, "out_hidden_size": 32}


def qwen3_vl(processor: Any) -> Any:
    ids = {name: getattr(processor, name) for name in PATCH_IDS}
    vision = _VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=_TEXT | {"head_dim": 8}, vision_config=vision, **ids)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen2_5_omni(processor: Any) -> Any:
    to_id = processor.tokenizer.convert_tokens_to_ids
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=_TEXT,
        vision_config=_VISION | {"window_size": 4 * PATCH_SIZE, "fullatt_block_indexes": [1]},
        audio_config={
            "num_mel_bins": MEL_BINS,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 50,
            "n_window": 8,
            "output_dim": 32,
        },
        image_token_index=to_id(processor.image_token),
        video_token_index=to_id(processor.video_token),
        audio_token_index=to_id(processor.audio_token),
        vision_start_token_id=to_id(processor.vision_bos_token),
        audio_start_token_id=to_id(processor.audio_bos_token),
        audio_end_token_id=to_id(processor.audio_eos_token),
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


MODELS = {"qwen3_vl": qwen3_vl, "qwen2_5_omni": qwen2_5_omni}
ROWS: dict[str, list[dict[str, list[str]]]] = {
    "qwen3_vl": [{}, {"images": ["0.png"]}, {"videos": ["a.mp4"]}, {"images": ["1.png", "0.png"], "videos": ["a.mp4"]}],
    "qwen2_5_omni": [
        {"audios": ["a.wav"]},
        {},
        {"images": ["0.png"], "audios": ["b.wav"]},
        {"images": ["1.png"], "videos": ["a.mp4"], "audios": ["a.wav"]},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    for number in range(2):
        picture(48 + 16 * number, 40, seed=number).save(folder / f"{number}.png")
    write_container(folder / "a.mp4", tone(1.0, 16000), 16000, frames=16, fps=8)
    (folder / "a.wav").write_bytes(sound_bytes(tone(0.4, 16000), 16000))
    (folder / "b.wav").write_bytes(sound_bytes(tone(0.7, 44100, 700.0, channels=2), 44100))
    return folder


def data_set(folder: Path, name: str, *, hears: bool = False) -> Any:
    (folder / name).mkdir(exist_ok=True)
    save_processor(name, folder / name)
    rows = []
    for number, media in enumerate(ROWS[name]):
        marks = "".join(f"<{column[:-1]}>" * len(items) for column, items in media.items())
        turns = [
            {"role": "user", "content": f"{marks}What is shown?"},
            {"role": "assistant", "content": "ten " * number},
        ]
        rows.append({"messages": turns, **media})
    param = {
        "basic_parameters": {
            "dataset": str(write_jsonl(folder / f"{name}.jsonl", rows)),
            "dataset_dir": str(folder),
            "cutoff_len": 8192,
            "train_on_prompt": True,
        },
        "preprocess_parameters": {"model_name_or_path": str(folder / name), "use_audio_in_video": hears},
    }
    return build_mm_dataset(DatasetParam.model_validate(param))[0]


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name](build_processor(name)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


def logits_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    given = {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
        if name not in ("labels", "shift_labels", "sample_ids")
    }
    with torch.no_grad():
        return model(**given, use_cache=False).logits


def alone(folder: Path, dataset: Any, sample: Any, *, hears: bool = False) -> dict[str, Any]:
    """What the processor itself makes of a row's text and files."""
    processor, loader = dataset.processor, MediaLoader(folder, limits=MediaLimits())
    text = processor.apply_chat_template(sample.messages)
    given: dict[str, Any] = {}
    for item in sample.media:
        if item.kind == "image":
            given.setdefault("images", []).append(loader.load_image(item.source))
        elif item.kind == "audio":
            given.setdefault("audio", []).append(loader.load_audio(item.source).samples)
        else:
            clip = loader.load_video(item.source)
            options = {"do_sample_frames": False, "video_metadata": [video_metadata(clip.header)]}
            options |= {"fps": clip.header.sampled_fps, "input_data_format": "channels_last"}
            given |= {"videos": [clip.frames], "videos_kwargs": options}
            if hears:
                given |= {"audio": [loader.load_audio(item.source).samples], "audio_from_video_indices": [0]}
                given |= {"load_audio_from_video": True}
    if "audio" in given:
        given["audio_kwargs"] = {"sampling_rate": 16000}
    made = dict(processor(text=[text], return_tensors="pt", **given))
    return made | ({"use_audio_in_video": True} if hears and "videos" in given else {})


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_all_kinds_is_its_rows(folder: Path, name: str) -> None:
    dataset, model = data_set(folder, name), model_of(name)
    batch = dataset.build_collator(CollateParam())([dataset[i] for i in range(len(dataset))])
    together = logits_of(model, batch)
    for row in range(len(dataset)):
        own = alone(folder, dataset, dataset.sample(row))
        length = own["input_ids"].shape[1]
        assert batch["input_ids"][row, :length].tolist() == own["input_ids"][0].tolist()
        torch.testing.assert_close(together[row, :length], logits_of(model, own)[0], rtol=1e-9, atol=1e-10)
    turned = batch | {"pixel_values": batch["pixel_values"].flip(0)}  # the planted fault
    assert not torch.allclose(together, logits_of(model, turned))


def test_the_sound_of_videos(folder: Path) -> None:
    """A model that hears what it watches; beside it rows without videos."""
    name = "qwen2_5_omni"
    dataset, model = data_set(folder, name, hears=True), model_of(name)
    rows = [1, 3, 2]
    batch = dataset.build_collator(CollateParam())([dataset[i] for i in rows])
    assert batch["use_audio_in_video"] is True
    assert len(batch["input_features"]) == 3  # of the video, of its row's sound, of the last row's
    together = logits_of(model, batch)
    for number, row in enumerate(rows):
        if row != 3:  # whose sound stands beside that of its video: the processor wants them told apart
            own = alone(folder, dataset, dataset.sample(row), hears=True)
            length = own["input_ids"].shape[1]
            torch.testing.assert_close(together[number, :length], logits_of(model, own)[0], rtol=1e-9, atol=1e-10)
    assert torch.isfinite(together).all()
