"""What generators are post-trained with, against torch.distributions, the papers' formulas, and counting."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from mindspeed_mm.core.errors import MMError
from mindspeed_mm.fsdp.loss import flow_objectives, flow_pair_objective, sde_steps
from mindspeed_mm.fsdp.loss.sde_steps import SdeKind, SdeSteps, StepDensity, TrainedWindow

SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.2, 0.0)
KINDS: tuple[SdeKind, ...] = ("flow", "dance", "cps")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_a_step_is_the_ode(kind: SdeKind) -> None:
    x, v = drawn(2, 3, 4), drawn(2, 3, 4, seed=1)
    steps = SdeSteps(kind, 0.0, SIGMAS)
    for index in range(len(steps)):
        density = steps.density(x, v, index)
        assert density.std == 0
        torch.testing.assert_close(density.mean, x + v * (SIGMAS[index + 1] - SIGMAS[index]), atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("kind", "diffusion"),
    [
        ("flow", lambda sigma, below: 0.7 * math.sqrt(sigma / (1 - (below if sigma == 1 else sigma)))),
        ("dance", lambda sigma, below: 0.7),
    ],
)
def test_steps_are_the_papers(kind: SdeKind, diffusion: Callable[[float, float], float]) -> None:
    """Flow-GRPO's equation 9 as its authors print it, with x̂₀ and the score written out."""
    x, v = drawn(2, 5), drawn(2, 5, seed=1)
    steps = SdeSteps(kind, 0.7, SIGMAS)
    for index, (sigma, below) in enumerate(pairwise(SIGMAS)):
        s, dt = diffusion(sigma, below), below - sigma
        score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2  # of N((1 − σ) x̂₀, σ²) at x
        mean = x + (v - s**2 / 2 * score) * dt
        density = steps.density(x, v, index)
        torch.testing.assert_close(density.mean, mean, atol=1e-13, rtol=0)
        assert density.std == pytest.approx(s * math.sqrt(-dt), abs=1e-15)


def test_cps_keeps_the_level_of_noise() -> None:
    """Its x' has σ' of noise whatever is drawn: the share of x̂₀ is 1 − σ', and the two kinds of noise add up to σ'."""
    clean, noise = drawn(1, 4), drawn(1, 4, seed=1)
    steps = SdeSteps("cps", 0.8, SIGMAS)
    for index, (sigma, below) in enumerate(pairwise(SIGMAS)):
        density = steps.density((1 - sigma) * clean + sigma * noise, noise - clean, index)
        kept = math.sqrt(below**2 - (below * math.sin(0.8 * math.pi / 2)) ** 2)
        torch.testing.assert_close(density.mean, (1 - below) * clean + kept * noise, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_fine_steps_keep_the_distribution_of_the_data(kind: SdeKind) -> None:
    """Data N(1, 0.4²), whose v is known: after many steps the samples have this mean and spread, with noise as without.
    A pull without Δ, or of the wrong sign, is far off."""
    count, levels = 8_000, 100
    sigmas = tuple(1 - index / levels for index in range(levels + 1))
    steps = SdeSteps(kind, 0.5, sigmas)
    x = drawn(count)
    for index, sigma in enumerate(sigmas[:-1]):
        variance = (1 - sigma) ** 2 * 0.16 + sigma**2
        shift = x - (1 - sigma)
        v = (sigma * shift / variance) - (1 + 0.16 * (1 - sigma) * shift / variance)  # E[ε | x] − E[x₀ | x]
        density = steps.density(x, v, index)
        x = density.mean + density.std * drawn(count, seed=index + 1)
    assert float(x.mean()) == pytest.approx(1, abs=0.025)
    assert float(x.std()) == pytest.approx(0.4, abs=0.025)


def test_densities_are_torchs() -> None:
    mean, other, sample = drawn(3, 2, 4), drawn(3, 2, 4, seed=1), drawn(3, 2, 4, seed=2)
    std = 0.3
    both = [Independent(Normal(each, std * torch.ones_like(mean)), 2) for each in (mean, other)]
    expected = both[0].log_prob(sample) / 8
    torch.testing.assert_close(sde_steps.log_prob(sample, StepDensity(mean, std)), expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(sde_steps.kl_divergence(mean, other, std), kl_divergence(*both) / 8, atol=1e-14, rtol=0)
    missing = sde_steps.log_prob(sample, StepDensity(mean, std / math.sqrt(0.1)))  # as if √−Δ were left out
    assert not torch.allclose(missing, expected, atol=0.1)


def test_the_loss_is_clipped_on_the_side_that_gains() -> None:
    ratio = torch.tensor([0.8, 1.0, 1.2] * 2, dtype=torch.float64, requires_grad=True)
    advantage = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64)
    loss = flow_objectives.clipped_loss(ratio, advantage, 0.1)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-0.8, -1, -1.1, 0.9, 1, 1.2])
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [-1, -1, 0, 0, 1, 1]
    assert flow_objectives.clipped_share(ratio, advantage, 0.1).tolist() == [0, 0, 1, 1, 0, 0]


