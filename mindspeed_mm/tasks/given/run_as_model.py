"""A configuration whose model is a run: the run's checkpoint takes its place, as a model folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mindspeed_mm.fsdp.params.loader import Given, Override, ResolvedConfig
from mindspeed_mm.fsdp.train.configuration import load_with_plugins

MODEL = "model.model_name_or_path"
PROCESSOR = "data.dataset_param.preprocess_parameters.model_name_or_path"


def load_of_run(given: Given, overrides: Sequence[Override] = (), *, ranks: int | None = None) -> ResolvedConfig:
    """`load_with_plugins`; where `model.model_name_or_path` is a run or one of its checkpoints, that is what is
    trained on, with its tokenizer and its processor, and stderr says which checkpoint it is.

    Raises:
        MMError: As `load_with_plugins`, or the run has no checkpoint that can be used.
    """
    config = load_with_plugins(given, overrides, ranks=ranks)
    words, line = words_of_run(config)
    if not words:
        return config
    sys.stderr.write(f"{line}\n")
    return load_with_plugins(given, (*overrides, *words), ranks=ranks)


def words_of_run(config: ResolvedConfig) -> tuple[list[Override], str]:
    """Overrides that put the model folder of a run in the run's place, and which checkpoint it is; empty where the
    model is not a run."""
    named = config.arguments.model.model_name_or_path
    if named is None or not Path(named).is_dir():
        return [], ""
    from mindspeed_mm.tasks.model_source import model_of_run  # torch: not for a wrong YAML

    with config.told_as_own():
        found = model_of_run(Path(named))
    if found is None:
        return [], ""
    folder, step = found
    words: list[Override] = [f"{MODEL}={folder}"]
    if config.arguments.data.dataset_param.preprocess_parameters.get("model_name_or_path") == named:
        words.append(f"{PROCESSOR}={folder}")
    return words, f"model  {named}: {step}, as {folder}"
