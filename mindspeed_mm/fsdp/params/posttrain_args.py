"""The `posttrain` section: training on preferences and on rewards. TRL's names where TRL has the setting."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.value_types import (
    Flag,
    Natural,
    Number,
    PathText,
    Positive,
    Ratio,
    Seconds,
    Section,
    fault,
    null_means,
    show,
)

Above0 = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]

BUILT_METHODS = {"language": ("dpo", "grpo"), "generator": ("dmd", "dpo", "grpo", "nft"), "unified": ()}
"""Kind of model → the methods that this version has for it."""


@dataclass(frozen=True)
class PairLossFacts:
    """What the configuration must know of a loss of preference pairs; `fsdp/loss/preference.py` computes it."""

    reads: tuple[str, ...] = ()
    """Keys of `posttrain.dpo` that act on this loss, and not on all."""
    has_reference: bool = True
    """Whether it compares the policy with a reference."""


PAIR_LOSSES = {
    "sigmoid": PairLossFacts(("label_smoothing",)),
    "hinge": PairLossFacts(),
    "ipo": PairLossFacts(),
    "robust": PairLossFacts(("label_smoothing",)),
    "exo_pair": PairLossFacts(("label_smoothing",)),
    "nca_pair": PairLossFacts(),
    "bco_pair": PairLossFacts(),
    "sppo_hard": PairLossFacts(),
    "apo_zero": PairLossFacts(),
    "apo_down": PairLossFacts(),
    "sigmoid_norm": PairLossFacts(("label_smoothing",)),
    "discopop": PairLossFacts(("discopop_tau",)),
    "sft": PairLossFacts(has_reference=False),
    "simpo": PairLossFacts(("simpo_gamma",), has_reference=False),
    "orpo": PairLossFacts(has_reference=False),
}
"""Losses of preference pairs, as `posttrain.dpo.loss_type` names them."""


def _loss_types(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise fault(f"{show(value)} is not a list of losses")
    unknown = [name for name in names if name not in PAIR_LOSSES]
    if unknown:
        raise fault(f"{show(unknown[0])} is not one of {', '.join(PAIR_LOSSES)}")
    return tuple(names)


def _old_decay(value: object) -> object:
    if value == "linear":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise fault(f"{show(value)} is not linear or a number from 0 to below 1")


def _noise_levels(value: object) -> object:
    steps = tuple(value) if isinstance(value, list | tuple) else ()
    if not steps or any(not isinstance(step, int) or isinstance(step, bool) for step in steps):
        raise fault(f"{show(value)} is not a list of whole numbers")
    falls = all(high > low for high, low in itertools.pairwise(steps))
    if steps[0] != 1000 or steps[-1] < 1 or not falls:
        raise fault(f"{show(value)} does not begin with 1000 and fall, above 0, from entry to entry")
    return steps


class ReferenceArguments(Section):
    """The reference policy, which the trained one is compared with."""

    kind: Literal["auto", "adapters_off", "frozen", "stored"] = "auto"
    """Source of the reference log-probabilities. `adapters_off`: the trained model with its adapters switched off, at
    the cost of one forward pass. `frozen`: a second model, sharded like the first and never trained. `stored`: computed
    once by `mm posttrain reference` and read back. `auto`: stored where the model is cut into pipeline stages or learns
    from stored trajectories, else adapters_off where adapters leave the base model unchanged, else frozen."""
    model_name_or_path: PathText | None = None
    """Folder of the reference model (`kind: frozen`); null: the weights that training starts from."""
    path: PathText | None = None
    """File of stored log-probabilities, or folder of a teacher's trajectories (`kind: stored`); null:
    `reference.safetensors`, or `trajectories`, in training.save."""
    sync_steps: Natural = 0
    """Number of optimizer steps between updates of the reference, which mix the current policy into it (TR-DPO, `kind:
    frozen`); 0: never updated."""
    mixup_alpha: Ratio = 0.6
    """Weight of the current policy when the reference is updated every `sync_steps` steps (TR-DPO, arXiv:2404.09656);
    the old reference keeps the rest."""


class DpoArguments(Section):
    """Preference pairs (DPO, arXiv:2305.18290, and its kin). s is the log-probability of an answer, h is that of the
    chosen one relative to the reference minus that of the rejected one."""

    beta: Above0 | None = None
    """Factor β of the pair losses; with a reference, larger values keep the policy closer to it. Null: 0.1 for language
    models, 2000 for generators."""
    loss_type: Annotated[tuple[str, ...], BeforeValidator(_loss_types)] = ("sigmoid",)
    """One loss, or several that are added: sigmoid (DPO), hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard,
    apo_zero, apo_down, sigmoid_norm, discopop, sft; and simpo and orpo, which need no reference."""
    loss_weights: tuple[NotNegative, ...] | None = None
    """Weights of the losses in `loss_type`, in their order; null: 1 each."""
    label_smoothing: Annotated[Number, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a pair is labelled the wrong way round (sigmoid: cDPO; robust: arXiv:2403.00409; exo_pair)."""
    pref_ftx: NotNegative = 0.0
    """Weight of the cross-entropy of the chosen answers beside the other losses (RPO, arXiv:2404.19733). It keeps the
    probability of chosen answers from falling together with that of rejected ones."""
    pref_ftx_by: Literal["token", "pair"] = "token"
    """What the cross-entropy of `pref_ftx` is a mean over, for language models. `token`: all label tokens of the chosen
    answers of the step. `pair`: the pairs of the step, where each counts the mean over its own tokens, so short answers
    weigh as much as long ones."""
    ld_alpha: Ratio | None = None
    """Weight of the tokens by which one answer of a pair is longer than the other (LD-DPO, arXiv:2409.06411), in the
    losses, rewards/* and kl/reference; null: all tokens count alike."""
    simpo_gamma: NotNegative = 0.5
    """Target margin between the chosen and the rejected answer (`loss_type: simpo`, arXiv:2405.14734)."""
    discopop_tau: Above0 = 0.05
    """Temperature that blends the two losses of `loss_type: discopop` (arXiv:2406.08414)."""
    timestep_weight: Literal["constant", "sigma"] = "constant"
    """Generators: weight of a pair by its noise level σ. `constant`: beta; `sigma`: 0.2 · beta · 1000 σ, as older
    trainers multiply it."""
    weight_alpha: NotNegative = 0.0
    """Generators: exponent α of a pair's rarity weight (β / √(p_chosen p_rejected))^α, where p is the share of all
    scores in the histogram bin of a side's score; 0: all pairs count alike."""
    weight_beta: Above0 | None = None
    """Generators: numerator β of a pair's rarity weight (α is `weight_alpha`); null: the largest share of a histogram
    bin."""
    histogram_path: PathText | None = None
    """Generators: JSON file with the histogram of all scores, for `weight_alpha`: an object with the lists `bin_edges`
    and `counts`."""


