"""Generators that are given media beside the caption: what they are trained with and sampled from is what diffusers'
own pipelines take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective
from mindspeed_mm.fsdp.models.diffusion.components import load_component, load_encoders, load_pipeline
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.models.diffusion.latents import as_pil
from mindspeed_mm.fsdp.models.diffusion.live_encoding import LiveEncoder
from mindspeed_mm.fsdp.models.diffusion.media_roles import MASK_OF_VIDEO
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments, SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import SampleOrder, load_media
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource
from tests.helpers.denoising import denoise, text_batch
from tests.helpers.pipeline_probe import of_the_mode
from tests.helpers.runs import lines, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_conditioned import make_tiny_conditioned
from tests.helpers.tiny_generator_run import generator_config

CPU = torch.device("cpu")
SIDE, FRAMES = 16, 5

slow = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A family and a task."""

    task: str
    columns: Mapping[str, str]
    """Column of a row → `picture`, `mask`, `clip` or `mask clip`."""
    options: Mapping[str, str]
    """Option of `mm infer` → the same."""
    by_hand: Callable[[Any, dict[str, torch.Tensor]], dict[str, Any]]
    """Pipeline in fp64, and pixels in −1..1 of a sample → what the transformer is given besides noise and text."""
    is_video: bool = False
    media: Mapping[str, Any] = field(default_factory=dict)


