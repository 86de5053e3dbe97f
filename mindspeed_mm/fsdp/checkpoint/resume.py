"""Whether a run may go on from a checkpoint: what its configuration and its data were then, and are now.

Pure functions, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from mindspeed_mm.core.errors import CheckpointError, Problem
from mindspeed_mm.core.redaction import without_credentials
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS

Context = Mapping[str, Any]
"""What a manifest records of a run, or a part of it."""

FREE_KEYS = (
    "data.dataloader_param.collate_param.*",
    "data.dataloader_param.enable_preload",
    "data.dataloader_param.max_*_per_batch",
    "data.dataloader_param.num_workers",
    "data.dataloader_param.pin_memory",
    "data.dataloader_param.prefetch_factor",
    "data.val_dataset_param*",
    "data.dataset_param.basic_parameters.cache_dir",
    "data.dataset_param.basic_parameters.dataset",
    "data.dataset_param.basic_parameters.dataset_dir",
    "data.dataset_param.basic_parameters.data_folder",
    "data.dataset_param.basic_parameters.*features_dir",
    "data.dataset_param.basic_parameters.media_roots*",
    "data.dataset_param.basic_parameters.overwrite_cache",
    "data.dataset_param.basic_parameters.preprocess*",
    "data.dataset_param.basic_parameters.val_dataset",
    "data.dataset_param.basic_parameters.val_max_samples",
    "data.dataset_param.basic_parameters.async_preprocess*",
    "data.dataset_param.preprocess_parameters.model_name_or_path",
    "features.activation_offload_plan*",
    "features.chunk*",
    "features.compile*",
    "features.enable_*",
    "features.ep_balance_plan*",
    "features.fused_kernels",
    "features.loss_cfg.router_aux_loss_offload",
    "features.recompute*",
    "features.skip_moe_pad_tokens",
    "features.weight_offload_plan*",
    "inference.*",
    "model.model_name_or_path",
    "model.skip_*_recompute",
    "model.train_from_scratch",
    "model.trust_remote_code",
    "parallel.*",
    "posttrain.rollout.api_key_env",
    "posttrain.rollout.base_url",
    "posttrain.rollout.batch_size",
    "posttrain.rollout.keep",
    "tools.*",
    "training.allow_*",
    "training.clip_grad_foreach",
    "training.adam_fused",
    "training.evaluate.*",
    "training.gradient_accumulation_steps",
    "training.init_model_with_meta_device",
    "training.load*",
    "training.log_interval",
    "training.report_to",
    "training.lora.lora_target_modules_support",
    "training.lora.pretrained_lora_path",
    "training.manual_gc_interval",
    "training.mem_fraction_static",
    "training.micro_batch_size",
    "training.no_load_*",
    "training.no_save_*",
    "training.on_save_error",
    "training.plugin*",
    "training.sampling.*",
    "training.save*",
    "training.*_timeout_s",
    "training.val_*",
    "training.verify_checkpoint",
)
"""May change without a word: where things are, how they are computed, what is written. The data itself is compared by
its fingerprint, the batch by its global size, limits of tokens and patches by what decides how samples share
batches."""

NOTED_KEYS = (
    "data.dataset_param.basic_parameters.max_bad_fraction",
    "data.dataset_param.basic_parameters.on_bad_sample",
    "features.loss_cfg.picture_loss_weight",
    "features.loss_cfg.router_aux_loss_coef",
    "features.loss_cfg.text_loss_weight",
    "features.loss_cfg.z_loss_coef",
    "model.*_implementation",
    "parallel.fsdp_plan.*_dtype",
    "training.adam_beta*",
    "training.adam_eps",
    "training.allow_hf32",
    "training.clip_grad",
    "training.clip_grad_ema_decay",
    "training.ema.*",
    "training.*loss_scale*",
    "training.lion_beta*",
    "training.lr*",
    "training.max_skipped_steps",
    "training.no_decay_*",
    "training.on_nonfinite",
    "training.train_epochs",
    "training.train_iters",
    "training.use_deter_comp",
    "training.weight_decay",
)
"""May change, and the log says so: the run goes on in another way from here."""


POSITION_NOTE = (
    "the position in the data is kept: as many samples of this epoch as were drawn before count as drawn from the data "
    "and in the order of now, so until the epoch ends some may come twice and others not at all"
)
"""What is said when changed data, or a changed order of them, were accepted."""

PROVIDED = "provided"
"""How the data of a run are batched that a function of the caller reads."""
_SPLIT_KEYS = frozenset({"micro_batches_per_step", "micro_batch_size"})


def check_resumable(manifest_context: Context, current_context: Context, accept_data_change: bool = False) -> list[str]:
    """Compare the run that saved with the run that resumes.

    A context holds `config` (the resolved configuration, nested), `dataset` (the fingerprint of the training data),
    `global_batch` (samples of one optimizer step), `batching` (what else decides how samples share batches),
    `world_size`, `mesh` (axis → size) and `versions`; of a run that trains adapters also `base_weights`, the mark of
    the weights under them.

    Args:
        manifest_context: Context of the run that saved, out of the manifest.
        current_context: Context of this run; `global_batch` is None where the number of ranks is not known.
        accept_data_change: Note a change of the data, or of the order in which they are taken, instead of refusing it.

    Returns:
        What changed and is allowed to, one sentence each, for the log.

    Raises:
        CheckpointError: Something changed that would make it another run; every difference is listed.
    """
    _check_same_kind_of_data(manifest_context, current_context, accept_data_change)
    noted, refused, data = _config_changes(manifest_context, current_context)
    data += _data_changes(manifest_context, current_context, told=[problem.key for problem in data])
    if accept_data_change:
        noted += data
    else:
        for change in data:
            refused.append(replace(change, way_out="Restore it, or add --accept-data-change."))
    batch_noted, batch_refused = _batch_change(manifest_context, current_context)
    noted, refused = noted + batch_noted, refused + batch_refused
    refused += _base_change(manifest_context, current_context)
    if refused:
        raise CheckpointError(
            "this is not the run that saved the checkpoint. Undo these changes; or start a new run from its weights: "
            "training.save=<new folder> training.load=<this run> --weights-only.",
            problems=refused,
        )
    told = list(map(str, noted))
    if data:
        told.append(POSITION_NOTE)
    return told + _environment_notes(manifest_context, current_context)


def _state_of(optimizer: object) -> str:
    """The word of an optimizer's state; of one that is not known here its name."""
    facts = OPTIMIZERS.get(str(optimizer))
    if facts is not None:
        return facts.state
    return str(optimizer)


