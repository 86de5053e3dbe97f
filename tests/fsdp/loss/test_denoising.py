"""The objective of generators against the papers' formulas, written out by hand in fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.media_geometry import MediaGeometry
from mindspeed_mm.fsdp.loss.denoising import DenoisingObjective, draw_level, loss_weight, noise_of, shift_sigma
from mindspeed_mm.fsdp.models.diffusion.noise_paths import DiscretePath, FlowPath, NoisePath
from mindspeed_mm.fsdp.params.diffusion_args import DiffusionArguments

SHAPE = (2, 4, 6)


class Denoiser(nn.Module):
    """A model whose output depends on everything that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor, return_dict: bool) -> tuple[Any]:
        assert return_dict is False
        return (self.scale * x + time.reshape(-1, 1, 1, 1) * text.mean(dim=(1, 2)).reshape(-1, 1, 1, 1),)


class Adapter:
    task, text_reads_media = "t2i", frozenset[str]()
    geometry = MediaGeometry(1, 1, (1, 2, 2), 2, is_video=False)
    noise_path: NoisePath = FlowPath()

    def given_latents(self, batch: Any) -> torch.Tensor | None:
        return None

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Any, guidance: float) -> dict[str, Any]:
        return {"x": noisy, "time": 1000 * sigma, "text": batch["prompt_embeds"]}

    further_latents: tuple[str, ...] = ()
    latents_are_one = False

    def predictions(self, output: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        assert output[0].shape == shapes["latents"]
        return {"latents": output[0]}

    def shift_tokens(self, latent_shape: tuple[int, ...]) -> int:
        return self.geometry.tokens(latent_shape)

    def released_shift(self, tokens: int) -> float:
        return 3.0

    def released_end(self) -> float:
        return 0.0

    def resolution_shift(self, tokens: int) -> float:
        return 1.0 + tokens / 6


def batch(*names: str, epochs: list[int] | None = None) -> dict[str, Any]:
    made = [torch.Generator().manual_seed(sum(name.encode())) for name in names]
    return {
        "sample_ids": list(names),
        "epochs": epochs or [0] * len(names),
        "latents": torch.stack([torch.randn(SHAPE, generator=g) for g in made]),
        "prompt_embeds": torch.stack([torch.randn((3, 5), generator=g) for g in made]),
    }  # fmt: skip


def objective(
    seed: int = 11, dtype: torch.dtype = torch.float64, adapter: Any = None, **arguments: Any
) -> DenoisingObjective:
    null_text = {"prompt_embeds": torch.zeros(3, 5)}
    return DenoisingObjective(
        adapter or Adapter(),
        DiffusionArguments(**arguments),
        seed=seed,
        compute_dtype=dtype,
        null_text=null_text,  # type: ignore[arg-type]
    )


def by_hand(model: Denoiser, given: dict[str, Any], made: dict[str, Any], weight: Any = lambda sigma: 1.0) -> float:
    """Σ w(σ) mean((f((1−σ)x + σε, 1000σ) − (ε − x))²), one sample after the other, in numpy."""
    total = 0.0
    for row in range(len(given["sample_ids"])):
        x = given["latents"][row].double().numpy()
        noise = made["_noise"][row].double().numpy()
        sigma = float(made["_time"][row])
        noisy = (1 - sigma) * x + sigma * noise
        output = model.scale.item() * noisy + 1000 * sigma * given["prompt_embeds"][row].double().numpy().mean()
        total += weight(sigma) * ((output - (noise - x)) ** 2).mean()
    return total


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "sigma_squared", "cosmap", "bell"])
@pytest.mark.parametrize("density", ["uniform", "logit_normal", "mode", "beta"])
def test_loss_is_the_formula(weighting: str, density: str) -> None:
    loss = objective(loss_weighting=weighting, timestep_density=density, shift=2.5)
    given, model = batch("a", "b", "c"), Denoiser()
    made = loss.prepare(given)
    expected = by_hand(model, given, made, lambda sigma: loss_weight(weighting, sigma))
    assert loss.terms(model, made)["loss"].item() == pytest.approx(expected, rel=1e-12)
    assert loss.count([made]) == {"loss": 3}


