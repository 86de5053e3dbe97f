"""The Python door: `import mindspeed_mm as mm`, then train, check, infer and evaluate as on the command line.

Each function takes a YAML file or a mapping in its place, raises the errors of the command line as exceptions
(`MMError`, with `problems` and `exit_code`), and leaves nothing behind in the process: a notebook may train again.
Nothing heavy is imported before a function is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from mindspeed_mm.core.errors import MMError, UsageError, told_as
from mindspeed_mm.core.python_words import problem_for_python, word_for_python
from mindspeed_mm.tasks.given.arguments import (
    check_choice,
    check_counts,
    check_flags,
    given_sections,
    named_by,
    refuse_unknown,
    short,
    wants_resume,
)
from mindspeed_mm.tasks.given.rows import named_path

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult
    from mindspeed_mm.tasks.check.check import CheckResult
    from mindspeed_mm.tasks.evaluate.evaluate import Evaluation
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
    model: Any = None,
    data: Sections = None,
    parallel: Sections = None,
    training: Sections = None,
    features: Sections = None,
    tools: Sections = None,
    inference: Sections = None,
    overrides: Sequence[str] = (),
    rows: Any = None,
    val_rows: Any = None,
    processor: Any = None,
    callbacks: Sequence[Hook | Callable[[StepResult], object]] = (),
    steps: int | None = None,
    resume: bool | Literal["auto", "never"] = True,
    weights_only: bool = False,
    allow_fresh: bool = False,
    accept_data_change: bool = False,
    **unknown: Any,
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
        resume: Continue from the newest checkpoint in `training.save`; False refuses a folder that has one. "auto" and
            "never", the words of the command line, mean the same.
        weights_only: Take a checkpoint's weights only and start at step 0.
        allow_fresh: Start from the beginning although no checkpoint there is valid.
        accept_data_change: Continue although the data set has changed.

    Returns:
        The run: `metrics` (a table), `last` and `best` (checkpoints), `folder`, `model`.

    Raises:
        MMError: Anything that a person can act on. `StoppedAfterSave` after Ctrl-C.
    """
    refuse_unknown(unknown, train)
    flags = {"weights_only": weights_only, "allow_fresh": allow_fresh, "accept_data_change": accept_data_change}
    check_flags(**flags)
    check_counts(steps=steps)
    resumes = wants_resume(resume)
    from mindspeed_mm.fsdp.utils.torchvision_guard import ensure_torchvision

    ensure_torchvision()
    module, named = _model(model)
    sections = given_sections(data=data, parallel=parallel, training=training, features=features, tools=tools)
    words = [sections | given_sections(inference=inference) | named, *overrides]
    hooks = _callbacks(callbacks)
    from mindspeed_mm.fsdp.train.trainer import Trainer, TrainOptions
    from mindspeed_mm.tasks.given.objects import with_objects
    from mindspeed_mm.tasks.given.run_view import RecordsInMemory
    from mindspeed_mm.tasks.train import collecting_later

    options = TrainOptions(steps=steps, resume=resumes, raises_on_second_interrupt=True, **flags)
    with ExitStack() as stack, collecting_later(), told_as(named_by(rows=rows, val_rows=val_rows)):
        words, objects = with_objects(_given(config), words, module, (rows, val_rows), processor, stack)
        kept = RecordsInMemory()
        trainer = Trainer(_resolved(_given(config), words), options, hooks, given=objects, trackers=[kept])
        engine = trainer.train()
    return _run_of(trainer.arguments.training.save, kept.records, engine.model if engine is not None else None)