def _check_same_kind_of_data(before: Context, now: Context, accept_data_change: bool) -> None:
    """Raise where a function of the user reads the data of one of the two runs alone: nothing else needs to be said."""
    then, today = before.get("batching"), now.get("batching")
    if accept_data_change or not then or not today:
        return
    was_provided, is_provided = then.get("loader") == PROVIDED, today.get("loader") == PROVIDED
    if was_provided == is_provided:
        return
    which = "this run" if is_provided else "the run that saved the checkpoint"
    raise CheckpointError(
        f"{which} reads its data by a function of the caller, the other one as the configuration says: no place in the "
        "one is a place in the other",
        way_out="Continue as it was started; or start a new run from its weights: training.save=<new folder> "
        "training.load=<this run> --weights-only.",
    )


def _config_changes(before: Context, now: Context) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Changes of the configuration that are noted, that are refused, and that change what the data is."""
    noted: list[Problem] = []
    refused: list[Problem] = []
    data: list[Problem] = []
    before, now = ({**side, "config": without_credentials(side.get("config", {}))} for side in (before, now))
    keys_then = _plain_leaves(before["config"])
    is_updated = _version(before) != _version(now)
    for key, values in _changed_leaves(before, now, "config"):
        if key not in keys_then and key in _defaults() and values[1] == _defaults()[key]:
            continue  # a key that an older version did not have, at the value that leaves everything as it was
        problem = Problem(_change(*values), key=key)
        # The same state, computed elsewhere: the log says so.
        is_same = key == "training.optimizer" and len({_state_of(value) for value in values}) == 1
        is_new = is_updated and key not in keys_then
        if is_same or is_new or _matches(key, NOTED_KEYS):
            noted.append(problem)
        elif _matches(key, FREE_KEYS):
            continue
        elif key.startswith("data."):
            data.append(problem)
        else:
            refused.append(problem)
    return noted, refused, data


@cache
def _defaults() -> dict[str, object]:
    """Key → the value that it has where nothing sets it."""
    return _plain_leaves(Arguments().model_dump(mode="json"))


def _data_changes(before: Context, now: Context, told: Sequence[str]) -> list[Problem]:
    """Changes of the fingerprint, each once: settings are told by their keys where those have changed too, the number
    of rows with the files that hold them, and a hash where nothing else tells of a change."""
    found = {}
    for key, values in _changed_leaves(before, now, "dataset"):
        if not _is_told(key, told):
            found[key] = values
    changes = []
    files_then, files_today = found.get("files", (None, None))
    if isinstance(files_then, list) and isinstance(files_today, list):
        changes = _file_changes(files_then, files_today)
        del found["files"]
        found.pop("rows", None)
    if changes or told or len(found) > 1:
        found.pop("hash", None)
    for key, values in found.items():
        changes.append(Problem(_change(*values), key=f"data: {key}"))
    return changes


def _is_told(key: str, told: Sequence[str]) -> bool:
    """Whether a setting of the fingerprint is one of these keys of the configuration."""
    if not key.startswith("settings."):
        return False
    setting = key.removeprefix("settings.")
    # The fingerprint has one template, which two keys name: `template` and `chat_template`.
    ending = "template" if setting == "template" else f".{setting}"
    return any(name.endswith(ending) for name in told)


def _by_name(files: Sequence[Context]) -> dict[str, Context]:
    return {str(file.get("name")): file for file in files}


def _file_changes(then: Sequence[Context], today: Sequence[Context]) -> list[Problem]:
    """In words, a file each; of files that are all the same their order."""
    before, now = _by_name(then), _by_name(today)
    changes = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if old is None:
            what = "is named now, and was not when the checkpoint was written"
        elif new is None:
            what = "is no longer named; the checkpoint was trained on it"
        elif old.get("rows") != new.get("rows"):
            what = f"had {old.get('rows')} rows, has {new.get('rows')}"
        else:
            what = "its content has changed"
        changes.append(Problem(what, key=f"data: {name}"))
    return changes or [Problem("the files come in another order", key="data: files")]


def _version(side: Context) -> object:
    """Of this package: another one may know keys that this one does not."""
    return side.get("versions", {}).get("mindspeed-mm")


def _batch_change(before: Context, now: Context) -> tuple[list[Problem], list[Problem]]:
    """Changes of the batch that are noted, and that are refused."""
    if now.get("global_batch") is None:  # the number of ranks is not known
        return [], []
    then, today = before.get("batching"), now.get("batching") or {}
    if then is not None and then != today:  # samples of different sizes: what shares a batch depends on it
        change = Problem(_change(_in_words(then), _in_words(today)), key="micro-batches")
        if is_other_split(then, today):
            return [change], []
        way_out = "Give micro_batch_size, max_tokens_per_batch and ranks × accumulation as they were."
        return [], [replace(change, way_out=way_out)]
    then, today = before.get("global_batch"), now.get("global_batch")
    if then == today or then is None:
        return [], []
    return [], [Problem(_change(then, today), key="global batch size", way_out=_same_batch(then, now))]


def _same_batch(then: int, now: Context) -> str:
    """The option that gives the global batch of the checkpoint on today's ranks, if there is one."""
    training = now.get("config", {}).get("training", {})
    accumulation, micro_batch = (training.get(key) for key in ("gradient_accumulation_steps", "micro_batch_size"))
    if accumulation and micro_batch:
        samples = now["global_batch"] // accumulation  # of one micro-batch on all data ranks
        if then % samples == 0:
            return f"Add training.gradient_accumulation_steps={then // samples}."
        ranks = samples // micro_batch
        if then % ranks == 0:
            return f"Add training.micro_batch_size={then // ranks} training.gradient_accumulation_steps=1."
    return f"Choose gradient_accumulation_steps so that micro_batch_size × data ranks × accumulation is {then}."


