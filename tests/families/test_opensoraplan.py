"""Open-Sora Plan 1.3 against its formulas, written out in fp64: attention within sets, transformer, WF-VAE, the loss of
a run, and the sampler's steps. No library has them."""

from __future__ import annotations

import json
import math
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from safetensors.torch import load_file

from mindspeed_mm.core.errors import ModelFolderError
from mindspeed_mm.core.media_geometry import MediaSize
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.loss.denoising import noise_of
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.ops.skiparse import SkiparseSets, skiparse_attention
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.prompts import Prompt
from mindspeed_mm.fsdp.sampling.sampler import SampleOrder
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers
from mindspeed_mm.tasks.draw.loading import load_sampler
from mindspeed_mm.tasks.model_source import ModelSource
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers import opensoraplan_reference as reference
from tests.helpers.runs import differing, losses, mm, tensors, train, watched_steps
from tests.helpers.tiny_generator_run import generator_config
from tests.helpers.tiny_opensoraplan import JOINT, TRANSFORMER, VAE, make_tiny_opensoraplan

prepare_for_transformers()
slow = pytest.mark.slow
TASKS = ("t2v", pytest.param("i2v", marks=slow))
SEED, GAMMA, SIDE, FRAMES = 7, 5.0, 32, 9
CAPTIONS = ("a red box", "two blue lines moving")
FP64 = ("parallel.fsdp_plan.param_dtype=fp64", "training.adam_fused=false")
FEATURES = "data.dataset_param.basic_parameters.features_dir="
RELEASED = Path(__file__).parents[1] / "released" / "opensoraplan.yaml"
TIME_TOO = {
    "l1_dowmsample_block": "Spatial2xTime2x3DDownsample", "l1_downsample_wavelet": "HaarWaveletTransform3D",
    "l1_upsample_block": "Spatial2xTime2x3DUpsample", "l1_upsample_wavelet": "InverseHaarWaveletTransform3D",
}  # fmt: skip
"""What 8×8×8 has beyond 4×8×8."""