@_worded
def check(
    config: Config = None,
    *,
    model: Any = None,
    data: Sections = None,
    parallel: Sections = None,
    training: Sections = None,
    features: Sections = None,
    tools: Sections = None,
    inference: Sections = None,
    overrides: Sequence[str] = (),
    rows: Any = None,
    val_rows: Any = None,
    nproc: int | None = None,
    **unknown: Any,
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

    Returns:
        `problems` (what, where, key, way out), `warnings`, `memory`, `exit_code`; nothing is raised for what is found.

    Raises:
        MMError: An argument is none.
    """
    refuse_unknown(unknown, check)
    check_counts(nproc=nproc)
    module, named = _model(model)
    if module is not None:
        raise UsageError(
            "a model object is not checked", key="model", way_out="Give its folder, or train it for a step: steps=1."
        )
    sections = given_sections(data=data, parallel=parallel, training=training, features=features, tools=tools)
    words: list[Any] = [sections | given_sections(inference=inference) | named, *overrides]
    given, named_as = _given(config), named_by(rows=rows, val_rows=val_rows)
    from mindspeed_mm.tasks.check import check as task

    with ExitStack() as stack:
        if rows is not None or val_rows is not None:
            from mindspeed_mm.tasks.given.objects import is_data_set, with_objects

            for key, each in (("rows", rows), ("val_rows", val_rows)):
                if is_data_set(each):
                    raise UsageError(
                        "a data set of your own is not checked", key=key, way_out="Train it for a step: steps=1."
                    )
            words, _ = with_objects(given, words, None, (rows, val_rows), None, stack, keeps=False)
        result = task.run(given, words, nproc=nproc)
    result.findings = [replace(each, problem=problem_for_python(named_as(each.problem))) for each in result.findings]
    return result


@_worded
def infer(
    model: Run | PathLike,
    prompt: str | Sequence[str] | None = None,
    *,
    images: Sequence[Any] = (),
    rows: Any = None,
    out: PathLike | None = None,
    max_new_tokens: int = 512,
    batch_size: int | None = None,
    lora: PathLike | None = None,
    config: PathLike | None = None,
    overwrite: bool = False,
    **sampling: Any,
) -> Any:
    """Ask a model, or let a generator draw, as `mm infer` does.

    Args:
        model: A run, or a folder of a run, of one checkpoint or of a model.
        prompt: What to ask, or to draw; a generator takes several.
        images: Pictures that go with the prompt: paths or PIL images.
        rows: Questions: a file, or rows as in `train`.
        out: The file of the answers to `rows`; a generator's folder of samples. A file or folder that exists is
            continued, unless `overwrite`.
        max_new_tokens: Longest answer.
        batch_size: Questions, or samples, at a time.
        lora: Folder of adapters to put beside the weights.
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
    from mindspeed_mm.tasks.model_kind import is_generator

    check_flags(overwrite=overwrite)
    folder = _path(model)
    adapters = named_path(lora, "lora") if lora is not None else None
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    with TemporaryDirectory(prefix="mm-") as name:
        listed = images if isinstance(images, list | tuple) else [images]
        pictures = tuple(_picture(image, Path(name), number) for number, image in enumerate(listed))
        if is_generator(folder):
            return _draw(folder, prompt, pictures, out, adapters, overwrite, sampling | _given_size(batch_size))
        refuse_unknown(sampling, infer, "is no argument for a language model")
        from mindspeed_mm.tasks.answer import infer as task

        if (prompt is None) == (rows is None):
            raise UsageError("give either a prompt or rows", key="prompt")
        if prompt is not None:
            if not isinstance(prompt, str):
                raise UsageError("a language model answers one prompt", key="prompt", way_out="Give rows for several.")
            view = named_path(config, "config") if config is not None else None
            return task.answer_prompt(
                folder, prompt, pictures, max_new_tokens=max_new_tokens, lora=adapters, config=view
            )
        questions = _question_file(rows, Path(name))
        answers = named_path(out, "out") if out is not None else Path(name) / "answers.jsonl"
        task.run(
            folder,
            questions,
            answers,
            batch_size=batch_size or 32,
            max_new_tokens=max_new_tokens,
            media_dir=None if isinstance(rows, str | os.PathLike) else Path.cwd(),
            overwrite=overwrite,
            lora=adapters,
            config=named_path(config, "config") if config is not None else None,
        )
        from mindspeed_mm.core.artifacts import read_jsonl

        return read_jsonl(answers)


@overload
def evaluate(
    model: Run | PathLike,
    rows: Any = None,
    *,
    loss: Literal[False] = False,
    out: PathLike | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    lora: PathLike | None = None,
    config: PathLike | None = None,
) -> Evaluation: ...


@overload
def evaluate(
    model: Run | PathLike,
    rows: Any = None,
    *,
    loss: Literal[True],
    out: PathLike | None = None,
    max_new_tokens: None = None,
    batch_size: int | None = None,
    lora: PathLike | None = None,
    config: PathLike | None = None,
) -> LossEvaluation: ...


@_worded
def evaluate(
    model: Run | PathLike,
    rows: Any = None,
    *,
    loss: bool = False,
    out: PathLike | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    lora: PathLike | None = None,
    config: PathLike | None = None,
    **unknown: Any,
) -> Evaluation | LossEvaluation:
    """Score a model on rows whose answers are known, as `mm evaluate` does.

    Args:
        model: A run, or a folder of a run, of one checkpoint or of a model.
        rows: A file, or rows as in `train`. With `loss` they may be left out: then the run's own validation rows.
        loss: Measure the cross-entropy of the answers; generate nothing.
        out: Where the results go; by default `eval/` of the run, or of the working directory.
        max_new_tokens: Longest answer; None: 512.
        batch_size: Rows at a time; None: 64, with `loss` 8.
        lora: Folder of adapters to put beside the weights.
        config: As in `infer`.

    Returns:
        An `Evaluation`: `scores` (task → accuracy, its interval, counts), `samples`, `facts`. With `loss` a
        `LossEvaluation`: `loss`, `perplexity`, `overall` and `tasks` (with rows and tokens), `samples`, `left_out`.

    Raises:
        MMError: Anything that a person can act on.
    """
    refuse_unknown(unknown, evaluate)
    check_flags(loss=loss)
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    folder, results = _path(model), named_path(out, "out") if out is not None else None
    in_memory = not (rows is None or isinstance(rows, str | os.PathLike))
    shown: dict[str, Any] = {
        "lora": named_path(lora, "lora") if lora is not None else None,
        "config": named_path(config, "config") if config is not None else None,
        "media_dir": Path.cwd() if in_memory else None,
        "data_name": _IN_MEMORY if in_memory else None,
    }
    with TemporaryDirectory(prefix="mm-") as name:
        data = _question_file(rows, Path(name)) if rows is not None else None
        if loss:
            from mindspeed_mm.tasks.evaluate import loss as evaluate_loss

            if max_new_tokens is not None:
                raise UsageError("nothing is generated with loss=True", key="max_new_tokens", way_out="Leave it out.")
            size = batch_size or evaluate_loss.BATCH_SIZE
            return evaluate_loss.run(evaluate_loss.LossRequest(folder, data, batch_size=size, **shown), results)
        if data is None:
            raise UsageError("there are no rows", key="rows", way_out="Give a file or a list of them.")
        from mindspeed_mm.tasks.evaluate import evaluate as task

        return task.run(
            folder, data, out=results, max_new_tokens=max_new_tokens or 512, batch_size=batch_size or 64, **shown
        )


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
    **unknown: Any,
) -> Exported:
    """Write a run's newest checkpoint, or a named one, as a folder that transformers, PEFT or diffusers loads.

    Args:
        run: A run, its folder, or one checkpoint of it.
        target: The folder to write.
        step: Which checkpoint of the run; None: the newest good one.
        weights: "ema": their average; "model": as they were trained; None: the average where the run kept one.
        dtype: Of the weights; None: as the model that the run started from has them.
        model_folder: Folder with all but the trained weights; None: the one that the run started from.
        merge: Of a run that trained adapters: write the whole model, adapters merged.
        transformer_only: Of a generator: leave encoders and other components out.
        overwrite: Replace what an earlier export or merge wrote at `target`.

    Returns:
        What was written: `folder`, `checkpoint`, `step`, `tensors`, `size_bytes`, `weights`, `kind`.

    Raises:
        MMError: Anything that a person can act on.
    """
    refuse_unknown(unknown, export)
    check_flags(merge=merge, transformer_only=transformer_only, overwrite=overwrite)
    check_counts(0, step=step)
    check_choice("weights", weights, ("ema", "model"))
    check_choice("dtype", dtype, ("bf16", "fp16", "fp32", "fp64"))
    from mindspeed_mm.tasks.export import export as task

    return task.run(
        _path(run),
        named_path(target, "target"),
        step=step,
        weights=weights,
        dtype=dtype,
        model_folder=named_path(model_folder, "model_folder") if model_folder is not None else None,
        merge=merge,
        transformer_only=transformer_only,
        overwrite=overwrite,
    )