def is_other_split(then: Context, today: Context) -> bool:
    """Whether samples of different sizes are dealt into other micro-batches, and a step has as many of them as before.
    Whether the place in the epoch can be kept then, the order of the data knows: `BucketOrder.go_on`."""
    for each in (then, today):
        if "micro_batches_per_step" not in each or "shuffle" not in each:
            return False
    others = (then.keys() | today.keys()) - _SPLIT_KEYS
    if any(then.get(key) != today.get(key) for key in others):
        return False
    rows, rows_today = then["micro_batches_per_step"], today["micro_batches_per_step"]
    if then["max_tokens_per_batch"] is None:  # otherwise micro_batch_size has no meaning
        rows, rows_today = rows * then["micro_batch_size"], rows_today * today["micro_batch_size"]
    return bool(rows == rows_today)


def _in_words(values: Context) -> str:
    given = [f"{key} {value}" for key, value in values.items() if value is not None]
    return ", ".join(given) or "samples as they come"


def _base_change(before: Context, now: Context) -> list[Problem]:
    then, today = before.get("base_weights"), now.get("base_weights")
    if then is None or today is None or then == today:
        return []
    return [
        Problem(
            "the folder does not hold the weights that the adapters were trained on",
            key="model.model_name_or_path",
            way_out="Name the folder that the run started from.",
        )
    ]


def _environment_notes(before: Context, now: Context) -> list[str]:
    notes = [f"{key} {_change(*values)}" for key, values in _changed_leaves(before, now, "versions")]
    then, today = before.get("world_size"), now.get("world_size")
    if then != today:
        notes.append(
            f"world size {_change(then, today)}: weights and optimizer are resharded, each rank's random numbers are "
            "derived from seed and step"
        )
    return notes


def _changed_leaves(before: Context, now: Context, part: str) -> list[tuple[str, tuple[object, object]]]:
    """(dotted key, (then, now)) of every leaf that differs once both are plain JSON, as the manifest is."""
    then, today = _json_leaves(before, part), _json_leaves(now, part)
    differences = []
    for key in sorted(then.keys() | today.keys()):
        if then.get(key) != today.get(key):
            differences.append((key, (then.get(key), today.get(key))))
    return differences


def _json_leaves(side: Context, part: str) -> dict[str, object]:
    return _plain_leaves(json.loads(json.dumps(side.get(part, {}), default=str)))


def _plain_leaves(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    leaves: dict[str, object] = {}
    for key, item in value.items():
        leaves |= _plain_leaves(item, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _change(then: object, today: object) -> str:
    return f"was {_shortened(then)}, is {_shortened(today)}"


def _shortened(value: object, most: int = 80) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= most:
        return text
    return f"{text[:most]}…"
