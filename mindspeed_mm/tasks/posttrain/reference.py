"""`mm posttrain reference`: computes once what a reference thinks of all pairs, or how a teacher draws all samples, and
writes it down."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.file_writing import check_output_file
from mindspeed_mm.core.request import words_of
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.rules.distillation import reads_trajectories
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.tasks.requests.train import ReferenceRequest


@dataclass(frozen=True)
class ReferenceOutcome:
    """Reports what `mm posttrain reference` wrote: the file and how many pairs it holds, or the folder of trajectories
    and how many these are."""

    path: str
    pairs: int = 0
    trajectories: int = 0


def run(request: ReferenceRequest, *, say: Callable[[int], None] = lambda _pairs: None) -> ReferenceOutcome:
    """Compute the log-probabilities of all training and validation pairs under the model as training starts, or under
    the one that `posttrain.reference.model_name_or_path` names, and write them where `kind: stored` reads them; of a
    distillation, that model's trajectories of all training samples.

    Args:
        request: The YAML, with overrides.
        say: Told how many pairs are done.

    Raises:
        MMError: Configuration, model or rows are off, or the file cannot be written.
    """
    config = _load(request.config, request.overrides)
    # Imported here: a wrong YAML is answered before torch is loaded.
    from mindspeed_mm.fsdp.train.stored_reference import stored_log_probs

    with config.told_as_own():
        if reads_trajectories(config.arguments.posttrain):
            from mindspeed_mm.fsdp.train.distillation.build import store_trajectories
            from mindspeed_mm.fsdp.train.distillation.trajectories import TrajectoryFolder

            rows = store_trajectories(config.arguments)
            return ReferenceOutcome(
                str(
                    TrajectoryFolder.of_run(
                        config.arguments.model, config.arguments.training, config.arguments.posttrain
                    ).path
                ),
                trajectories=rows,
            )
        path = _output(config)
        stored = stored_log_probs(config.arguments, say)

        if os.environ.get("RANK", "0") == "0":
            stored.save(path)
    return ReferenceOutcome(str(path), len(stored.log_probs))


def run_ranks(request: ReferenceRequest) -> int:
    """The same in `nproc` processes on this host; returns their exit code."""
    config = _load(request.config, request.overrides)  # what is wrong is answered once, not by every rank
    with config.told_as_own():
        if not reads_trajectories(config.arguments.posttrain):
            _output(config)
    from mindspeed_mm.tasks.launch.launcher import launch

    alone: ReferenceRequest = replace(request, nproc=1)
    return launch(request.nproc, ["posttrain", "reference", *words_of(alone)], None)


def _output(config: ResolvedConfig) -> Path:
    """The file that may be written."""
    from mindspeed_mm.fsdp.train.stored_reference import KEY, is_stored_log_probs, path_of_reference

    path = path_of_reference(config.arguments.training, config.arguments.posttrain)
    check_output_file(path, is_stored_log_probs, KEY)
    return path


def _load(config_path: Path, overrides: Sequence[str]) -> ResolvedConfig:
    """The configuration, for a method that has a reference which can be stored."""
    config = load_with_plugins(config_path, [*overrides, "posttrain.reference.kind=stored"])
    posttrain = config.arguments.posttrain
    if posttrain.method != "dpo" and not reads_trajectories(posttrain):
        raise ConfigError(
            f"is {posttrain.method or 'null'}, and only preference pairs can be scored before training",
            where=str(config_path),
            key="posttrain.method",
            way_out="Set it to dpo; or to dmd, with posttrain.dmd.objective: ode_regression.",
        )
    return config