# --- attention within sets --------------------------------------------------------------------------------------------


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def sparse_and_dense(length: int, sets: SkiparseSets, masked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and gradients of queries, side by side: dealt out, and by a table of all pairs."""
    make = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, length, 3, 4, generator=make, dtype=torch.float64).unbind(0)
    shown = torch.rand(2, length, generator=make) > 0.3 if masked else torch.ones(2, length, dtype=torch.bool)
    seen = reference.seen_pairs(length, sets.sets, sets.in_runs)[None] & shown[:, None]
    counts = seen.any(-1)[..., None, None]  # tokens all of whose set is hidden are nobody's
    found = []
    for attend in (
        lambda q: skiparse_attention(q, k, v, sets, kernel, shown if masked else None),
        lambda q: kernel(q, k, v, (seen | ~seen.any(-1, keepdim=True))[:, None]),
    ):
        asked = q.clone().requires_grad_()
        out = attend(asked) * counts
        out.square().sum().backward()
        assert asked.grad is not None and asked.grad.isfinite().all()
        found.append(torch.stack([out.detach(), asked.grad * counts]))
    return found[0], found[1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("in_runs", [False, True])
@pytest.mark.parametrize(("length", "sets"), [(32, 4), (27, 4), (5, 4), (12, 2), (7, 1)])
def test_dealt_out_tokens_attend_as_a_table_of_pairs_says(length: int, sets: int, in_runs: bool, masked: bool) -> None:
    sparse, dense = sparse_and_dense(length, SkiparseSets(sets, in_runs), masked)
    torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


DEAL = SkiparseSets.deal


def dealt_one_later(self: SkiparseSets, x: torch.Tensor) -> torch.Tensor:
    """Fault: runs begin one token late."""
    return DEAL(self, x.roll(1, dims=1) if self.in_runs else x)


def mask_not_dealt(self: SkiparseSets, length: int, key_mask: torch.Tensor | None, like: torch.Tensor) -> Any:
    """Fault: the mask stays in the order of the tokens."""
    assert key_mask is not None
    cut = key_mask.unflatten(1, (self.sets, -1)).flatten(0, 1)
    return (cut | ~cut.any(1, keepdim=True))[:, None, None]


@pytest.mark.parametrize(("name", "fault"), [("deal", dealt_one_later), ("shown", mask_not_dealt)])
def test_what_is_dealt_out_wrongly_is_seen(name: str, fault: Any) -> None:
    with mock.patch.object(SkiparseSets, name, fault), pytest.raises(AssertionError, match="not close"):
        sparse, dense = sparse_and_dense(32, SkiparseSets(4, in_runs=True), masked=name == "shown")
        torch.testing.assert_close(sparse, dense, rtol=1e-12, atol=1e-12)


# --- transformer and VAE ----------------------------------------------------------------------------------------------


def drawn(module: torch.nn.Module, std: float = 0.3) -> Any:
    make = torch.Generator().manual_seed(1)
    for parameter in module.double().eval().parameters():
        parameter.data = torch.randn(parameter.shape, generator=make, dtype=torch.float64) * std
    return module


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_transformer_is_its_formula(task: str) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan import transformer_1_3 as classes

    name = "OpenSoraT2V_v1_3" if task == "t2v" else "OpenSoraInpaint_v1_3"
    model = drawn(getattr(classes, name)(**TRANSFORMER))
    make = torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=make, dtype=torch.float64)
    x, given, text = draw(2, 4, 3, 6, 8), draw(2, 8, 3, 6, 8), draw(2, 5, TRANSFORMER["caption_channels"])
    times, mask = torch.tensor([4, 990]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    behind = given if task == "i2v" else None
    whole = x if behind is None else torch.cat([x, behind], dim=1)
    with torch.no_grad():
        found = model(whole, times, text, encoder_attention_mask=mask, return_dict=False)[0]
        expected = reference.transformer(model.state_dict(), model.config, x, times, text, mask, behind)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # times are embedded in fp32


def test_latents_that_only_fill_up_are_attended_to_by_nobody() -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_3 import OpenSoraT2V_v1_3

    model = drawn(OpenSoraT2V_v1_3(**TRANSFORMER))
    x, text = torch.randn(1, 4, 2, 4, 6).double(), torch.randn(1, 5, TRANSFORMER["caption_channels"]).double()
    real = torch.ones(1, 2, 4, 6)
    real[..., 4:] = 0
    other = torch.where(real.bool()[:, None], x, torch.randn_like(x))
    with torch.no_grad():
        one, two = (model(each, torch.tensor([9]), text, real, return_dict=False)[0] for each in (x, other))
    torch.testing.assert_close(one * real[:, None], two * real[:, None], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", [4, 8])
def test_the_vae_is_its_formula_at_once_and_chunk_by_chunk(ratio: int) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.wf_vae import WFVAEModel

    settings = {**VAE, **(TIME_TOO if ratio == 8 else {})}
    vae = drawn(WFVAEModel(**settings))
    axes = 3 if ratio == 8 else 2
    for frames in (1, 1 + ratio, 1 + 3 * ratio, 1 + 6 * ratio):
        clip = torch.randn(2, 3, frames, 16, 8, generator=torch.Generator().manual_seed(3)).double()
        expected = reference.encode(vae.state_dict(), clip, 1, axes)
        assert expected.shape == (2, 4, 1 + (frames - 1) // ratio, 2, 1)
        decoded = reference.decode(vae.state_dict(), expected, 1, axes, 4, 1)
        for tiles in (False, True):
            vae.uses_tiling = tiles
            with torch.no_grad():
                torch.testing.assert_close(vae.encode(clip).latent_dist.mode(), expected, rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(vae.decode(expected).sample, decoded, rtol=1e-9, atol=1e-9)


def test_settings_that_no_release_has_are_refused() -> None:
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_3 import OpenSoraT2V_v1_3
    from mindspeed_mm.fsdp.models.opensoraplan.transformer_1_5 import OpenSoraT2V_v1_5
    from mindspeed_mm.fsdp.models.opensoraplan.wf_vae import WFVAEModel

    for changes, said in (
        ({"norm_type": "groupnorm"}, "norm_type is 'groupnorm'"),
        ({"scale": [1.0]}, "one number for each of 4 channels"),
        ({"scale": [1.0, 0.0, 1.0, 1.0]}, "a scale of 0"),
        ({"l1_upsample_wavelet": "InverseHaarWaveletTransform3D"}, "not of the 2 axes"),
    ):
        with pytest.raises(ValueError, match=said):
            WFVAEModel(**{**VAE, **changes})
    for changes, said in (({"patch_size_t": 2}, "patch_size_t is 2"), ({"sparse_n": 0}, "sparse_n is 0")):
        with pytest.raises(ValueError, match=said):
            OpenSoraT2V_v1_3(**{**TRANSFORMER, **changes})
    with pytest.raises(ValueError, match="sparse_n is 0"):
        OpenSoraT2V_v1_5(**{**JOINT, "sparse_n": [1, 0, 1]})


@pytest.mark.parametrize("name", ["transformer_t2v", "transformer_i2v", "transformer_1_5", "vae_1_3", "vae_1_5"])
def test_weights_have_the_released_names_and_shapes(name: str) -> None:
    from mindspeed_mm.fsdp.models.opensoraplan import transformer_1_3, transformer_1_5, wf_vae

    record = YAML(typ="safe").load(RELEASED)[name]
    room = {"vae_1_3": wf_vae, "vae_1_5": wf_vae, "transformer_1_5": transformer_1_5}.get(name, transformer_1_3)
    with torch.device("meta"):
        model = getattr(room, record["class"])(**record["config"])
    found = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    expected = dict(record["keys"])
    for at in range(record.get("layers", 0)):
        expected |= {f"transformer_blocks.{at}.{key}": shape for key, shape in record["in_each_block"].items()}
    stages = record.get("stages", ())
    for stage, depth in enumerate(stages):
        for at in range(depth):
            is_last = stage == len(stages) - 1 and at == depth - 1
            for key, shape in record["in_each_block"].items():
                if not (is_last and key in record["not_in_the_last"]):
                    expected[f"transformer_blocks.{stage}.{at}.{key}"] = shape
    assert found == expected


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Task → the folder of its model, clips and YAML, made once."""
    made: dict[str, Path] = {}

    def run_of(task: str) -> Path:
        if task not in made:
            made[task] = write_run(tmp_path_factory.mktemp(task), task)
        return made[task]

    return run_of


def write_run(folder: Path, task: str) -> Path:
    make_tiny_opensoraplan(folder / "model", task)
    bytes_of, rows = random.Random(3), []
    for index, caption in enumerate(CAPTIONS):
        shape = (FRAMES, SIDE, SIDE)
        pixels = np.frombuffer(bytes_of.randbytes(int(np.prod(shape))), dtype=np.uint8).reshape(shape)
        first, *others = map(Image.fromarray, pixels)
        first.save(folder / f"{index}.gif", save_all=True, append_images=others, duration=60, loop=0)
        rows.append({"path": f"{index}.gif", "cap": caption})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"height": SIDE, "width": SIDE, "num_frames": FRAMES}
    noise = {"snr_gamma": GAMMA}
    config = generator_config(folder, sizes, training={"train_iters": 2, "seed": SEED, "diffusion": noise})
    with (folder / "run.yaml").open("w") as file:
        YAML().dump(json.loads(json.dumps(config)), file)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {key: value.double() for key, value in load_file(path).items()}
    return found


