"""Samples are those of the plain diffusers pipeline with the same noise; batch, rank and place in a file change nothing
that they should not; prompt files are used to the last line, and what is off in them is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from mindspeed_mm.core.errors import ConfigError, DataError, MMError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.models.diffusion.components import load_component, load_encoders
from mindspeed_mm.fsdp.models.diffusion.find import find_adapter
from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError
from mindspeed_mm.fsdp.sampling.prompts import Prompt, empty_note, prompts_of, read_prompts
from mindspeed_mm.fsdp.sampling.sampler import (
    DiffusionSampler,
    SampleOrder,
    computing_in,
    deal_in_step,
    evaluating,
    plan_batches,
)
from tests.helpers.tiny_generators import make_tiny_flux, make_tiny_wan

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Path], Path]] = {
    "flux": make_tiny_flux,
    "flux dev": lambda folder: make_tiny_flux(folder, guidance_embeds=True),
    "t2v": make_tiny_wan,
    "i2v": lambda folder: make_tiny_wan(folder, task="i2v"),
    "pixels": lambda folder: make_tiny_flux(folder, identity_vae=True),
}


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DiffusionSampler]:
    made: dict[str, DiffusionSampler] = {}

    def sampler(kind: str) -> DiffusionSampler:
        if kind not in made:
            adapter = find_adapter(MAKERS[kind](tmp_path_factory.mktemp("folder")))
            made[kind] = DiffusionSampler(adapter, load_component(adapter, "transformer"), load_encoders(adapter, CPU))
        return made[kind]

    return sampler


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("media") / "first.png"
    Image.fromarray(pixels).save(path)
    return path


def settings(kind: str = "flux", **changes: Any) -> SamplingArguments:
    frames = 5 if kind in ("t2v", "i2v") else None
    asked = {"height": 32, "width": 32, "num_frames": frames, "num_inference_steps": 2, "guidance_scale": 4.0}
    return SamplingArguments(**{**asked, **changes})


def prompts(*texts: str, **fields: Any) -> list[Prompt]:
    return [Prompt(number, text, f"p:{number + 1}", **fields) for number, text in enumerate(texts)]


def samples(sampler: DiffusionSampler, wanted: list[Prompt], sampling: SamplingArguments) -> np.ndarray:
    return np.stack([sample.frames for batch in sampler.sample(wanted, sampling) for sample in batch])


def alike(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for what the order of sums in another batch size does: the next level, in one byte of a thousand."""
    steps = np.abs(found.astype(int) - expected)
    return bool(steps.max() <= 1 and (steps > 0).mean() < 1e-3)


