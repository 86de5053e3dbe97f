"""What a run with functions of the user does around its steps, beside what every run does.

With `--ckpt-format torch` Megatron's files for the ranks of the flags are written beside each checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from mindspeed_mm.checkpoint.common.config import CommonModelConfig, ParallelConfig
from mindspeed_mm.checkpoint.conversion.run import Writing
from mindspeed_mm.checkpoint.hf_folder import model_config
from mindspeed_mm.checkpoint.layout import checkpoint_folder, list_iterations, write_tracker
from mindspeed_mm.checkpoint.megatron.families import family_of
from mindspeed_mm.checkpoint.ptd.conversions import hf_to_megatron
from mindspeed_mm.core.errors import MMError
from mindspeed_mm.core.folder_writing import remove_written
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR_INDEX
from mindspeed_mm.fsdp.distributed.pipeline.plan import StagePlan
from mindspeed_mm.fsdp.params.argument import ModelArguments, TrainingArguments
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective, reduce_reports
from mindspeed_mm.fsdp.train.run.data import Pass
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine


class ReportHook(Hook):
    """Writes down what loss functions reported: the mean over micro-batches and ranks since the last line, of a pair
    the sum divided by the summed divisor.

    Args:
        objective: Keeps the reports.
        record: Writes `metrics.jsonl`.
        interval: Steps between two lines.
        ranks: All of them; None for one process.
    """

    def __init__(
        self, objective: ProviderObjective, record: RunRecord, interval: int, ranks: dist.ProcessGroup | None
    ) -> None:
        self._objective, self._record, self._interval, self._ranks = objective, record, interval, ranks
        self.values: dict[str, float] = {}
        """The latest."""

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return step % self._interval == 0 or step == engine.last_step

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Write when it is time."""
        if not self.is_called_at_once(engine, result.step) and not engine.stopping:
            return
        self.values = reported(self._objective.take_reports(), self._ranks)
        if self.values:
            named = {f"reported/{name}": value for name, value in self.values.items()}
            self._record.metrics({"step": result.step, **named})


def reported(reports: Sequence[JsonObject], ranks: dist.ProcessGroup | None) -> dict[str, float]:
    """The means of what loss functions reported, on all ranks. Ranks may have nothing to report: stages but the last.

    Args:
        reports: Of this rank, one a micro-batch.
        ranks: All of them; None for one process.
    """
    own = reduce_reports(reports)
    everyone = [own]
    if ranks is not None:
        everyone = [own] * dist.get_world_size(ranks)
        dist.all_gather_object(everyone, own, group=ranks)
    sums: dict[str, torch.Tensor] = {}
    for report in everyone:
        for name, number in report.items():
            if name in sums:
                number = sums[name] + number
            sums[name] = number
    means = {}
    for name, number in sums.items():
        total, divisor = number.tolist()
        means[name] = total / divisor if divisor else 0.0
    return means


class SaveLineHook(Hook):
    """Tells of each checkpoint in the words that scripts of older tools look for.

    Args:
        save: The run folder.
        record: Where it is told.
    """

    def __init__(self, save: Path, record: RunRecord) -> None:
        self._save, self._record = save, record

    @override
    def is_called_at_once(self, engine: TrainEngine, step: int) -> bool:
        return False  # where a step is saved, all are

    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        """Tell, where the step's checkpoint is complete; one that is written in the background is told by the run."""
        if checkpoint_folder(self._save, result.step).is_dir():
            line = f"saving checkpoint at iteration {result.step:>7} to {self._save} in torch_dcp format"
            self._record.progress.note(line)


class ArgumentsHook(Hook):
    """Keeps the numbers current that functions of the user read from `get_args()`.

    Args:
        args: The namespace.
    """

    def __init__(self, args: Any) -> None:
        self._args = args

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        self._tell(engine)

    @override
    def on_step_launched(self, engine: TrainEngine) -> None:
        self._tell(engine)

    def _tell(self, engine: TrainEngine) -> None:
        self._args.iteration = self._args.curr_iteration = engine.iteration
        self._args.consumed_train_samples = engine.consumed_samples


class AfterStepHook(Hook):
    """Calls functions of the user with the model after each update, as `train(call_backs=…)` asks for.

    Args:
        functions: Called with the model.
    """

    def __init__(self, functions: Sequence[Callable[[Any], object]]) -> None:
        self._functions = tuple(functions)

    @override
    def on_step_end(self, engine: TrainEngine, result: StepResult) -> None:
        for function in self._functions:
            function(engine.model)


