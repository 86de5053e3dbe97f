"""What a setup trains on: rows, documents, preference pairs or rewards; methods that are not built are rejected."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.other_tools import words_of
from mindspeed_mm.tasks.importing.draft import Method, PeerSetup, is_on
from mindspeed_mm.tasks.importing.generator_media import process_of

_METHODS: dict[str, Method] = {
    "sft": "sft", "pt": "pretrain", "pretrain": "pretrain", "dpo": "dpo", "orpo": "dpo", "simpo": "dpo", "ipo": "dpo",
    "mpo": "dpo", "grpo": "grpo", "gspo": "grpo", "causal_lm": "sft",
}  # fmt: skip
_DISTIL = "Let the teacher answer, with mm infer, and train on its answers."
_REWARD_MODEL = "Train on the pairs themselves with DPO, or name a judge in posttrain.rewards."
_ONLINE = "posttrain.method: grpo learns from the model's own answers and their rewards."
_UNBUILT = {
    "kto": "Put good and bad answers to the same question into pairs, chosen and rejected, and train with DPO.",
    "bco": "posttrain.dpo.loss_type: bco_pair trains on pairs of a chosen and a rejected answer.",
    "rm": _REWARD_MODEL,
    "prm": _REWARD_MODEL,
    "reward": _REWARD_MODEL,
    "reward_model": _REWARD_MODEL,
    "reward_modeling": _REWARD_MODEL,
    "process_reward_model": _REWARD_MODEL,
    "ppo": "posttrain.method: grpo trains on the same rewards without a value model.",
    "rloo": "posttrain.method: grpo with posttrain.grpo.scale_rewards: none compares the samples of a prompt, too.",
    "online_dpo": _ONLINE,
    "dpo_online": _ONLINE,
    "nash_md": _ONLINE,
    "xpo": _ONLINE,
    "gkd": _DISTIL,
    "gold": _DISTIL,
    "distillation": _DISTIL,
    "sdft": _DISTIL,
    "ssd": _DISTIL,
    "sdpo": _DISTIL,
    "cpo": "posttrain.dpo.loss_type: simpo or orpo need no reference model, either.",
    "tpo": "posttrain.method: dpo trains on the pairs of chosen and rejected answers.",
    "text_diffusion": "Language models that denoise text are not built: train one that predicts the next token.",
}
"""Method that is not built → what to do instead."""
_INSTEAD = "mm route lists what is built."
_OF_PICTURES = "training.lora trains adapters on pictures with captions, and on pairs of pictures for editing."
_SCRIPTS = ("controlnet", "control_net", "control", "textual_inversion", "instruct_pix2pix", "lcm", "custom_diffusion",
            "unconditional")  # fmt: skip
"""Part of the name of a script for generators → what is not built."""
_JOBS = {
    "generate": "mm infer draws from a run or a folder.",
    "extract": "training.lora trains adapters from the start.",
    "mod": "mm merge and mm export change adapters.",
}
"""Job of ai-toolkit that does not train → what to do instead."""
_TRAINING_PROCESSES = ("sd_trainer", "diffusion_trainer", "ui_trainer", "custom_sd_trainer")
"""`config.process[].type` of ai-toolkit for training a generator on pictures and clips."""


def method_of(draft: PeerSetup) -> Method:
    """What is trained.

    Raises:
        ConfigError: It is not built, or only the code of a script says what it is.
    """
    if draft.tool.name == "ai-toolkit":
        _check_job(draft)
    if draft.tool.is_for_generators:
        _check_script(draft)
    word, setting = _of_settings(draft) or _of_program(draft) or (_of_options(draft), "")
    if word not in _METHODS:
        raise draft.refuse(f"{word.upper()} is not built", setting or draft.tool.name, _UNBUILT.get(word, _INSTEAD))
    if word in ("orpo", "simpo", "ipo"):
        draft.put("posttrain.dpo.loss_type", [word])
    return _METHODS[word]


def _of_settings(draft: PeerSetup) -> tuple[str, str] | None:
    """(method, the setting that names it)."""
    if draft.tool.name == "axolotl":
        for name in ("reward_model", "process_reward_model"):
            if is_on(draft.get(name, False)):
                return name, name
        if any(each.key.startswith("diffusion.") for each in draft.given.settings):
            return "text_diffusion", next(key for key in draft.settings if key.startswith("diffusion."))
    found = None
    for name in ("stage", "rlhf_type", "rl", "task_type"):
        if draft.has(name) and name in words_of(draft.tool.name):
            found = str(draft.get(name)).lower(), name
    return found


def _of_program(draft: PeerSetup) -> tuple[str, str] | None:
    """(method, nothing), by the verb of a command or the name of a script.

    Raises:
        ConfigError: A script of TRL that is not named after its method.
    """
    program = draft.given.program
    if draft.tool.name == "trl" and program and (word := _in_name(Path(program[0]).stem)):
        return word, ""
    for word in program[1:2]:
        if word in _METHODS or word in _UNBUILT:
            return word, ""
    if program[1:2] == ("rlhf",):
        return "dpo", ""
    if draft.tool.name == "trl" and program and not (draft.has("num_generations") or draft.has("reward_funcs")):
        what = f"what {Path(program[0]).name} trains is in its code"
        raise ConfigError(what, where=draft.given.source, way_out="Write trl sft, trl dpo or trl grpo for it.")
    return None


def _of_options(draft: PeerSetup) -> str:
    """The method that a setup without a name for it means."""
    if draft.tool.name == "trl":
        if draft.has("num_generations") or draft.has("reward_funcs"):
            return "grpo"
        if draft.has("beta"):
            return "dpo"
        return "sft"
    if draft.tool.name == "axolotl" and any(map(draft.has, ("pretraining_dataset[].path", "pretraining_dataset"))):
        return "pretrain"
    is_dpo = draft.get("dist_config.name") and "dpo" in str(draft.get("train_dataset", ""))
    if is_dpo:
        return "dpo"
    return "sft"


def _in_name(stem: str) -> str:
    """The longest name of a method among the words of a script's name: `online_dpo_vlm` is online DPO."""
    return max((word for word in (*_METHODS, *_UNBUILT) if re.search(rf"(^|_){word}(_|$)", stem)), key=len, default="")


def _check_job(draft: PeerSetup) -> None:
    """Raises `ConfigError` for a job of ai-toolkit that trains nothing, or something that is not built."""
    job = str(draft.given.tree.get("job", "extension"))
    kind = str(process_of(draft).get("type", "sd_trainer"))
    if job in _JOBS:
        raise draft.refuse(f"job {job} does not train", "job", _JOBS[job])
    if kind not in _TRAINING_PROCESSES:
        raise draft.refuse(f"{kind} is not built", "type", "config.process[].type sd_trainer is.")


def _check_script(draft: PeerSetup) -> None:
    """Raises `ConfigError` for a script that trains a generator for something that is not built."""
    stem = Path(draft.given.program[0]).stem if draft.given.program else ""
    for word in _SCRIPTS:
        if re.search(rf"(^|_){word}(_|$)", stem):
            raise draft.refuse(f"{word} is not built", draft.tool.name, _OF_PICTURES)
