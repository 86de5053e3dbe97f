"""Policy gradients: formulas by hand in fp64, any split of a step, and TRL's own functions where TRL is installed."""

import math
from types import SimpleNamespace

import pytest
import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.policy_gradient import PolicyRows, PolicyRule, PolicySums, group_advantages, policy_sums

LENGTHS = torch.tensor([3, 1, 5, 2, 4, 4])
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")


def padded(seed: int = 0) -> dict[str, torch.Tensor]:
    """Six answers of up to five tokens: (A, T) numbers, and where a token is."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), int(LENGTHS.max()))
    draw = lambda scale: scale * torch.randn(shape, generator=random, dtype=torch.float64)  # noqa: E731
    lp = -draw(1.0).abs() - 0.1
    return {
        "lp": lp,
        "old": lp + draw(0.3),
        "reference": lp + draw(0.4),
        "advantages": torch.randn(len(LENGTHS), generator=random, dtype=torch.float64),
        "mask": (torch.arange(shape[1]) < LENGTHS[:, None]).double(),
        "entropy": draw(1.0).abs(),
    }


def rows_of(numbers: dict[str, torch.Tensor], answers: list[int] | None = None, **changes: object) -> PolicyRows:
    """The tokens of some answers."""
    kept = list(range(len(LENGTHS))) if answers is None else answers
    mask = numbers["mask"][kept].bool()
    number = torch.arange(len(kept))[:, None].expand_as(mask)[mask]
    rows = PolicyRows(
        numbers["lp"][kept][mask],
        number,
        numbers["advantages"][kept],
        mask.sum(1),
        numbers["old"][kept][mask],
        numbers["reference"][kept][mask],
        entropy_N=numbers["entropy"][kept][mask],
    )
    return rows._replace(**changes)


def denominator(rule: PolicyRule, rows: PolicyRows) -> int:
    return len(rows.advantages_A) if rule.counts_answers else len(rows.log_probs_N)


def loss_of(rule: PolicyRule, rows: PolicyRows, over: float | None = None, tokens: float | None = None) -> torch.Tensor:
    sums = policy_sums(rule, rows)
    return (sums.policy + sums.kl) / (over or denominator(rule, rows)) + sums.entropy / (
        tokens or len(rows.log_probs_N)
    )


def test_the_clipped_surrogate_by_hand() -> None:
    lp = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
    rows = PolicyRows(
        lp, torch.tensor([0, 0, 1, 1]), torch.tensor([2.0, -3.0]).double(), torch.tensor([2, 2]), -1.0 - ratios.log()
    )
    sums = policy_sums(PolicyRule(), rows)
    # min(1.5·2, 1.2·2) + min(0.5·2, 0.8·2); min(1.5·−3, 1.2·−3) + min(0.5·−3, 0.8·−3)
    assert sums.policy.item() == pytest.approx(-(2.4 + 1.0 - 4.5 - 2.4), abs=1e-15)
    assert sums.clipped.item() == 2
    (gradient,) = torch.autograd.grad(sums.policy, lp)
    assert torch.allclose(gradient, torch.tensor([0.0, -1.0, 4.5, 0.0], dtype=torch.float64), atol=1e-15)
    bounded = policy_sums(PolicyRule(delta=1.3), rows)
    assert bounded.policy.item() == pytest.approx(-(2.4 + 1.0 - 3.9 - 2.4), abs=1e-15)


def test_a_ratio_of_one_is_cross_entropy_with_advantages_as_weights() -> None:
    numbers = padded()
    numbers["lp"].requires_grad_()
    for loss_type in ("dapo", "bnpo", "cispo", "luspo"):
        rows = rows_of(numbers, old_N=None)
        (gradient,) = torch.autograd.grad(policy_sums(PolicyRule(loss_type), rows).policy, numbers["lp"])
        expected = -numbers["advantages"][:, None] * numbers["mask"]
        # cispo's upper end is a ratio of 0.2 here
        assert torch.allclose(gradient, expected * (0.2 if loss_type == "cispo" else 1), atol=1e-15)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_any_split_of_a_step_has_the_same_loss_and_gradient(loss_type: str, level: str) -> None:
    rule = PolicyRule(loss_type, level, beta=0.1, entropy_coef=0.2, max_completion_length=5)
    numbers = padded()
    numbers["lp"].requires_grad_()
    tokens = int(LENGTHS.sum())
    whole = loss_of(rule, rows_of(numbers))
    (gradient,) = torch.autograd.grad(whole, numbers["lp"])
    over = denominator(rule, rows_of(numbers))
    for split in ([[0], [1, 2, 3, 4, 5]], [[5, 0], [2], [1, 3, 4]], [[number] for number in range(6)]):
        parts = sum(loss_of(rule, rows_of(numbers, answers), over, tokens) for answers in split)
        (of_parts,) = torch.autograd.grad(parts, numbers["lp"])
        assert torch.allclose(parts, whole, rtol=0, atol=1e-15)
        assert torch.allclose(of_parts, gradient, rtol=0, atol=1e-15)
    # what a local denominator would do
    wrong = sum(loss_of(rule, rows_of(numbers, answers)) for answers in ([0], [1, 2, 3, 4, 5])) / 2
    (of_wrong,) = torch.autograd.grad(wrong, numbers["lp"])
    assert (of_wrong - gradient).abs().max() > 1e-2


@pytest.mark.parametrize("corrects", [True, False])
def test_the_divergence_and_the_entropy_by_hand(corrects: bool) -> None:
    """k3 of two tokens with ratios of 1.5 and 0.5, its mean over an answer, and its gradient."""
    lp = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    ratios = torch.tensor([1.5, 0.5], dtype=torch.float64)
    distance = torch.tensor([0.3, -0.2], dtype=torch.float64)  # reference − policy
    rows = PolicyRows(
        lp,
        torch.tensor([0, 0]),
        torch.zeros(1),
        torch.tensor([2]),
        (lp - ratios.log()).detach(),
        (lp + distance).detach(),
        entropy_N=entropy,
    )
    sums = policy_sums(PolicyRule("grpo", beta=0.04, corrects_kl=corrects, entropy_coef=0.01), rows)
    k3 = [math.exp(0.3) - 1.3, math.exp(-0.2) - 0.8]
    weights = [1.5, 0.5] if corrects else [1, 1]
    expected = 0.04 * (k3[0] * weights[0] + k3[1] * weights[1]) / 2
    assert sums.kl.item() == pytest.approx(expected, abs=1e-15)
    assert sums.divergence.item() == pytest.approx(sum(k3), abs=1e-15)
    assert sums.entropy.item() == pytest.approx(-0.02, abs=1e-15)
    # d k3 / d lp = 1 − e^d; a ratio has its own derivative, the ratio
    own = [1 - math.exp(0.3), 1 - math.exp(-0.2)]
    slopes = [(slope + corrects * k) * weight for slope, k, weight in zip(own, k3, weights, strict=True)]
    by_lp, by_entropy = torch.autograd.grad(sums.kl + sums.entropy, [lp, entropy])
    assert by_lp.tolist() == pytest.approx([0.02 * slope for slope in slopes], abs=1e-15)
    assert by_entropy.tolist() == [-0.01, -0.01]


def test_the_kl_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="reference"):
        policy_sums(PolicyRule(beta=0.1), rows_of(padded(), reference_N=None))


def test_tokens_of_another_sampler_are_corrected() -> None:
    numbers = padded()
    rows = rows_of(numbers)
    half = policy_sums(PolicyRule(), rows._replace(correction_N=torch.full_like(rows.log_probs_N, 0.5)))
    assert half.policy.item() == pytest.approx(policy_sums(PolicyRule(), rows).policy.item() / 2, abs=1e-15)


# --- advantages ------------------------------------------------------------------------------------------------------

NAN = float("nan")
ONE = torch.ones(1, dtype=torch.float64)


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0], [2.0], [2.0], [2.0], [2.0]], dtype=torch.float64)
    found = group_advantages(rewards, ONE, 4)
    std = (4 * 0.25 / 3) ** 0.5
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.5 / (std + 1e-4), 0, 0, 0, 0]
    assert torch.allclose(found.values, torch.tensor(expected, dtype=torch.float64), atol=1e-15)
    assert found.without_spread == 0.5
    assert group_advantages(rewards, ONE, 4, scale="none").values[:4].tolist() == [0.5, -0.5, -0.5, 0.5]
    batch = group_advantages(rewards, ONE, 4, scale="batch").values
    assert batch[0].item() == pytest.approx(0.5 / (rewards.std().item() + 1e-4), abs=1e-15)
    # advantages over a part of a group are others
    assert (group_advantages(rewards[:2], ONE, 2).values - found.values[:2]).abs().max() > 0.1


def test_what_no_reward_judges_has_no_advantage_and_leaves_the_others_alone() -> None:
    rewards = torch.tensor([[1.0, 2.0], [0.0, NAN], [NAN, NAN], [NAN, 1.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    found = group_advantages(rewards, weights, 4)
    judged = torch.tensor([2.0, 0.0, 0.5], dtype=torch.float64)
    expected = (judged - judged.mean()) / (judged.std() + 1e-4)
    assert torch.allclose(found.values[[0, 1, 3]], expected, atol=1e-15)
    assert found.values[2] == 0 and found.rewards[2].isnan()
    apart = group_advantages(rewards, weights, 4, aggregation="normalize_then_sum")
    assert apart.values[2] == 0 and not apart.values.isnan().any()


# --- beside TRL ------------------------------------------------------------------------------------------------------


def trl_trainer() -> type:
    from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers

    prepare_for_transformers()
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


class _One:
    num_processes = 1
    sync_gradients = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor


def of_trl(rule: PolicyRule, numbers: dict[str, torch.Tensor], *, with_old: bool = True) -> torch.Tensor:
    """`GRPOTrainer._compute_loss` of one micro-batch that is the whole step."""
    from collections import defaultdict

    args = SimpleNamespace(
        delta=rule.delta,
        use_bias_correction_kl=rule.corrects_kl,
        steps_per_generation=1,
        sapo_temperature_pos=rule.sapo_temperatures[0],
        sapo_temperature_neg=rule.sapo_temperatures[1],
    )
    trainer = SimpleNamespace(
        args=args,
        _get_per_token_logps_and_entropies=lambda *_, **__: (numbers["lp"], numbers["entropy"], None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=rule.level,
        beta=rule.beta,
        loss_type=rule.loss_type,
        epsilon_low=rule.epsilon,
        epsilon_high=rule.upper,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=rule.max_completion_length,
        accelerator=_One(),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=rule.entropy_coef != 0,
        entropy_coef=rule.entropy_coef,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    mask = numbers["mask"]
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": numbers["advantages"],
        "ref_per_token_logps": numbers["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if with_old:
        inputs["old_per_token_logps"] = numbers["old"]
    return trl_trainer()._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradient_are_those_of_trl(loss_type: str, level: str, beta: float) -> None:
    high = 1.1 if loss_type == "cispo" else 0.28
    for rule in (
        PolicyRule(loss_type, level, epsilon_high=high, beta=beta, max_completion_length=7, entropy_coef=beta / 5),
        PolicyRule(loss_type, level, delta=1.25, beta=beta, corrects_kl=False, max_completion_length=7),
    ):
        for with_old in (True, False):
            numbers = padded(3)
            numbers["lp"].requires_grad_(), numbers["entropy"].requires_grad_()
            theirs = of_trl(rule, numbers, with_old=with_old)
            tensors = [numbers["lp"], *([numbers["entropy"]] if rule.entropy_coef else [])]
            their_gradients = torch.autograd.grad(theirs, tensors)
            ours = loss_of(rule, rows_of(numbers) if with_old else rows_of(numbers, old_N=None))
            our_gradients = torch.autograd.grad(ours, tensors)
            # Sums of another order; TRL rounds the temperatures of sapo to fp32.
            near = 1e-7 if loss_type == "sapo" else 1e-14
            assert torch.allclose(ours, theirs, rtol=near, atol=1e-15)
            for our_gradient, their_gradient in zip(our_gradients, their_gradients, strict=True):
                assert torch.allclose(our_gradient, their_gradient, rtol=10 * near, atol=near / 10)


def test_the_sums_say_what_was_clipped() -> None:
    sums = policy_sums(PolicyRule(epsilon=0.01), rows_of(padded()))
    assert isinstance(sums, PolicySums) and 0 < sums.clipped <= LENGTHS.sum()