def test_the_guarded_ratio_is_centred() -> None:
    """log ρ of samples of the old policy: the plain one has the mean −‖Δ mean‖² / 2 std², the guarded one 0, and the
    spread of a single dimension, ‖Δ mean‖, whatever std is."""
    old = torch.zeros(200_000, 1, dtype=torch.float64)
    for std in (0.1, 0.5):
        sample = old + std * drawn(200_000, 1)
        moved = StepDensity(old + 0.02, std)
        before = sde_steps.log_prob(sample, StepDensity(old, std))
        plain = flow_objectives.policy_ratio(sample, moved, before).log()
        guarded = flow_objectives.normalised_ratio(sample, moved, before, old).log()
        assert float(plain.mean()) == pytest.approx(-(0.02**2) / (2 * std**2), rel=0.3)
        assert float(guarded.mean()) == pytest.approx(0, abs=2e-4)
        assert float(guarded.std()) == pytest.approx(0.02, rel=0.02)


def test_the_window_moves_along_and_begins_again() -> None:
    window = TrainedWindow(8, size=2, iterations=3, stride=2)
    firsts = [window.drawn(rollout)[0] for rollout in range(15)]
    assert firsts == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3 + [0] * 3  # 5, 6: step 7 is the last one
    assert window.drawn(9) == (5, 6)
    stays = TrainedWindow(8, size=2, iterations=3, stride=2, roll_back=False)
    assert stays.drawn(14) == (5, 6)
    by_chance = TrainedWindow(8, size=2, order="random", iterations=1, seed=1)
    assert {by_chance.drawn(rollout)[0] for rollout in range(60)} == set(range(6))
    assert by_chance.drawn(7) == TrainedWindow(8, size=2, order="random", iterations=1, seed=1).drawn(7)


def test_without_a_window_all_but_the_last_step_are_trained_or_a_share_of_them() -> None:
    assert TrainedWindow(5).trained(3) == (0, 1, 2, 3)
    share = TrainedWindow(11, fraction=0.6)
    assert share.drawn(0) == tuple(range(10))
    assert all(len(share.trained(rollout)) == 6 for rollout in range(9))
    assert len({share.trained(rollout) for rollout in range(9)}) > 1


