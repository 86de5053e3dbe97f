"""Rules for the flags of schedule, optimizer, adapters, checkpoints, validation and rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from mindspeed_mm.core.suggest import did_you_mean
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS
from mindspeed_mm.provider.reading import LENGTH_OF_RUN, Reading, derived

# --- names of layers that get adapters --------------------------------------------------------------------------------

_LANGUAGE = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's fused layers → the layers that they fuse."""
_WAN = {
    "proj_q": ("to_q",),
    "proj_k": ("to_k",),
    "proj_v": ("to_v",),
    "proj_qkv": ("to_q", "to_k", "to_v"),
    "proj_out": ("to_out.0",),
    "ffn.0": ("ffn.net.0.proj",),
    "ffn.2": ("ffn.net.2",),
}
"""Layers of generators → their names in diffusers."""


def _adapter_targets(words: Sequence[str], is_generator: bool) -> list[str]:
    """Names of layers as the libraries have them; other words stay what they are."""
    table = _LANGUAGE
    if is_generator:
        table = _WAN
    names: dict[str, None] = {}
    for word in words:
        names |= dict.fromkeys(table.get(word, (word,)))
    return list(names)


# --- rules ------------------------------------------------------------------------------------------------------------


_DATA = "data.dataset_param"
_LOADER = "data.dataloader_param"
_STYLES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "WSD": "wsd",
    "wsd": "wsd",
}
_ANNEALS = ("linear", "cosine", "exponential", "minus_sqrt")
_OPTIMIZERS = {facts.launch_name: name for name, facts in OPTIMIZERS.items() if facts.launch_name}
_SELECTIONS = ("fused_adamw", "fused_torch_adamw", "fused_ema_adamw")
_WEIGHTINGS = {
    "none": ("timestep_density", "uniform"),
    "sigma_sqrt": ("loss_weighting", "sigma_sqrt"),
    "cosmap": ("loss_weighting", "cosmap"),
    "logit_normal": ("timestep_density", "logit_normal"),
    "mode": ("timestep_density", "mode"),
}
_FORMATS = ("torch", "torch_dcp", "torch_dist")


_NOT_OF_LANGUAGE = ["vision", "audio", "linear_proj", "linear_proj_audio"]
"""Modules of Ming-Lite-Omni that its script does not train."""


def script_of_one_model(reading: Reading) -> None:
    """What `finetune_ocr.py` and `finetune_vl.py` do without a flag: they have loops of their own, not Megatron's."""
    if not reading.has("warmup_ratio"):
        return
    draft = reading.draft
    draft.fill("parallel.fsdp_plan.param_dtype", "bf16", "scripts with --warmup-ratio compute in bf16")
    draft.fill("parallel.fsdp_plan.reduce_dtype", "fp32", "scripts with --warmup-ratio sum gradients in fp32")
    if not reading.has("lr_decay_style"):
        draft.fill("training.lr_decay_style", "cosine", "what scripts with --warmup-ratio do")
    draft.fill("training.log_interval", 1, "what scripts with --warmup-ratio do")
    if reading.has("processor_path"):
        words = "finetune_vl.py of Ming"
        draft.fill("model.freeze", _NOT_OF_LANGUAGE, f"{words} trains the language model alone")
        draft.fill(f"{_DATA}.basic_parameters.train_on_prompt", True, f"{words} trains on questions, too")


