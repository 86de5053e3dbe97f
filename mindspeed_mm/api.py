"""The Python door: `import mindspeed_mm as mm`, then train, check, infer and evaluate as on the command line.

Each function takes a YAML file or a mapping in its place, raises the errors of the command line as exceptions
(`MMError`, with `problems` and `exit_code`), and leaves nothing behind in the process: a notebook may train again.
Nothing heavy is imported before a function is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from mindspeed_mm.core.errors import MMError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.python_words import word_for_python
from mindspeed_mm.tasks.given.arguments import (
    check_counts,
    check_flags,
    refuse_unknown,
    wants_resume,
)
from mindspeed_mm.tasks.given.configuration import GivenConfig
from mindspeed_mm.tasks.given.rows import named_path, optional_path

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.sampling.answers.scored import Evaluation
    from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult
    from mindspeed_mm.tasks.check.check import CheckResult
    from mindspeed_mm.tasks.evaluate.loss import LossEvaluation
    from mindspeed_mm.tasks.export.export import Exported
    from mindspeed_mm.tasks.given.run_view import Run

__all__ = ["MMError", "check", "evaluate", "export", "infer", "load_run", "train"]

PathLike = str | os.PathLike[str]
Config = PathLike | Mapping[str, Any] | None
"""A YAML file, or its sections as a mapping; None: nothing but what the other arguments give."""
Sections = Mapping[str, Any] | None
"""Keys of one section of a configuration."""

_IN_MEMORY = "(given in Python)"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _worded(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function whose errors speak of its arguments, not of options."""

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except MMError as error:
            word_for_python(error)
            raise

    return called


@_worded
def train(
    config: Config = None,
    *,
    model: object = None,
    data: Sections = None,
    parallel: Sections = None,
    training: Sections = None,
    features: Sections = None,
    tools: Sections = None,
    inference: Sections = None,
    overrides: Sequence[str] = (),
    rows: object = None,
    val_rows: object = None,
    processor: object = None,
    callbacks: Sequence[Hook | Callable[[StepResult], object]] = (),
    steps: int | None = None,
    resume: bool | Literal["auto", "never"] = True,
    weights_only: bool = False,
    allow_fresh: bool = False,
    accept_data_change: bool = False,
    **unknown: object,
) -> Run:
    """Train in this process, as `mm train` does; under torchrun, as one rank of the job.

    Args:
        config: A YAML file, or a mapping of its sections.
        model: Changes to the `model` section; or a model's folder; or a model object, which is trained in place. Where
            the configuration names no folder for an object, one of transformers is stored with its processor in
            `model/` of the run folder, so that the run can be resumed, exported and used from anywhere.
        data: Changes to the `data` section, and so on for `parallel`, `training`, `features`, `tools`, `inference`.
        overrides: `section.key=value`, as on the command line.
        rows: Training rows: a file, a list of dicts (pictures may be PIL images), a `datasets.Dataset`, a
            DataFrame; or a torch data set with samples of your own and a `collate_fn`. Relative paths of media start in
            the working directory.
        val_rows: Validation rows, of the same kinds.
        processor: For a model object without a folder: its processor or tokenizer.
        callbacks: Functions that are called with each step's result (`step`, `loss`, `losses`, `grad_norm`, `lr`,
            `validation` …), and end the run by returning True; or `Hook` objects.
        steps: Stop after this many steps of this start; the schedule stays that of the whole run.
        resume: Continue from the newest checkpoint in `training.save`, as "auto"; False or "never" refuses to.
        weights_only: Load only a checkpoint's weights and start at step 0.
        allow_fresh: Start from the beginning even though no checkpoint in the run folder is valid.
        accept_data_change: Continue although the data set has changed.

    Returns:
        The run: `metrics` (a table), `last` and `best` (checkpoints), `folder`, `model`.

    Raises:
        MMError: Anything that a person can act on. `StoppedAfterSave` after Ctrl-C.
    """
    refuse_unknown(unknown, train)
    from mindspeed_mm.fsdp.train.run.train_options import TrainOptions

    options = TrainOptions(
        steps=steps,
        resume=wants_resume(resume),
        weights_only=weights_only,
        allow_fresh=allow_fresh,
        accept_data_change=accept_data_change,
        raises_on_second_interrupt=True,
    )
    sections = {"data": data, "parallel": parallel, "training": training, "features": features, "tools": tools}
    given = GivenConfig.of(config, model, overrides, **sections, inference=inference)
    from mindspeed_mm.tasks.given.training import train_given

    return train_given(given, rows, val_rows, processor, callbacks, options)