class GrpoArguments(Section):
    """Group-relative policy optimisation (arXiv:2402.03300): several samples of a prompt are compared by their
    rewards."""

    num_generations: Positive = 8
    """Number of samples of each prompt, which form a group."""
    beta: NotNegative = 0.0
    """Weight of the KL divergence from the reference policy; 0: no reference is needed."""
    epsilon: Above0 = 0.2
    """Lower clip range: ratios of new to old probability below 1 minus this are clipped (not with `loss_type: cispo` or
    `sapo`)."""
    epsilon_high: Above0 | None = None
    """Upper clip range: ratios of new to old probability above 1 plus this are clipped (DAPO, arXiv:2503.14476); with
    `loss_type: cispo`, ratios above the value itself. Null: the value of `epsilon`."""
    delta: Above0 | None = None
    """Upper bound of the ratio of new to old probability where the advantage is negative (two-sided clipping); null:
    none."""
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo"] = "dapo"
    """Form and normalisation of the loss: divided by the tokens of the step (`dapo`, `bnpo`, `cispo`), by the sequences
    (`grpo` and `sapo`, each a mean over its tokens; `luspo`, a sum), or by the sequences times
    `rollout.max_completion_length` (`dr_grpo`). `cispo` clips the weight of a token instead of its objective; `sapo`
    has a soft gate instead of the clip."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level at which ratios of new to old probability are taken: each token, or the geometric mean over a sequence
    (GSPO, arXiv:2507.18071)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Standard deviation that advantages are divided by: that of the group, that of the whole rollout (`batch`), or
    none. Has no effect with `multi_objective_aggregation: normalize_then_sum`."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order in which several rewards become one advantage: sum them and normalise the sum, or normalise each and sum
    the results."""
    num_iterations: Positive = 1
    """Number of passes over the samples of each rollout."""
    steps_per_generation: Positive = 1
    """Number of optimizer steps that the samples of one rollout are divided into."""
    mask_truncated_completions: Flag = False
    """Exclude answers that reached the length limit from the loss."""
    entropy_coef: Number = 0.0
    """Weight of an entropy bonus, which keeps the policy from collapsing onto few answers."""
    use_bias_correction_kl: Flag = True
    """Multiply the KL estimate by the ratio of new to old probability, which makes it unbiased for samples of an older
    policy."""
    clip_range: Above0 = 1e-4
    """Generators: clip range; ratios of new to old probability outside 1 ± this are clipped."""
    adv_clip_max: Above0 = 5.0
    """Generators: advantages are clipped to ± this value."""
    ratio_norm: Flag = False
    """Generators: centre and scale the probability ratio of each denoising step (GRPO-Guard, arXiv:2510.22319)."""