def warm_up(reading: Reading) -> None:
    """The share of the steps in which the learning rate rises."""
    names = ("lr_warmup_iters", "lr_warmup_fraction", "warmup_ratio", "lr_warmup_steps")
    given = [name for name in names if reading.has(name) and reading.value(name)]
    steps, draft = reading.draft.value(LENGTH_OF_RUN), reading.draft
    if len(given) > 1:
        one, other = given[:2]
        what = f"{reading.value(one)}, but {reading.place(other)} says {reading.value(other)}"
        draft.problem(what, reading.place(one), "Keep one of them.")
    for name in given[:1]:
        value, place = reading.value(name), reading.place(name)
        if value < 0:
            draft.problem(f"{value} is below 0", place, "Give the length of the warm-up.")
            return
        if name in ("lr_warmup_iters", "lr_warmup_steps"):
            if not isinstance(steps, int) or steps < 1:
                return
            if value > steps:
                draft.problem(f"{value} is more than all {steps} steps", place, "Lower it.")
                return
            value, place = value / steps, derived(f"{place} {value} / {steps} steps")
        elif name == "lr_warmup_fraction" and reading.has("lr_decay_iters") and isinstance(steps, int) and steps > 0:
            # Of the decay's steps, as in Megatron's training.py.
            decay_steps = reading.value("lr_decay_iters")
            whole = f"{place} {value} of {reading.place('lr_decay_iters')} {decay_steps} / {steps} steps"
            value, place = value * decay_steps / steps, derived(whole)
            if value > 1:
                draft.problem(f"{value:.3g} of all {steps} steps warm up", str(place), "Lower it.")
                return
        draft.put("training.lr_warmup_ratio", value, place)
        draft.fill("training.lr_warmup_from_start", True, "the first step of a warm-up has --lr-warmup-init")


def decay(reading: Reading) -> None:
    """The shape of the learning rate's schedule."""
    name = "lr_scheduler" if reading.has("lr_scheduler") else "lr_decay_style"
    value, place, draft = reading.value(name), reading.place(name), reading.draft
    if value not in _STYLES:
        hint = did_you_mean(value, _STYLES)
        draft.problem(f"'{value}' is not built", place, f"{hint}Known: {', '.join(_STYLES)}.")
    elif reading.has(name):
        draft.put("training.lr_decay_style", _STYLES[value], place)
    elif not reading.has("learning_rate"):  # of the scripts in diffusers' manner, whose rate is constant
        draft.fill("training.lr_decay_style", _STYLES[value], "Megatron's default of --lr-decay-style")
    if _STYLES.get(value) == "wsd":
        _anneal(reading)
    else:
        for flag in ("lr_wsd_decay_iters", "lr_wsd_decay_style"):
            if reading.has(flag):
                draft.note(f"--{flag.replace('_', '-')} has no effect with --lr-decay-style {value}.")
        steps = draft.value(LENGTH_OF_RUN)
        if reading.has("lr_decay_iters") and isinstance(steps, int):
            place = reading.place("lr_decay_iters")
            draft.put(
                "training.lr_decay_ratio", reading.value("lr_decay_iters") / steps, derived(f"{place} / {steps} steps")
            )


def _anneal(reading: Reading) -> None:
    """How many of the last steps anneal in a schedule of warm-up, stable part and decay, and in which shape."""
    draft, steps = reading.draft, reading.draft.value(LENGTH_OF_RUN)
    style, place = reading.value("lr_wsd_decay_style"), reading.place("lr_wsd_decay_style")
    if style not in _ANNEALS:
        draft.problem(f"'{style}' is not one of {', '.join(_ANNEALS)}", place, did_you_mean(style, _ANNEALS).strip())
    elif reading.has("lr_wsd_decay_style"):
        draft.put("training.lr_wsd_style", style, place)
    else:
        draft.fill("training.lr_wsd_style", style, "Megatron's default of --lr-wsd-decay-style")
    if not isinstance(steps, int):
        return
    last, place = reading.value("lr_wsd_decay_iters"), reading.place("lr_wsd_decay_iters")
    if last is None:
        draft.problem("is not given, but WSD anneals", place, "Give the number of steps at the end that anneal.")
        # without it the check of the configuration would report the same thing again
        draft.fill("training.lr_decay_ratio", 1 / steps, "what is missing is told once")
    elif not 0 < last < steps:
        draft.problem(f"{last} is not between 1 and {steps - 1}", place, f"They are the last of all {steps} steps.")
    else:
        draft.put("training.lr_decay_ratio", last / steps, derived(f"{place} / {steps} steps"))
    if reading.value("lr_decay_iters", steps) != steps:
        what = f"{reading.value('lr_decay_iters')}, but WSD anneals up to the last of all {steps} steps"
        draft.problem(what, reading.place("lr_decay_iters"), "Leave it out, and set --lr-wsd-decay-iters.")