def test_nft_has_the_optimum_of_the_paper() -> None:
    """Without the weights w the optimum is v_old + (2 / β) Cov(r, v): Newton's method finds it."""
    beta, count = 0.7, 9
    targets, good = drawn(count, 4), torch.rand(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    old = targets.mean(dim=0, keepdim=True)
    v = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    positive, negative = flow_objectives.both_predictions(v.expand(count, 4), old, beta)
    errors = [(side - targets).square().sum(dim=1) for side in (positive, negative)]
    (gradient,) = torch.autograd.grad((good * errors[0] + (1 - good) * errors[1]).mean(), v)
    best = v.detach() - gradient / (2 * beta**2)
    covariance = ((good - good.mean()).unsqueeze(1) * (targets - old)).mean(dim=0)
    torch.testing.assert_close(best[0], old[0] + 2 / beta * covariance, atol=1e-14, rtol=0)


def test_nft_weighs_both_sides_by_their_own_error() -> None:
    latents, noise, v, old = (drawn(2, 3, seed=seed) for seed in range(4))
    sigma, good, beta = torch.tensor([0.3, 0.8], dtype=torch.float64), torch.tensor([0.9, 0.2]).double(), 0.5
    noisy = (1 - sigma[:, None]) * latents + sigma[:, None] * noise
    found = flow_objectives.nft_loss(v, old, noisy, latents, sigma, good, beta)
    for row in range(2):
        sides = []
        for sign in (1, -1):
            error = noisy[row] - sigma[row] * (old[row] + sign * beta * (v[row] - old[row])) - latents[row]
            sides.append(float(error.square().mean() / error.abs().mean()))
        assert float(found[row]) == pytest.approx(float(good[row]) * sides[0] + (1 - float(good[row])) * sides[1])
    advantages = torch.tensor([-9.0, -5.0, 0.0, 2.5, 7.0])
    assert flow_objectives.probability_of_good(advantages, 5.0).tolist() == [0, 0, 0.5, 0.75, 1]
    assert [flow_objectives.old_policy_decay(update) for update in (0, 100, 500, 900)] == [0, 0.1, 0.5, 0.5]


def test_pairs_begin_at_ln_2_and_learn_what_the_reference_lacks() -> None:
    latents, noise, v, ref = (drawn(2, 3, seed=seed) for seed in range(4))
    error, of_ref = ((each - (noise - latents)).square().flatten(1).mean(dim=1) for each in (v, ref))
    torch.testing.assert_close(error[0], ((v[0] - noise[0] + latents[0]) ** 2).mean(), atol=1e-14, rtol=0)
    same = flow_pair_objective.pair_margin(of_ref, error, of_ref, error)
    torch.testing.assert_close(flow_pair_objective.pair_loss(same, 2000.0), torch.full((2,), math.log(2)).double())
    margin = flow_pair_objective.pair_margin(error, of_ref, of_ref, error)
    expected = -torch.log(torch.sigmoid(-50 * ((error - of_ref) - (of_ref - error))))
    torch.testing.assert_close(flow_pair_objective.pair_loss(margin, 100.0), expected)
    sigma = torch.tensor([0.25, 1.0])
    assert flow_pair_objective.timestep_factor("constant", sigma).tolist() == [1, 1]
    assert flow_pair_objective.timestep_factor("sigma", sigma).tolist() == [50, 200]


def test_rare_pairs_count_more() -> None:
    counted = flow_pair_objective.ScoreHistogram.of_scores([0.0, 0.01, 0.02, 0.99, 1.0])
    assert counted.counts == (3, *[0] * 18, 2)
    assert counted.edges == pytest.approx([number / 20 for number in range(21)])
    histogram = flow_pair_objective.ScoreHistogram((0.0, 0.5, 1.0), (9, 2))
    assert histogram.default_beta == pytest.approx(9 / 11)
    assert flow_pair_objective.pair_weight(histogram, 0.1, 0.2, 2.0, None) == pytest.approx(1)
    rare = flow_pair_objective.pair_weight(histogram, 1.0, 0.2, 2.0, None)
    assert rare == pytest.approx(((9 / 11) / math.sqrt(2 / 11 * 9 / 11)) ** 2)
    assert flow_pair_objective.pair_weight(histogram, 7.0, -1.0, 0.0, None) == 1  # nobody asks the histogram
    with pytest.raises(MMError, match="lies in none of its bins"):
        flow_pair_objective.pair_weight(histogram, 7.0, 0.5, 1.0, None)