def normalised_latents(model: Path, pixels: torch.Tensor, swapped: bool = False) -> torch.Tensor:
    """(z − shift) · scale of (1, 3, T, H, W) in −1..1; as a fault they change places."""
    z = reference.encode(weights(model / "vae"), pixels, 1, 2)
    names = ("scale", "shift") if swapped else ("shift", "scale")
    shift, scale = (torch.tensor(VAE[name]).double().view(1, -1, 1, 1, 1) for name in names)
    return (z - shift) * scale


def given_of(model: Path, first: torch.Tensor, frames: int) -> torch.Tensor:
    """Latents of the first frame with black behind it, and the mask: 0 for the first latent frame, else 1."""
    black = torch.full_like(first, -1.0).expand(-1, -1, frames - 1, -1, -1)
    z = normalised_latents(model, torch.cat([first, black], dim=2))
    mask = z.new_ones(1, 4, *z.shape[2:])
    mask[:, :, 0] = 0
    return torch.cat([z, mask], dim=1)


def caption_features(model: Path, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import AutoTokenizer, MT5EncoderModel

    tokens = AutoTokenizer.from_pretrained(model / "tokenizer")(caption, return_tensors="pt")
    encoder = MT5EncoderModel.from_pretrained(model / "text_encoder").eval()
    with torch.no_grad():
        return encoder(**tokens)[0].double(), tokens.attention_mask


def loss_by_hand(model: Path, task: str, raw: dict[str, Any], swapped: bool = False) -> float:
    """Mean over the samples of the weighted squared error of v."""
    w, shares, found = weights(model / "transformer"), reference.signal_shares(), []
    for row, sample in enumerate(raw["sample_ids"]):
        pixels = 2 * raw["pixels"][row : row + 1].double() / 255 - 1
        x = normalised_latents(model, pixels, swapped)
        chance = np.random.Generator(np.random.Philox(key=derive_seed(SEED, raw["epochs"][row], sample)))
        chance.random()  # whether the caption is dropped
        t = int(chance.random() * 1000)
        noise = noise_of(derive_seed(SEED, raw["epochs"][row], sample), x.shape[1:])[None].double()
        signal, level = shares[t].sqrt(), (1 - shares[t]).sqrt()
        noisy, v = signal * x + level * noise, signal * noise - level * x
        given = given_of(model, pixels[:, :, :1], FRAMES) if task == "i2v" else None
        text, mask = caption_features(model, raw["captions"][row])
        said = reference.transformer(w, TRANSFORMER, noisy, torch.tensor([t]), text, mask, given)
        snr = float(shares[t] / (1 - shares[t]))
        found.append(min(snr, GAMMA) / (snr + 1) * float((said - v).square().mean()))
    return float(np.mean(found))


@pytest.mark.parametrize("task", TASKS)
def test_training_learns_the_formulas_loss(task: str, runs: Any, tmp_path: Path) -> None:
    """On raw clips, and on features, in fp64; what is learned is exported under the released names."""
    folder = runs(task)
    raw: list[dict[str, Any]] = []
    with watched_steps(lambda _, batches: raw.extend(batches)), keeping_double():
        train(folder / "run.yaml", tmp_path / "raw", "training.train_iters=1", *FP64)
    assert losses(tmp_path / "raw")[1] == pytest.approx(
        loss_by_hand(folder / "model", task, raw[0]), rel=1e-4
    )  # encoders in fp32
    turned = loss_by_hand(folder / "model", task, raw[0], swapped=True)
    assert losses(tmp_path / "raw")[1] != pytest.approx(turned, rel=1e-3)
    said = mm("extract", folder / "run.yaml", "--out", tmp_path / "features")
    assert said.code == 0, said.err
    with keeping_double():
        train(folder / "run.yaml", tmp_path / "run", FEATURES + str(tmp_path / "features"), *FP64)
    assert losses(tmp_path / "run")[1] == pytest.approx(losses(tmp_path / "raw")[1], rel=1e-6)
    assert losses(tmp_path / "run")[2] != losses(tmp_path / "run")[1]
    said = mm("export", tmp_path / "run", tmp_path / "exported")
    assert said.code == 0, said.err
    found, before = weights(tmp_path / "exported/transformer"), weights(folder / "model/transformer")
    trained = tensors(tmp_path / "run")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[key], trained[f"model.{key}"].float().double()) for key in found)
    assert not any(torch.equal(found[key], before[key]) for key in found if key.endswith("to_q.weight"))
    assert find_adapter(tmp_path / "exported").task == task