def optimizer(reading: Reading) -> None:
    """Which optimizer, and whether an average of the weights is kept."""
    name, selection, draft = reading.value("optimizer"), reading.value("optimizer_selection"), reading.draft
    if name not in _OPTIMIZERS:
        draft.problem(f"'{name}' is not built", reading.place("optimizer"), f"There are {' and '.join(_OPTIMIZERS)}.")
    elif reading.has("optimizer"):
        draft.put("training.optimizer", _OPTIMIZERS[name], reading.place("optimizer"))
    if reading.value("swap_optimizer") and name == "adam":
        # `replace`: --optimizer adam has set the key already, and `put` would see a contradiction
        draft.replace("training.optimizer", "adamw_swap", reading.place("swap_optimizer"))
    elif reading.value("swap_optimizer"):
        draft.problem(
            f"cannot be combined with --optimizer {name}", reading.place("swap_optimizer"), "Keep one of them."
        )
    place = reading.place("optimizer_selection")
    if selection not in _SELECTIONS:
        way_out = f"{did_you_mean(selection, _SELECTIONS)}There are {', '.join(_SELECTIONS)}."
        draft.problem(f"'{selection}' is not built", place, way_out)
    elif selection == "fused_ema_adamw":
        draft.put("training.ema.enable", True, place)


def constant_weight_decay(reading: Reading) -> None:
    """Weight decay does not change in a run."""
    style = reading.value("weight_decay_incr_style")
    if style != "constant":
        what = f"'{style}' is not built: weight decay is constant"
        reading.draft.problem(what, reading.place("weight_decay_incr_style"), "Leave it out, and set --weight-decay.")
    for name in ("start_weight_decay", "end_weight_decay"):
        if reading.has(name) and reading.value(name) != reading.value("weight_decay"):
            what = f"{reading.value(name)}, but --weight-decay is {reading.value('weight_decay')} in all steps"
            reading.draft.problem(what, reading.place(name), "Leave it out.")


def undecayed_parameters(reading: Reading) -> None:
    """Parameters whose names hold a word are not decayed."""
    words = reading.value("weight_decay_exclude_modules")
    if words:
        patterns = [f"*{word}*" for word in words]
        reading.draft.put("training.no_decay_params", patterns, reading.place("weight_decay_exclude_modules"))


def scaled_learning_rates(reading: Reading) -> None:
    """Parameters whose names hold a word learn at another rate."""
    words, factor = reading.value("lr_scale_modules"), reading.value("lr_mult")
    if words:
        # the plan takes regular expressions, the flag parts of names
        plan = [{"match": re.escape(word), "scale": factor} for word in words]
        reading.draft.put("training.lr_scaling_plan", plan, reading.place("lr_scale_modules"))
    elif reading.has("lr_mult"):
        reading.draft.note("--lr-mult has no effect without --lr-scale-modules.")


def loss_of_samples(reading: Reading) -> None:
    """How the loss is normalised; of a language model where no flag and no file says it, as Megatron-LM does."""
    for name, kind in (("per_sample", "per_sample_loss"), ("per_token", "per_token_loss")):
        if reading.value(f"calculate_{name}_loss"):
            place = reading.place(f"calculate_{name}_loss")
            reading.draft.put("features.loss_cfg.loss_type", kind, place)
    draft = reading.draft
    is_generator = reading.is_generator or draft.value(f"{_DATA}.dataset_type") == "generation"
    if not is_generator and draft.value("posttrain.method") is None:
        words = "Megatron-LM without --calculate-per-token-loss"
        draft.fill("features.loss_cfg.loss_type", "per_micro_batch_loss", words)