class WindowArguments(Section):
    """Generators: the window of denoising steps that draw noise and are trained (MixGRPO, arXiv:2507.21802)."""

    size: Positive | None = None
    """Number of denoising steps in the trained window; null: all steps."""
    order: Literal["progressive", "random"] = "progressive"
    """Direction in which the trained window moves: `progressive`, from the first denoising steps towards the last;
    `random`, to a random place."""
    iterations: Positive = 25
    """Number of rollouts between moves of the trained window."""
    stride: Positive = 1
    """Number of denoising steps by which the trained window moves (`order: progressive`)."""
    roll_back: Flag = True
    """Return the trained window to the first denoising step once it has reached the end; false: leave it there."""


class FlowArguments(Section):
    """Generators: how trajectories are sampled and trained (Flow-GRPO, arXiv:2505.05470)."""

    sde: Literal["flow", "dance", "cps"] = "flow"
    """SDE sampler that draws trajectories: `flow` (arXiv:2505.05470), `dance` (arXiv:2505.07818) or `cps`
    (arXiv:2509.05952)."""
    noise_level: NotNegative = 0.7
    """Scale of the SDE sampler's noise; 0: the deterministic ODE sampler."""
    num_inference_steps: Positive = 10
    """Number of denoising steps in a trajectory."""
    guidance_scale: Annotated[Number, Field(ge=1)] = 1.0
    """Scale of classifier-free guidance with an empty prompt, in sampling and in the trained probability ratios; above
    1 each step costs two forward passes. `grpo` only."""
    timestep_fraction: Annotated[Ratio, Field(gt=0)] = 1.0
    """Share of the denoising steps that are trained; with a window, of the steps in it."""
    window: WindowArguments = Field(default_factory=WindowArguments)
    """The window of denoising steps that draw noise and are trained."""
    same_noise: Flag = False
    """Start all samples of a prompt from the same noise."""


