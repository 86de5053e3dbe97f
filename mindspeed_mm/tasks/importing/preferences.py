"""Conversions of setups that train on preference pairs and on rewards."""

from __future__ import annotations

import math
from typing import Any

from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.params.other_tools import PeerRow
from mindspeed_mm.fsdp.params.posttrain_args import PAIR_LOSSES
from mindspeed_mm.tasks.importing.common_values import key_of
from mindspeed_mm.tasks.importing.draft import Outcome, PeerSetup, conversion, default_of, idle, is_on, no, texts

_GROUP = "posttrain.grpo.num_generations"


@conversion(":beta")
def beta(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The β of pairs, or of the divergence in GRPO."""
    if draft.method == "grpo":
        is_given = "beta" in draft.settings or draft.tool.name == "ms-swift"
        if is_given:
            return {"posttrain.grpo.beta": float(value)}
        return {}
    return {"posttrain.dpo.beta": float(value)}


@conversion(":pairloss")
@conversion(":loss_type")
def loss_type(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The loss of pairs, or of a group of answers."""
    names = texts(value)
    if draft.method == "grpo":
        known = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "luspo")
        if names[0] in known:
            return {"posttrain.grpo.loss_type": names[0]}
        return no(f"{names[0]} is not built")
    if draft.method != "dpo" and row.how == ":pairloss":
        return idle("it belongs to preference pairs")
    if draft.method != "dpo":
        if names[0] in ("nll", "none", "default"):
            return {}
        return no("features.loss_cfg.loss_type chooses the loss")
    unknown = [name for name in names if name not in PAIR_LOSSES]
    if unknown:
        return no(f"{unknown[0]} is not built; posttrain.dpo.loss_type takes {', '.join(PAIR_LOSSES)}")
    return {"posttrain.dpo.loss_type": names}


def note_orpo(draft: PeerSetup) -> None:
    """Say what ORPO's cross-entropy is of: TRL's trainer, which axolotl has, too, takes questions and answers."""
    if draft.tool.name in ("trl", "axolotl") and "orpo" in draft.out.get("posttrain.dpo.loss_type", ()):
        draft.note("posttrain.dpo.loss_type", "its cross-entropy is of the answers here, of the questions, too, there")


@conversion(":sync_ref")
def sync_ref(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """The reference follows the policy (TR-DPO)."""
    if is_on(value):
        return {key_of(row): int(draft.get("ref_model_sync_steps", 512))}
    return {}


_REWARDS = {"accuracy_reward": "exact_match", "think_format_reward": "think_format", "accuracy": "exact_match"}


@conversion(":rewards")
def rewards(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """Rewards by name; functions of one's own are registered by a plugin."""
    prefix = "trl." if row.words[0].startswith("trl.") else ""
    weights = draft.get(f"{prefix}reward_weights", [])
    weights = weights if isinstance(weights, list) else [weights]
    made: list[JsonObject] = []
    for number, name in enumerate(texts(value)):
        entry: JsonObject = {"name": _REWARDS.get(name, name)}
        if number < len(weights):
            entry["weight"] = float(weights[number])
        made.append(entry)
    draft.note("posttrain.rewards", "a function of yours is registered by a plugin: docs/posttrain.md")
    return {"posttrain.rewards": made}


@conversion(":vllm")
def vllm(draft: PeerSetup, row: PeerRow, value: object) -> Outcome:
    """A server that draws; inside the training process our own model draws."""
    prefix = "trl." if row.words[0].startswith("trl.") else ""
    host = draft.get(f"{prefix}vllm_server_host")
    if not is_on(value) or (host is None and not draft.has("vllm_server_base_url")):
        return idle("the trained model draws its own samples; posttrain.rollout.base_url names a server")
    found: JsonObject = {"posttrain.rollout.backend": "vllm"}
    if host is not None:
        found["posttrain.rollout.base_url"] = f"http://{host}:{draft.get(f'{prefix}vllm_server_port', 8000)}"
    return found


@conversion(":lf_ftx")
def lf_ftx(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """LLaMA-Factory's weight of the cross-entropy, which it takes as a mean over pairs (compute_preference_loss)."""
    if float(value):
        return {key_of(row): float(value), "posttrain.dpo.pref_ftx_by": "pair"}
    return {}


@conversion(":cpo_alpha")
def cpo_alpha(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """The weight of the cross-entropy beside SimPO, which CPO's trainer adds unless it is 0 (TRL's CPOConfig)."""
    if "simpo" not in draft.out.get("posttrain.dpo.loss_type", ()):
        return idle("it belongs to CPO and SimPO")
    if float(value):
        return {key_of(row): float(value)}
    return {}


@default_of("beta_of_swift")
def beta_of_swift(draft: PeerSetup) -> float:
    """0.04 for GRPO, 2 for SimPO, else 0.1 (RLHFArguments)."""
    if draft.method == "grpo":
        return 0.04
    if "simpo" in draft.out.get("posttrain.dpo.loss_type", ()):
        return 2.0
    return 0.1


@default_of("loss_of_swift")
def loss_of_swift(draft: PeerSetup) -> str | None:
    """The loss of GRPO as it was first published (RLHFArguments)."""
    if draft.method == "grpo":
        return "grpo"
    return None


@default_of("temperature_of_swift")
def temperature_of_swift(draft: PeerSetup) -> float | None:
    """0.9 while samples are drawn (RLHFArguments)."""
    if draft.method == "grpo":
        return 0.9
    return None


@conversion(":steps_per_generation")
def steps_per_generation(draft: PeerSetup, row: PeerRow, value: Any) -> Outcome:
    """Optimizer steps of a rollout, from micro-batches of it (TRL's GRPOConfig)."""
    each = int(draft.out.get("training.gradient_accumulation_steps", 1))
    draft.note(key_of(row), f"{value} micro-batches there")
    return {key_of(row): max(1, round(int(value) / each))}


def fit_groups(draft: PeerSetup) -> None:
    """Accumulate until the samples of a prompt fit into a step of one rank; other tools spread them over all ranks."""
    key = "training.gradient_accumulation_steps"
    each, group = int(draft.out.get("training.micro_batch_size", 1)), int(draft.out.get(_GROUP, 8))
    count = int(draft.out.get(key, 1))
    needed = count * group // math.gcd(each * count, group)
    if needed != count:
        draft.put(key, needed, f"{count} there; the samples of a prompt stay on one rank here")