def starting_point(reading: Reading) -> None:
    """Where the weights come from, and whether the step and the optimizer's state come with them."""
    draft, saved = reading.draft, reading.draft.value("training.save")
    if reading.has("data_path") and reading.has("load"):  # scripts of one model, which have no model.json
        draft.fill("model.model_name_or_path", reading.value("load"), "--load of a script without --mm-model")
    for name in ("load_base_model", "pretrained_checkpoint", "load"):
        path = reading.value(name)
        if path is None or path == draft.value("model.model_name_or_path"):
            continue
        if path == saved:
            draft.note(f"--load and --save are {path}: a run continues by itself from the newest checkpoint there.")
        # a generator's weights are part of the model's folder: they are loaded with it
        elif str(PurePosixPath(path)) != reading.folder_of_weights:
            draft.put("training.load", path, reading.place(name))
    if reading.has("ckpt_step") and draft.value("training.load") is None:
        draft.problem("is given without --load", reading.place("ckpt_step"), "Name the run whose step is meant.")
    elif reading.has("ckpt_step"):
        step = f"{draft.value('training.load')}/iter_{reading.value('ckpt_step'):07d}"
        draft.replace("training.load", step, reading.place("ckpt_step"))
    weights_alone = reading.set_ones("finetune", "pretrained_checkpoint")
    for name in weights_alone[:1]:
        for key in ("no_load_optim", "no_load_rng"):
            draft.put(f"training.{key}", True, reading.place(name))


def checkpoint_format(reading: Reading) -> None:
    """Checkpoints have one layout, which resumes with any number of ranks."""
    value, place = reading.value("ckpt_format"), reading.place("ckpt_format")
    if value not in _FORMATS:
        reading.draft.problem(f"'{value}' is not one of {', '.join(_FORMATS)}", place)
    elif reading.has("ckpt_format"):
        reading.draft.fill("training.save_format", "dcp", f"--ckpt-format {value}")
        if value not in ("torch_dcp", "torch"):
            reading.draft.note(
                f"--ckpt-format {value}: checkpoints are written as distributed ones (torch_dcp), which resume with "
                "any number of ranks. mm export and mm-convert make other layouts of them."
            )


def validation(reading: Reading) -> None:
    """Validation acts where data.json names rows for it."""
    draft = reading.draft
    basic = f"{_DATA}.basic_parameters"
    rows = (f"{basic}.val_dataset", f"{basic}.val_rate", f"{basic}.val_features_dir", "data.val_dataset_param")
    if not any(draft.value(key) for key in rows):
        if reading.has("eval_interval"):
            draft.note(
                "--eval-interval and --eval-iters have no effect on the rows of data.json, which names none for "
                "validation; a datasets provider of your own may bring some."
            )
        return
    if reading.has("eval_interval"):
        draft.put("training.val_interval", reading.value("eval_interval"), reading.place("eval_interval"))
    else:
        draft.fill("training.val_interval", 1000, "Megatron's default of --eval-interval")
    micro = draft.value("training.micro_batch_size", 1)
    # --eval-iters counts global batches, val_max_samples counts samples
    batch = micro * reading.data_ranks * draft.value("training.gradient_accumulation_steps", 1)
    if draft.value(f"{basic}.val_dataset") or draft.value(f"{basic}.val_rate"):
        words = f"--eval-iters {reading.value('eval_iters')} x {batch} samples"
        draft.fill(f"{basic}.val_max_samples", reading.value("eval_iters") * batch, words)


def waiting_times(reading: Reading) -> None:
    """How long a rank waits for others."""
    if reading.has("distributed_timeout_minutes"):
        seconds = reading.value("distributed_timeout_minutes") * 60
        for name in ("setup_timeout_s", "step_timeout_s", "save_timeout_s"):
            reading.draft.put(f"training.{name}", seconds, reading.place("distributed_timeout_minutes"))


def longest_sample(reading: Reading) -> None:
    """Samples have at most so many tokens; generators have no such limit."""
    if reading.has("seq_length") and not reading.is_generator and "seq_length" not in reading.settled:
        key = f"{_DATA}.basic_parameters.cutoff_len"
        reading.draft.put(key, reading.value("seq_length"), reading.place("seq_length"))


def worker_processes(reading: Reading) -> None:
    """The flag wins over data.json."""
    if reading.has("num_workers"):
        reading.draft.replace(f"{_LOADER}.num_workers", reading.value("num_workers"), reading.place("num_workers"))


def order_of_rows(reading: Reading) -> None:
    """Rows in the order of their file."""
    if reading.value("no_shuffle"):
        reading.draft.put(f"{_LOADER}.shuffle", False, reading.place("no_shuffle"))