class TestSetHook(Hook):
    """Measures the loss on the test set when the run has reached its end.

    Args:
        batches: Makes a pass over the test set.
        record: Where the loss is told and written down.
    """

    __test__ = False  # not a test case, whatever pytest thinks of its name

    def __init__(self, batches: Pass, record: RunRecord) -> None:
        self._batches, self._record = batches, record

    def on_train_end(self, engine: TrainEngine) -> None:
        """Measure, unless the run was stopped before."""
        if engine.iteration < engine.schedule.total_steps:
            return
        losses = {f"test_{name}": value for name, value in engine.validate(self._batches()).items()}
        self._record.metrics({"step": engine.iteration, **losses})
        shown = ", ".join(f"{name.removeprefix('test_')} {value:.4f}" for name, value in losses.items())
        self._record.event("test", engine.iteration, f"step {engine.iteration}: test set {shown}", **losses)

    def on_failure(self, engine: TrainEngine) -> None:
        """Nothing: the error is what is told."""


class MegatronSaves:
    """Writes `<save>_megatron/iter_0000123/release/mp_rank_…/model_optim_rng.pt` of the Hugging Face folder that was
    saved at the same step, and the tracker that names the newest; what belongs to a checkpoint that was deleted is
    deleted too. `--load` takes the weights of `<save>_megatron`, or of a step of it; a run is resumed from its own
    checkpoints. The folder is next to the run folder, since no conversion may write into that.

    Args:
        save: The run folder.
        division: How the weights are divided.
    """

    def __init__(self, save: Path, division: ParallelConfig) -> None:
        self._save, self._division = save, division
        self._home = save.with_name(f"{save.name}_megatron")

    def __call__(self, folder: Path) -> None:
        """Write the layout of one folder; the first rank does.

        Raises:
            MMError: The weights cannot be divided so.
        """
        self._home.mkdir(exist_ok=True)
        target = self._home / folder.name
        hf_to_megatron(
            family_of(model_config(folder), str(folder)),
            folder,
            target,
            self._division,
            facts=CommonModelConfig(),
            writing=Writing(overwrite=True, verify=False),  # training waits; the folder itself was checked
        )
        for old in self._home.glob("iter_*"):
            if old != target and not (self._save / old.name).is_dir():
                remove_written(old)
        write_tracker(self._home, max(list_iterations(self._home)))


def why_not(model: ModelArguments, training: TrainingArguments) -> str:
    """Why a run cannot write Megatron's layout; empty where it can."""
    folder = model.model_name_or_path
    if training.save is None:
        return "nothing is saved"
    if folder is None:
        return "the model has no folder, which names its family"
    if training.lora.enable:
        return "adapters are saved alone"
    if (Path(folder) / GENERATOR_INDEX).is_file():
        return "mm-convert mm_to_hf and resplit read a generator's run as it is"
    try:
        family_of(model_config(Path(folder)), str(folder))
    except MMError as error:
        return str(error)
    return ""


def division_of(sizes: ParallelSizes, stages: StagePlan | None, folder: Path) -> ParallelConfig:
    """How a run's own plan divides the weights: towers lie on the first stage.

    Args:
        sizes: Of the parallel groups.
        stages: Of a pipeline.
        folder: Of the model.
    """
    if stages is None:
        return ParallelConfig(tp_size=sizes.tp, ep_size=sizes.ep)
    config = model_config(folder)
    depths = family_of(config, str(folder)).model(config).depths
    # With virtual stages, each rank has one stage a lap.
    laps = range(stages.stages // stages.ranks)
    text = []
    for lap in laps:
        own = range(lap * stages.ranks, (lap + 1) * stages.ranks)
        text.append([len(stages.layers_of(stage)) for stage in own])
    towers: JsonObject = {}
    for tower, key in (("vision", "vit_pp_layers"), ("audio", "audio_pp_layers")):
        if tower in depths:
            first = [[0] * stages.ranks for _ in laps]
            first[0][0] = depths[tower]
            towers[key] = first
    return ParallelConfig(llm_pp_layers=text, tp_size=sizes.tp, ep_size=sizes.ep, **towers)
