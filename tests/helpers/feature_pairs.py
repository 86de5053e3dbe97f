"""Features that change nothing of what is computed, those that do, and which two do not go together.

Every pair is in a configuration that must equal the run without the first kind, in loss, every gradient, clip norm and
every weight after two steps; or it must be refused by `mm check`. There are no holes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.tasks.verify.precision import keeping_double
from tests.helpers.covering import covering
from tests.helpers.plan_matrix import EP, RING, TP, ULYSSES
from tests.helpers.planned_steps import overrides, train_steps

TOLERANCE = 1e-11
"""Relative. Rounding of fp64 through two steps of AdamW; what a planted fault does is a thousand million times that."""

NEUTRAL: dict[str, tuple[str, ...]] = {
    "recompute": ("features.recompute=true",),
    "selective": ("features.recompute=true", "features.recompute_plan.mode=selective"),
    "reentrant": ("features.recompute=true", "features.recompute_plan.use_reentrant=true"),
    "attention kept": ("features.recompute=true", "model.skip_flash_attn_recompute=true"),
    "activation offload": ("features.enable_activation_offload=true",),
    "chunk_mbs": ("features.enable_chunk_mbs=true", "features.chunkmbs_plan.apply_modules={chunked}"),
    "compile": ("features.compile=true", "features.compile_plan.backend=aot_eager"),
    "chunk loss": ("features.enable_chunk_loss=true", "features.chunkloss_plan.chunk_size=3"),
    "dynamic chunk loss": ("features.enable_dynamic_chunk_loss=true", "features.chunkloss_plan.total_chunk_size=8"),
    "gradient offload": ("features.enable_gradient_offload=true",),
    "swap": ("training.optimizer=adamw_swap",),
    "zero-2": ("parallel.fsdp_plan.reshard_after_forward=false",),
    "cpu_offload": ("parallel.fsdp_plan.cpu_offload=true",),
    "prefetch": ("parallel.fsdp_plan.num_to_forward_prefetch=1", "parallel.fsdp_plan.num_to_backward_prefetch=1"),
    "pregather": ("parallel.fsdp_plan.pregather=true",),
    "memory profile": ("tools.memory_profile.enable=true", "tools.memory_profile.save_path={folder}"),
}  # fmt: skip
"""On and off give the same numbers."""

CHANGING: dict[str, tuple[str, ...]] = {
    "by sample": ("features.loss_cfg.loss_type=per_sample_loss",),
    "z-loss": ("features.loss_cfg.z_loss_coef=0.01",),
    "muon": ("training.optimizer=muon",),
    "lora": ("training.lora.enable=true",),
    "dora": ("training.lora.enable=true", "training.lora.use_dora=true"),
    "projector whole": ("training.lora.enable=true", "training.lora.modules_to_save=['{projector}']"),
    "frozen tower": ("model.freeze=['{tower}']",),
    "ema": ("training.ema.enable=true",),
}
"""What is computed is another thing, with which the neutral ones must go all the same."""

FAMILY_WORDS = {
    "vlm": {
        "chunked": "['model.language_model.layers.{*}.mlp']", "projector": "model.visual.merger",
        "tower": "model.visual",
    },
    "wan": {
        "chunked": "['blocks.{*}.ffn']", "projector": "proj_out", "tower": "condition_embedder",
    },
}  # fmt: skip

FEATURES = NEUTRAL | CHANGING

REFUSED: dict[frozenset[str], str] = {
    # A re-entrant pass has no results of single operations to keep.
    frozenset(("selective", "reentrant")): "features.recompute_plan.use_reentrant",
    frozenset(("reentrant", "attention kept")): "features.recompute_plan.use_reentrant",
    # All is on the host already.
    frozenset(("gradient offload", "cpu_offload")): "parallel.fsdp_plan.cpu_offload",
    frozenset(("swap", "cpu_offload")): "parallel.fsdp_plan.cpu_offload",
    # Beside adapters there are no matrices left for it.
    frozenset(("muon", "lora")): "training.optimizer",
    frozenset(("muon", "dora")): "training.optimizer",
    frozenset(("muon", "projector whole")): "training.optimizer",
    # A rank that has a part of a row cannot measure it.
    frozenset(("tp2", "dora")): "training.lora.use_dora",
}
"""Two that do not go together → the key that the refusal names."""

HIDDEN_BY = {"chunk loss": "dynamic chunk loss"}
"""Feature → another, beside which it does nothing."""

LIMIT = 6
"""Most features of a configuration, a plan included."""

OF_LANGUAGE = {"chunk loss", "dynamic chunk loss", "by sample", "z-loss", "projector whole"}
"""What a generator has nothing of."""

SHORT = ("parallel.fsdp_plan.param_dtype=fp32",)
SHORT_TOLERANCE = 5e-5
"""For compiled generators: their code says `.float()`, and a traced graph does not see that a test lets fp64 pass."""

PLANS: dict[str, tuple[int, list[str]]] = {
    "fsdp2": (2, overrides(2, 2)),
    "tp2": (2, overrides(1, 2, TP)),
    "ulysses2": (2, overrides(1, 2, ULYSSES)),
    "ring2": (2, overrides(1, 2, RING)),
    "ep2": (2, overrides(2, 2, EP)),
}


def words_of(family: str, names: tuple[str, ...], folder: str) -> list[str]:
    """The overrides that switch these features on."""
    told = FAMILY_WORDS[family.partition(" ")[0]] | {"folder": folder}
    words = [word for name in names for word in FEATURES[name]]
    for key, value in told.items():
        words = [word.replace(f"{{{key}}}", value) for word in words]
    return list(dict.fromkeys([*words, *(SHORT if is_short(family, names) else ())]))


def may_meet(one: str, other: str) -> bool:
    """Whether two features, or a feature and a plan, can be in one configuration: the two are not one choice, and not
    refused."""
    if one in PLANS or other in PLANS:
        is_one_choice = one in PLANS and other in PLANS
    else:
        first, second = (dict(word.split("=", 1) for word in FEATURES[name]) for name in (one, other))
        sets_otherwise = any(second.get(key, value) != value for key, value in first.items())
        is_kind_of = first.items() <= second.items() or second.items() <= first.items()
        is_one_choice = sets_otherwise or is_kind_of
    return not is_one_choice and frozenset((one, other)) not in REFUSED


def features_of(family: str) -> list[str]:
    """The features that a family has, neutral ones first."""
    return [name for name in FEATURES if family != "wan" or name not in OF_LANGUAGE]


def configurations(family: str) -> list[tuple[str, ...]]:
    """Few configurations with every pair of features in at least one of them; of the language model also every feature
    under every plan."""
    plans = list(PLANS) if family == "vlm" else []
    return covering([*plans, *features_of(family)], may_meet, LIMIT, lambda names, pair: shows(family, names, pair))


def shows(family: str, names: tuple[str, ...], pair: tuple[str, str]) -> bool:
    """Whether a configuration shows something about a pair in it. What is compared in fp32 shows less: it counts for
    the feature alone that makes it so."""
    is_hidden = any(HIDDEN_BY.get(name) in names and HIDDEN_BY[name] not in pair for name in pair)
    return not is_hidden and (not is_short(family, names) or is_short(family, pair))


def is_short(family: str, names: tuple[str, ...]) -> bool:
    """Whether these features are compared in fp32."""
    return family == "wan" and "compile" in names


def outcome(yaml: str, words: list[str]) -> Any:
    """The recorded steps of a run, or the words of its refusal."""
    torch._dynamo.reset()
    try:
        with nullcontext() if set(SHORT) & set(words) else keeping_double():
            return train_steps(yaml, words)
    except ConfigError as error:
        return str(error)
