"""How released generators are called when a request leaves everything out: as their model cards and the signatures of
diffusers' pipelines say, by every command alike."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data.data_utils.decoding.video import probe_video
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.components import diffusers_class
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.cards import families
from mindspeed_mm.fsdp.params.data_args import DataArguments
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.defaults import as_trained, filled
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import check_request, resolve_size
from tests.helpers.runs import lines, mm
from tests.helpers.tiny_generator_families import FAMILIES
from tests.helpers.tiny_generators import make_tiny_flux

CALLS: list[dict[str, Any]] = YAML(typ="safe").load(Path(__file__).parents[1] / "released/generator_calls.yaml")
BY_NAME = {entry["release"]: entry for entry in CALLS}


def make_folder(folder: Path, entry: dict[str, Any]) -> Path:
    """What the release's folder holds of the settings that tell releases apart."""
    index = {"_class_name": entry["pipeline"], **entry.get("index", {})}
    for name in ("transformer", "vae", "scheduler"):
        content = entry.get(name, {})
        index[name] = ["diffusers", content.get("_class_name", "Some")]
        (folder / name).mkdir(parents=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name / file).write_text(json.dumps(content))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def adapter_of(folder: Path, entry: dict[str, Any]) -> DiffusionAdapter:
    return find_adapter(make_folder(folder, entry), task=entry.get("task"))


def empty_pipeline(name: str) -> Any:
    """The pipeline without a single component: what it takes for the sizes of pictures is in its constructor."""
    pipeline_class = diffusers_class(name)
    components = [each for each in inspect.signature(pipeline_class.__init__).parameters if each != "self"]
    with_defaults = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(
        **{each: None for each in components if with_defaults[each].default is inspect.Parameter.empty}
    )


def called_with(adapter: DiffusionAdapter, sampling: SamplingArguments) -> dict[str, Any]:
    """The arguments of the pipeline, its defaults included."""
    size = MediaSize(sampling.num_frames or 1, *(adapter.geometry.nearest(MediaSize(1, 64, 64)).height,) * 2)
    latents = torch.zeros(1, *adapter.geometry.latent_shape(size))
    return defaults_of(adapter.pipelines[adapter.task]) | adapter.pipeline_arguments(sampling, ["x"], latents)


def defaults_of(pipeline: str) -> dict[str, Any]:
    parameters = inspect.signature(diffusers_class(pipeline).__call__).parameters.items()
    return {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}


def compared(arguments: dict[str, Any]) -> set[str]:
    """Those that decide how a sample is made, beside its prompt, size and noise."""
    parts = ("steps", "scale", "guidance", "rescale", "frames", "frame_rate", "decode", "max_sequence_length", "cfg_n")
    named = {name for name in arguments if any(part in name for part in parts)}
    return {name for name in named if "blocks" not in name and name != "conditioning_scale"}


@pytest.mark.edge("BN1")
def test_every_released_generator_is_in_the_table() -> None:
    named = {name for card in families() if card.model_class.startswith("diffusers.") for name in card.released}
    assert named <= BY_NAME.keys()


@pytest.mark.edge("BN1")
@pytest.mark.parametrize("name", BY_NAME)
def test_a_release_is_called_as_its_model_card_says(name: str, tmp_path: Path) -> None:
    entry = BY_NAME[name]
    adapter = adapter_of(tmp_path / "model", entry)
    sampling = filled(adapter, SamplingArguments())
    found, card = called_with(adapter, sampling), entry.get("call", {})
    own = defaults_of(entry["pipeline"])
    assert not {each for each in card if each not in own}, "the fixture names an argument that the pipeline lacks"
    for argument in compared(own) - set(entry.get("unread", ())):
        expected = card.get(argument, own[argument])
        if argument in ("num_frames", "frames"):
            expected = card.get(argument, own[argument] or sampling.num_frames)
        if argument in entry.get("example", {}):
            expected = own[argument]
        if argument == "guidance_scale_2" and expected is None:
            expected = found["guidance_scale"] if found[argument] is not None else None  # which means the same
        assert found[argument] == expected, argument
    if "HunyuanVideo-1.5" not in name:  # computes its size: the next test
        size = adapter.default_size(empty_pipeline(entry["pipeline"]))
        own_size = entry.get("size", [own.get("height"), own.get("width")])
        assert list(size) == [card.get("height", own_size[0]), card.get("width", own_size[1])]
        adapter.geometry.check(MediaSize(sampling.num_frames or 1, size[0] or 0, size[1] or 0))
    if adapter.geometry.is_video:
        assert sampling.fps == entry["fps"]