def flux_latents(pipe: Any, image: torch.Tensor) -> torch.Tensor:
    vae = pipe.vae
    return (vae.encode(image).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor


def packed(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    return pipe._pack_latents(latents, *latents.shape)


def wan_latents(pipe: Any, video: torch.Tensor) -> torch.Tensor:
    mean, std = (
        torch.tensor(n, dtype=video.dtype).view(1, -1, 1, 1, 1)
        for n in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    return (pipe.vae.encode(video).latent_dist.mode() - mean) / std


def kontext(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"behind": packed(pipe, flux_latents(pipe, pixels["source"][:, :, 0]))}


def fill(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    mask = (pixels["mask"][:, :1, 0] >= 0).to(pixels["target"])
    around = pixels["target"][:, :, 0] * (1 - mask)
    ratio = pipe.vae_scale_factor
    height, width = (side // ratio for side in mask.shape[-2:])
    folded = mask[:, 0].view(1, height, ratio, width, ratio).permute(0, 2, 4, 1, 3).reshape(1, ratio**2, height, width)
    return {"beside": torch.cat([packed(pipe, flux_latents(pipe, around)), packed(pipe, folded)], dim=-1)}


def flf2v(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    first, last = pixels["first_frame"], pixels["last_frame"]
    target = pixels["target"]
    between = torch.zeros_like(target[:, :, 1:-1])
    condition = wan_latents(pipe, torch.cat([first, between, last], dim=2))
    mask = torch.zeros(1, 4, *condition.shape[2:], dtype=condition.dtype)
    mask[:, :, 0], mask[:, 3, -1] = 1, 1
    pictures = [as_pil(((frame[:, :, 0] + 1) * 127.5).round().byte())[0] for frame in (first, last)]
    pipe.image_encoder.double()
    found = pipe.image_processor(images=pictures, return_tensors="pt").pixel_values.double()
    embeds = pipe.image_encoder(found, output_hidden_states=True).hidden_states[-2]
    return {"channels": torch.cat([mask, condition], dim=1), "encoder_hidden_states_image": embeds}


def vace(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Without a control video it is zeros, and without a mask that is ones, as `preprocess_conditions` has it."""
    white = pixels.get("mask", torch.ones_like(pixels["target"]))
    mask = (white[:, :1] > 0).to(pixels["target"])
    video = pixels.get("control", torch.zeros_like(pixels["target"]))
    latents = [wan_latents(pipe, video * (1 - mask)), wan_latents(pipe, video * mask)]
    ratio, (frames, height, width) = 8, mask.shape[2:]
    raw = ((white[0, 0] + 1) / 2).view(frames, height // ratio, ratio, width // ratio, ratio)
    raw = raw.permute(2, 4, 0, 1, 3).flatten(0, 1)[None]
    size = latents[0].shape[2:]
    folded = torch.nn.functional.interpolate(raw, size=tuple(size), mode="nearest-exact")
    return {"control_hidden_states": torch.cat([*latents, folded], dim=1)}


def vace_references(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Pictures stand in front, the last one first; nothing of them is to be made."""
    control = vace(pipe, pixels)["control_hidden_states"]
    names = [name for name in ("reference_3", "reference_2", "reference") if name in pixels]
    pictures = torch.cat([wan_latents(pipe, pixels[name]) for name in names], dim=2)
    kept = torch.cat([pictures, torch.zeros_like(pictures)], dim=1)
    kept = torch.cat([kept, kept.new_zeros(1, control.shape[1] - kept.shape[1], *kept.shape[2:])], dim=1)
    return {"control_hidden_states": torch.cat([kept, control], dim=2), "in_front": pictures}


def nothing(pipe: Any, pixels: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {}


CASES = {
    "kontext": Case("edit", {"source": "picture"}, {"--image": "picture"}, kontext),
    "fill": Case("fill", {"mask": "mask"}, {"--image": "picture", "--mask": "mask"}, fill),
    "flf2v": Case("flf2v", {}, {"--image": "picture", "--last-image": "picture"}, flf2v, is_video=True),
    "v2v": Case("v2v", {}, {"--video": "clip"}, nothing, is_video=True),
    "vace": Case(
        "vace",
        {"control": "clip", "mask": "mask clip"},
        {"--control": "clip", "--mask": "mask clip"},
        vace,
        is_video=True,
    ),
}
CASES["vace_references"] = Case(
    "vace",
    {**CASES["vace"].columns, "reference": "picture", "reference_2": "picture"},
    {**CASES["vace"].options, "--reference": "picture"},
    vace_references,
    is_video=True,
)
CASES["vace_alone"] = Case("vace", {"reference": "picture"}, {"--reference": "picture"}, vace_references, is_video=True)
CASES["vace_control"] = Case("vace", {"control": "clip"}, {"--control": "clip"}, vace, is_video=True)
DEFAULT = ("kontext", "flf2v", "vace_alone")
ALL = [pytest.param(name, marks=() if name in DEFAULT else slow) for name in CASES]


def draw_media(kind: str, path: Path, seed: int) -> Path:
    """A picture or a clip of noise; masks are white on the right."""
    frames = FRAMES if "clip" in kind else 1
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, SIDE, SIDE, 3), dtype=np.uint8)
    if "mask" in kind:
        pixels[:] = 0
        for number, frame in enumerate(pixels):  # equal frames would become one
            frame[:, SIDE // 2 + number :] = 255
    path = path.with_suffix(".gif" if frames > 1 else ".png")
    first, *others = [Image.fromarray(frame) for frame in pixels]
    first.save(path, **({"save_all": True, "append_images": others, "duration": 125} if others else {}))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model, rows and YAML of a case, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = write_run(tmp_path_factory.mktemp(name), name)
        return made[name]

    return make


def write_run(folder: Path, name: str) -> Path:
    case = CASES[name]
    make_tiny_conditioned(folder / "model", name)
    rows = []
    for number in range(4):
        row: dict[str, Any] = {"cap": f"number {number}"}
        for column, kind in {"path": "clip" if case.is_video else "picture", **case.columns}.items():
            row[column] = draw_media(kind, folder / f"{column}{number}", seed=10 * number + len(column)).name
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"height": SIDE, "width": SIDE, **({"num_frames": FRAMES} if case.is_video else {})}
    config = generator_config(folder, sizes)
    config["model"]["task"] = case.task
    config["training"]["train_iters"] = 2
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(config, file)
    return folder


@pytest.mark.parametrize("name", ALL)
def test_features_and_raw_media_train_the_same(folders: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    folder = folders(name)
    yaml, features = folder / "run.yaml", f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}"
    assert mm("check", yaml).code == 0
    assert mm("data", "check", yaml).code == 0
    assert mm("extract", yaml, features).code == 0
    train(yaml, tmp_path / "raw")
    train(yaml, tmp_path / "stored", features)
    assert losses(tmp_path / "raw") == pytest.approx(losses(tmp_path / "stored"), rel=1e-6)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_the_loss_is_that_of_plain_diffusers(folders: Callable[[str], Path], name: str) -> None:
    """By hand, in fp64, with nothing of ours but σ and noise."""
    folder, case = folders(name), CASES[name]
    arguments = load_with_plugins(folder / "run.yaml").arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param)
    adapter = find_adapter(folder / "model", task=case.task)
    collate = dataset.build_collator(arguments.data.dataloader_param.collate_param)
    assert collate is not None
    batch = collate([dataset.item(index, 0) for index in range(2)])
    pipe = load_encoders(adapter, CPU, torch.float64)
    transformer = load_component(adapter, "transformer", torch.float64).eval()
    objective = DenoisingObjective(
        adapter, DiffusionArguments(), seed=1, compute_dtype=torch.float64, encode=LiveEncoder(adapter, pipe)
    )
    prepared = objective.prepare(dict(batch))
    ours = float(objective.terms(transformer, prepared)["loss"])

    theirs = 0.0
    for row in range(2):
        pixels = {key.removeprefix("pixels_"): batch[key][row : row + 1] for key in batch if key.startswith("pixels")}
        pixels["target"] = pixels.pop("pixels")
        exact = {key: value.double() / 127.5 - 1 for key, value in pixels.items()}
        noise, sigma = prepared["_noise"][row : row + 1].double(), prepared["_time"][row].double()
        given = case.by_hand(pipe, exact)
        if "in_front" in given:
            noise = torch.cat([prepared["_noise_reference_latents"][row : row + 1].double(), noise], dim=2)
        error = by_hand_error(pipe, transformer, batch["captions"][row], exact["target"], noise, sigma, given)
        theirs += float(error.square().mean())
    assert ours == pytest.approx(theirs, rel=1e-6)


def by_hand_error(
    pipe: Any,
    transformer: Any,
    caption: str,
    target: torch.Tensor,
    noise: torch.Tensor,
    sigma: torch.Tensor,
    given: Any,
) -> torch.Tensor:
    """Prediction minus ε − x of one sample."""
    if target.shape[2] > 1:
        latents = wan_latents(pipe, target)
        if "in_front" in given:
            latents = torch.cat([given.pop("in_front"), latents], dim=2)
        hidden = (1 - sigma) * latents + sigma * noise
        text, _ = pipe.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=512 if "channels" in given else 24
        )
        if "channels" in given:
            hidden = torch.cat([hidden, given.pop("channels")], dim=1)
        inputs = {"hidden_states": hidden, "timestep": 1000 * sigma[None], "encoder_hidden_states": text, **given}
        return transformer(**inputs, return_dict=False)[0] - (noise - latents)
    latents = flux_latents(pipe, target[:, :, 0])
    hidden = packed(pipe, (1 - sigma) * latents + sigma * noise)
    tokens, (height, width) = hidden.shape[1], latents.shape[-2:]
    ids = pipe._prepare_latent_image_ids(1, height // 2, width // 2, CPU, torch.float64)
    if "behind" in given:
        hidden = torch.cat([hidden, given["behind"]], dim=1)
        other = ids.clone()
        other[:, 0] = 1
        ids = torch.cat([ids, other])
    if "beside" in given:
        hidden = torch.cat([hidden, given["beside"]], dim=-1)
    text, pooled, text_ids = pipe.encode_prompt(caption, None, max_sequence_length=24)
    found = transformer(
        hidden_states=hidden, timestep=sigma[None], encoder_hidden_states=text, pooled_projections=pooled,
        txt_ids=text_ids, img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    return found[:, :tokens] - packed(pipe, noise - latents)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_samples_are_those_of_the_pipeline(folders: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """`mm infer` against the folder's pipeline, called as its documentation says."""
    folder, case = folders(name), CASES[name]
    files = {
        option: draw_media(kind, tmp_path / option[2:], seed=7 + at)
        for at, (option, kind) in enumerate(case.options.items())
    }
    words = [word for option, path in files.items() for word in (option, path)]
    size = ["--size", f"{SIDE}x{SIDE}", *(["--frames", FRAMES] if case.is_video else [])]
    said = mm(
        "infer", folder / "model", "--task", case.task, "--prompt", "a cat", *words, *size, "--steps", 3,
        "--guidance-scale", 1, "--out", tmp_path / "out",
    )  # fmt: skip
    assert said.code == 0, said.err
    (entry,) = lines(tmp_path / "out" / "manifest.jsonl")
    expected = plain(folder / "model", case, files, entry["noise_seed"])
    if not case.is_video:
        (picture,) = (tmp_path / "out").glob("*.png")
        assert np.array_equal(np.asarray(Image.open(picture)), (expected[0] * 255).round().astype(np.uint8))
    assert (tmp_path / "out" / entry["file"]).stat().st_size > 0
    again = mm("infer", folder / "model", "--task", case.task, "--prompt", "a cat", *size, "--out", tmp_path / "none")
    assert again.code == 4
    assert re.search("the prompt has (no|neither)", again.err)


def plain(folder: Path, case: Case, files: dict[str, Path], seed: int) -> np.ndarray:
    import diffusers

    adapter = find_adapter(folder, task=case.task)
    pipe = getattr(diffusers, adapter.pipelines[case.task]).from_pretrained(folder)
    shape = adapter.geometry.latent_shape(MediaSize(FRAMES if case.is_video else 1, SIDE, SIDE))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))[None]
    media = {option: frames_of(path) for option, path in files.items()}
    names = {
        "edit": {"--image": "image"}, "fill": {"--image": "image", "--mask": "mask_image"},
        "flf2v": {"--image": "image", "--last-image": "last_image"}, "v2v": {"--video": "video"},
        "vace": {"--control": "video", "--mask": "mask", "--reference": "reference_images"},
    }[case.task]  # fmt: skip
    given: dict[str, Any] = {
        names[option]: found if files[option].suffix == ".gif" else found[0] for option, found in media.items()
    }
    size: dict[str, Any] = {"height": SIDE, "width": SIDE, "num_inference_steps": 3, "guidance_scale": 1.0}
    size |= {"output_type": "np", "max_sequence_length": 512 if case.task == "flf2v" else 24}
    if case.task in ("edit", "fill"):
        noise = pipe._pack_latents(noise, *noise.shape)
        size |= {"max_area": SIDE**2, "_auto_resize": False, "true_cfg_scale": 1.0} if case.task == "edit" else {}
    if case.task in ("flf2v", "vace"):
        size |= {"num_frames": FRAMES}
    if case.task == "v2v":
        given |= {"generator": torch.Generator().manual_seed(seed), "strength": 0.8}
    elif "reference_images" in given:  # frames more than the sample has: the pipeline draws the noise of all
        given |= {"generator": torch.Generator().manual_seed(seed), "reference_images": [given["reference_images"]]}
    else:
        given |= {"latents": noise, "generator": torch.Generator().manual_seed(seed)}
    return np.asarray(pipe(prompt="a cat", **given, **size, return_dict=False)[0])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "vace_alone" else slow) for name in CASES if name.startswith("vace")],
)
def test_frames_are_those_of_the_pipeline(folders: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    """To the bit, whatever of a control video, its mask and pictures is given."""
    folder, case = folders(name) / "model", CASES[name]
    files = {option: draw_media(kind, tmp_path / option[2:], seed=7) for option, kind in case.options.items()}
    adapter = find_adapter(folder, task=case.task)
    sampling = SamplingArguments(
        num_inference_steps=3, guidance_scale=1.0, height=SIDE, width=SIDE, num_frames=FRAMES, batch_size=1
    )
    prompt = Prompt(0, "a cat", "here", others=tuple((option[2:], path) for option, path in files.items()))
    ((made,),) = load_sampler(adapter, ModelSource(folder), CPU).sample([prompt], sampling)
    expected = plain(folder, case, files, SampleOrder(prompt, 0).noise_seed(sampling.seed))
    assert np.array_equal(made.frames, (expected[0] * 255).round().astype(np.uint8))


@torch.no_grad()
def test_more_references_than_latent_frames(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which diffusers' pipeline has too short a mask for."""
    folder = folders("vace_alone") / "model"
    adapter = find_adapter(folder, task="vace")
    pipe = load_pipeline(adapter, load_component(adapter, "transformer"), load_encoders(adapter, CPU)).to(torch.float64)
    names, draw = ("reference", "reference_2", "reference_3"), np.random.default_rng(3)
    pixels = {
        name: torch.from_numpy(draw.integers(0, 255, (1, 3, 1, SIDE, SIDE), dtype=np.uint8))
        for name in ("target", *names)
    }
    made = adapter.encode_conditions(pipe, pixels)
    expected = vace_references(pipe, {name: each.double() / 127.5 - 1 for name, each in pixels.items()})
    for name, key in (("control_latents", "control_hidden_states"), ("reference_latents", "in_front")):
        assert made[name].shape[2] == 4 - (name == "reference_latents")
        torch.testing.assert_close(made[name].double(), expected[key], rtol=0, atol=1e-5)

    files = (*names, "other")
    pictures = {name: draw_media("picture", tmp_path / name, seed=number) for number, name in enumerate(files)}
    sampling = SamplingArguments(num_inference_steps=2, height=SIDE, width=SIDE, num_frames=1, batch_size=1)
    sampler = load_sampler(adapter, ModelSource(folder), CPU)
    vae, found = sampler.pipeline.vae, []
    decode = vae.decode
    monkeypatch.setattr(vae, "decode", lambda latents, **more: found.append(latents) or decode(latents, **more))
    for changed in (None, *names):  # less than what eight bits show
        others = tuple((name, pictures["other" if name == changed else name]) for name in names)
        ((drawn,),) = sampler.sample([Prompt(0, "a cat", "here", others=others)], sampling)
        assert len(drawn.frames) == 1
    assert all((each - found[0]).abs().max() > 1e-5 for each in found[1:])


def frames_of(path: Path) -> list[Image.Image]:
    from PIL import ImageSequence

    return [frame.convert("RGB") for frame in ImageSequence.Iterator(Image.open(path))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT else slow)
        for name in CASES
        if name != "v2v" and not name.startswith("vace_")
    ],
)
@torch.no_grad()
def test_the_adapters_inputs_denoise_as_the_pipeline_does(folders: Callable[[str], Path], name: str) -> None:
    folder, case = folders(name), CASES[name]
    adapter = find_adapter(folder / "model", task=case.task)
    pipe = load_pipeline(adapter, load_component(adapter, "transformer").eval(), load_encoders(adapter, CPU))
    frames = FRAMES if case.is_video else 1
    draw = np.random.default_rng(3)
    media: dict[str, torch.Tensor] = {}
    roles = [role for role in adapter.media_roles if not role.is_whole]
    for key in ("target", *(role.name for role in roles)):
        count = frames if key in ("target", "control") or (key == "mask" and case.is_video) else 1
        media[key] = torch.from_numpy(draw.integers(0, 255, (1, 3, count, SIDE, SIDE), dtype=np.uint8))
    if "mask" in media:
        media["mask"][:] = 0
        media["mask"][..., SIDE // 2 :] = 255
    if case.task == "fill":
        media["source"] = media["target"]
    latents = torch.randn(1, *adapter.geometry.latent_shape(MediaSize(frames, SIDE, SIDE)))
    sampling = SamplingArguments(num_inference_steps=3, guidance_scale=1.0, height=SIDE, width=SIDE)
    pictures = {role.name: as_pil(media[role.name][0].transpose(0, 1)) for role in roles}
    given = {role.name: pictures[role.name] if role.frames == "all" else pictures[role.name][0] for role in roles}
    arguments = adapter.pipeline_arguments(sampling, ["a cat"], latents) | adapter.pipeline_media(given, sampling)
    if case.task == "fill":  # the pipeline draws from the posterior
        pipe.vae.encode = of_the_mode(pipe.vae.encode)
    if case.task == "vace":  # it takes no lists
        arguments |= {"prompt": "a cat", "negative_prompt": ""}
    theirs = pipe(**{"prompt": ["a cat"], **arguments, "output_type": "latent"}, return_dict=False)[0]
    if not case.is_video:
        theirs = unpacked(theirs, tuple(latents.shape))
    batch = text_batch(adapter, pipe, ["a cat"]) | adapter.encode_conditions(pipe, media)
    ours = denoise(adapter, pipe, latents, batch, steps=3, guidance=1.0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def unpacked(tokens: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    B, C, H, W = shape
    return tokens.view(B, H // 2, W // 2, C, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(shape)


@slow
def test_the_blocks_of_the_control_are_trained_beside_frozen_ones(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """As a ControlNet is: what reads the control learns, and the model that makes clips stays as it is."""
    folder = folders("vace")
    frozen = "['blocks.{*}', patch_embedding, condition_embedder, proj_out, scale_shift_table]"
    train(folder / "run.yaml", tmp_path / "run", f"model.freeze={frozen}", "training.lr=0.01")
    (file,) = (folder / "model" / "transformer").glob("*.safetensors")
    before, after = load_file(file), tensors(tmp_path / "run")
    changed = {
        name.partition(".")[0] for name, value in before.items() if not torch.equal(value, after[f"model.{name}"])
    }
    assert changed == {"vace_blocks", "vace_patch_embedding"}


class TestTheTask:
    def test_is_checked_against_the_folder(self, folders: Callable[[str], Path]) -> None:
        folder = folders("flf2v") / "model"
        assert find_adapter(folder, task="flf2v").task == "flf2v"
        with pytest.raises(
            ConfigError, match=r"model\.task .*'t2v' is not what WanImageToVideoPipeline is for\. Set i2v or flf2v"
        ):
            find_adapter(folder, task="t2v")
        with pytest.raises(ConfigError, match=r"places for two pictures.*Set model\.task: flf2v"):
            find_adapter(folder)

    def test_rows_without_the_medium_of_a_role(self, folders: Callable[[str], Path], tmp_path: Path) -> None:
        folder = folders("kontext")
        rows = lines(folder / "rows.jsonl")
        del rows[2]["source"]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = mm(
            "train", folder / "run.yaml", f"data.dataset_param.basic_parameters.dataset={tmp_path / 'rows.jsonl'}"
        )
        assert said.code == 4
        assert "rows.jsonl:3  source  the row has no source: none of source, source_image" in said.err

    def test_what_vace_has_to_be_given(self, folders: Callable[[str], Path], tmp_path: Path) -> None:
        """A mask is of a control video, and there is that video or a picture."""
        folder, rows = folders("vace_references"), tmp_path / "rows.jsonl"
        given = lines(folder / "rows.jsonl")
        all_of_them = ("control", "mask", "reference", "reference_2")
        for lacking, told in (
            (("control",), "rows.jsonl:1  mask  the row has a mask and no control that it would be of"),
            (all_of_them, "rows.jsonl:1  control  the row has neither a control nor a reference: none of"),
        ):
            rest = [{key: value for key, value in row.items() if key not in lacking} for row in given]
            rows.write_text("".join(json.dumps(row) + "\n" for row in rest))
            said = mm("data", "check", folder / "run.yaml", f"data.dataset_param.basic_parameters.dataset={rows}")
            assert said.code == 4
            assert told in said.out + said.err
        mask = draw_media("mask clip", tmp_path / "mask", seed=1)
        asked = ("--task", "vace", "--prompt", "a cat", "--size", "16x16", "--frames", FRAMES)
        said = mm("infer", folder / "model", *asked, "--mask", mask, "--out", tmp_path / "none")
        assert said.code == 4 and "the prompt has neither a control nor a reference" in said.err

    def test_a_still_mask_counts_for_every_frame_of_a_sample(
        self, folders: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder, rows = folders("vace"), tmp_path / "rows.jsonl"
        mask = draw_media("mask", tmp_path / "still", seed=1)
        given = [{**row, "mask": str(mask)} for row in lines(folder / "rows.jsonl")]
        rows.write_text("".join(json.dumps(row) + "\n" for row in given))
        words = (
            f"data.dataset_param.basic_parameters.dataset={rows}",
            f"data.dataset_param.basic_parameters.media_roots=[{tmp_path}]",
        )
        arguments = load_with_plugins(folder / "run.yaml", words).arguments
        dataset, _ = build_mm_dataset(arguments.data.dataset_param)
        item = dataset.item(0, 0)
        expected = torch.from_numpy(np.array(Image.open(mask))).permute(2, 0, 1)
        assert item["pixels_mask"].shape == item["pixels"].shape
        assert all(torch.equal(item["pixels_mask"][:, frame], expected) for frame in range(FRAMES))
        rows.write_text("".join(json.dumps({**row, "control": str(mask)}) + "\n" for row in given))
        dataset, _ = build_mm_dataset(arguments.data.dataset_param)
        with pytest.raises(DataError, match="has 1 frame at the rate of the clips, fewer than the 5 asked for"):
            dataset.item(0, 0)

    def test_a_still_mask_counts_for_every_frame_that_is_sampled(
        self, folders: Callable[[str], Path], tmp_path: Path, recwarn: pytest.WarningsRecorder
    ) -> None:
        """What moves is not told to be read by its first frame; what is too short is told before anything is made."""
        model, rows, out = folders("vace") / "model", tmp_path / "rows.jsonl", tmp_path / "out"
        control = draw_media("clip", tmp_path / "control", seed=1)
        mask = draw_media("mask", tmp_path / "mask", seed=2)
        asked = ("--task", "vace", "--size", "16x16", "--frames", FRAMES, "--steps", 1, "--guidance-scale", 1)
        given = ("--prompt", "a cat", "--control", control, "--mask", mask)
        said = mm("infer", model, *asked, *given, "--out", out)
        assert said.code == 0, said.err
        assert not [each for each in recwarn if "the first is used" in str(each.message)]
        assert len(lines(out / "manifest.jsonl")) == 1
        prompt = Prompt(0, "a cat", "here", others=(("mask", mask),))
        shown = load_media(prompt, MASK_OF_VIDEO, MediaSize(FRAMES, SIDE, SIDE))
        assert [np.asarray(frame).tolist() for frame in shown] == FRAMES * [np.asarray(Image.open(mask)).tolist()]

        good = {"prompt": "a cat", "control": str(control)}
        rows.write_text("".join(json.dumps(row) + "\n" for row in (good, {**good, "control": str(mask)})))
        said = mm("infer", model, *asked, "--prompts", rows, "--media-dir", tmp_path, "--out", tmp_path / "none")
        assert said.code == 4
        assert "rows.jsonl:2  control  'mask.png' has 1 frame, fewer than the 5 that are sampled" in said.err
        assert not list((tmp_path / "none").glob("*.mp4"))

    def test_samples_with_and_without_a_control_share_no_micro_batch(
        self, folders: Callable[[str], Path], tmp_path: Path
    ) -> None:
        """One of each kind, and one of two pictures, train together, raw and stored."""
        folder, rows = folders("vace_references"), tmp_path / "rows.jsonl"
        given = lines(folder / "rows.jsonl")
        kinds = (("mask", "reference", "reference_2"), ("control", "mask", "reference_2"), ("mask",), ())
        mixed = [
            {key: value for key, value in row.items() if key not in kind}
            for row, kind in zip(given, kinds, strict=True)
        ]
        rows.write_text("".join(json.dumps(row) + "\n" for row in mixed))
        words = (
            f"data.dataset_param.basic_parameters.dataset={rows}",
            "training.train_iters=4",
            "training.micro_batch_size=1",
        )
        stored = f"data.dataset_param.basic_parameters.features_dir={tmp_path / 'features'}"
        assert mm("extract", folder / "run.yaml", *words, stored).code == 0
        with watched_steps() as seen:
            train(folder / "run.yaml", tmp_path / "raw", *words)
        train(folder / "run.yaml", tmp_path / "stored", *words, stored)
        assert losses(tmp_path / "raw") == pytest.approx(losses(tmp_path / "stored"), rel=1e-6)
        assert len({sample for step in seen for sample in step}) == 4
        arguments = load_with_plugins(folder / "run.yaml", words).arguments
        dataset, _ = build_mm_dataset(arguments.data.dataset_param)
        assert len(set(map(str, dataset.sizes or ()))) == 3