def plain(sampler: DiffusionSampler, kind: str, text: str, seed: int, **arguments: Any) -> np.ndarray:
    """One sample with nothing but diffusers, from the folder; (T, H, W, 3)."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(sampler.adapter.folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    latents = torch.randn(1, *LATENTS[kind], generator=torch.Generator().manual_seed(seed % 2**63))
    if "flux" in kind:
        latents = pipeline._pack_latents(latents, 1, *LATENTS[kind])
    size = {"height": 32, "width": 32, **({} if "flux" in kind else {"num_frames": 5})}
    output = pipeline(
        prompt=text,
        latents=latents,
        num_inference_steps=2,
        output_type="np",
        max_sequence_length=sampler.adapter.text_tokens,
        **size,
        **arguments,
    )
    media = output.images if "flux" in kind else output.frames[0]
    return (media * 255).round().astype(np.uint8)


LATENTS = {"flux": (4, 16, 16), "flux dev": (4, 16, 16), "t2v": (16, 2, 4, 4), "i2v": (16, 2, 4, 4)}
GUIDED = {
    "flux": {"true_cfg_scale": 4.0, "negative_prompt": "blur"},
    "flux dev": {"guidance_scale": 4.0},
    "t2v": {"guidance_scale": 4.0, "negative_prompt": "blur"},
    "i2v": {"guidance_scale": 4.0, "negative_prompt": "blur"},
}


@pytest.mark.parametrize("kind", GUIDED)
def test_a_sample_is_that_of_the_plain_pipeline(
    samplers: Callable[[str], DiffusionSampler], picture: Path, kind: str
) -> None:
    sampler, guided = samplers(kind), dict(GUIDED[kind])
    image = picture if kind == "i2v" else None
    sampling = settings(kind, negative_prompt=guided.get("negative_prompt", ""), seed=7)
    found = samples(sampler, prompts("a red cat", "a dog", image=image), sampling)
    extra = {"image": Image.open(picture)} if image else {}
    for number, text in enumerate(("a red cat", "a dog")):
        expected = plain(sampler, kind, text, derive_seed(7, number, 0), **guided, **extra)
        assert np.array_equal(found[number], expected)
        other_seed = plain(sampler, kind, text, derive_seed(8, number, 0), **guided, **extra)
        assert not np.array_equal(found[number], other_seed)
    scale = next(name for name in guided if name.endswith("scale"))
    unguided = plain(sampler, kind, "a dog", derive_seed(7, 1, 0), **{**guided, scale: 1.0}, **extra)
    assert not np.array_equal(found[1], unguided)


@pytest.mark.parametrize("kind", ["flux", "pixels"])
def test_a_sample_does_not_depend_on_its_batch(samplers: Callable[[str], DiffusionSampler], kind: str) -> None:
    sampler, wanted = samplers(kind), prompts("one", "two", "", "four five six")
    whole = samples(sampler, wanted, settings(num_samples=2))
    assert whole.shape == (8, 1, 32, 32, 3)
    assert len({sample.tobytes() for sample in whole}) == 8
    for batch_size in (3, 8):
        assert alike(samples(sampler, wanted, settings(num_samples=2, batch_size=batch_size)), whole)
    assert np.array_equal(samples(sampler, wanted[2:3], settings(num_samples=2)), whole[4:6])
    with mock.patch.object(SampleOrder, "noise_seed", lambda order, seed: seed):  # the planted fault: one noise for all
        assert not alike(samples(sampler, wanted, settings(num_samples=2)), whole)


def test_rows_may_have_their_own_seed_and_negative_prompt(samplers: Callable[[str], DiffusionSampler]) -> None:
    sampler = samplers("flux")
    own_seed = [Prompt(number, "cat", "p", seed=3) for number in (0, 5)]
    first, second = samples(sampler, own_seed, settings(seed=1))
    assert np.array_equal(first, second)
    assert np.array_equal(samples(sampler, own_seed[:1], settings(seed=2))[0], first)
    mixed = [Prompt(0, "cat", "p"), Prompt(1, "cat", "p", negative_prompt="dog"), Prompt(2, "cat", "p")]
    found = samples(sampler, mixed, settings(negative_prompt="bird", batch_size=2))  # 0 and 2 share a batch
    bird, dog = settings(negative_prompt="bird"), settings(negative_prompt="dog")
    assert alike(found[:2], samples(sampler, [mixed[0], mixed[2]], bird))
    assert alike(found[2], samples(sampler, prompts("", "cat")[1:], dog)[0])
    assert not alike(found[2], samples(sampler, prompts("", "cat")[1:], bird)[0])


def test_modes_and_parameters_are_left_as_they_were(samplers: Callable[[str], DiffusionSampler]) -> None:
    sampler = samplers("flux")
    transformer = sampler.pipeline.transformer.train()
    transformer.norm_out.eval()
    before = torch.get_rng_state()
    samples(sampler, prompts("cat"), settings())
    assert transformer.training and not transformer.norm_out.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in transformer.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    with evaluating(transformer):
        assert not any(module.training for module in transformer.modules())
    transformer.eval()


def test_a_model_that_computes_in_another_type_gets_its_inputs_in_it() -> None:
    seen: dict[str, torch.dtype] = {}

    class Model(nn.Module):
        def forward(self, **inputs: Any) -> tuple[torch.Tensor]:
            seen.update({name: value.dtype for name, value in inputs.items()})
            return (inputs["hidden_states"],)

    model, one = Model(), torch.ones(1)
    with computing_in(model, torch.bfloat16):
        (output,) = model(hidden_states=one, timestep=one, img_ids=one, pooled_projections=one, rows=one.long())
    assert output.dtype == torch.float32
    bf16, fp32 = torch.bfloat16, torch.float32
    assert seen == {
        "hidden_states": bf16, "timestep": fp32, "img_ids": fp32, "pooled_projections": bf16, "rows": torch.int64
    }  # fmt: skip
    model(hidden_states=one)
    assert seen["hidden_states"] == fp32  # the hooks are gone


# --- what cannot be sampled ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "error", "message"),
    [
        ("flux", {"height": 33}, ConfigError, "33×32 cannot be encoded.*multiples of 4.*Use 32×32"),
        ("flux", {"num_frames": 5}, ConfigError, "images have one frame"),
        ("t2v", {"num_frames": 6}, ConfigError, r"--frames  6 frames .* must be 4k\+1\. Use 5\."),
        ("flux dev", {"negative_prompt": "blur"}, ConfigError, "takes guidance as an input"),
    ],
)
def test_settings_that_do_not_fit_are_said_before_anything_runs(
    samplers: Callable[[str], DiffusionSampler], kind: str, changes: dict[str, Any], error: type[MMError], message: str
) -> None:
    sampler = samplers(kind)
    with (
        mock.patch.object(type(sampler.pipeline), "__call__", side_effect=AssertionError("it ran")),
        pytest.raises(error, match=message),
    ):
        samples(sampler, prompts("cat"), settings(kind, **changes))


def test_an_open_size_is_the_pipelines_own(samplers: Callable[[str], DiffusionSampler]) -> None:
    sizes = {kind: samplers(kind).prepared([], SamplingArguments(width=64)) for kind in ("flux", "t2v")}
    assert (sizes["flux"].height, sizes["flux"].width, sizes["flux"].num_frames) == (256, 64, 1)  # 128 latents
    assert (sizes["t2v"].height, sizes["t2v"].width, sizes["t2v"].num_frames) == (480, 64, 81)


def test_pictures_go_where_they_belong(samplers: Callable[[str], DiffusionSampler], picture: Path) -> None:
    with pytest.raises(DataError, match=r"p:1.*no picture"):
        samples(samplers("i2v"), prompts("cat"), settings("i2v"))
    with pytest.raises(DataError, match=r"p:1.*takes no picture"):
        samples(samplers("t2v"), prompts("cat", image=picture), settings("t2v"))
    broken = picture.with_name("broken.png")
    broken.write_bytes(picture.read_bytes()[:200])
    with pytest.raises(DataError, match=r"p:1.*'broken.png' is broken"):
        samples(samplers("i2v"), prompts("cat", image=broken), settings("i2v"))


def test_samples_that_are_no_numbers_are_refused(samplers: Callable[[str], DiffusionSampler]) -> None:
    sampler = samplers("flux")
    with torch.no_grad():
        weight = sampler.pipeline.transformer.proj_out.weight
        kept = weight.clone()
        weight.fill_(float("nan"))
        with pytest.raises(NotFiniteError, match=r"p:1.*finite"):
            samples(sampler, prompts("cat"), settings())
        weight.copy_(kept)


def test_prompts_that_are_too_long_are_found(samplers: Callable[[str], DiffusionSampler]) -> None:
    assert samplers("flux").cut_short(prompts("cat", "cat " * 200)) == prompts("", "cat " * 200)[1:]


# --- which samples, in which order -----------------------------------------------------------------------------------


def test_every_sample_is_ordered_once_and_batches_share_what_a_batch_must() -> None:
    wanted = [
        Prompt(number, "x", "p", image=Path("ab"[number % 2]), negative_prompt=("n", None)[number % 3 > 0])
        for number in range(11)
    ]
    batches = plan_batches(wanted, settings(num_samples=2, batch_size=3))
    orders = [(order.prompt.number, order.number) for batch in batches for order in batch]
    assert sorted(orders) == [(number, k) for number in range(11) for k in range(2)]
    for batch in batches:
        assert len(batch) <= 3
        assert len({(order.prompt.image, order.prompt.negative_prompt) for order in batch}) == 1


def test_ranks_in_step_make_the_same_calls_and_each_sample_once() -> None:
    wanted = [Prompt(number, "x", "p", negative_prompt=("n", None)[number % 3 > 0]) for number in range(10)]
    batches = plan_batches(wanted, settings(batch_size=2))
    for world_size in (1, 2, 3, 7):
        dealt = [list(deal_in_step(batches, rank, world_size)) for rank in range(world_size)]
        negatives = [[batch[0].prompt.negative_prompt for batch, _ in rank] for rank in dealt]
        assert all(rank == negatives[0] for rank in negatives)
        kept = [batch for rank in dealt for batch, is_kept in rank if is_kept]
        assert sorted(kept, key=batches.index) == batches


# --- prompt files ----------------------------------------------------------------------------------------------------


def test_every_line_of_a_file_is_used(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa cat\r\n\r\n  ein Hund, läuft \n\n".encode())
    found = read_prompts(path)
    assert [(p.number, p.text, p.place) for p in found] == [
        (0, "a cat", "p.txt:1"), (1, "", "p.txt:2"), (2, "ein Hund, läuft", "p.txt:3"), (3, "", "p.txt:4")
    ]  # fmt: skip
    assert empty_note(found) == "2 prompts are empty (p.txt:2, p.txt:4): sampled without a caption"
    assert empty_note(found[:1]) == ""
    path.write_text("".join(f"prompt {number}\n" for number in range(10_000)))
    many = read_prompts(path)
    assert [p.text for p in many] == [f"prompt {number}" for number in range(10_000)]
    assert len(plan_batches(many, settings(batch_size=8))) == 1250


def test_rows_of_json(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "image": "a.png", "seed": 3}\n\n{"prompt": "", "negative_prompt": "b"}\n')
    first, second = read_prompts(path)
    assert (first.number, first.image, first.seed) == (0, tmp_path / "a.png", 3)
    assert (second.number, second.place, second.negative_prompt) == (2, "p.jsonl:3", "b")  # numbered by line
    sampling = SamplingArguments(prompts=("x", ""), prompts_file=str(path))
    assert [p.number for p in prompts_of(sampling)] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "p.txt.*empty"),
        ("p.txt", b"a\nb\xff\n", r"p.txt:2.*byte 3 is not UTF-8 \(0xff\)"),
        ("p.txt", b"a\0b\n", "NUL"),
        ("p.txt", b'{"prompt": "a"}\n', "JSON objects.*Rename"),
        ("p.csv", b"prompt\na\n", "'.csv' files are not read"),
        ("p.jsonl", b"", "p.jsonl.*empty"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"p.jsonl:2.*broken JSON"),
        ("p.jsonl", b'{"text": "a"}\n', r"p.jsonl:1.*'text' is not a field.*A row has prompt"),
        ("p.jsonl", b'{"prompt": "a", "negativ_prompt": ""}\n', "Did you mean 'negative_prompt'"),
        ("p.jsonl", b'{"seed": 1}\n', r"p.jsonl:1.*no 'prompt'"),
        ("p.jsonl", b'{"prompt": 3}\n', r"p.jsonl:1.*3 is not text"),
        ("p.jsonl", b'{"prompt": "a", "negative_prompt": 3}\n', r"negative_prompt.*3 is not text"),
        ("p.jsonl", b'{"prompt": "a", "seed": -1}\n', r"-1 is not a whole number"),
        ("p.jsonl", b'{"prompt": "a", "seed": true}\n', r"True is not a whole number"),
        ("p.jsonl", b'{"prompt": "a", "image": "gone.png"}\n', r"p.jsonl:1.*'gone.png' not found"),
        ("p.jsonl", b'{"prompt": "a", "image": "/etc/passwd"}\n', "outside the media roots"),
        ("p.jsonl", b'{"prompt": "a", "image": "http://a/b.png"}\n', "only local files"),
        ("p.jsonl", b'{"prompt": "a", "image": 5}\n', "5 is not a path"),
        ("p.jsonl", b"[1]\n", r"p.jsonl:1.*not an object"),
    ],
)  # fmt: skip
def test_what_is_off_in_a_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_prompts(tmp_path / name)


def test_every_bad_row_is_counted_and_the_first_ten_are_named(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("{\n" * 12)
    with pytest.raises(DataError, match="12 of 12 rows are bad") as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert len(caught.value.problems) == 10
    with pytest.raises(DataError, match="no such file"):
        read_prompts(tmp_path / "gone.txt")


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("A seven, moving left!", "a-seven-moving-left"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "empty"),
        ("!?", "empty"),
        ("eine süße Katze", "eine-süße-katze"),
        ("x" * 99, "x" * 40),
        ("word " * 20, "word-word-word-word-word-word-word-word"),
    ],
)
def test_words_become_a_part_of_a_file_name(text: str, slug: str) -> None:
    assert Prompt(7, text, "p").slug == slug
    assert SampleOrder(Prompt(7, text, "p"), 1).file_stem() == f"007_01_{slug}"
