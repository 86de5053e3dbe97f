"""`mm extract`: encodes the media and captions of a configuration once, so that training only reads features.

Work goes on where it stopped, after a kill too: a finished batch is a file of its own until it is put into a shard.
Ranks share the batches out among themselves and then work without a word to each other; rank 0 makes the shards and, at
the end, the index.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mm.core.cores import usable_cores
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR, UNIFIED, ModelKind, kind_of_folder
from mindspeed_mm.fsdp.data.datasets.bagel.bagel_dataset import BagelDataset
from mindspeed_mm.fsdp.data.datasets.generation.generation_dataset import GenerationDataset
from mindspeed_mm.fsdp.distributed.job.launch import joined_ranks
from mindspeed_mm.fsdp.models.diffusion.find import adapter_of_section
from mindspeed_mm.fsdp.params.data_args import BasicParameters
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.register import data_register
from mindspeed_mm.tasks.extract.feature_set import Encoders, ExtractOptions, ExtractOutcome, SetExtraction
from mindspeed_mm.tasks.extract.limits import FEATURES_KEY
from mindspeed_mm.tasks.extract.pictures import PictureExtraction
from mindspeed_mm.tasks.launch.launcher import launch

MAX_BAD_FRACTION = 0.1
"""Share of rows that may be bad when the configuration does not say: they are listed, and can be looked at."""
_BASIC = "data.dataset_param.basic_parameters"
_WAIT_S = 3600.0
"""Ranks wait for one another only before the work, while encoders are hashed and files verified."""
_MOST_THREADS = 8
Sets = list[tuple[Path, BasicParameters]]
"""Folder and rows of each feature set."""


def run(
    config: Path | ResolvedConfig,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    progress_to_stderr: bool = False,
    **options: Any,
) -> list[ExtractOutcome]:
    """Make the feature sets of a configuration, or what is missing of them, as one rank of a job if it is one.

    Args:
        config: The YAML that training takes, or what it resolves to.
        overrides: `section.key=value`, of a YAML.
        out: Where to; None: `basic_parameters.features_dir`, and `val_features_dir` for the validation rows.
        progress_to_stderr: Leave stdout to the result.
        options: Fields of `ExtractOptions`.

    Returns:
        One outcome a set; nothing on ranks above 0.

    Raises:
        StoppedAfterSave: A signal asked for an end; run again to go on.
        MMError: Anything else that a person can act on.
    """
    if not isinstance(config, ResolvedConfig):
        config = load_with_plugins(config, overrides)
    # before ranks join: a wrong section is an answer, not a wait
    kind, sets = configured_kind(config), configured_sets(config, out)
    given = {name: value for name, value in options.items() if value is not None}
    stream = sys.stderr if progress_to_stderr else sys.stdout
    with joined_ranks(_WAIT_S) as ranks, StopSignal(LaunchFolder.of_this_rank()) as stop:
        settings = ExtractOptions(**{"threads": _threads(config), **given})
        outcomes = []
        for extraction in _EXTRACTIONS[kind](config, sets, ranks=ranks, options=settings, stop=stop, stream=stream):
            outcome = extraction.run()
            if outcome is not None:
                outcomes.append(outcome)
    return outcomes


def run_ranks(
    nproc: int, config_path: Path, overrides: Sequence[str], options: Sequence[str], out: Path | None = None
) -> int:
    """Extract in `nproc` processes on this host and return their exit code.

    Args:
        nproc: Number of ranks on this host.
        config_path: The YAML.
        overrides: `section.key=value`.
        options: The command line's other words, for each rank.
        out: As `run`.

    Raises:
        MMError: The configuration is off, or the ranks could not be started.
    """
    config = load_with_plugins(config_path, overrides)  # a wrong YAML is answered once, here
    configured_kind(config)
    configured_sets(config, out)
    return launch(nproc, ["extract", str(config_path), *overrides, *options], None)


def configured_kind(config: ResolvedConfig) -> ModelKind:
    """The kind of the model whose encoders are used: a generator, or a model that answers and draws.

    Raises:
        ConfigError: There is no model.
        ModelFolderError: It is of another kind, or lacks what makes features.
    """
    model = config.arguments.model
    if model.model_name_or_path is None:
        raise ConfigError(
            "there is no model whose encoders could be used", key="model.model_name_or_path", way_out="Name its folder."
        )
    # asked of the folder alone: the model is not built here
    if kind_of_folder(model.model_name_or_path) is UNIFIED:
        return UNIFIED
    adapter_of_section(model).require("vae")
    return GENERATOR


def _of_generator(config: ResolvedConfig, sets: Sets, **told: Any) -> Iterator[SetExtraction]:
    encoders = Encoders(adapter_of_section(config.arguments.model), current_device(), told["options"].dtype)
    for folder, basic in sets:
        yield SetExtraction(folder, basic, config.arguments.data.dataset_param.preprocess_parameters, encoders, **told)


def _of_pictures(config: ResolvedConfig, sets: Sets, **told: Any) -> Iterator[PictureExtraction]:
    param, folder = config.arguments.data.dataset_param, Path(str(config.arguments.model.model_name_or_path))
    for features, basic in sets:
        # the rows of validation have a set of their own
        rows = basic.model_copy(update={"val_dataset": None, "val_rate": None})
        of_rows = param.model_copy(update={"basic_parameters": rows})
        yield PictureExtraction(features, of_rows, folder, current_device(), **told)


_EXTRACTIONS: dict[ModelKind, Callable[..., Iterator[SetExtraction | PictureExtraction]]] = {
    GENERATOR: _of_generator,
    UNIFIED: _of_pictures,
}
"""Kind of model → the work for each set; models of words alone have no features."""
_ROWS = {GENERATOR: ("generation", GenerationDataset), UNIFIED: ("bagel", BagelDataset)}
"""Kind of model → the rows that features are made of: `dataset_type` and its class."""


def configured_sets(config: ResolvedConfig, out: Path | None) -> Sets:
    """Folder and rows of each feature set that the configuration asks for.

    Raises:
        ConfigError: The rows are none of such a model's, or no folder is named.
    """
    param = config.arguments.data.dataset_param
    name, rows = _ROWS[configured_kind(config)]
    given = data_register.get(param.dataset_type)
    if given is not rows:
        # Another model's rows of the same kind are read by a class that is built on these.
        encodes = isinstance(given, type) and issubclass(given, rows)
        raise ConfigError(
            f"rows of '{param.dataset_type}' have no features to extract",
            key="data.dataset_param.dataset_type",
            way_out="Go on with mm train: it encodes their pictures while training." if encodes else f"Set {name}.",
        )
    basic = _rows(config, param.basic_parameters)
    folder = out or param.basic_parameters.get("features_dir")
    if folder is None:
        raise ConfigError("no folder is given", key=FEATURES_KEY, way_out="Set it, or give --out FOLDER.")
    sets = [(Path(folder), basic)]
    val_folder = param.basic_parameters.get("val_features_dir")
    has_validation = basic.val_dataset is not None and basic.val_max_samples != 0
    # `--out` names one folder, which can hold one set
    if out is None and val_folder is not None and has_validation:
        update = {"dataset": basic.val_dataset, "max_samples": basic.val_max_samples}
        sets.append((Path(val_folder), basic.model_copy(update=update)))
    return sets


def _rows(config: ResolvedConfig, basic: BasicParameters) -> BasicParameters:
    """Raw rows. Bad ones are skipped and listed, up to a tenth, unless the configuration says otherwise."""
    update: JsonObject = {"features_dir": None, "val_features_dir": None}
    for name, default in (("on_bad_sample", "skip"), ("max_bad_fraction", MAX_BAD_FRACTION)):
        if not _is_set(config, f"{_BASIC}.{name}"):
            update[name] = default
    return basic.model_copy(update=update)


def _is_set(config: ResolvedConfig, key: str) -> bool:
    # a default that code sets is not what somebody asked for
    origin = config.origins.get(key)
    return origin is not None and origin.kind in ("yaml", "command line")


def _threads(config: ResolvedConfig) -> int:
    """As many as the configuration's loader has processes; where it does not say, this rank's share of the cores."""
    loader = config.arguments.data.dataloader_param
    if _is_set(config, "data.dataloader_param.num_workers"):
        return max(1, loader.num_workers)
    cores = usable_cores()
    return min(_MOST_THREADS, max(2, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