def test_prior_preservation_is_the_formula() -> None:
    """DreamBooth, equation 2: mean over the thing + λ · mean over its class, in fp64, however samples are batched."""
    loss, model = objective(prior_loss_weight=0.3, timestep_density="uniform"), Denoiser()
    names, is_prior = ("a", "b", "c", "d", "e"), [False, True, True, False, True]
    each = [by_hand(model, batch(name), loss.prepare(batch(name))) for name in names]
    of_thing = [value for value, prior in zip(each, is_prior, strict=True) if not prior]
    of_class = [value for value, prior in zip(each, is_prior, strict=True) if prior]
    expected = {"loss": np.mean(of_thing), "prior": 0.3 * np.mean(of_class)}
    for split in ([slice(0, 5)], [slice(0, 1), slice(1, 5)], [slice(0, 2), slice(2, 3), slice(3, 5)]):
        parts = [loss.prepare(batch(*names[part]) | {"is_prior": torch.tensor(is_prior[part])}) for part in split]
        counts = loss.count(parts)
        assert counts == {"loss": 2, "prior": 3}
        for term, value in expected.items():
            mean = sum(loss.terms(model, part)[term].item() for part in parts) / counts[term]
            assert mean == pytest.approx(value, rel=1e-12)
    assert loss.count([loss.prepare(batch("a"))]) == {"loss": 1, "prior": 0}


def test_weights_by_name_have_the_published_values() -> None:
    assert loss_weight("sigma_sqrt", 0.5) == pytest.approx(4.0)
    assert loss_weight("sigma_squared", 0.5) == pytest.approx(0.25)
    assert loss_weight("cosmap", 0.5) == pytest.approx(2 / (math.pi * 0.5))
    levels = (np.arange(100_000) + 0.5) / 100_000
    assert np.mean([loss_weight("bell", s) for s in levels]) == pytest.approx(1.0, rel=1e-6)
    assert loss_weight("bell", 0.0) == pytest.approx(0.0, abs=1e-12)
    assert loss_weight("none", 0.1) == 1.0


def test_shift_has_the_published_values() -> None:
    assert shift_sigma(0.5, 3.0) == pytest.approx(0.75)
    assert shift_sigma(0.4, 1.0) == pytest.approx(0.4)
    assert [shift_sigma(end, 5.0) for end in (0.0, 1.0)] == [0.0, 1.0]


MOMENTS = {
    "uniform": (0.5, 1 / 12),
    "beta": (1.5 / 2.5, 1.5 / (2.5**2 * 3.5)),
    "logit_normal": (0.5, 0.0434),  # by quadrature of sigmoid(N(0, 1))
    "mode": (0.5, 0.0274),  # by quadrature at s = 1.29
}


@pytest.mark.parametrize("density", MOMENTS)
def test_densities_have_their_moments(density: str) -> None:
    random = np.random.default_rng(5)
    drawn = np.array([draw_level(density, DiffusionArguments(), random) for _ in range(20_000)])  # type: ignore[arg-type]
    mean, variance = MOMENTS[density]
    if density in ("logit_normal", "mode"):
        grid = (np.arange(200_000) + 0.5) / 200_000
        if density == "mode":
            values = 1 - grid - 1.29 * (np.cos(np.pi * grid / 2) ** 2 - 1 + grid)
        else:
            normal = torch.distributions.Normal(0.0, 1.0).icdf(torch.from_numpy(grid)).numpy()
            values = 1 / (1 + np.exp(-normal))
        mean, variance = values.mean(), values.var()
    assert drawn.mean() == pytest.approx(mean, abs=0.01)
    assert drawn.var() == pytest.approx(variance, rel=0.04)
    assert drawn.min() >= 0 and drawn.max() <= 1


def test_a_samples_noise_depends_on_seed_epoch_and_id_alone() -> None:
    loss = objective(caption_dropout=0.5)
    together, apart = loss.prepare(batch("a", "b", "c")), loss.prepare(batch("c"))
    for key in ("_noise", "_time", "prompt_embeds"):
        assert torch.equal(together[key][2:], apart[key])
    for other in (objective(seed=12, caption_dropout=0.5).prepare(batch("c")), loss.prepare(batch("c", epochs=[1]))):
        assert not torch.equal(other["_noise"], apart["_noise"])
        assert other["_time"] != apart["_time"]


def test_validation_repeats_itself_and_keeps_captions() -> None:
    loss = objective(caption_dropout=0.99)
    first = loss.prepare(batch("a", "b", epochs=[0, 0]), training=False)
    later = loss.prepare(batch("a", "b", epochs=[7, 9]), training=False)
    assert torch.equal(first["_noise"], later["_noise"])
    assert torch.equal(first["_time"], later["_time"])
    assert torch.equal(first["prompt_embeds"], batch("a", "b")["prompt_embeds"])