class NftArguments(Section):
    """Generators: negative-aware fine-tuning of the forward process (DiffusionNFT, arXiv:2509.16117)."""

    beta: Above0 = 1.0
    """Distance of the implicit positive and negative policies from the sampling policy: v_old ± β (v − v_old)."""
    kl: NotNegative = 1e-4
    """Weight of the squared distance between the predictions of the policy and of the reference; 0: no reference is
    needed."""
    old_decay: Annotated[float | Literal["linear"], BeforeValidator(_old_decay)] = "linear"
    """Decay of the sampling policy, an exponential moving average of the trained one, updated after each rollout: a
    number, or `linear`: min(0.001 · optimizer step, 0.5). 0: the trained policy itself draws the samples, without a
    second copy of the trained weights."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Advantages that are used: `all`; only those above 0 (`positive_only`) or below 0 (`negative_only`), others being
    0; 1 where above 0, else 0 (`one_only`); or their signs (`binary`)."""


class DmdArguments(Section):
    """Generators: distillation into a student of few steps by distribution matching (DMD2, arXiv:2405.14867), and, of
    clips in blocks of frames, Self-Forcing (arXiv:2506.08009). The teacher is `posttrain.reference`."""

    objective: Literal["distribution_matching", "ode_regression"] = "distribution_matching"
    """What the student learns from. `distribution_matching`: its own samples, by a teacher and a critic.
    `ode_regression`: the clean ends of the teacher's trajectories, which `mm posttrain reference` stores; no second
    model is in memory. A student that draws in blocks of frames starts there (CausVid, arXiv:2412.07772)."""
    num_inference_steps: Positive = 48
    """`ode_regression`: steps of the teacher in a trajectory, in addition to the student's noise levels."""
    denoising_step_list: Annotated[tuple[int, ...], BeforeValidator(_noise_levels)] = (1000, 750, 500, 250)
    """Noise levels of the student's steps before the shift, in thousandths; as many as it draws in."""
    timestep_shift: Above0 | None = None
    """Shift s of the noise levels of student, teacher and critic: σ ← s σ / (1 + (s − 1) σ); null: as
    `training.diffusion.shift` says, which is what the folder's scheduler does if it is null, too."""
    guidance_scale: NotNegative = 4.0
    """Guidance scale of the teacher: without + scale · (with − without) the prompt; 1: no guidance. Transformers that
    take it as an input are told it. (The code of Self-Forcing counts from 0: its 3.0 is 4.0 here.)"""
    negative_prompt: str = ""
    """Prompt that the teacher's guidance steers away from."""
    dfake_gen_update_ratio: Positive = 5
    """Updates of the critic in each step, before the one of the student; each takes further prompts."""
    critic_name_or_path: PathText | None = None
    """Folder that the critic starts from, of the student's family; null: the teacher's."""
    critic_lora: Flag | None = None
    """Train adapters of the critic alone, by the settings of `training.lora`; null: as `training.lora.enable`."""
    lr_critic: Above0 | None = None
    """Learning rate of the critic, which follows the schedule of the student's; null: `training.lr`."""
    beta1_critic: Ratio | None = None
    """Adam's β₁ of the critic; null: `training.adam_beta1`. Not with lion."""
    beta2_critic: Ratio | None = None
    """Adam's β₂ of the critic; null: `training.adam_beta2`. Not with lion."""
    score_range: tuple[Ratio, Ratio] = (0.02, 0.98)
    """Smallest and largest noise level, after the shift, at which teacher and critic look at samples; those outside are
    moved to the nearer end."""
    last_step_only: Flag = False
    """Train the student's last step alone; false: a step drawn by chance, the same for all samples of an update."""
    num_frame_per_block: Positive | None = None
    """Self-Forcing: latent frames of a block. Blocks are drawn one after the other, and see themselves and the
    blocks before. Null: the whole sample is drawn at once."""
    same_step_across_blocks: Flag = True
    """Self-Forcing: end all blocks of an update at the same step; false: chance chooses a step for each block."""
    context_noise: Annotated[Natural, Field(le=1000)] = 0
    """Self-Forcing: noise level, in thousandths, that finished blocks have when later ones look at them."""
    independent_first_frame: Flag = False
    """Self-Forcing: a first block of one frame. Not in this version: only false."""
    gan_loss_weight: NotNegative = 0.0
    """Weight of DMD2's adversarial loss on real samples. Not in this version: only 0."""
    regression_loss_weight: NotNegative = 0.0
    """Weight of DMD's regression loss on the teacher's own trajectories. Not in this version: only 0."""


