"""`mm evaluate --loss`: the cross-entropy of answers that are known, and the perplexity; nothing is generated."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindspeed_mm.checkpoint.recognise import recognise
from mindspeed_mm.core.artifacts import atomic_write_jsonl, atomic_write_text, make_writable_folder
from mindspeed_mm.core.errors import ConfigError, DataError, UsageError, told_as
from mindspeed_mm.core.file_writing import check_output_file, first_line_has, is_object_of
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.build import collator_of
from mindspeed_mm.fsdp.data.data_utils.rows.formats import RowFormat
from mindspeed_mm.fsdp.data.data_utils.training_view import TOKEN_KEYS
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.data.document_pieces import in_pieces
from mindspeed_mm.fsdp.params.argument import Arguments, DataArguments
from mindspeed_mm.fsdp.params.data_args import DatasetAttr, DatasetParam
from mindspeed_mm.fsdp.params.loader import load_config
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.questions import DEFAULT_TASK, as_asked, text_field
from mindspeed_mm.fsdp.train.row_losses import (
    LossModel,
    RowLeftOut,
    RowLoss,
    loss_of_model,
    loss_of_run,
    row_losses,
)
from mindspeed_mm.fsdp.utils.device import current_device
from mindspeed_mm.fsdp.utils.work_progress import WorkProgress
from mindspeed_mm.tasks.answer.generation import load_model
from mindspeed_mm.tasks.answer.peft_loading import load_peft
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.evaluate.folder import Facts, results_folder
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.model_source import ModelSource, resolve_model, run_arguments, with_adapters
from mindspeed_mm.tasks.requests.evaluate import LOSS_ROWS_AT_A_TIME, EvaluateRequest

RESULTS = "loss.json"
ROWS = "loss_rows.jsonl"
_MOST_NAMED = 3
_is_loss = is_object_of(
    ("tasks", "overall", "left_out", "model", "data", "seconds"),
    ("lora", "media_dir", "weights"),
    "overall",
    ("loss", "perplexity", "tokens", "rows"),
)
_NO_PERPLEXITY = math.log(1e300)


@dataclass(frozen=True)
class MeanLoss:
    """Mean loss over some rows, with the numbers of rows and of trained tokens."""

    loss: float
    """Mean cross-entropy of the trained tokens, in nats; tokens count as their messages' weights say."""
    rows: int
    tokens: int
    """Trained ones."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is not a number."""
        if self.loss < _NO_PERPLEXITY:
            return math.exp(self.loss)
        return math.inf

    def to_dict(self) -> dict[str, object]:
        """For JSON, which has no infinity."""
        perplexity = self.perplexity if math.isfinite(self.perplexity) else None
        return {"loss": self.loss, "perplexity": perplexity, "tokens": self.tokens, "rows": self.rows}

    def __str__(self) -> str:
        return f"{self.loss:.4f}, perplexity {self.perplexity:.4g} ({self.rows:,} rows, {self.tokens:,} tokens)"