def trusted_code(reading: Reading) -> None:
    """Python files in the model's folder may run."""
    if reading.value("trust_remote_code"):
        for section in ("model", f"{_DATA}.preprocess_parameters"):
            reading.draft.put(f"{section}.trust_remote_code", True, reading.place("trust_remote_code"))


def adapters(reading: Reading) -> None:
    """Low-rank adapters, by the names that scripts give to layers."""
    draft, targets = reading.draft, reading.value("lora_target_modules")
    settings = {"lora_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
    if not targets:
        if any(reading.has(name) for name in settings):
            draft.note("--lora-r, --lora-alpha and --lora-dropout have no effect without --lora-target-modules.")
        return
    place = reading.place("lora_target_modules")
    words: list[str] = []
    for target in targets:
        words += filter(None, target.split(","))
    draft.put("training.lora.enable", True, place)
    draft.put("training.lora.target_modules", _adapter_targets(words, reading.is_generator), place)
    for name, key in settings.items():
        if reading.has(name):
            draft.put(f"training.lora.{key}", reading.value(name), reading.place(name))
        else:
            draft.fill(f"training.lora.{key}", reading.value(name), f"Megatron's default of {reading.place(name)}")


def profiled_steps(reading: Reading) -> None:
    """Which steps of which ranks are profiled. Megatron counts steps from 0."""
    for name, key in (("profile_step_start", "start_step"), ("profile_step_end", "end_step")):
        if reading.has(name):
            where = f"tools.profile.static_param.{key}"
            # ours count from 1
            reading.draft.put(where, reading.value(name) + 1, reading.place(name))
    if reading.has("profile_ranks"):
        words, place = reading.value("profile_ranks"), reading.place("profile_ranks")
        if all(word.isdigit() for word in words):
            reading.draft.put("tools.profile.ranks", list(map(int, words)), place)
        else:
            reading.draft.problem(f"'{' '.join(words)}' are not numbers of ranks", place)


def picture_size(reading: Reading) -> None:
    """Pictures with captions, and square ones where a size is given: scripts in diffusers' manner."""
    flags = ("dataset_name", "json_path", "instance_data_dir", "image_folder", "resolution")
    if any(map(reading.has, flags)):
        reading.draft.fill(f"{_DATA}.dataset_type", "generation", "rows of pictures with captions")
    for side in ("height", "width"):
        if reading.has("resolution"):
            key = f"{_DATA}.preprocess_parameters.{side}"
            reading.draft.put(key, reading.value("resolution"), reading.place("resolution"))


def noise_levels(reading: Reading) -> None:
    """How noise levels are drawn and weighted."""
    name = reading.value("weighting_scheme")
    if name is None:
        return
    place = reading.place("weighting_scheme")
    if name not in _WEIGHTINGS:
        hint = did_you_mean(name, _WEIGHTINGS)
        reading.draft.problem(f"'{name}' is not one of {', '.join(_WEIGHTINGS)}", place, hint.strip())
        return
    key, value = _WEIGHTINGS[name]
    reading.draft.put(f"training.diffusion.{key}", value, place)
    if key == "loss_weighting":
        reading.draft.put("training.diffusion.timestep_density", "uniform", place)


def samples(reading: Reading) -> None:
    """Samples of a generator while it is trained; epochs are counted in steps where the rows are counted."""
    prompt = reading.value("validation_prompt")
    if prompt is not None:
        reading.draft.put("training.sampling.prompts", [prompt], reading.place("validation_prompt"))
        steps = reading.draft.value("training.save_interval") or reading.draft.value(LENGTH_OF_RUN, 0)
        reading.draft.fill("training.sampling.interval", steps, "the interval of checkpoints")
    if reading.has("validation_epochs"):
        reading.draft.note("--validation_epochs has no effect: samples are made whenever a checkpoint is saved.")


def framework(reading: Reading) -> None:
    """Report a problem where `--ai-framework` names a framework other than PyTorch."""
    if reading.value("ai_framework") not in (None, "pytorch"):
        what = f"'{reading.value('ai_framework')}' is not built"
        reading.draft.problem(what, reading.place("ai_framework"), "Leave it out: the suite runs on PyTorch.")