class RolloutArguments(Section):
    """How samples are drawn from the policy."""

    backend: Literal["transformers", "vllm", "sglang"] = "transformers"
    """Program that draws the samples: this one, with the trained model (`transformers`), or a server."""
    base_url: str | None = None
    """Address of the server that draws the samples, such as http://host:8000."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key of the sampling server; null: no key is sent."""
    weight_sync: Literal["disk", "nccl"] = "disk"
    """How the sampling server gets new weights: from a folder that both can read, or over NCCL."""
    temperature: NotNegative = 1.0
    """Sampling temperature, above 0, by which logits are divided."""
    top_p: Annotated[Ratio, Field(gt=0)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this (nucleus sampling); 1: from all."""
    top_k: Natural = 0
    """Sample from the k most likely tokens; 0: from all."""
    max_completion_length: Positive = 512
    """Maximum length of an answer in tokens."""
    batch_size: Positive | None = None
    """Number of samples drawn at a time; null: those of one micro-batch."""
    ahead: Natural = 0
    """1: the server draws the samples of the next rollout while the current one is trained on, with the weights from
    before that training; 0: samples are drawn when they are needed."""
    correction: Literal["none", "token_truncate", "token_mask"] = "token_truncate"
    """Correction where the server's probabilities differ from the policy's: none, cap the importance ratio of each
    token (`token_truncate`), or leave tokens above the cap out of the loss (`token_mask`)."""
    correction_max: Above0 = 3.0
    """Cap on the importance ratio of a token (policy's probability / server's probability), see `correction`."""
    keep: Flag = True
    """Keep the samples of every rollout in the run folder; false: only those that a resumed run needs."""


class RewardArguments(Section):
    """One reward, with its weight in the sum."""

    name: str
    """Name of a built-in reward, or of one that a plugin registers."""
    weight: Number = 1.0
    """Weight of this reward in the sum."""
    settings: JsonObject = Field(default_factory=dict)
    """Keyword arguments of the reward."""
    timeout_s: Seconds = 60.0
    """Longest wait for an answer to one request, in seconds, for rewards that ask a server."""


class PosttrainArguments(Section):
    """Training on preferences and on rewards."""

    method: Literal["dmd", "dpo", "grpo", "nft"] | None = None
    """Training method. `dpo`: preference pairs; `grpo`: the model's own samples and their rewards; `nft`: the same for
    generators, without a likelihood; `dmd`: distillation of generators into few steps; null: supervised training."""
    reference: ReferenceArguments = Field(default_factory=ReferenceArguments)
    """The reference policy, which the trained one is compared with."""
    dpo: DpoArguments = Field(default_factory=DpoArguments)
    """Losses of training on preference pairs."""
    grpo: GrpoArguments = Field(default_factory=GrpoArguments)
    """How the rewards of a group of samples become a loss."""
    flow: FlowArguments = Field(default_factory=FlowArguments)
    """How trajectories of generators are sampled and trained."""
    nft: NftArguments = Field(default_factory=NftArguments)
    """How generators are trained without a likelihood."""
    dmd: DmdArguments = Field(default_factory=DmdArguments)
    """How generators are distilled into students of few steps."""
    rollout: RolloutArguments = Field(default_factory=RolloutArguments)
    """How samples are drawn from the policy, and by which program."""
    rewards: Annotated[tuple[RewardArguments, ...], null_means(())] = ()
    """Rewards that score each sample; their weighted sum is used."""