@dataclass(frozen=True)
class LossEvaluation:
    """Losses by task, in the order of first appearance, and over all rows."""

    tasks: dict[str, MeanLoss]
    overall: MeanLoss
    facts: Facts
    samples: list[JsonObject]
    """Result of each row that was counted: `id`, `task`, `loss` (its mean) and `tokens`."""
    left_out: list[dict[str, str]]
    """Rows without a loss: `id`, `reason`."""

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the trained tokens of all rows, in nats."""
        return self.overall.loss

    @property
    def perplexity(self) -> float:
        """Perplexity over all rows, exp of `loss`; infinite where the loss is too large."""
        return self.overall.perplexity

    def to_dict(self) -> dict[str, object]:
        """Return the content of `loss.json`: losses by task and overall, rows left out, and the facts."""
        tasks = {name: mean.to_dict() for name, mean in self.tasks.items()}
        return {"tasks": tasks, "overall": self.overall.to_dict(), "left_out": self.left_out, **self.facts}

    def lines(self) -> list[str]:
        """For people: rows that were left out, then the losses."""
        lines = [f"left out: {each['id']}: {each['reason']}" for each in self.left_out[:_MOST_NAMED]]
        if (more := len(self.left_out) - len(lines)) > 0:
            lines.append(f"left out: {more:,} more rows")
        if len(self.tasks) > 1:
            lines += [f"loss, {name}: {mean}" for name, mean in self.tasks.items()]
        return [*lines, f"loss: {self.overall}"]


def run(request: EvaluateRequest) -> LossEvaluation:
    """Measure the loss, and write `loss.json` and `loss_rows.jsonl`.

    Rows are encoded as training encodes them: template, masks, media, `cutoff_len`. A run computes as it validates: in
    its types, its adapters beside the weights, with the average of the weights where it validates with that.

    Raises:
        MMError: The folder is not a language model, rows are bad, or `out` cannot be written.
    """
    if not kind_of_path(request.folder).has_tokens:
        raise UsageError(
            "is a generator: its answers are images or videos, which have no tokens",
            where=str(request.folder),
            key="--loss",
            way_out="Give its run validation rows (val_dataset, val_rate): mm train logs their val_loss.",
        )
    kind = recognise(request.folder)
    run_folder = {"run": request.folder, "dcp": request.folder.absolute().parent}.get(kind)
    out = request.out or results_folder(run_folder, request.folder)
    check_output_file(out / ROWS, first_line_has("id", "task", "loss", "tokens"), "--out")
    check_output_file(out / RESULTS, _is_loss, "--out")
    make_writable_folder(out)
    began = time.monotonic()
    with _opened(request, run_folder) as (measured, dataset, arguments, facts):
        data = arguments.data
        collate = collator_of(dataset, data.dataloader_param, packs=False, dataset_param=data.dataset_param)
        batch_size = request.batch_size or LOSS_ROWS_AT_A_TIME
        batches = row_losses(measured, dataset, collate, batch_size, arguments.training.seed)
        found = list(_with_progress(batches, len(dataset)))
    facts |= {"seconds": round(time.monotonic() - began, 3)}
    evaluation = _evaluation(found, dataset, facts)
    _write(evaluation, out)
    return evaluation


# --- what is measured -------------------------------------------------------------------------------------------------

_Opened = tuple[LossModel, MMDataset, Arguments, dict[str, Any]]
"""The model, the rows, the configuration, and what the results say of them."""


@contextmanager
def _opened(request: EvaluateRequest, run_folder: Path | None) -> Iterator[_Opened]:
    arguments = run_arguments(run_folder)
    own_adapter = arguments.inference.adapter if arguments is not None else None
    if arguments is None or request.lora is not None or own_adapter is not None:
        yield _of_folder(request)
        return
    if request.config is not None:
        param = _shown_by(request.config, arguments.data)
        arguments = arguments.model_copy(update={"data": arguments.data.model_copy(update={"dataset_param": param})})
    dataset = _rows(request, arguments.data, arguments.training.seed)
    with loss_of_run(arguments, request.folder, dataset.processor) as (measured, weights):
        yield measured, dataset, arguments, _facts_of_loss(request, request.folder, None) | {"weights": weights}


def _of_folder(request: EvaluateRequest) -> _Opened:
    """A model's folder, an exported run's too, in the type that its weights are stored in."""
    source = with_adapters(resolve_model(request.folder), request.lora)
    arguments = _arguments_of(source, rows_view(source, request.config).param)
    # first: it makes torchvision importable
    dataset = _rows(request, arguments.data, arguments.training.seed)
    model = load_model(source.folder)
    if source.lora is not None:
        model = load_peft(model, source.lora).get_base_model()
    device = current_device()
    return (
        loss_of_model(model.to(device), device),
        dataset,
        arguments,
        _facts_of_loss(request, source.folder, source.lora),
    )


def _arguments_of(source: ModelSource, param: DatasetParam) -> Arguments:
    arguments = load_config({"model": {"model_name_or_path": str(source.folder)}, "training": {"lr": 0.0}}).arguments
    preprocess = param.preprocess_parameters.model_copy(update={"model_name_or_path": str(source.folder)})
    param = param.model_copy(update={"preprocess_parameters": preprocess})
    return arguments.model_copy(update={"data": arguments.data.model_copy(update={"dataset_param": param})})


def _shown_by(config: Path, data: DataArguments) -> DatasetParam:
    """The section of another configuration, with the processor of the run."""
    param = rows_view(ModelSource(Path()), config).param
    own = data.dataset_param.preprocess_parameters
    kept = {key: own[key] for key in ("model_name_or_path", *TOKEN_KEYS)}
    preprocess = param.preprocess_parameters.model_copy(update=kept)
    return param.model_copy(update={"preprocess_parameters": preprocess})


def _rows(request: EvaluateRequest, data: DataArguments, seed: int) -> MMDataset:
    """The rows that are asked for, encoded as training with this seed does.

    Raises:
        UsageError: None are named, and the run validates with none.
        DataError: The file is not there.
        ConfigError: Rows are preference pairs.
    """
    param = data.dataset_param
    if param.basic_parameters.stage == "rm":
        raise ConfigError(
            "preference pairs do not have the loss of one answer", key="stage", way_out="Give rows of answers."
        )
    if request.data is not None:
        with told_as(as_asked):
            named = _with_rows(param, request.data, request.media_dir)
            return in_pieces(build_mm_dataset(named, encode_ahead=False, rows_whole=True)[0])
    if param.basic_parameters.dataset is None:
        raise _nothing_named(request)
    if request.media_dir is not None:
        raise UsageError("the run's own validation rows have their media", key="--media-dir", way_out="Leave it out.")
    _, validation = build_mm_dataset(
        param,
        seed=seed,
        val_dataset_param=data.val_dataset_param,
        encode_ahead=False,
        rows_whole=True,
    )
    if validation is None:
        raise _nothing_named(request)
    return in_pieces(validation)


def _nothing_named(request: EvaluateRequest) -> UsageError:
    return UsageError(
        "no rows are given, and there are no validation rows of a run",
        where=str(request.folder),
        key="--data",
        way_out="Name a file of rows.",
    )


def _with_rows(param: DatasetParam, data: Path, media_dir: Path | None) -> DatasetParam:
    """The section with one file as its rows; all of them are read, each on its own."""
    if not data.is_file():
        what = "is a folder, not a file of rows" if data.is_dir() else "there is no such file"
        raise DataError(what, where=str(data), way_out="Give a JSONL file of conversations.")
    basic = param.basic_parameters
    row_format = RowsView(param).row_format(data)
    told = {f.name: getattr(row_format, f.name) for f in fields(RowFormat) if f.name in DatasetAttr.model_fields}
    own: dict[str, Any] = {
        "dataset": str(data.absolute()),
        "dataset_dir": str((media_dir or data.parent).absolute()),
        "media_roots": (*basic.media_roots, str(data.parent.absolute())),
        "val_dataset": None, "val_rate": None, "max_samples": None, "mix": None, "streaming": False,
        "packing": False, "neat_packing": False, "preprocess_on_fly": True,
    }  # fmt: skip
    if row_format != RowFormat.from_attr(param.attr):
        param = param.model_copy(update={"attr": param.attr.model_copy(update=told)})
    return param.model_copy(update={"basic_parameters": basic.model_copy(update=own)})


# --- results ----------------------------------------------------------------------------------------------------------


def _with_progress(batches: Iterable[Sequence[RowLoss | RowLeftOut]], total: int) -> Iterator[RowLoss | RowLeftOut]:
    progress = WorkProgress("rows", total=total)
    for batch in batches:
        yield from batch
        progress.advance(len(batch))
    progress.end()


def _evaluation(found: Sequence[RowLoss | RowLeftOut], dataset: MMDataset, facts: Facts) -> LossEvaluation:
    """Raises `DataError` where no row has a loss."""
    by_task: dict[str, list[RowLoss]] = defaultdict(list)
    counted: list[RowLoss] = []
    samples, left_out = [], []
    for each in found:
        row = dataset.row(each.index)
        name = text_field(row, "id", str(dataset.place(each.index)))
        if isinstance(each, RowLeftOut):
            left_out.append({"id": name, "reason": each.reason})
            continue
        task = text_field(row, "task", DEFAULT_TASK)
        by_task[task].append(each)
        counted.append(each)
        samples.append({"id": name, "task": task, "loss": each.total / each.weight, "tokens": each.tokens})
    if not samples:
        what = f"none of the {len(found)} rows has a loss"
        if left_out:
            what += f"; the first: {left_out[0]['reason']}"
        raise DataError(what, way_out="Give rows with answers.")
    tasks = {task: _mean(rows) for task, rows in by_task.items()}
    return LossEvaluation(tasks, _mean(counted), facts, samples, left_out)


def _mean(rows: Sequence[RowLoss]) -> MeanLoss:
    total = math.fsum(row.total for row in rows)
    weight = math.fsum(row.weight for row in rows)
    return MeanLoss(total / weight, len(rows), sum(row.tokens for row in rows))


def _facts_of_loss(request: EvaluateRequest, model: Path, lora: Path | None) -> Facts:
    facts = {"model": str(model.absolute())}
    if lora is not None:
        facts["lora"] = str(lora.absolute())
    if request.data is None:
        return facts | {"data": "the run's validation rows"}
    media_dir = request.media_dir or request.data.parent
    told = request.data_name or str(request.data.absolute())
    return facts | {"data": told, "media_dir": str(media_dir.absolute())}


def _write(evaluation: LossEvaluation, out: Path) -> None:
    """The rows, then the results: where results stand, the rows are theirs."""
    (out / RESULTS).unlink(missing_ok=True)
    atomic_write_jsonl(out / ROWS, evaluation.samples)
    atomic_write_text(out / RESULTS, json.dumps(evaluation.to_dict(), indent=2, ensure_ascii=False) + "\n")