@pytest.mark.edge("BN1")
def test_the_size_of_hunyuan_video_1_5_is_what_its_pipeline_computes(tmp_path: Path) -> None:
    from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor

    class Trained:
        video_processor = HunyuanVideo15ImageProcessor(vae_scale_factor=16)
        target_size = 640

    adapter = find_adapter(make_folder(tmp_path, BY_NAME["hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"]))
    found = adapter.default_size(Trained())  # type: ignore[arg-type]
    assert found == Trained.video_processor.calculate_default_height_width(9, 16, 640)


def flux_folder(folder: Path, *, schnell: bool) -> Path:
    """19 tiny blocks with what tells schnell from other FLUX.1 folders, or without it."""
    make_tiny_flux(folder, num_layers=19)
    scheduler = folder / "scheduler/scheduler_config.json"
    settings = json.loads(scheduler.read_text())
    settings |= {"shift": 1.0, "use_dynamic_shifting": False} if schnell else {}
    scheduler.write_text(json.dumps(settings))
    return folder


@pytest.mark.edge("BN1")
def test_mm_infer_draws_what_the_card_s_call_draws(tmp_path: Path) -> None:
    folder = flux_folder(tmp_path / "model", schnell=True)
    assert mm("infer", folder, "--prompt", "a red box", "--size", "16x16", "--out", tmp_path / "out").code == 0
    (entry,) = lines(tmp_path / "out/manifest.jsonl")
    assert entry["settings"]["num_inference_steps"] == 4
    plain = diffusers_class("FluxPipeline").from_pretrained(folder)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(entry["noise_seed"]))
    card = BY_NAME["black-forest-labs/FLUX.1-schnell"]["call"] | {"max_sequence_length": 24}  # the tokenizer's own
    latents = plain._pack_latents(noise, 1, 4, 8, 8)
    expected = plain("a red box", height=16, width=16, latents=latents, output_type="np", **card).images[0]
    drawn = np.asarray(Image.open(tmp_path / "out" / entry["file"]))
    assert (drawn == (expected * 255).round()).all()


@pytest.mark.edge("BN1")
def test_an_unknown_release_gets_the_pipeline_s_defaults(tmp_path: Path) -> None:
    adapter = find_adapter(flux_folder(tmp_path, schnell=False))
    sampling, own = filled(adapter, SamplingArguments()), defaults_of("FluxPipeline")
    assert sampling.num_inference_steps == own["num_inference_steps"]
    assert sampling.guidance_scale == own["true_cfg_scale"]
    assert adapter.usage.release == ""
    asked = SamplingArguments(num_inference_steps=3, guidance_scale=2.5, fps=7.0)
    assert filled(adapter, asked) == asked


@pytest.mark.edge("BN1")
def test_the_server_and_samples_while_training_fill_in_the_same(tmp_path: Path) -> None:
    from mindspeed_mm.tasks.draw.engine import DrawEngine
    from mindspeed_mm.tasks.draw.generate import load_generator

    sampler, settings = load_generator(flux_folder(tmp_path, schnell=True))
    wanted = settings.model_copy(update={"height": 16, "width": 16})
    engine = DrawEngine(sampler, wanted)
    (job,) = engine.jobs(Prompt(0, "x", "request"), wanted)
    engine.close()
    of_training = sampler.prepared([Prompt(0, "x", "p")], wanted, "training.sampling")
    assert job.sampling == of_training == filled(sampler.adapter, of_training)
    assert (job.sampling.num_inference_steps, job.sampling.guidance_scale) == (4, 1.0)