def test_captions_are_dropped_at_the_rate_asked_for() -> None:
    loss = objective(caption_dropout=0.3)
    names = [f"sample {n}" for n in range(2000)]
    assert np.mean([loss.draw(name, 0).drops_caption for name in names]) == pytest.approx(0.3, abs=0.03)
    made = loss.prepare(batch(*names[:40]))
    empty = (made["prompt_embeds"] == 0).all(dim=(1, 2))
    assert empty.tolist() == [loss.draw(name, 0).drops_caption for name in names[:40]]
    assert 0 < int(empty.sum()) < 40


def test_dropout_does_not_move_noise_levels() -> None:
    plain, dropping = objective().prepare(batch("a", "b")), objective(caption_dropout=0.9).prepare(batch("a", "b"))
    assert torch.equal(plain["_time"], dropping["_time"])
    assert torch.equal(plain["_noise"], dropping["_noise"])


def test_dropout_without_an_empty_caption_is_refused() -> None:
    with pytest.raises(ConfigError, match="no empty caption"):
        DenoisingObjective(Adapter(), DiffusionArguments(caption_dropout=0.1), seed=0)  # type: ignore[arg-type]
    validates_on_raw = DenoisingObjective(
        Adapter(),  # type: ignore[arg-type]
        DiffusionArguments(caption_dropout=1.0),
        seed=0,
        encode=lambda raw: raw,
    )
    with pytest.raises(ConfigError, match="no empty caption"):
        validates_on_raw.prepare(batch("a"))
    validates_on_raw.prepare(batch("a"), training=False)


def test_blank_rows_count_for_nothing() -> None:
    loss, model = objective(), Denoiser()
    whole = loss.prepare(batch("a", "b"))
    filled = loss.prepare(batch("a", "b", "b") | {"blank_rows": 1})
    assert loss.terms(model, filled)["loss"].item() == pytest.approx(loss.terms(model, whole)["loss"].item(), rel=1e-14)
    assert loss.count([filled]) == loss.count([whole]) == {"loss": 2}


@pytest.mark.parametrize(("shift", "expected"), [(2.0, 2.0), (None, 3.0), ("resolution", 2.0)])
def test_shift_is_the_one_asked_for(shift: Any, expected: float) -> None:
    assert objective(shift=shift).shift(SHAPE) == expected  # 2 × 3 tokens


def test_raw_media_are_encoded_with_the_captions_that_were_kept() -> None:
    seen: list[str] = []

    def encode(raw: dict[str, Any]) -> dict[str, Any]:
        seen.extend(raw["captions"])
        return {key: batch("a", "b")[key] for key in ("latents", "prompt_embeds")}

    loss = DenoisingObjective(
        Adapter(),
        DiffusionArguments(caption_dropout=0.5),
        seed=11,
        compute_dtype=torch.float64,
        encode=encode,  # type: ignore[arg-type]
    )
    raw = {"sample_ids": ["a", "b"], "epochs": [0, 0], "pixels": torch.zeros(2, 3, 1, 4, 6), "captions": ["x", "y"]}
    made = loss.prepare(raw)
    dropped = [loss.draw(name, 0).drops_caption for name in ("a", "b")]
    assert seen == ["" if drops else caption for caption, drops in zip(("x", "y"), dropped, strict=True)]
    assert torch.equal(made["_noise"], objective().prepare(batch("a", "b"))["_noise"])
    assert "pixels" not in made and "captions" not in made


def test_timesteps_stay_exact_while_the_model_computes_in_bf16() -> None:
    seen = SimpleNamespace()

    class Watching(Adapter):
        def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Any, guidance: float) -> dict[str, Any]:
            seen.noisy, seen.sigma, seen.text = noisy.dtype, sigma.dtype, batch["prompt_embeds"].dtype
            return super().inputs(noisy, sigma, batch, guidance)

    loss = DenoisingObjective(Watching(), DiffusionArguments(), seed=0, compute_dtype=torch.bfloat16)  # type: ignore[arg-type]
    value = loss.terms(Denoiser(), loss.prepare(batch("a")))["loss"]
    assert (seen.noisy, seen.sigma, seen.text) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert value.dtype == torch.float32