@slow
def test_a_run_goes_on(runs: Any, tmp_path: Path) -> None:
    folder = runs("t2v")
    train(folder / "run.yaml", tmp_path / "whole")
    train(folder / "run.yaml", tmp_path / "parts", "training.train_iters=1")
    train(folder / "run.yaml", tmp_path / "parts")
    assert differing(tensors(tmp_path / "whole"), tensors(tmp_path / "parts")) == []


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_samples_are_those_of_the_samplers_formula(task: str, runs: Any, tmp_path: Path) -> None:
    model = runs(task) / "model"
    adapter = find_adapter(model)
    sampler = load_sampler(adapter, ModelSource(model), torch.device("cpu"))
    sampling = SamplingArguments(
        num_inference_steps=3, guidance_scale=2.5, height=SIDE, width=SIDE, num_frames=FRAMES, fps=8.0
    )
    image = tmp_path / "first.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(image)
    prompt = Prompt(0, CAPTIONS[0], "here", image=image if task == "i2v" else None)
    (made,) = [made for batch in sampler.sample([prompt], sampling) for made in batch]
    order = SampleOrder(prompt, 0)
    noise = sampler.noise(order, sampling.seed, MediaSize(FRAMES, SIDE, SIDE))[None]
    generator = torch.Generator().manual_seed(order.noise_seed(sampling.seed))
    expected = sample_by_hand(model, noise.double(), generator, image if task == "i2v" else None)
    difference = np.abs(expected.astype(int) - made.frames.astype(int))
    assert difference.max() <= 1 and np.ptp(made.frames) > 20