@_worded
def load_run(folder: PathLike) -> Run:
    """The run in a folder: `metrics`, `last`, `best`, `facts`.

    Raises:
        DataError: It is no run folder.
    """
    from mindspeed_mm.tasks.given.run_view import load_run as read

    return read(named_path(folder, "folder"))


# --- configurations --------------------------------------------------------------------------------------------------


def _given(config: Config) -> Path | Mapping[str, Any]:
    if config is None:
        return {}
    return config if isinstance(config, Mapping) else named_path(config, "config")


def _callbacks(callbacks: Any) -> Sequence[Any]:
    """Functions and hooks; one alone may be given without a list."""
    from mindspeed_mm.fsdp.train.train_engine import Hook

    listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for one in listed:
        if not (isinstance(one, Hook) or callable(one)):
            raise UsageError(
                f"{short(one)} cannot be called",
                key="callbacks",
                way_out="Give functions of a step's result, or mm.Hook.",
            )
    return listed


def _model(model: Any) -> tuple[Any, dict[str, Any]]:
    """A model object, and what is said of the `model` section."""
    if model is None:
        return None, {}
    if isinstance(model, Mapping):
        return None, {"model": model}
    if isinstance(model, str | os.PathLike):
        return None, {"model": {"model_name_or_path": str(named_path(model, "model"))}}
    from torch import nn

    if isinstance(model, nn.Module):
        return model, {}
    raise UsageError(
        f"{type(model).__name__} is no model",
        key="model",
        way_out="Give the model's folder, a torch module, or a mapping of the section.",
    )