def test_noise_is_standard_normal_and_repeats_itself() -> None:
    noise = noise_of(123, (50_000,))
    assert abs(float(noise.mean())) < 0.02 and float(noise.std()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(noise, noise_of(123, (50_000,))) and not torch.equal(noise, noise_of(124, (50_000,)))


class Stepping(Adapter):
    """A model of whole steps, with the schedule that CogVideoX was released with."""

    def __init__(self, prediction: str = "v_prediction", **changes: Any) -> None:
        from diffusers import CogVideoXDDIMScheduler

        settings = {"prediction_type": prediction, "rescale_betas_zero_snr": True, "snr_shift_scale": 3.0, **changes}
        self.scheduler = CogVideoXDDIMScheduler(**settings)
        self.noise_path = DiscretePath(self.scheduler.alphas_cumprod, prediction)  # type: ignore[arg-type]

    def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Any, guidance: float) -> dict[str, Any]:
        return {"x": noisy, "time": sigma, "text": batch["prompt_embeds"]}


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_steps_are_those_of_the_librarys_scheduler(prediction: str) -> None:
    """x_t and the target come from `add_noise` and `get_velocity` of diffusers."""
    from diffusers import DDPMScheduler

    adapter = Stepping(prediction)
    library = DDPMScheduler(prediction_type=prediction)
    library.alphas_cumprod = adapter.scheduler.alphas_cumprod.double()
    loss, given, model = objective(adapter=adapter), batch("a", "b", "c"), Denoiser()
    made = loss.prepare(given)
    x, noise, steps = given["latents"].double(), made["_noise"].double(), made["_time"].long()
    noisy = library.add_noise(x, noise, steps)
    target = noise if prediction == "epsilon" else library.get_velocity(x, noise, steps)
    predicted = model(noisy, made["_time"], given["prompt_embeds"].double(), return_dict=False)[0]
    expected = (predicted - target).square().mean(dim=(1, 2, 3)).sum()
    assert loss.terms(model, made)["loss"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert loss.describe() == f"denoising in 1000 steps, learning {'ε' if prediction == 'epsilon' else 'v'}"


def test_another_prediction_is_refused() -> None:
    """It would be trained as v."""
    with pytest.raises(ConfigError, match="'sample' is not trained"):
        Stepping("sample")


def test_every_step_is_drawn_alike_often_and_the_last_is_all_noise() -> None:
    adapter = Stepping(num_train_timesteps=10)
    loss = objective(adapter=adapter)
    times = torch.cat([loss.prepare(batch(f"{n}"))["_time"] for n in range(1000)])
    counts = torch.bincount(times.long(), minlength=10)
    assert len(counts) == 10 and counts.min() > 60 and counts.max() < 140
    x, noise = torch.randn(1, *SHAPE).double(), torch.randn(1, *SHAPE).double()
    last = torch.tensor(9.0).reshape(1, 1, 1, 1)
    torch.testing.assert_close(adapter.noise_path.mix(x, noise, last), noise)
    torch.testing.assert_close(adapter.noise_path.target(x, noise, last), -x)


@pytest.mark.parametrize(("name", "value"), [("shift", 3.0), ("loss_weighting", "bell"), ("sigma_range", (0.1, 0.5))])
def test_settings_of_noise_levels_are_refused_where_steps_are_counted(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="which has no noise levels") as caught:
        objective(adapter=Stepping(), **{name: value})
    assert caught.value.problems[0].key == f"training.diffusion.{name}"


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_weighs_by_the_papers_formula(prediction: Any) -> None:
    alphas = torch.linspace(0.999, 0.0, 10).double()

    class Counting(Adapter):
        noise_path = DiscretePath(alphas, prediction)

    loss = objective(adapter=Counting(), snr_gamma=2.0)
    prepared = [loss.prepare(batch(f"{n}")) for n in range(200)]
    steps = torch.cat([each["_time"] for each in prepared]).long()
    snr = alphas / (1 - alphas)
    capped = snr.clamp(max=2.0)
    expected = capped / snr if prediction == "epsilon" else capped / (snr + 1)
    expected = expected.nan_to_num(nan=1.0)  # of ε where there is no signal: the limit
    assert set(steps.tolist()) == set(range(10))
    torch.testing.assert_close(torch.cat([each["_weights"] for each in prepared]), expected[steps])


def test_min_snr_is_refused_where_there_are_no_steps() -> None:
    with pytest.raises(ConfigError, match="which has no steps") as caught:
        objective(snr_gamma=5.0)
    assert caught.value.problems[0].key == "training.diffusion.snr_gamma"


class Given(Adapter):
    """The first row of every picture is given."""

    def given_latents(self, batch: Any) -> torch.Tensor:
        mask = torch.zeros(1, 1, SHAPE[1], 1, dtype=torch.bool)
        mask[:, :, 0] = True
        return mask


def test_features_that_were_made_of_caption_and_picture_have_no_empty_caption() -> None:
    class Reading(Adapter):
        text_reads_media = frozenset({"t2i"})

    arguments = DiffusionArguments(caption_dropout=0.1)
    with pytest.raises(ConfigError, match=r"caption_dropout.*together with each sample's picture.*Train on raw media"):
        DenoisingObjective(Reading(), arguments, seed=1, null_text={"text": torch.zeros(1, 3)})  # type: ignore[arg-type]


def test_given_latents_have_no_noise_and_no_loss() -> None:
    seen = {}

    class Watching(Given):
        def inputs(self, noisy: torch.Tensor, sigma: torch.Tensor, batch: Any, guidance: float) -> dict[str, Any]:
            seen["noisy"] = noisy
            return super().inputs(noisy, sigma, batch, guidance)

    loss, given, model = objective(adapter=Watching(), shift=1.0), batch("a", "b"), Denoiser()
    made = loss.prepare(given)
    x, noise, sigma = given["latents"].double(), made["_noise"].double(), made["_time"].reshape(-1, 1, 1, 1)
    noisy = (1 - sigma) * x + sigma * noise
    noisy[:, :, 0] = x[:, :, 0]
    predicted = model(noisy, 1000 * made["_time"], given["prompt_embeds"].double(), return_dict=False)[0]
    expected = (predicted - (noise - x)).square()[:, :, 1:].mean(dim=(1, 2, 3)).sum()
    assert loss.terms(model, made)["loss"].item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.equal(seen["noisy"][:, :, 0], x[:, :, 0]) and not torch.equal(seen["noisy"][:, :, 1], x[:, :, 1])


def test_a_range_keeps_the_density_inside_and_nothing_outside() -> None:
    """Of the levels that the whole density has in the range, the share below any level is the same."""
    names = [f"sample {n}" for n in range(3000)]
    whole, cut = objective(shift=5.0), objective(shift=5.0, sigma_range=[0.875, 1])
    levels = np.array([whole.prepare(batch(name))["_time"].item() for name in names])
    inside = np.array([cut.prepare(batch(name))["_time"].item() for name in names])
    assert inside.min() >= 0.875 and inside.max() <= 1
    kept = levels[levels >= 0.875]
    assert 0.2 < len(kept) / len(names) < 0.6
    for level in (0.9, 0.95):
        assert np.mean(inside < level) == pytest.approx(np.mean(kept < level), abs=0.04)
    assert set(kept) <= set(inside)  # a level that lies inside at once is drawn


def test_a_range_that_nothing_falls_into_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of 10000 noise levels") as caught:
        objective(shift=1.0, logit_mean=20.0, sigma_range=[0.1, 0.2]).prepare(batch("a"))
    assert caught.value.problems[0].key == "training.diffusion.sigma_range"


def test_levels_end_where_the_folders_scheduler_ends() -> None:
    """The same stretch as `stretch_shift_to_terminal` of diffusers does to a schedule that ends at 0."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    class Ending(Adapter):
        def released_end(self) -> float:
            return 0.1

    scheduler = FlowMatchEulerDiscreteScheduler(shift_terminal=0.1)
    ending, plain = objective(adapter=Ending()), objective(adapter=Ending(), shift=3.0)
    for name in ("a", "b", "c"):
        (level,) = plain.prepare(batch(name))["_time"]
        expected = scheduler.stretch_shift_to_terminal(torch.tensor([1.0, level, 0.0], dtype=torch.float64))[1]
        assert ending.prepare(batch(name))["_time"].item() == pytest.approx(expected.item(), rel=1e-12)


def test_an_empty_caption_may_be_longer_or_shorter_than_those_of_the_batch() -> None:
    for length in (2, 5):
        loss = DenoisingObjective(
            Adapter(),  # type: ignore[arg-type]
            DiffusionArguments(caption_dropout=0.5),
            seed=11,
            null_text={"prompt_embeds": torch.full((length, 5), 7.0)},
        )
        names = [f"sample {n}" for n in range(8)]
        given = batch(*names)
        made = loss.prepare(given)["prompt_embeds"]
        dropped = [loss.draw(name, 0).drops_caption for name in names]
        assert made.shape[1] == max(3, length) and 0 < sum(dropped) < 8
        for row, drops in enumerate(dropped):
            real = torch.full((length, 5), 7.0) if drops else given["prompt_embeds"][row]
            assert torch.equal(made[row, : len(real)], real) and not made[row, len(real) :].any()