def sample_by_hand(model: Path, x: torch.Tensor, generator: torch.Generator, image: Path | None) -> np.ndarray:
    """Ancestral steps of Euler's method (Karras et al. 2022, in σ = √((1 − ᾱ) / ᾱ)), v-prediction, three steps that end
    at the last one, where 2⁻²⁴ of the signal is left; guidance 2.5."""
    w, shares = weights(model / "transformer"), reference.signal_shares()
    shares[-1] = 2**-24
    times = [999, 666, 332]  # 1000, 666.67, 333.33, rounded, less one
    sigmas = [*(((1 - shares[t]) / shares[t]).sqrt() for t in times), torch.tensor(0.0).double()]
    texts = [caption_features(model, text) for text in (CAPTIONS[0], "")]
    given = None
    if image is not None:
        pixels = 2 * torch.tensor(np.asarray(Image.open(image))).double().permute(2, 0, 1)[None, :, None] / 255 - 1
        given = given_of(model, pixels, FRAMES)
    x = x * (sigmas[0] if sigmas[0] > 0 else 1)
    for t, sigma, following in zip(times, sigmas, sigmas[1:], strict=False):
        scaled = x / (sigma**2 + 1).sqrt()
        said = []
        for text, mask in texts:
            said.append(reference.transformer(w, TRANSFORMER, scaled, torch.tensor([t]), text, mask, given))
        v = said[1] + 2.5 * (said[0] - said[1])
        clean = x / (sigma**2 + 1) - v * sigma / (sigma**2 + 1).sqrt()
        up = (following**2 * (sigma**2 - following**2) / sigma**2).sqrt()
        down = (following**2 - up**2).sqrt()
        x = x + (x - clean) / sigma * (down - sigma)
        x = x + torch.randn(x.shape, generator=generator).double() * up
    shift, scale = (torch.tensor(VAE[name]).double().view(1, -1, 1, 1, 1) for name in ("shift", "scale"))
    frames = reference.decode(weights(model / "vae"), x / scale + shift, 1, 2, 4, 1)
    bytes_of = ((frames[0] / 2 + 0.5).clamp(0, 1) * 255).round()
    assert math.isfinite(float(frames.sum()))
    return bytes_of.permute(1, 2, 3, 0).numpy().astype(np.uint8)


@slow
def test_adapters_train_and_are_loaded_again(runs: Any, tmp_path: Path) -> None:
    """Beside the weights and merged into them, they draw the same."""
    folder = runs("t2v")
    train(folder / "run.yaml", tmp_path / "run", "training.lora.enable=true", "training.lr=0.05")
    for option, out in ((), "lora"), (("--merge",), "merged"):
        said = mm("export", tmp_path / "run", tmp_path / out, *option)
        assert said.code == 0, said.err
    found = {}
    for name, model, lora in (
        ("base", folder / "model", None),
        ("beside", folder / "model", tmp_path / "lora"),
        ("merged", tmp_path / "merged", None),
    ):
        sampler = load_sampler(find_adapter(model), ModelSource(model, lora=lora), torch.device("cpu"))
        sampling = SamplingArguments(num_inference_steps=2, height=SIDE, width=SIDE, num_frames=FRAMES, fps=8.0)
        ((made,),) = sampler.sample([Prompt(0, CAPTIONS[0], "here")], sampling)
        found[name] = made.frames.astype(int)
    assert np.abs(found["merged"] - found["beside"]).max() <= 1
    assert np.abs(found["merged"] - found["base"]).max() > 3


def test_a_picture_is_asked_for(runs: Any, tmp_path: Path) -> None:
    said = mm("infer", runs("i2v") / "model", "--prompt", "a box", "--out", tmp_path / "out")
    assert said.code != 0 and "image" in said.err


def test_a_vae_of_another_family_is_refused(runs: Any, tmp_path: Path) -> None:
    """It says nothing of `latent_dim`, so that no width would tell."""
    model = tmp_path / "model"
    shutil.copytree(runs("t2v") / "model", model)
    (model / "vae/config.json").write_text(json.dumps({"_class_name": "StepVideoVAE", "latent_channels": 4}))
    with pytest.raises(ModelFolderError, match="does not fit") as caught:
        find_adapter(model).check()
    (problem,) = caught.value.problems
    assert (problem.key, problem.where) == ("_class_name", str(model / "vae/config.json"))
    assert "latents of WFVAEModel" in str(problem)
