"""The `posttrain` section: training on preferences and on rewards. TRL's names where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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

BUILT_METHODS = {"language": ("dpo", "grpo"), "generator": ("dpo", "grpo", "nft")}
"""Kind of model → the methods that this version has for it."""
PAIR_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
    "discopop",
    "sft",
    "simpo",
    "orpo",
)
"""Losses of preference pairs, as `posttrain.dpo.loss_type` names them."""
WITHOUT_REFERENCE = frozenset({"sft", "simpo", "orpo"})
"""Those that compare the policy with no reference."""


def _loss_types(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise fault(f"{show(value)} is not a list of losses")
    unknown = [name for name in names if name not in PAIR_LOSSES]
    if unknown:
        raise fault(f"{show(unknown[0])} is not one of {', '.join(PAIR_LOSSES)}")
    return tuple(names)


def _old_decay(value: Any) -> Any:
    if value == "linear":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    raise fault(f"{show(value)} is not linear or a number from 0 to below 1")


class ReferenceArguments(Section):
    """The policy that the trained one is compared with."""

    kind: Literal["auto", "adapters_off", "frozen", "stored"] = "auto"
    """Where its log-probabilities come from. `adapters_off`: the trained model with its adapters switched off, at the
    cost of one forward pass. `frozen`: a second model, sharded as the first and never trained. `stored`: computed once
    by `mm posttrain reference` and read back. `auto`: stored where the model is cut into pipeline stages, else
    adapters_off where adapters leave the base model alone, else frozen."""
    model_name_or_path: PathText | None = None
    """Folder of the reference (`kind: frozen`); null: that of the model itself."""
    path: PathText | None = None
    """File of stored log-probabilities (`kind: stored`); null: `reference.safetensors` in training.save."""
    sync_steps: Natural = 0
    """Number of steps after which the reference becomes a mixture of itself and of the policy (`kind: frozen`); 0:
    never."""
    mixup_alpha: Ratio = 0.6
    """Share of the policy in that mixture (TR-DPO, arXiv:2404.09656)."""


class DpoArguments(Section):
    """Preference pairs (DPO, arXiv:2305.18290, and its kin). s is the log-probability of an answer, h is that of the
    chosen one relative to the reference minus that of the rejected one."""

    beta: Above0 | None = None
    """Strength of the tie to the reference. Null: 0.1 for language models, 2000 for generators."""
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
    ld_alpha: Ratio | None = None
    """Weight of the tokens of the longer answer behind the length of the shorter one (LD-DPO, arXiv:2409.06411), in
    the losses, rewards/* and kl/reference; null: all tokens count alike."""
    simpo_gamma: NotNegative = 0.5
    """Margin by which a chosen answer is to win (`simpo`, arXiv:2405.14734)."""
    discopop_tau: Above0 = 0.05
    """Temperature of the blend of the two losses in `discopop` (arXiv:2406.08414)."""
    timestep_weight: Literal["constant", "sigma"] = "constant"
    """Generators: weight of a pair by its noise level σ. `constant`: beta; `sigma`: 0.2 · beta · 1000 σ, as older
    trainers multiply it."""
    weight_alpha: NotNegative = 0.0
    """Generators: exponent of the weight of a pair by how rare the scores of its two sides are; 0: all count alike."""
    weight_beta: Above0 | None = None
    """Generators: numerator of that weight; null: the largest share of the histogram."""
    histogram_path: PathText | None = None
    """Generators: JSON file of the histogram of all scores, an object with the lists `bin_edges` and `counts`."""


class GrpoArguments(Section):
    """Group-relative policy optimisation (arXiv:2402.03300): several samples of a prompt are compared by their
    rewards."""

    num_generations: Positive = 8
    """Number of samples of each prompt, which form a group."""
    beta: NotNegative = 0.0
    """Weight of the divergence from the reference; 0: no reference is needed."""
    epsilon: Above0 = 0.2
    """Distance below 1 at which the ratio of probabilities is clipped."""
    epsilon_high: Above0 | None = None
    """Distance above 1 at which it is clipped (DAPO, arXiv:2503.14476); null: `epsilon`."""
    delta: Above0 | None = None
    """Upper bound of the ratio where the advantage is negative; null: none."""
    loss_type: Literal["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo"] = "dapo"
    """Which loss is summed and what it is divided by: `dapo`, `bnpo`: tokens of the step; `grpo`, `luspo`: sequences;
    `dr_grpo`: sequences times `rollout.max_completion_length`."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether ratios are of tokens, or of the mean over a sequence (GSPO, arXiv:2507.18071)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What advantages are divided by: the standard deviation of the group or of the whole step, or nothing."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards become one advantage."""
    num_iterations: Positive = 1
    """Number of times that a step's samples are trained on."""
    steps_per_generation: Positive = 1
    """Number of optimizer steps that the samples of one generation are spread over."""
    mask_truncated_completions: Flag = False
    """Leave answers that were cut at the length limit out of the loss."""
    entropy_coef: Number = 0.0
    """Weight of the entropy of the policy, which is maximised."""
    use_bias_correction_kl: Flag = True
    """Multiply the estimate of the divergence by the ratio of probabilities."""
    clip_range: Above0 = 1e-4
    """Generators: distance from 1 at which the ratio is clipped."""
    adv_clip_max: Above0 = 5.0
    """Generators: largest magnitude of an advantage."""
    ratio_norm: Flag = False
    """Generators: centre and scale the ratio of each step (GRPO-Guard, arXiv:2510.22319)."""


class WindowArguments(Section):
    """Generators: the steps of a trajectory that are random and trained (MixGRPO, arXiv:2507.21802)."""

    size: Positive | None = None
    """Number of such steps; null: all of them."""
    order: Literal["progressive", "random"] = "progressive"
    """How the window moves: forwards through the trajectory, or at random."""
    iterations: Positive = 25
    """Number of optimizer steps after which it moves."""
    stride: Positive = 1
    """Number of steps by which it moves."""
    roll_back: Flag = True
    """Start again at the first step when the end is reached; false: stay there."""


class FlowArguments(Section):
    """Generators: how trajectories are sampled and trained (Flow-GRPO, arXiv:2505.05470)."""

    sde: Literal["flow", "dance", "cps"] = "flow"
    """How noise is added: `flow` (arXiv:2505.05470), `dance` (arXiv:2505.07818) or `cps` (arXiv:2509.05952)."""
    noise_level: NotNegative = 0.7
    """Amount of that noise; 0 is the ordinary sampler."""
    num_inference_steps: Positive = 10
    """Number of steps of a trajectory."""
    guidance_scale: Annotated[Number, Field(ge=1)] = 1.0
    """Scale of classifier-free guidance, by an empty prompt, in sampling and in the ratios that are trained; above 1
    each step costs two passes. `grpo` only."""
    timestep_fraction: Annotated[Ratio, Field(gt=0)] = 1.0
    """Share of the steps that are trained."""
    window: WindowArguments = Field(default_factory=WindowArguments)
    """The steps that are random and trained."""
    same_noise: Flag = False
    """Start all samples of a prompt from the same noise."""


class NftArguments(Section):
    """Generators: negative-aware fine-tuning of the forward process (DiffusionNFT, arXiv:2509.16117)."""

    beta: Above0 = 1.0
    """Distance of the two implicit policies from the old one."""
    kl: NotNegative = 1e-4
    """Weight of the distance from the reference."""
    old_decay: Annotated[float | Literal["linear"], BeforeValidator(_old_decay)] = "linear"
    """The policy that draws samples is an older one, of which this share remains whenever the samples of a rollout are
    used up: a number, or `linear`: min(0.001 · step, 0.5). 0: the policy itself draws them, without a second copy of
    what is trained."""
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Which samples count, by the sign of their advantages; `all` uses all of them."""


class RolloutArguments(Section):
    """How samples are drawn from the policy."""

    backend: Literal["transformers", "vllm", "sglang"] = "transformers"
    """What samples: the trained model itself (`transformers`), or a server."""
    base_url: str | None = None
    """Address of the server that samples, such as http://host:8000."""
    weight_sync: Literal["disk", "nccl"] = "disk"
    """How the server gets new weights: from a folder that both see, or sent to it."""
    temperature: NotNegative = 1.0
    """Divisor of the logits before a token is sampled."""
    top_p: Annotated[Ratio, Field(gt=0)] = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_k: Natural = 0
    """Sample from this many of the most likely tokens; 0: from all."""
    max_completion_length: Positive = 512
    """Largest number of tokens in an answer."""
    batch_size: Positive | None = None
    """Number of samples that are drawn together; null: those of a micro-batch."""
    ahead: Natural = 0
    """1: a server draws the next rollout while one is trained on, by weights that are so many steps older; 0: it
    draws when samples are needed."""
    correction: Literal["none", "token_truncate", "token_mask"] = "token_truncate"
    """What is done about a sampler whose probabilities differ from the policy's: nothing, bound the ratio of each
    token, or leave out tokens above the bound."""
    correction_max: Above0 = 3.0
    """Largest ratio of a token to which `correction` leaves its value."""
    keep: Flag = True
    """Keep the samples of each step in the run folder, from which a run that was killed goes on."""


class RewardArguments(Section):
    """One entry of `rewards`."""

    name: str
    """Name of a built-in reward, or of one that a plugin registers."""
    weight: Number = 1.0
    """Factor on it before rewards are summed."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of its own: arguments of the reward by name."""
    timeout_s: Seconds = 60.0
    """Time after which a reward that asks a server gives up."""


class PosttrainArguments(Section):
    """Training on preferences and on rewards."""

    method: Literal["dpo", "grpo", "nft"] | None = None
    """`dpo`: preference pairs; `grpo`: samples and their rewards; `nft`: the same for generators, without a likelihood;
    null: supervised training."""
    reference: ReferenceArguments = Field(default_factory=ReferenceArguments)
    """The policy that the trained one is compared with."""
    dpo: DpoArguments = Field(default_factory=DpoArguments)
    """The losses of preference pairs, and how strongly they act."""
    grpo: GrpoArguments = Field(default_factory=GrpoArguments)
    """How the rewards of a group of samples become a loss."""
    flow: FlowArguments = Field(default_factory=FlowArguments)
    """How trajectories of generators are sampled and trained."""
    nft: NftArguments = Field(default_factory=NftArguments)
    """How generators are trained without a likelihood."""
    rollout: RolloutArguments = Field(default_factory=RolloutArguments)
    """How samples are drawn from the policy, and by what."""
    rewards: Annotated[tuple[RewardArguments, ...], null_means(())] = ()
    """Rewards of samples, which are weighted and summed."""
