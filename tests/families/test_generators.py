"""Every family of generators against diffusers' own pipeline: features, loss, samples, exports, adapters, and two ranks
against one process.

The loss is the papers' formula: a pipeline that loads the same folder by itself is given the noisy latents of a sample
as if it were in the middle of sampling, and what it hands to its scheduler is compared with what is to be learned.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from ruamel.yaml import YAML
from safetensors.torch import load_file
from torch.utils._pytree import tree_map_only

from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.cogvideox.modeling_cogvideox import CogVideoXAdapter, noised_picture
from mindspeed_mm.fsdp.models.diffusion import latents
from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil
from mindspeed_mm.fsdp.models.diffusion.transformer import ExpertPair
from mindspeed_mm.fsdp.models.flux.modeling_flux import FluxAdapter
from mindspeed_mm.fsdp.models.hunyuan_video.modeling_hunyuan_video import HunyuanVideoAdapter
from mindspeed_mm.fsdp.models.hunyuan_video_1_5.modeling_hunyuan_video_1_5 import HunyuanVideo15Adapter
from mindspeed_mm.fsdp.models.lumina2.modeling_lumina2 import Lumina2Adapter
from mindspeed_mm.fsdp.models.wan.modeling_wan import WanAdapter, WanTokenTimeAdapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import SampleOrder
from mindspeed_mm.tasks.draw.loading import load_lora, load_sampler
from mindspeed_mm.tasks.model_source import ModelSource
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.distributed import run_ranks
from tests.helpers.parity import compare_steps
from tests.helpers.pipeline_probe import Probed, drawn_time, encoded, in_layout_of, of_the_mode, plain_pipeline
from tests.helpers.planned_steps import train_steps
from tests.helpers.runs import losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generator_families import FAMILIES, TinyFamily, smaller_pictures
from tests.helpers.tiny_generator_run import generator_config
from tests.helpers.tiny_video_families import make_tiny_hunyuan_video_i2v

BY_DEFAULT = ("sd3", "wan2_2", "cogvideox")
CASES = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FAMILIES]
FEATURES = "data.dataset_param.basic_parameters.features_dir="
CAPTIONS = ("a red box", "two blue lines", 'a "seven" moving left', "grain, large and round")
SEED = 7
EXACTLY = (
    "sd3", "flux", "flux2", "flux2_dev", "sana", "lumina2", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus",
    "wan", "wan_i2v", "wan2_2", "wan2_2_5b_ti2v", "wan2_2_i2v", "cogvideox",
)  # fmt: skip
"""Families whose loss is compared in fp64, too."""
EXACT = 1e-6
"""Of losses in fp64: pipelines hand noise and times to their transformer in fp32."""
CLIP_MS = 120
"""How long each picture of a clip is shown, which some models are told."""


def make_run(name: str, folder: Path, side: int = 0) -> Path:
    """Model, four captioned pictures or clips (of `side` pixels, else of the family's own size), and the YAML."""
    family = FAMILIES[name] if not side else replace(FAMILIES[name], side=side)
    family.make(folder / "model")
    (folder / "media").mkdir()
    bytes_of, rows = random.Random(3), []
    for index, caption in enumerate(CAPTIONS):
        shape = (family.frames, family.side, family.side, 3)
        pixels = np.frombuffer(bytes_of.randbytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
        path = f"media/{index}.{'png' if family.frames == 1 else 'gif'}"
        save_media(pixels, folder / path)
        row = {"path": path, "cap": caption}
        for role in find_adapter(folder / "model", task=family.task).media_roles:
            if role.name.endswith("_3") and index > 1:
                continue  # two rows with three pictures, and two with two
            row[role.columns[0]] = path.replace(f"{index}.", f"{index}_{role.name}.")
            shown = pixels[::-1] if role.frames == "all" else pixels[:1, ::-1]
            shown = np.roll(shown, len(row), axis=2)  # further pictures are others
            save_media(shown, folder / row[role.columns[0]])
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"height": family.side, "width": family.side}
    sizes |= {"num_frames": family.frames} if family.frames > 1 else {}
    average = {"enable": True, "decay": 0.5, "warmup": False}
    model = {} if family.task is None else {"task": family.task}
    config = generator_config(
        folder, sizes, model=model, training={"train_iters": 2, "seed": SEED, "ema": average, "diffusion": {}}
    )
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(config, file)
    return folder / "run.yaml"


def save_media(pixels_THWC: np.ndarray, path: Path) -> None:
    """A picture, or a clip in shades of grey."""
    is_clip = path.suffix == ".gif"
    first, *others = [Image.fromarray(frame[:, :, 0] if is_clip else frame) for frame in pixels_THWC]
    first.save(path, **({"save_all": True, "append_images": others, "duration": CLIP_MS, "loop": 0} if others else {}))


@pytest.mark.parametrize("name", CASES)
def test_a_family_equals_its_pipeline(name: str, tmp_path: Path) -> None:
    yaml = make_run(name, tmp_path)
    with smaller_pictures():
        check_losses(name, yaml, tmp_path)
        check_export(name, tmp_path)
        check_adapters(name, yaml, tmp_path)


def check_losses(name: str, yaml: Path, folder: Path) -> None:
    """Of a step on raw media and of one on features: equal to each other, and to the pipeline's."""
    raw: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []
    said = mm("extract", yaml, "--out", folder / "features")
    assert said.code == 0, said.err
    with watched_steps(lambda _, batches: raw.extend(batches)):
        train(yaml, folder / "raw", "training.train_iters=1")
    with watched_steps(lambda _, batches: seen.extend(batches)):
        train(yaml, folder / "run", FEATURES + str(folder / "features"))
    values = losses(folder / "run")
    assert len(values) == 2 and values[1] == pytest.approx(losses(folder / "raw")[1], rel=2e-5)
    expected = losses_by_hand(name, folder / "model", raw[0], seen[0])
    assert values[1] == pytest.approx(float(np.mean(expected)), rel=5e-5), expected
    if name not in EXACTLY:
        return
    with keeping_double():
        train(yaml, folder / "exact", FEATURES + str(folder / "features"), "training.train_iters=1", *FP64)
        exact = losses_by_hand(name, folder / "model", raw[0], seen[0], torch.float64)
    assert losses(folder / "exact")[1] == pytest.approx(float(np.mean(exact)), rel=EXACT), exact


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_a_family_trains_in_bf16(name: str, tmp_path: Path) -> None:
    yaml = make_run(name, tmp_path)
    words = ("training.train_iters=1", "training.ema.enable=false")
    with smaller_pictures():
        train(yaml, tmp_path / "exact", *words)
        train(yaml, tmp_path / "short", *words, "parallel.fsdp_plan.param_dtype=bf16")
    assert losses(tmp_path / "short")[1] == pytest.approx(losses(tmp_path / "exact")[1], rel=0.03)


def given_one_frame_later(self: Any, batch: Any) -> torch.Tensor:
    """Fault: another latent frame stands there without noise."""
    latents = batch["latents"]
    return (torch.arange(latents.shape[2]) == 1).view(1, 1, -1, 1, 1)


def experts_swapped(self: Any, timestep: torch.Tensor, **inputs: Any) -> Any:
    """Fault: much noise is sent to the transformer of little noise."""
    first, second = self.transformer, self.transformer_2
    self.transformer, self.transformer_2 = second, first
    try:
        return PAIR_FORWARD(self, timestep, **inputs)
    finally:
        self.transformer, self.transformer_2 = first, second


PAIR_FORWARD = ExpertPair.forward
LUMINA_INPUTS = Lumina2Adapter.inputs


def time_turned(self: Any, noisy: torch.Tensor, sigma: torch.Tensor, batch: Any, guidance: float) -> dict[str, Any]:
    """Fault: time runs from noise to the picture, as other families count it."""
    return LUMINA_INPUTS(self, noisy, sigma, batch, guidance) | {"timestep": sigma}


def spread_alone(latents: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    """Fault: latents are brought to variance 1, and not to mean 0."""
    return latents / torch.as_tensor(std).view(1, -1, 1, 1, 1)


def first_frame_one_later(self: Any, latents: torch.Tensor) -> torch.Tensor:
    """Fault: the mask says that the second latent frame is given."""
    mask = latents.new_zeros(latents.shape[0], self.geometry.temporal_ratio, *latents.shape[2:])
    mask[:, :, 1] = 1
    return mask


def predicts_the_picture(self: Any, output: Any, latent_shape: tuple[int, ...]) -> torch.Tensor:
    """Fault: x − ε is taken for ε − x."""
    return output[0]


FLUX_INPUTS, HUNYUAN_INPUTS, FIRST_PICTURES = (
    FluxAdapter.inputs,
    HunyuanVideoAdapter.inputs,
    HunyuanVideo15Adapter.inputs,
)
ROTARY_TABLES = CogVideoXAdapter.rotary_tables


def sides_exchanged(self: Any, *args: Any) -> dict[str, Any]:
    """Fault: rows are taken for columns."""
    inputs = FLUX_INPUTS(self, *args)
    return inputs | {"img_ids": inputs["img_ids"][:, [0, 2, 1]]}


def sines_first(self: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Fault: cosines and sines in each other's stead."""
    cosines, sines = ROTARY_TABLES(self, *args)
    return sines, cosines


def guidance_unscaled(self: Any, *args: Any) -> dict[str, Any]:
    """Fault: guidance is not told in thousandths."""
    inputs = HUNYUAN_INPUTS(self, *args)
    return inputs | {"guidance": inputs["guidance"] / 1000}


def picture_said_to_be_given(self: Any, *args: Any) -> dict[str, Any]:
    """Fault: the mask says that a picture is given where none is."""
    inputs = FIRST_PICTURES(self, *args)
    inputs["hidden_states"][:, -1] = 1
    return inputs


FAULTS = {
    "flux": (FluxAdapter, "inputs", sides_exchanged),
    "cogvideox": (CogVideoXAdapter, "rotary_tables", sines_first),
    "hunyuan_video": (HunyuanVideoAdapter, "inputs", guidance_unscaled),
    "hunyuan_video_1_5": (HunyuanVideo15Adapter, "inputs", picture_said_to_be_given),
    "wan2_2_5b_ti2v": (WanTokenTimeAdapter, "given_latents", given_one_frame_later),
    "wan2_2": (ExpertPair, "forward", experts_swapped),
    "lumina2": (Lumina2Adapter, "inputs", time_turned),
    "lumina2 ": (Lumina2Adapter, "prediction", predicts_the_picture),
    "wan": (latents, "standardised", spread_alone),
    "wan_i2v": (WanAdapter, "_given_mask", first_frame_one_later),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fault.strip()
    yaml = make_run(name, tmp_path)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError, match=r"comparison failed|not close"):
        check_losses(name, yaml, tmp_path)


@torch.no_grad()
def losses_by_hand(
    name: str, model: Path, raw: dict[str, Any], features: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Of each sample, by the plain pipeline; also compares latents and text features with it. `dtype`: what its
    transformer computes in."""
    adapter, family = find_adapter(model, task=FAMILIES[name].task), FAMILIES[name]
    pipeline = plain_pipeline(model, adapter.pipelines[adapter.task])
    for part in adapter.transformers:
        getattr(pipeline, part).to(dtype).register_forward_pre_hook(partial(cast, dtype), with_kwargs=True)
    pipeline.vae.encode = of_the_mode(pipeline.vae.encode)
    if name.startswith("hunyuan_video_i2v"):
        pipeline.prepare_latents = without_picture(pipeline.prepare_latents)
    sampling = SamplingArguments(
        guidance_scale=family.guidance,
        num_inference_steps=50,
        height=family.side,
        width=family.side,
        fps=1000 / CLIP_MS,
    )
    adapter.prepare_pipeline(pipeline, sampling)
    found, times = [], []
    for row, sample in enumerate(raw["sample_ids"]):
        caption, x = raw["captions"][row], features["latents"][row : row + 1]
        assert features["sample_ids"][row] == sample

        media = adapter.pipeline_media(shown_media(adapter, raw, row), sampling)

        def call(latents: torch.Tensor, caption: str = caption, media: dict[str, Any] = media) -> dict[str, Any]:
            arguments = media | adapter.pipeline_arguments(sampling, [caption], latents)
            return {**arguments, "prompt": [caption], "output_type": "np", "return_dict": False}

        packed = call(x)["latents"]
        first = Probed(pipeline, call(x), torch.tensor(500), packed, x)
        theirs = encoded(pipeline.vae, raw["pixels"][row : row + 1])
        made = learned_part(first.decoded.reshape(theirs.shape), theirs, family.given_frames)
        torch.testing.assert_close(made, learned_part(theirs, theirs, family.given_frames), rtol=1e-4, atol=1e-5)
        text = features["prompt_embeds"][row]
        mask = features.get("prompt_mask")
        assert first.has_text(text if mask is None else text[mask[row].bool()])

        chance = np.random.Generator(np.random.Philox(key=derive_seed(SEED, raw["epochs"][row], sample)))
        chance.random()  # whether the caption is dropped
        time = drawn_time(chance, pipeline.scheduler, first.mu)
        times.append(time)
        noise = noise_of(derive_seed(SEED, raw["epochs"][row], sample), x.shape[1:])[None]
        noisy, target = mixed(pipeline.scheduler, x.double(), noise.double(), time)
        noisy[:, :, : family.given_frames] = x[:, :, : family.given_frames]
        is_step = hasattr(pipeline.scheduler, "alphas_cumprod") and time > 1
        asked = torch.tensor(int(time)) if is_step else torch.tensor(1000 * time, dtype=torch.float32)
        second = Probed(pipeline, call(noisy.float()), asked, packed, x)
        target, said = (
            learned_part(each, x, family.given_frames)
            for each in (in_layout_of(call(target)["latents"], second.said, target), second.said)
        )
        found.append(float((said - target).square().mean()))
    boundary = pipeline.config.get("boundary_ratio")
    assert boundary is None or min(times) < boundary <= max(times), times  # both transformers are compared
    return found


def cast(dtype: torch.dtype, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook in front of a pipeline's transformer."""

    def exact(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, exact, (args, kwargs))


def shown_media(adapter: DiffusionAdapter, raw: dict[str, Any], row: int) -> dict[str, Any]:
    """What a sample is made from, as the pipeline is given it: role → picture, or pictures."""
    media = {}
    for role in adapter.roles.get(adapter.task, ()):
        if role.is_optional and role.batch_key not in raw:
            continue
        pixels = raw.get(role.batch_key, raw["pixels"])[row]
        pictures = as_pil(pixels.transpose(0, 1))
        media[role.name] = pictures if role.frames == "all" else pictures[0]
        if isinstance(adapter, CogVideoXAdapter):
            media[role.name] = noised_picture(pixels[None])[:, :, 0]
    return media


def without_picture(prepare: Any) -> Any:
    """HunyuanVideo's pipeline mixes a thousandth of the picture into the noise that it begins with."""

    def prepared(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return arguments[9].float(), prepare(*arguments)[1]

    return prepared


def learned_part(latents: torch.Tensor, whole_BCTHW: torch.Tensor, given_frames: int) -> torch.Tensor:
    """Without what is given, which may be left out already: frames stand first, in tokens too."""
    if not given_frames:
        return latents
    if latents.dim() == 5:
        return latents[:, :, given_frames - whole_BCTHW.shape[2] :]
    given = given_frames * latents.shape[1] // whole_BCTHW.shape[2]
    return latents[:, given:]


def mixed(scheduler: Any, x: torch.Tensor, noise: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t and what is learned from it: of flow matching, or of diffusers' own `add_noise` and `get_velocity`."""
    from diffusers import DDPMScheduler

    if time <= 1:
        return (1 - time) * x + time * noise, noise - x
    steps = DDPMScheduler(prediction_type="v_prediction")
    steps.alphas_cumprod = scheduler.alphas_cumprod.double()
    at = torch.tensor([int(time)])
    return steps.add_noise(x, noise, at), steps.get_velocity(x, noise, at)


def check_export(name: str, folder: Path) -> None:
    """The averaged weights are exported, load in diffusers, and draw what our sampler draws."""
    said = mm("export", folder / "run", folder / "exported")
    assert said.code == 0, said.err
    weights, trained = exported_weights(folder / "exported"), tensors(folder / "run")
    averages = {key.removeprefix("ema."): value for key, value in trained.items() if key.startswith("ema.")}
    assert averages and averages.keys() <= weights.keys()  # buffers are exported, too
    for key, value in averages.items():
        assert torch.equal(weights[key], value)
    assert any(not torch.equal(value, trained[f"model.{key}"]) for key, value in averages.items())

    check_samples(FAMILIES[name], folder / "exported", folder)


def check_samples(family: TinyFamily, model: Path, folder: Path) -> None:
    """What our sampler draws is what the plain pipeline does, called with the same noise.

    Args:
        family: Says the size of its media.
        model: The folder.
        folder: For the media that samples are made from.
    """
    adapter = find_adapter(model, task=family.task)
    sampler = load_sampler(adapter, ModelSource(model), torch.device("cpu"))
    sampling = SamplingArguments(
        num_inference_steps=3, guidance_scale=3.0, height=family.side, width=family.side, num_frames=family.frames,
        batch_size=1 if adapter.task in adapter.one_by_one else 2, fps=16.0,
    )  # fmt: skip
    files = files_to_show(adapter, family, folder)
    others = tuple((name, path) for name, path in files.items() if name != "image")
    prompts = [
        Prompt(number, text, "here", image=files.get("image"), others=others)
        for number, text in enumerate(CAPTIONS[:2])
    ]
    ours = [made.frames for batch in sampler.sample(prompts, sampling) for made in batch]
    pipeline = plain_pipeline(model, adapter.pipelines[adapter.task])
    adapter.prepare_pipeline(pipeline, sampling)
    pictures = {role.name: frames_of(files[role.prompt]) for role in adapter.roles.get(adapter.task, ())}
    for prompt, made in zip(prompts, ours, strict=True):
        order = SampleOrder(prompt, 0)
        noise = sampler.noise(order, sampling.seed, MediaSize(family.frames, family.side, family.side))[None]
        seed = order.noise_seed(sampling.seed)
        drawn_by_pipeline = adapter.task in adapter.draws
        draw = torch.Generator().manual_seed(seed if drawn_by_pipeline else derive_seed(seed, "steps") % 2**63)
        shown = {
            role.name: pictures[role.name] if role.frames == "all" else pictures[role.name][0]
            for role in adapter.roles.get(adapter.task, ())
        }
        arguments = adapter.pipeline_arguments(sampling, [prompt.text], noise)
        arguments |= adapter.pipeline_media(shown, sampling) | {"generator": draw}
        arguments["prompt"] = [prompt.text]
        if adapter.task in adapter.one_by_one:  # some take no lists
            single = arguments.keys() & {"prompt", "negative_prompt"}
            arguments |= {key: arguments[key][0] for key in single}
        drawn = pipeline(**{**arguments, "output_type": "np", "return_dict": False})[0]
        theirs = (np.asarray(drawn[0]) * 255).round().reshape(made.shape)
        assert np.abs(theirs - made).max() <= 1
    assert np.abs(ours[0].astype(int) - ours[1]).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kontext", "fill", "flf2v", "v2v", "vace"])
def test_samples_of_tasks_with_media_equal_their_pipelines(name: str, tmp_path: Path) -> None:
    """Guided, with numbers that the pipeline draws itself: those of filling and of v2v."""
    frames = 1 if name in ("kontext", "fill") else 5
    frames = 9 if name == "vace" else frames  # diffusers takes no more reference pictures than latent frames
    task = "edit" if name == "kontext" else name
    family = TinyFamily(lambda folder: make_tiny_conditioned(folder, name), frames=frames, task=task)
    family.make(tmp_path / "model")
    check_samples(family, tmp_path / "model", tmp_path)


@pytest.mark.edge("BN12")
@pytest.mark.parametrize("condition", ["latent_concat", "token_replace"])
def test_a_picture_of_another_size_is_cut_before_anything_sees_it(condition: str, tmp_path: Path) -> None:
    """HunyuanVideo-I2V: both the VAE and LLaVA see the middle, scaled, as they see first frames in training. The
    pipeline stretches a picture for the VAE and shows LLaVA the whole of it."""
    make_tiny_hunyuan_video_i2v(tmp_path / "model", condition)
    picture = Image.fromarray(np.random.default_rng(5).integers(0, 255, (20, 40, 3), dtype=np.uint8))
    picture.save(tmp_path / "picture.png")
    sampler = load_sampler(find_adapter(tmp_path / "model"), ModelSource(tmp_path / "model"), torch.device("cpu"))
    sampling = SamplingArguments(num_inference_steps=3, height=16, width=16, num_frames=9, batch_size=1)
    prompt = Prompt(0, CAPTIONS[0], "here", image=tmp_path / "picture.png")
    ((made,),) = sampler.sample([prompt], sampling)
    seed = SampleOrder(prompt, 0).noise_seed(sampling.seed)
    noise = torch.randn(1, 4, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    pipeline = plain_pipeline(tmp_path / "model")
    released = {} if condition == "latent_concat" else {"guidance_scale": 6.0}

    def apart(shown: Image.Image) -> float:
        drawn = pipeline(
            image=shown, prompt=CAPTIONS[0], latents=noise, height=16, width=16, num_frames=9, num_inference_steps=3,
            output_type="np", **released,
        ).frames[0]  # fmt: skip
        return float(np.abs((drawn * 255).round() - made.frames).max())

    middle = picture.resize((16, 16), Image.Resampling.BICUBIC, box=(10, 0, 30, 20))
    assert apart(middle) <= 1 < apart(picture)


def files_to_show(adapter: DiffusionAdapter, family: TinyFamily, folder: Path) -> dict[str, Path]:
    """Field of a prompt → a file of noise, for each medium that samples are made from."""
    files, draw = {}, np.random.default_rng(5)
    for role in adapter.roles.get(adapter.task, ()):
        frames = family.frames if role.frames == "all" else 1
        files[role.prompt] = folder / f"shown_{role.name}.{'gif' if frames > 1 else 'png'}"
        save_media(draw.integers(0, 255, (frames, family.side, family.side, 3), dtype=np.uint8), files[role.prompt])
    return files


def frames_of(path: Path) -> list[Image.Image]:
    return [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(path))]


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    """By the names that they have in the run: of two transformers behind the names of their folders."""
    found, is_pair = {}, (folder / "transformer_2").is_dir()
    for part in ("transformer", "transformer_2")[: 1 + is_pair]:
        own = load_file(next((folder / part).glob("*.safetensors")))
        found |= {f"{part}.{key}" if is_pair else key: value for key, value in own.items()}
    return found


def check_adapters(name: str, yaml: Path, folder: Path) -> None:
    """Trained adapters load beside the weights in diffusers, and say there what the merged folder says."""
    words = ("training.lora.enable=true", "training.lr=0.05", FEATURES + str(folder / "features"))
    train(yaml, folder / "adapters", *words, "training.ema.enable=false")
    for option, out in ((), "lora"), (("--merge",), "merged"):
        said = mm("export", folder / "adapters", folder / out, *option)
        assert said.code == 0, said.err
    adapter, family = find_adapter(folder / "model", task=FAMILIES[name].task), FAMILIES[name]
    kind = adapter.pipelines[adapter.task]
    beside, merged, base = (plain_pipeline(folder / each, kind) for each in ("model", "merged", "model"))
    if (folder / "lora/transformer_2").is_dir():
        beside.load_lora_weights(folder / "lora/transformer")
        beside.load_lora_weights(folder / "lora/transformer_2", load_into_transformer_2=True)
    else:
        load_lora(beside, folder / "lora")
    side, scale = family.side, family.guidance
    sampling = SamplingArguments(num_inference_steps=28, guidance_scale=scale, height=side, width=side, fps=16.0)
    size = adapter.geometry.latent_shape(MediaSize(family.frames, family.side, family.side))
    latents = torch.randn(1, *size, generator=torch.Generator().manual_seed(1))
    files = files_to_show(adapter, family, folder)
    shown = {role.name: frames_of(files[role.prompt])[0] for role in adapter.roles.get(adapter.task, ())}
    arguments = adapter.pipeline_media(shown, sampling) | adapter.pipeline_arguments(sampling, [CAPTIONS[0]], latents)
    for pipeline in (beside, merged, base):
        pipeline.vae.encode = of_the_mode(pipeline.vae.encode)
    for time in (500, 900):
        said_by = []
        for pipeline in (beside, merged, base):
            adapter.prepare_pipeline(pipeline, sampling)
            call = {**arguments, "prompt": [CAPTIONS[0]], "return_dict": False}  # a list of its own: some write into it
            said_by.append(Probed(pipeline, call, torch.tensor(time), arguments["latents"], latents).said)
        torch.testing.assert_close(said_by[0], said_by[1], rtol=1e-3, atol=1e-4)
        assert (said_by[0] - said_by[2]).abs().max() > 1e-3


# --- two ranks --------------------------------------------------------------------------------------------------------

FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false", "training.ema.enable=false")


SOME_AND_EACH = [BY_DEFAULT, *(pytest.param((name,), marks=pytest.mark.slow) for name in FAMILIES)]


@pytest.mark.parametrize("names", SOME_AND_EACH, ids="-".join)
def test_two_ranks_equal_one_process(names: Sequence[str], tmp_path: Path) -> None:
    """Loss, gradients and weights of two steps, in fp64."""
    yamls = {}
    for name in names:
        (tmp_path / name).mkdir()
        yamls[name] = str(make_run(name, tmp_path / name))
    expected = steps_of(yamls, 2)
    for measured in run_ranks(2, steps_of, yamls, 1):
        for name in names:
            print(name, end=": ")
            compare_steps(expected[name], measured[name], 1e-6)


def steps_of(yamls: dict[str, str], micro_batch_size: int) -> dict[str, Any]:
    """Name → its recorded steps, on this rank."""
    words = [*FP64, f"training.micro_batch_size={micro_batch_size}"]
    with keeping_double(), smaller_pictures():
        return {name: train_steps(yaml, words) for name, yaml in yamls.items()}
