"""Features that Lightricks' trainer made of clips are read as those that `mm extract` makes of them: what goes into the
connectors is taken from diffusers' own, by a hook."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data.datasets.ltx2.ltx2_precomputed_dataset import PrecomputedDataset
from mindspeed_mm.fsdp.data.feature_store import PrecomputedFeatures, PrecomputedLayout
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from tests.helpers.pipeline_probe import plain_pipeline
from tests.helpers.runs import losses, mm
from tests.helpers.tiny_video_families import make_tiny_ltx2

CAPTION = "a seven moving left"
REAL = 5
"""Tokens of a caption whose padding was left out."""


@torch.no_grad()
def write_files(folder: Path, *, is_2_3: bool, trimmed: bool = False) -> dict[str, torch.Tensor]:
    """A model, and one clip as the trainer writes it, in `.precomputed`; returns what should be read of it."""
    make_tiny_ltx2(folder / "model", is_2_3=is_2_3)
    pipeline, adapter = plain_pipeline(folder / "model"), find_adapter(folder / "model")
    seen: list[torch.Tensor] = []
    for connector in (pipeline.connectors.video_connector, pipeline.connectors.audio_connector):
        connector.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    embeds, mask, _, _ = pipeline.encode_prompt(
        CAPTION, do_classifier_free_guidance=False, max_sequence_length=adapter.text_tokens
    )
    video, audio, _ = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
    draw = torch.Generator().manual_seed(0)
    assert adapter.sound is not None
    latents = torch.randn(adapter.geometry.latent_channels, 2, 2, 3, generator=draw)
    sound = torch.randn(adapter.sound.latent_shape(7), generator=draw)
    start = int((~mask[0].bool()).sum()) if trimmed else 0
    names = ("video_prompt_embeds", "audio_prompt_embeds") if is_2_3 else ("prompt_embeds",)
    conditions = {name: each[start:].clone() for name, each in zip(names, seen, strict=False)}
    files = {
        "latents": {"latents": latents, "num_frames": 2, "height": 2, "width": 3, "fps": 12.0},
        "conditions": conditions | {"prompt_attention_mask": mask[0, start:].bool()},
        "audio_latents": {"latents": sound, "num_time_steps": 7, "frequency_bins": sound.shape[-1]},
    }
    for name, content in files.items():
        path = folder / "data" / ".precomputed" / name / "clips" / "a.pt"
        path.parent.mkdir(parents=True)
        torch.save(content, path)
    return {
        "latents": latents, "audio_latents": sound, "prompt_embeds": video[0], "audio_prompt_embeds": audio[0],
    }  # fmt: skip


@pytest.mark.parametrize(("is_2_3", "trimmed"), [(False, False), (True, True)])
def test_files_of_the_trainer_are_read(is_2_3: bool, trimmed: bool, tmp_path: Path) -> None:
    expected = write_files(tmp_path, is_2_3=is_2_3, trimmed=trimmed)
    adapter = find_adapter(tmp_path / "model")
    store = PrecomputedFeatures(tmp_path / "data", adapter, PrecomputedLayout())
    (record,) = store.records
    step = adapter.geometry.spatial_ratio
    assert (record.size.frames, record.size.height, record.size.width) == (9, 2 * step, 3 * step)
    assert (record.size.sound, record.fps) == (7, 12.0)
    found = store.read(0, 0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    # the older layout: tokens in a row, and the sound's channels in a position
    older = {"latents": expected["latents"].flatten(1).T, "audio_latents": expected["audio_latents"].transpose(0, 1)}
    for name, rows in older.items():
        path = tmp_path / "data" / ".precomputed" / name / "clips" / "a.pt"
        torch.save(torch.load(path, weights_only=True) | {"latents": rows.reshape(len(rows), -1)}, path)
    again = PrecomputedFeatures(tmp_path / "data", adapter, PrecomputedLayout()).read(0, 0)
    assert all(torch.equal(again[name], expected[name]) for name in older)


def test_what_is_set_elsewhere_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, is_2_3=False)
    model = {"model_name_or_path": str(tmp_path / "model")}
    for custom, named in (
        ({"first_frame_conditioning_p": 0.5}, "first_frame_conditioning_p"),
        ({"timestep_sampling_mode": "uniform"}, "timestep_sampling_mode"),
        ({"timestep_sampling_params": {"std": 2.0}}, "timestep_sampling_params"),
        ({"with_audio": False}, "with_audio"),
    ):
        section = DatasetParam.model_validate(
            {
                "dataset_type": "ltx2_precomputed",
                "ltx2_dataset_custom": custom,
                "basic_parameters": {"dataset_dir": str(tmp_path / "data")},
                "preprocess_parameters": model,
            }
        )
        with pytest.raises(ConfigError) as refused:
            PrecomputedDataset(section.basic_parameters, section.preprocess_parameters, section)
        assert named in refused.value.problems[0].key
    for path in (tmp_path / "data").rglob("audio_latents/clips/a.pt"):
        path.unlink()
    with pytest.raises(DataError, match="no clip has a file in each"):
        PrecomputedFeatures(tmp_path / "data", find_adapter(tmp_path / "model"), PrecomputedLayout())


@pytest.mark.parametrize("kind", ["ltx2_precomputed", pytest.param("ltx2_3_precomputed", marks=pytest.mark.slow)])
def test_a_file_of_mindspeed_mm_trains(kind: str, tmp_path: Path) -> None:
    """The sections of its example, with a folder for the model."""
    write_files(tmp_path, is_2_3="2_3" in kind)
    config = {
        "parallel": {"fsdp_plan": {"apply_modules": ["transformer.transformer_blocks.{*}"], "param_dtype": "fp32"}},
        "data": {
            "dataset_param": {
                "dataset_type": kind,
                "preprocess_parameters": {},
                kind.replace("precomputed", "dataset_custom"): {
                    "latents_dir": "latents", "conditions_dir": "conditions", "with_audio": True,
                    "audio_latents_dir": "audio_latents", "audio_channels": 8, "fps": 24.0,
                    "first_frame_conditioning_p": 0.0, "timestep_sampling_mode": "shifted_logit_normal",
                    "timestep_sampling_params": {"std": 1.0, "min_shift": 0.95},
                },
                "basic_parameters": {"dataset_dir": str(tmp_path / "data" / ".precomputed"), "dataset": kind},
            },
            "dataloader_param": {"num_workers": 0, "collate_param": {"model_name": "ltx2"}},
        },
        "model": {"model_id": kind.removesuffix("_precomputed"), "model_name_or_path": str(tmp_path / "model")},
        "training": {"train_iters": 2, "save": str(tmp_path / "run"), "lr": 1e-3},
    }  # fmt: skip
    with (tmp_path / "run.yaml").open("w") as file:
        YAML().dump(json.loads(json.dumps(config)), file)
    said = mm("train", tmp_path / "run.yaml")
    assert said.code == 0, said.err
    assert 0.1 < losses(tmp_path / "run")[2] < 10
