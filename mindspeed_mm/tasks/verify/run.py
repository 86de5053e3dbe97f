"""What the processes of a verification do: two steps of the trainer in one way after another, recorded and compared."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typing_extensions import override

from mindspeed_mm.core.counts import short_count
from mindspeed_mm.core.errors import ConfigError, DataError, DivergedError, MMError, ModelFolderError
from mindspeed_mm.fsdp.data import build_mm_dataset
from mindspeed_mm.fsdp.data.build import DatasetPart, collator_of
from mindspeed_mm.fsdp.data.dataloader.sampler import Pick
from mindspeed_mm.fsdp.data.dataloader.sizes import read_sample
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.models.behaviour.packed_rows import check_packed_rows
from mindspeed_mm.fsdp.models.modelhub import ModelHub
from mindspeed_mm.fsdp.params.argument import Arguments, ModelArguments
from mindspeed_mm.fsdp.params.data_args import DataArguments
from mindspeed_mm.fsdp.params.feature_args import FeatureArguments
from mindspeed_mm.fsdp.plan.outline import build_outline, packs_rows
from mindspeed_mm.fsdp.train.hooks.step_record import StepRecord, StepRecorder
from mindspeed_mm.fsdp.train.run.data import RunData
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.train.trainer import Trainer
from mindspeed_mm.fsdp.utils.register import import_plugin
from mindspeed_mm.tasks.verify.faults import planted
from mindspeed_mm.tasks.verify.model import (
    Candidate,
    can_be_built,
    check_real_model,
    real_model,
    small_models,
    write_weights,
)
from mindspeed_mm.tasks.verify.precision import keeping_double
from mindspeed_mm.tasks.verify.ranks import Tell
from mindspeed_mm.tasks.verify.setup import STEPS, Case, OneProcess, Setup, VerifyJob, arguments_of
from mindspeed_mm.tasks.verify.table import TOLERANCE, Row

PLANNED = "as planned = one process"
ACCUMULATED = "accumulated = one big batch"
RESUMED = "resumed = uninterrupted"
PACKED = "packed = unpacked"
_SHOWN_NAMES = 3
"""Parameters that are named, of those that nothing is said about."""

# --- one process ------------------------------------------------------------------------------------------------------


def run_reference(job: VerifyJob, tell: Tell) -> OneProcess:
    """Choose the model, compute two steps with one big batch each, and write their record.

    Raises:
        MMError: What `mm train` would refuse.
    """
    import_plugin(job.config.arguments.training.plugin)
    arguments = job.setup.arguments
    dataset, _ = build_mm_dataset(arguments.data.dataset_param, seed=arguments.training.seed)
    if (agreeing := agreeing_rows(dataset, arguments, job.setup)) is not None:
        rows, told = agreeing
        dataset = _part_of(dataset, rows)
        job = replace(job, rows=rows, setup=replace(job.setup, changes=(*job.setup.changes, told)))
    # packs and several sizes: not any two samples can share a micro-batch
    if packs_rows(arguments) or len(set(dataset.sizes or ())) > 1:
        setup = replace(job.setup, accumulation=job.setup.rows // job.setup.sizes.dp)
        job = replace(job, setup=setup, one_size=False)
    job = replace(job, unpackable=why_unpackable(dataset, arguments.model, arguments.data, arguments.features))
    if job.full:
        candidates = [real_model(arguments, job.folder)]
    else:
        check_real_model(job.config.arguments.parallel, arguments)
        candidates = list(small_models(arguments, job.setup.sizes, job.folder))
    engine, chosen = _first_that_runs(job, candidates)
    tell("reference")
    return OneProcess(chosen, _describe(engine, job.full))


def why_unpackable(
    dataset: MMDataset, model_args: ModelArguments, data: DataArguments, features: FeatureArguments
) -> str:
    """Why samples of this data set cannot share a row of this model; empty when they can."""
    makes_own_batches = dataset.collate_fn is not None or dataset.sizes is not None
    try:
        if not makes_own_batches:
            collator = dataset.build_collator(data.dataloader_param.collate_param, packs=True)
            makes_own_batches = collator is None
        if makes_own_batches:
            return "the data set makes its own batches"
        model = ModelHub.build(model_args, feature_args=features)
        check_packed_rows(model, attention=model_args.attn_implementation)
    except ConfigError as error:
        return error.problems[0].what
    return ""


def _first_that_runs(job: VerifyJob, candidates: Sequence[Candidate]) -> tuple[TrainEngine, VerifyJob]:
    """Run the smallest model that can be; the last one's error is the user's."""
    for number, (arguments, lines) in enumerate(candidates):
        is_last = number == len(candidates) - 1
        if not is_last and not can_be_built(arguments):
            continue
        try:
            made = arguments
            if not job.full:
                made = write_weights(arguments, job.folder / f"weights{number}")
            setup = replace(job.setup, arguments=made, changes=(*lines, *job.setup.changes))
            chosen = replace(job, setup=setup)
            micro_batches = 1 if job.one_size else setup.rows
            engine, steps = steps_of(chosen, Case(alone=True, micro_batches=micro_batches))
        except (ModelFolderError, ValueError, TypeError, RuntimeError, LookupError):
            if is_last:
                raise
            continue
        save_records(job.folder / "reference.safetensors", steps)
        told = (*setup.changes, *uncompared(engine.model, steps))
        return engine, replace(chosen, setup=replace(setup, changes=told))
    raise AssertionError("there is always a candidate")


def _describe(engine: TrainEngine, full: bool) -> str:
    count = sum(parameter.numel() for parameter in engine.model.parameters())
    name = type(engine.model).__name__.removeprefix("FSDP")
    words = f"{name}, {short_count(count)} parameters"
    if full:
        return words
    return f"{words}, random weights (--full uses the real model)"


def uncompared(model: nn.Module, steps: Sequence[StepRecord]) -> tuple[str, ...]:
    """A line on trained parameters to which no step gives a gradient other than 0: a comparison says nothing of them.

    Args:
        model: Computed the steps.
        steps: Of one process.
    """
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    reached = {
        name
        for step in steps
        for name, gradient in step["gradients"].items()
        if gradient is not None and bool(gradient.any())
    }
    still = [name for name in trained if name not in reached]
    if not still:
        return ()
    shown = ", ".join(still[:_SHOWN_NAMES])
    if len(still) > _SHOWN_NAMES:
        shown += " …"
    return (f"not compared, since no gradient reaches them: {len(still)} of {len(trained)} parameters: {shown}",)


# --- as planned -------------------------------------------------------------------------------------------------------


def run_planned(job: VerifyJob, tell: Tell) -> list[Row]:
    """Compute the same two steps as planned, accumulated, resumed and packed, and compare them with the record."""
    import_plugin(job.config.arguments.training.plugin)
    reference = load_records(job.folder / "reference.safetensors")
    case = Case(micro_batches=job.setup.accumulation)
    kept = replace(case, save=job.folder / "run")
    with planted(job.fault):
        _, planned = steps_of(job, case)
        tell("planned")
        rows = compare(PLANNED, reference, planned)
        if job.setup.arguments.features.loss_cfg.router_aux_loss_coef:
            rows.append(Row(ACCUMULATED, "", note="not used, because each micro-batch balances the routers by itself"))
        elif job.one_size:
            _, accumulated = steps_of(job, replace(case, micro_batches=2 * case.micro_batches))
            rows += compare(ACCUMULATED, reference, accumulated)
        else:
            rows.append(Row(ACCUMULATED, "", note="not used, because sizes decide which samples share a micro-batch"))
        tell("accumulated")
        steps_of(job, replace(kept, stops=True))
        tell("saved")
        _, resumed = steps_of(job, replace(kept, resumes=True))
        tell("resumed")
        rows += compare(RESUMED, planned[1:], resumed, tolerance=0.0, first_step=2)
        rows += packed_rows_of(job, case, reference)
        tell("packed")
    return rows


def packed_rows_of(job: VerifyJob, case: Case, reference: Sequence[StepRecord]) -> list[Row]:
    """The samples of each micro-batch in one row where the reference has a row for each, or the other way round."""
    if job.unpackable:
        return [Row(PACKED, "", note=f"not used, {job.unpackable}")]
    _, measured = steps_of(job, replace(case, packs=not packs_rows(job.setup.arguments)))
    return compare(PACKED, reference, measured)


def compare(
    check: str,
    reference: Sequence[StepRecord],
    measured: Sequence[StepRecord],
    *,
    tolerance: float = TOLERANCE,
    first_step: int = 1,
) -> list[Row]:
    """A row for every quantity, with its largest deviation."""
    try:
        worst = _worst_of(deviations(reference, measured, first_step=first_step))
    except RecordsDifferError as error:
        missing = float("inf")
        return [Row(check, name, tolerance, missing, str(error)) for name in _QUANTITIES.values()]
    rows = []
    for key, name in _QUANTITIES.items():
        each = worst[key]
        rows.append(Row(check, name, tolerance, each.value, each.place, each.expected, each.found))
    return rows


# --- a run ------------------------------------------------------------------------------------------------------------


def steps_of(job: VerifyJob, case: Case) -> tuple[TrainEngine, list[StepRecord]]:
    """The recorded steps of one run of the trainer.

    Raises:
        DivergedError: The loss is not finite.
        MMError: No step was run.
    """
    arguments = arguments_of(job.setup, case)
    # The real model may start from another run's checkpoint: from its weights, at step 0.
    options = TrainOptions(
        steps=1 if case.stops else None, weights_only=job.full and not case.resumes, packs=case.packs
    )
    recorder = StepRecorder()
    with keeping_double(of_whole_numbers=True):
        trainer = PartTrainer(replace(job.config, arguments=arguments), options, hooks=[recorder])
        trainer.rows = job.rows
        engine = trainer.train()
    gc.collect()
    if engine is None or not recorder.steps:
        raise MMError("no step was run")
    if not all(torch.isfinite(step["loss"]) for step in recorder.steps):
        raise DivergedError("the loss is not finite")
    return engine, recorder.steps


def save_records(path: Path, steps: Sequence[StepRecord]) -> None:
    """Write steps as one file."""
    tensors: dict[str, torch.Tensor] = {}
    for number, step in enumerate(steps, start=1):
        for quantity in _QUANTITIES:
            value = step[quantity]
            entries = value if isinstance(value, dict) else {"": value}
            for name, tensor in entries.items():
                if tensor is not None:
                    tensors[f"{number}/{quantity}/{name}"] = tensor.contiguous()
    save_file(tensors, path)


def load_records(path: Path) -> list[StepRecord]:
    """Read what `save_records` wrote; a parameter without a gradient has None."""
    steps: dict[str, StepRecord] = {}
    for key, tensor in load_file(path).items():
        number, quantity, name = key.split("/", 2)
        step = steps.setdefault(number, {"gradients": {}, "weights": {}})
        if name:
            step[quantity][name] = tensor
        else:
            step[quantity] = tensor
    for step in steps.values():
        gradients = step["gradients"]
        step["gradients"] = {name: gradients.get(name) for name in step["weights"]}
    return [steps[number] for number in sorted(steps, key=int)]


# --- rows -------------------------------------------------------------------------------------------------------------
# Towers without a stand-in for a missing medium: in several processes all rows of a step have that medium, or none.

_MOST_ROWS = 512
"""Rows that are encoded to find such as agree."""


class PartTrainer(Trainer):
    """A trainer on some rows of the training data."""

    rows: Sequence[int] | None = None
    """Their numbers, ascending; None: all."""

    @override
    def _build_data(self, job: Job) -> RunData:
        data = super()._build_data(job)
        if self.rows is None:
            return data
        return replace(data, train=_part_of(data.train, self.rows))


def _part_of(dataset: MMDataset, rows: Sequence[int]) -> DatasetPart:
    """Some rows of a data set."""
    return DatasetPart(dataset, np.asarray(rows), "verified")


def agreeing_rows(dataset: MMDataset, arguments: Arguments, setup: Setup) -> tuple[tuple[int, ...], str] | None:
    """The rows that are compared where the model's towers have no stand-in for a medium that a rank lacks, so that
    training in several processes refuses steps of which some rows have it and some have none.

    Args:
        dataset: The training rows.
        arguments: Comparable.
        setup: How many processes share a step, and how many rows it takes.

    Returns:
        Numbers of rows, and in words which were left out; None where all rows are compared.
    """
    keys = build_outline(arguments).spec.media_without_towers if setup.sizes.dp > 1 else ()
    if not keys or dataset.streams or dataset.sizes is not None:
        return None
    data = arguments.data
    collate = collator_of(dataset, data.dataloader_param, packs=False, dataset_param=data.dataset_param)
    groups: dict[tuple[str, ...], list[int]] = {}
    looked_at = min(len(dataset), _MOST_ROWS)
    for row in range(looked_at):
        with suppress(DataError):  # a row that cannot be used: whoever trains on it says so
            batch = collate([read_sample(dataset, Pick(0, row), arguments.training.seed)])
            groups.setdefault(tuple(key for key in keys if batch.get(key) is not None), []).append(row)
    if len(groups) < 2:
        return None
    enough = setup.rows * STEPS
    held, rows = max(groups.items(), key=lambda group: (min(len(group[1]), enough), len(group[0])))
    what = f"those with {', '.join(held)}" if held else f"those without {', '.join(keys)}"
    told = (
        f"rows: {what}, {len(rows):,} of the first {looked_at:,}; the others are left out, since in several processes "
        "all rows of a step must have such media, or none"
    )
    return tuple(rows), told


# --- deviations -------------------------------------------------------------------------------------------------------
# Compares what two ways of training produce in a step: loss, clip norm, every gradient, every weight.
# Right plans agree to about 1e-15 in fp64, a wrong divisor or a lost reduction is off by 1e-3 and more; a bound of
# 1e-9 between the two needs no arguing.

_SCALE_FLOOR = 1e-3
"""Deviations of tensors smaller than this are measured against it: nothing can be said about noise."""

_QUANTITIES = {"loss": "loss", "gradients": "gradients", "grad_norm": "clip norm", "weights": "weights"}
"""Key of a record → its name for people, in the order of a step."""


class RecordsDifferError(ValueError):
    """Two records cannot be compared: their steps or their parameters are not the same."""


class Deviation(NamedTuple):
    """The largest difference of a quantity, relative to the largest entry of its reference."""

    value: float
    quantity: str
    """A key of `_QUANTITIES`."""
    step: int
    name: str = ""
    """The parameter."""
    expected: float = 0.0
    """The entry of the reference where the two differ most."""
    found: float = 0.0
    """The same entry of what was measured."""

    @property
    def place(self) -> str:
        """The step of the deviation and, where there is one, its parameter, in words."""
        if not self.name:
            return f"step {self.step}"
        return f"step {self.step}, {self.name}"

    def __str__(self) -> str:
        return f"{self.value:.1e}  {self.quantity}, {self.place}: {self.found:.17g} instead of {self.expected:.17g}"


def deviations(
    reference: Sequence[StepRecord], measured: Sequence[StepRecord], *, first_step: int = 1
) -> Iterable[Deviation]:
    """The deviation of every quantity and parameter of consecutive steps.

    Args:
        reference: Of the plain computation.
        measured: The same steps computed in another way.
        first_step: Number of the first one.

    Raises:
        RecordsDifferError: One side has steps or parameters that the other lacks.
    """
    if len(reference) != len(measured):
        raise RecordsDifferError(f"{len(reference)} reference steps, {len(measured)} measured")
    for step, (expected, found) in enumerate(zip(reference, measured, strict=True), start=first_step):
        for quantity in ("loss", "grad_norm"):
            yield _deviation(expected[quantity], found[quantity], quantity, step)
        for quantity in ("gradients", "weights"):
            yield from _of_parameters(expected[quantity], found[quantity], quantity, step)


def _worst_of(found: Iterable[Deviation]) -> dict[str, Deviation]:
    """Quantity → its largest deviation, the first of equal ones."""
    worst: dict[str, Deviation] = {}
    for deviation in found:
        if deviation.quantity not in worst or deviation.value > worst[deviation.quantity].value:
            worst[deviation.quantity] = deviation
    return worst


def _of_parameters(
    expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None], quantity: str, step: int
) -> Iterable[Deviation]:
    if expected.keys() != found.keys():
        lacking = ", ".join(sorted(expected.keys() ^ found.keys()))
        raise RecordsDifferError(f"{_QUANTITIES[quantity]}, step {step}: only one side has {lacking}")
    for name, tensor in expected.items():
        other = found[name]
        if tensor is not None and other is not None:
            yield _deviation(tensor, other, quantity, step, name)
        elif tensor is other:
            yield Deviation(0.0, quantity, step, name)
        else:
            yield Deviation(math.inf, quantity, step, name, _size_of(tensor), _size_of(other))


def _deviation(expected: torch.Tensor, found: torch.Tensor, quantity: str, step: int, name: str = "") -> Deviation:
    if expected.shape != found.shape:
        return Deviation(math.inf, quantity, step, name)
    if not expected.numel():
        return Deviation(0.0, quantity, step, name)
    expected, found = expected.double().flatten(), found.double().flatten()
    difference = (expected - found).abs()
    place = int(difference.nan_to_num(nan=math.inf).argmax())
    scale = max(float(expected.abs().max()), _SCALE_FLOOR)
    value = float(difference[place]) / scale
    value = math.inf if math.isnan(value) else value
    return Deviation(value, quantity, step, name, float(expected[place]), float(found[place]))


def _size_of(tensor: torch.Tensor | None) -> float:
    """Largest entry; NaN of what is not there."""
    if tensor is None:
        return math.nan
    return float(tensor.abs().max())