def _resolved(given: Path | Mapping[str, Any], words: Sequence[Any]) -> Any:
    from mindspeed_mm.fsdp.train.configuration import load_with_plugins

    return load_with_plugins(given, words)


# --- runs and models ------------------------------------------------------------------------------------------------


def _run_of(save: str | None, records: Sequence[dict[str, Any]], model: Any) -> Run:
    """The run as its folder has it, else as this process does."""
    from mindspeed_mm.tasks.given.run_view import Run

    if save is None:
        return Run(None, records, model=model)
    run = load_run(save)
    return Run(run.folder, run.records, run.facts, model)


def _path(model: Run | PathLike) -> Path:
    """A run's folder, or the path itself."""
    try:
        return named_path(os.fspath(model), "model")
    except TypeError as error:
        raise UsageError(
            "this run kept nothing" if hasattr(model, "records") else f"{type(model).__name__} is no run and no path",
            key="model",
            way_out="Set training.save to keep checkpoints, or name a folder; the model that was trained is run.model.",
        ) from error


# --- pictures and questions ------------------------------------------------------------------------------------------


def _picture(image: Any, folder: Path, number: int) -> Path:
    """The file of a picture; one that is in memory is stored."""
    if isinstance(image, str | os.PathLike):
        return named_path(image, "images")
    from mindspeed_mm.tasks.given.rows import is_picture, picture_bytes

    if not is_picture(image):
        raise UsageError(f"{type(image).__name__} is no picture", key="images", way_out="Give paths or PIL images.")
    path = folder / f"{number}.png"
    path.write_bytes(picture_bytes(image))
    return path


def _question_file(rows: Any, folder: Path) -> Path:
    if isinstance(rows, str | os.PathLike):
        return named_path(rows, "rows")
    from mindspeed_mm.tasks.given.rows import listed_rows, with_ids, write_rows

    return write_rows(with_ids(listed_rows(rows, "question")), folder, "questions", stores_media=False)


def _given_size(batch_size: int | None) -> dict[str, int]:
    return {} if batch_size is None else {"batch_size": batch_size}


def _draw(
    folder: Path,
    prompt: str | Sequence[str] | None,
    pictures: tuple[Path, ...],
    out: PathLike | None,
    lora: Path | None,
    overwrite: bool,
    settings: dict[str, Any],
) -> list[Path]:
    """Samples of a generator; returns their files in the order of the prompts."""
    if out is None:
        raise UsageError("samples need a folder", key="out", way_out="Name one: out='samples'.")
    if len(pictures) > 1:
        raise UsageError("a video goes on from one picture", key="images", way_out="Give one.")
    from mindspeed_mm.core.artifacts import read_jsonl
    from mindspeed_mm.fsdp.params.diffusion_args import SamplingArguments
    from mindspeed_mm.tasks.draw import generate

    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt or ())
    known = SamplingArguments.model_fields
    refuse_unknown({name: value for name, value in settings.items() if name not in known}, infer, also=known)
    checked = _resolved({"inference": {"sampling": settings}}, ()).arguments.inference.sampling
    request = generate.GenerateRequest(
        prompts=prompts,
        image=next(iter(pictures), None),
        settings={name: getattr(checked, name) for name in settings},
        lora=lora,
    )
    generate.run(folder, Path(out), request, overwrite=overwrite)
    return [Path(out) / record["file"] for record in read_jsonl(Path(out) / "manifest.jsonl")]