@_worded
def check(
    config: Config = None,
    *,
    model: object = None,
    data: Sections = None,
    parallel: Sections = None,
    training: Sections = None,
    features: Sections = None,
    tools: Sections = None,
    inference: Sections = None,
    overrides: Sequence[str] = (),
    rows: object = None,
    val_rows: object = None,
    nproc: int | None = None,
    resume: bool | Literal["auto", "never"] = True,
    weights_only: bool = False,
    allow_fresh: bool = False,
    accept_data_change: bool = False,
    **unknown: object,
) -> CheckResult:
    """What is wrong with a configuration, from its text to its first batch, as `mm check` finds it.

    Args:
        config: A YAML file, or a mapping of its sections.
        model: Changes to the `model` section; or a model's folder.
        data: Changes to the `data` section, and so on, as in `train`.
        overrides: `section.key=value`.
        rows: Training rows, a file or in memory, as in `train`. Nothing is written to `training.save`.
        val_rows: Validation rows, of the same kinds.
        nproc: Number of ranks that the plan is checked for.
        resume: As `train` will be given it; so are `weights_only`, `allow_fresh` and `accept_data_change`.

    Returns:
        `problems` (what, where, key, way out), `warnings`, `memory`, `exit_code`; nothing is raised for what is found.

    Raises:
        MMError: An argument is none.
    """
    refuse_unknown(unknown, check)
    from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions

    check_counts(nproc=nproc)
    start = ResumeOptions(
        resume=wants_resume(resume),
        weights_only=weights_only,
        allow_fresh=allow_fresh,
        accept_data_change=accept_data_change,
    )
    sections = {"data": data, "parallel": parallel, "training": training, "features": features, "tools": tools}
    given = GivenConfig.of(config, model, overrides, **sections, inference=inference)
    from mindspeed_mm.tasks.given.checking import check_given

    return check_given(given, rows, val_rows, nproc, start)


@_worded
def infer(
    model: Run | PathLike,
    prompt: str | Sequence[str] | None = None,
    *,
    images: Sequence[object] = (),
    videos: Sequence[PathLike] | PathLike = (),
    audios: Sequence[PathLike] | PathLike = (),
    rows: object = None,
    out: PathLike | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    lora: PathLike | None = None,
    config: PathLike | None = None,
    overwrite: bool = False,
    **sampling: Any,
) -> Any:
    """Ask a model, or let a generator draw, as `mm infer` does.

    Args:
        model: A run, or a folder of a run, of one checkpoint or of a model.
        prompt: What to ask, or to draw; a generator takes several, a speech recogniser needs none.
        images: Pictures that go with the prompt: paths or PIL images.
        videos: Video files that go with the prompt.
        audios: Sound files that go with the prompt.
        rows: Questions: a file, or rows as in `train`.
        out: The file of the answers to `rows`; a generator's folder of samples. A file or folder that exists is
            continued, unless `overwrite`.
        max_new_tokens: Longest answer; None: 512.
        batch_size: Questions, or samples, at a time.
        lora: Folder of adapters to apply to the weights.
        config: A YAML that says how rows and media are read; None: as the run was trained, or as the model's folder
            says.
        overwrite: Forget what `out` holds.
        sampling: Of a generator: `height`, `width`, `num_frames`, `num_inference_steps`, `guidance_scale`,
            `negative_prompt`, `num_samples`, `seed`, `fps`.

    Returns:
        An answer (`text`, `finished`) to a prompt; a list of records for rows; a generator's list of files.

    Raises:
        MMError: Anything that a person can act on.
    """
    from mindspeed_mm.tasks.given.models import Asked, media_files, model_path, picture_files

    check_flags(overwrite=overwrite)
    folder, results, adapters = model_path(model), optional_path(out, "out"), optional_path(lora, "lora")
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    with TemporaryDirectory(prefix="mm-") as name:
        asked = Asked(
            model=folder,
            prompt=prompt,
            pictures=picture_files(images, Path(name)),
            clips=media_files(videos, "videos"),
            sounds=media_files(audios, "audios"),
            rows=rows,
            out=results,
            folder=Path(name),
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            lora=adapters,
            config=optional_path(config, "config"),
            overwrite=overwrite,
            sampling=sampling,
            function=infer,
        )
        return asked.answered()


@overload
def evaluate(
    model: Run | PathLike, rows: object = None, *, loss: Literal[False] = False, **options: Any
) -> Evaluation: ...


@overload
def evaluate(model: Run | PathLike, rows: object = None, *, loss: Literal[True], **options: Any) -> LossEvaluation: ...


