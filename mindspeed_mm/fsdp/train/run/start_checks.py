"""What must hold before a run starts: features that exist, a device that can compute it, ranks that want the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_mm.core.errors import ConfigError, DataError, MachineError, Problem
from mindspeed_mm.core.redaction import redact
from mindspeed_mm.core.version import __version__
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.argument import Arguments, ModelArguments, ParallelArguments, TrainingArguments
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.rules.path import check_save_folder, missing_inputs
from mindspeed_mm.fsdp.train.run.trackers import check_trackers
from mindspeed_mm.fsdp.utils.device import get_device_type, supports_bf16


def check_config(config: ResolvedConfig) -> None:
    """What can be refused before anything is joined, read or built.

    Raises:
        MMError: A feature is not built, a secret is missing, a tracker is not installed, the run folder cannot be
            written, or a reference's folder is missing.
    """
    config.check_built()
    config.check_revealed()
    training = config.arguments.training
    check_trackers(training.report_to)
    if training.save:
        check_save_folder(Path(training.save), config.path)
    check_save_format(config.arguments.model, config.arguments.training)
    for error in missing_inputs(config.arguments, "posttrain."):  # read when the trained model is built already
        raise error


def check_save_format(model: ModelArguments, training: TrainingArguments) -> None:
    """Raise `ConfigError` when checkpoints are to be model folders and there is none to take the rest from."""
    if training.save_format == "hf" and not model.model_name_or_path:
        raise ConfigError(
            "'hf' needs a model folder: configuration, tokenizer and processor are copied from there",
            key="training.save_format",
            way_out="Set model.model_name_or_path, or save_format=dcp.",
        )


def check_device(parallel: ParallelArguments) -> None:
    """Raise when the device cannot compute what the plan asks for."""
    if parallel.fsdp_plan.param_dtype == "bf16" and not supports_bf16():
        raise MachineError(
            f"this {get_device_type()} does not compute in bf16",
            key="parallel.fsdp_plan.param_dtype",
            way_out="Set fp16 or fp32.",
        )


def check_ranks_agree(arguments: Arguments, world_size: int) -> None:
    """Raise when ranks were started with different configurations or versions; the message is the difference."""
    if world_size == 1:
        return
    mine = {
        "config": redact(arguments.model_dump(mode="json")),
        "version": __version__,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    found = _first_difference(mine, world_size)
    if found is not None:
        raise MachineError(
            f"rank 0 and rank {found[0]} were started differently: {found[1]}",
            way_out="Start every rank with the same YAML, overrides and versions.",
        )


def check_same_data(datasets: Mapping[str, MMDataset | None], world_size: int) -> None:
    """Raise when ranks have read different rows, as hosts with files of their own may: each would train on its own
    idea of sample 17, which would go unnoticed. The same facts are compared as for a resume; the message tells the
    difference.

    Args:
        datasets: Name → data set; None where there is none.
        world_size: Ranks of the job; all of them call this.
    """
    if world_size == 1:
        return
    facts = {name: dataset.fingerprint() for name, dataset in datasets.items() if dataset is not None}
    found = _first_difference(facts, world_size)
    if found is not None:
        raise DataError(
            f"rank 0 and rank {found[0]} have read different data: {found[1]}",
            key="data.dataset_param",
            way_out="Give every host the same files: a shared folder, or copies (with their times: rsync -t).",
        )


def check_encoders(datasets: Sequence[MMDataset | None]) -> None:
    """Raise `ModelFolderError` when media are to be encoded while training and an encoder is not there."""
    for dataset in datasets:
        if dataset is not None:
            dataset.check_encoders()


def check_rows_of_features(datasets: Sequence[MMDataset | None], *, accept: bool = False) -> list[str]:
    """Refuse features when the rows that the configuration names are no longer those that they were made of.

    Args:
        datasets: Data sets; those that are made of no features are passed over, None too.
        accept: Train on the features as they are.

    Returns:
        What has changed, one sentence each, when it is accepted.

    Raises:
        DataError: Rows have changed, and that is not accepted; every difference is listed.
    """
    found: list[Problem] = []
    for dataset in datasets:
        if dataset is not None:
            found += dataset.row_changes()
    problems = list(dict.fromkeys(found))  # two parts of one set tell the same
    if problems and not accept:
        verdict = Problem(
            "the rows have changed since their features were extracted",
            key="data.dataset_param.basic_parameters.features_dir",
            way_out="Restore them; or run mm extract again, with --overwrite; or add --accept-data-change to use the "
            "features as they are. Where the rows are not at hand, leave basic_parameters.dataset out.",
        )
        raise DataError("features and rows do not belong together", problems=[verdict, *problems])
    return [f"features are used although the rows have changed: {problem}" for problem in problems]


def _first_difference(mine: Mapping[str, object], world_size: int) -> tuple[int, str] | None:
    """The first rank that has something else than rank 0, and what; the same answer on all ranks."""
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    # Digests first: where all agree, no configuration has to travel.
    digests = [digest] * world_size
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return None
    everyone = [mine] * world_size
    dist.all_gather_object(everyone, mine)
    rank = next(r for r in range(world_size) if digests[r] != digests[0])
    return rank, "; ".join(sorted(_differing_keys(everyone[0], everyone[rank]))[:5])


def _differing_keys(left: object, right: object, path: str = "") -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from _differing_keys(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    elif left != right:
        yield f"{path.removeprefix('config.')} is {left!r} on the one and {right!r} on the other"