@pytest.mark.edge("BN1")
def test_clips_are_written_at_the_family_s_rate_or_the_run_s(tmp_path: Path) -> None:
    FAMILIES["cogvideox"].make(tmp_path / "model")
    asked = ["--prompt", "a", "--size", "32x32", "--frames", 9, "--steps", 1, "--guidance-scale", 1]
    assert mm("infer", tmp_path / "model", *asked, "--out", tmp_path / "out").code == 0
    (clip,) = (tmp_path / "out").glob("*.mp4")
    with clip.open("rb") as file:
        assert float(probe_video(file, str(clip)).fps) == 8.0
    data = DataArguments.model_validate({"dataset_param": {"preprocess_parameters": {"fps": 12}}})
    assert as_trained(data, SamplingArguments()).fps == 12.0
    assert as_trained(data, SamplingArguments(fps=5.0)).fps == 5.0


@pytest.mark.parametrize(
    ("media", "asked", "expected"),
    [
        ({"height": 32, "width": 48, "num_frames": 9}, {}, (32, 48, 9)),
        ({"height": 32, "width": 48, "num_frames": 9}, {"height": 16, "num_frames": 5}, (16, None, 5)),
        ({"height": 32, "width": 48, "num_frames": [9, 17]}, {}, (32, 48, None)),
        ({"buckets": ["32x48x9", "48x32x9"]}, {}, (None, None, None)),
        ({"max_pixels": 1024}, {"num_frames": 5}, (None, None, 5)),
    ],
)
def test_samples_of_a_run_have_the_one_size_that_it_names(
    media: dict[str, Any], asked: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    data = DataArguments.model_validate({"dataset_param": {"preprocess_parameters": media}})
    sampling = as_trained(data, SamplingArguments(**asked))
    assert (sampling.height, sampling.width, sampling.num_frames) == expected


@pytest.mark.edge("BN1")
@pytest.mark.parametrize("name", ["black-forest-labs/FLUX.1-schnell", "Tongyi-MAI/Z-Image-Turbo"])
def test_a_negative_prompt_without_guidance_is_refused(name: str, tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path, BY_NAME[name])
    sampling = SamplingArguments(negative_prompt="blur")
    with pytest.raises(ConfigError, match="no effect: guidance is off"):
        check_request(adapter, [Prompt(0, "x", "p")], sampling)
    check_request(adapter, [Prompt(0, "x", "p")], sampling.model_copy(update={"guidance_scale": 3.0}))


@pytest.mark.edge("BN1")
def test_guidance_of_a_distilled_klein_is_refused(tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path, BY_NAME["black-forest-labs/FLUX.2-klein-4B"])
    with pytest.raises(ConfigError, match="4 has no effect"):
        check_request(adapter, [Prompt(0, "x", "p")], SamplingArguments(guidance_scale=4.0))


@pytest.mark.edge("BN1")
def test_captions_of_schnell_have_256_tokens_in_training_too(tmp_path: Path) -> None:
    schnell = adapter_of(tmp_path / "schnell", BY_NAME["black-forest-labs/FLUX.1-schnell"])
    dev = adapter_of(tmp_path / "dev", BY_NAME["black-forest-labs/FLUX.1-dev"])
    own = defaults_of("FluxPipeline")["max_sequence_length"]
    assert (schnell.text_tokens, dev.text_tokens) == (256, own)


@pytest.mark.edge("BN1")
def test_a_side_alone_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path, BY_NAME["zai-org/CogVideoX-5b"])
    with pytest.raises(ConfigError, match="multiples of 16"):
        check_request(adapter, [Prompt(0, "x", "p")], SamplingArguments(height=481))
    with pytest.raises(ConfigError, match=r"frames must be 8k\+1"):
        check_request(adapter, [Prompt(0, "x", "p")], SamplingArguments(num_frames=48))
    size = resolve_size(adapter, empty_pipeline("CogVideoXPipeline"), filled(adapter, SamplingArguments()))
    assert size == MediaSize(49, 480, 720)