@_worded
def evaluate(
    model: Run | PathLike,
    rows: object = None,
    *,
    loss: bool = False,
    out: PathLike | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    metric: Literal["exact", "wer", "cer"] = "exact",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    lora: PathLike | None = None,
    config: PathLike | None = None,
    **unknown: object,
) -> Evaluation | LossEvaluation:
    """Score a model on rows whose answers are known, as `mm evaluate` does.

    Args:
        model: A run, or a folder of a run, of one checkpoint or of a model.
        rows: A file, or rows as in `train`. With `loss` they may be left out: then the run's own validation rows.
        loss: Measure the cross-entropy of the answers; generate nothing.
        out: Where the results go; by default `eval/` of the run, or `eval/NAME` here for a folder NAME.
        max_new_tokens: Longest answer; None: 512.
        batch_size: Rows at a time; None: 64, with `loss` 8.
        metric: "exact": whether each answer is the expected one; "wer", "cer": the share of wrong words or characters.
        ignore_case: Small and capital letters are the same.
        ignore_punctuation: Punctuation does not count.
        lora: Folder of adapters to apply to the weights.
        config: As in `infer`.

    Returns:
        An `Evaluation`: `scores` (task → accuracy or error rate, its interval, counts), `samples`, `facts`. With `loss`
        a `LossEvaluation`: `loss`, `perplexity`, `overall` and `tasks` (with rows and tokens), `samples`, `left_out`.

    Raises:
        MMError: Anything that a person can act on.
    """
    refuse_unknown(unknown, evaluate)
    from mindspeed_mm.tasks.given.models import model_path, question_file
    from mindspeed_mm.tasks.given.rows import is_in_memory
    from mindspeed_mm.tasks.requests.evaluate import EvaluateRequest

    in_memory = is_in_memory(rows)
    asked: JsonObject = {"ignore_case": ignore_case, "ignore_punctuation": ignore_punctuation}
    asked |= {"out": optional_path(out, "out"), "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    asked |= {"lora": optional_path(lora, "lora"), "config": optional_path(config, "config")}
    if in_memory:
        asked |= {"media_dir": Path.cwd(), "data_name": _IN_MEMORY}
    request = EvaluateRequest(str(model_path(model)), loss=loss, metric=metric, **asked)
    with TemporaryDirectory(prefix="mm-") as name:
        data = question_file(rows, Path(name)) if rows is not None else None
        request = replace(request, data=data)
        if loss:
            _refuse_given(
                max_new_tokens=max_new_tokens is not None,
                metric=metric != "exact",
                ignore_case=ignore_case,
                ignore_punctuation=ignore_punctuation,
            )
            from mindspeed_mm.tasks.evaluate import loss as loss_task

            return loss_task.run(request)
        if data is None:
            raise UsageError("there are no rows", key="rows", way_out="Give a file or a list of them.")
        from mindspeed_mm.tasks.evaluate import evaluate as task

        return task.run(request)


def _refuse_given(**is_given: bool) -> None:
    """Raise `UsageError` where something is given that is about generating answers."""
    for key, given in is_given.items():
        if given:
            raise UsageError("nothing is generated with loss=True", key=key, way_out="Leave it out.")


@_worded
def export(
    run: Run | PathLike,
    target: PathLike,
    *,
    step: int | None = None,
    weights: Literal["ema", "model"] | None = None,
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None,
    model_folder: PathLike | None = None,
    merge: bool = False,
    transformer_only: bool = False,
    overwrite: bool = False,
    single_file: bool = False,
    lora_format: Literal["diffusers", "comfyui", "kohya"] = "diffusers",
    **unknown: object,
) -> Exported:
    """Write a run's best checkpoint if it keeps one, else its newest, or a named one, as a folder that transformers,
    PEFT or diffusers loads.

    Args:
        run: A run, its folder, or one checkpoint of it.
        target: The folder to write.
        step: Which checkpoint of the run; None: the best one that it keeps, else the newest good one.
        weights: "ema": their average; "model": as they were trained; None: the average where the run kept one.
        dtype: Of the weights; None: as the model that the run started from has them.
        model_folder: Folder with all but the trained weights; None: the one that the run started from.
        merge: For a run that trained adapters: write the whole model with the adapters merged.
        transformer_only: For a generator: leave out encoders and other components.
        overwrite: Replace what an earlier export or merge wrote at `target`.
        single_file: For a generator: write the transformer as one file under its authors' names.
        lora_format: For a generator's adapters: whose names the file uses.

    Returns:
        What was written: `folder`, `checkpoint`, `step`, `tensors`, `size_bytes`, `weights`, `kind`.

    Raises:
        MMError: Anything that a person can act on.
    """
    refuse_unknown(unknown, export)
    from mindspeed_mm.tasks.export import export as task
    from mindspeed_mm.tasks.given.models import model_path
    from mindspeed_mm.tasks.requests.export import ExportRequest

    check_counts(0, step=step)
    request = ExportRequest(
        model_path(run),
        named_path(target, "target"),
        step=step,
        weights=weights,
        dtype=dtype,
        model_folder=optional_path(model_folder, "model_folder"),
        merge=merge,
        transformer_only=transformer_only,
        overwrite=overwrite,
        single_file=single_file,
        lora_format=lora_format,
    )
    return task.run(request)


@_worded
def load_run(folder: PathLike) -> Run:
    """The run in a folder: `metrics`, `last`, `best`, `facts`.

    Raises:
        DataError: It is not a run folder.
    """
    from mindspeed_mm.tasks.given.run_view import load_run as read

    return read(named_path(folder, "folder"))
