"""The trainer: builds the parts of a run in reading order and hands them to the engine.

`mm train run.yaml` ends here; so does `torchrun … mindspeed_mm/fsdp/train/trainer.py run.yaml`.
"""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from mindspeed_mm.checkpoint.layout import checkpoint_folder
from mindspeed_mm.core.errors import ExitCode, StoppedAfterSave, StoppedUnsaved
from mindspeed_mm.core.garbage import passed_over_by_collection
from mindspeed_mm.core.run_ownership import mark_run_folder
from mindspeed_mm.fsdp.checkpoint.base_weights import told_by_load
from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
from mindspeed_mm.fsdp.checkpoint.manifest import RunContext
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import Given, ResolvedConfig
from mindspeed_mm.fsdp.params.rules.distillation import trains_critic
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.build_engine import (
    TOTAL_STEPS,
    build_average,
    build_engine,
    continue_from,
    jump_of_rate,
    why_steps_wait,
)
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.family import Family, family_of
from mindspeed_mm.fsdp.train.hooks.build import CallbackHook, build_hooks
from mindspeed_mm.fsdp.train.hooks.log import summary_hook
from mindspeed_mm.fsdp.train.run.began import as_run_began
from mindspeed_mm.fsdp.train.run.data import (
    Pass,
    RunData,
    RunLoader,
    build_data,
    build_loader,
    build_validation_loader,
    go_on_in_data,
    total_steps_of,
)
from mindspeed_mm.fsdp.train.run.failures import ending_of, explained
from mindspeed_mm.fsdp.train.run.introduction import global_batch, introduce
from mindspeed_mm.fsdp.train.run.job import Job, joined
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import seed_everything
from mindspeed_mm.fsdp.train.run.record import WARNING, RunRecord, trusted_code
from mindspeed_mm.fsdp.train.run.resume import ResumePoint, base_of_adapters, find_resume_point, run_context
from mindspeed_mm.fsdp.train.run.start_checks import (
    check_config,
    check_encoders,
    check_rows_of_features,
    check_same_data,
)
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.run.trackers import Tracker
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.utils.at_hand import arguments_at_hand

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.train.distillation.critic import Critic


@dataclass(frozen=True)
class GivenObjects:
    """What a caller in Python has built itself."""

    model: nn.Module | None = None
    """Trained in place: it keeps its values, and has the trained ones afterwards."""
    build_model: Callable[[], nn.Module] | None = None
    """Makes the model when the ranks have met: with values, which it keeps, or on meta."""
    train_set: Any = None
    """As a plugin's data set: samples by number, and a `collate_fn`."""
    validation_set: Any = None
    """The same, for validation."""


class Trainer:
    """One run, from a resolved configuration to its last step.

    Args:
        config: The configuration: resolved, or a YAML file, or a mapping of its sections.
        options: What the command line adds.
        hooks: Called around steps after those of the run itself; a function is called with the result of each step,
            and ends the run by returning True.
        given: Objects of the caller that take the place of what the configuration names.
        trackers: Follow the numbers of the run, beside those of `training.report_to`.
    """

    def __init__(
        self,
        config: ResolvedConfig | Given | str,
        options: TrainOptions | None = None,
        hooks: Sequence[Hook | Callable[[StepResult], object]] = (),
        *,
        given: GivenObjects | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        if isinstance(config, str):
            config = Path(config)
        if not isinstance(config, ResolvedConfig):
            config = load_with_plugins(config)
        self.options = options or TrainOptions()
        self.config = as_run_began(config, self.options)
        self.arguments: Arguments = self.config.arguments
        self.hooks = tuple(hook if isinstance(hook, Hook) else CallbackHook(hook) for hook in hooks)
        self.given = given or GivenObjects()
        self.trackers = tuple(trackers)
        self.run_id = f"{config.path.stem}-{uuid.uuid4().hex[:8]}"
        self.iteration = 0
        """Steps done, by this start and those before it."""

    def train(self) -> TrainEngine | None:
        """Train to the end; returns the engine (None after a dry run, and when there was nothing left to do).

        Raises:
            StoppedAfterSave: A signal asked for a stop and the state was saved.
            MMError: Anything that a person can act on.
        """
        check_config(self.config)
        training = self.arguments.training
        if training.save:
            mark_run_folder(Path(training.save))
        stream = sys.stderr if self.options.progress_to_stderr else sys.stdout
        with (
            arguments_at_hand(self.arguments),
            joined(self.arguments) as job,
            RunRecord.opened(
                training.save,
                job.rank,
                self.run_id,
                stream,
                training.report_to,
                self.trackers,
                plain_lines=self.options.plain_lines,
            ) as record,
        ):
            job.record_hang_by(record.break_off)
            try:
                with record.noting_warnings(), explained():  # what is recorded is what the process ends with
                    engine = self._train(job, record)
            except BaseException as error:
                record.keep_traceback(error)
                record.end(*ending_of(error))
                raise
            is_finished = engine is None or engine.iteration >= engine.schedule.total_steps
            record.end("finished" if is_finished else "stopped", int(ExitCode.OK))
            return engine

    def _train(self, job: Job, record: RunRecord) -> TrainEngine | None:
        data = self._build_data(job)
        with job.setup("comparing the data"):
            self._check_data(data, job, record)
            loader = self._build_loader(job, data)
            total_steps = total_steps_of(self.arguments.model, self.arguments.training, loader)
            context = self._context(data, loader, job) | {TOTAL_STEPS: total_steps}
        with job.setup("looking for a checkpoint"):
            resume = find_resume_point(
                self.arguments.training, self.options, context, note=record.note, say=record.progress.note
            )
        self.iteration = resume.iteration
        if self.iteration >= total_steps:
            record.progress.note(f"nothing to do: all {total_steps} steps are done")
            return None
        engine, parts = self._build(job, record, data, loader, resume, total_steps)
        # The caller's hooks find the step logged, saved and validated; the summary has the last word.
        engine.hooks = [*self._build_hooks(parts), *self.hooks, summary_hook(parts)]
        self._note_waits(engine, record)
        verbose = self.options.verbose or self.options.dry_run
        introduce(record.progress, self.config, parts.assembled, loader, engine, job.state, verbose=verbose)
        if self.options.dry_run:
            record.progress.note("dry run: everything was built, nothing was run")
            return None
        record.begin(self.config, self._facts(context, engine, job), engine.iteration + 1)
        if resume.checkpoint is not None:
            record.event("resume", engine.iteration, checkpoint=str(resume.checkpoint.path))
        self._run(engine, record)
        return engine

    def _build(
        self,
        job: Job,
        record: RunRecord,
        data: RunData,
        loader: RunLoader,
        resume: ResumePoint,
        total_steps: int,
    ) -> tuple[TrainEngine, RunParts]:
        """The model, its optimizer, its objective and the engine around them, in the state of the checkpoint."""
        training = self.arguments.training
        with job.setup("building the model"):
            assembled = self._assemble(job, data, resume)
            optimizer = build_optimizer(
                assembled.model, training, self.arguments.features, assembled.plan.groups, note=record.note
            )
            ema = build_average(assembled.model, self.arguments.training, self.arguments.posttrain)
            critic = self._build_critic(job, assembled, record)
            assembled = replace(assembled, average=ema, critic=critic)
        with job.setup("loading the checkpoint"):
            seed_everything(training.seed, job.state.random_rank)
            state = resume.load(assembled.model, optimizer, ema, critic)
        if state is not None:
            self._continue_data(loader, resume, state, record)
        family = family_of(assembled.model, self.arguments, job.device)
        for line in family.warnings():
            record.note(f"{WARNING}{line}")
        objective = self._build_objective(family, assembled, job, data)
        if draws_samples(self.arguments.posttrain):
            from mindspeed_mm.fsdp.train.rollouts.loader import RolloutLoader  # a plain run starts without it

            assert isinstance(loader, RolloutLoader)
            source = family.rollout_source(assembled, job, data, objective)
            loader.draw_from(source, assembled.model, record.note)
        engine = build_engine(
            self.arguments, job, assembled, objective, optimizer, ema, loader, total_steps, self.options.steps
        )
        if state is not None:
            continue_from(engine, state, self.arguments.training, job)
            self._note_jump_of_rate(engine, resume, record)
        held_out = partial(self._held_out, job, data)
        return engine, RunParts(self.arguments, job, record, resume, data, loader, assembled, family, held_out)

    def _run(self, engine: TrainEngine, record: RunRecord) -> None:
        raises = self.options.raises_on_second_interrupt
        with (
            passed_over_by_collection(),
            StopSignal(LaunchFolder.of_this_rank(), record.break_off, raises=raises) as engine.stop_signal,
        ):
            engine.train()
        self.iteration = engine.iteration
        self._raise_if_stopped(engine)

    # --- the parts: each is a step of its own, which a subclass may replace ------------------------------------------

    def _build_data(self, job: Job) -> RunData:
        if self.given.train_set is None:
            return build_data(self.arguments.data, self.arguments.training, self.arguments.posttrain, job)
        held_out = None
        if self.given.validation_set is not None:
            held_out = as_mm_dataset(self.given.validation_set)
        return RunData(as_mm_dataset(self.given.train_set), held_out)

    def _check_data(self, data: RunData, job: Job, record: RunRecord) -> None:
        """Raise for data that cannot be trained on, or that are not the same on all ranks."""
        sets = (data.train, data.validation)
        check_encoders(sets)
        for line in check_rows_of_features(sets, accept=self.options.accept_data_change):
            record.note(line)
        check_same_data({"data": data.train, "validation": data.validation}, job.world_size)

    def _build_loader(self, job: Job, data: RunData) -> RunLoader:
        """What yields the training data; it may read the first of them as late as its `__iter__`."""
        if draws_samples(self.arguments.posttrain):
            from mindspeed_mm.fsdp.train.rollouts.build import build_rollout_loader  # a plain run starts without it

            return build_rollout_loader(self.arguments, job, data.train)
        return build_loader(
            self.arguments.data,
            self.arguments.training,
            self.arguments.posttrain,
            job.data_share,
            data.train,
            self.options.packs,
        )

    def _held_out(self, job: Job, data: RunData) -> Pass | None:
        """Makes passes over the held-out samples; None where there are none. Asked for where validation is due."""
        if data.validation is None:
            return None
        return build_validation_loader(
            self.arguments.data, self.arguments.training, job.data_share, data.validation
        ).one_pass

    def _build_objective(self, family: Family, assembled: Assembled, job: Job, data: RunData) -> Objective:
        """What the model is trained for."""
        return family.build_objective(assembled, job, data)

    def _assemble(self, job: Job, data: RunData, resume: ResumePoint) -> Assembled:
        weights = resume.weights or base_of_adapters(self.arguments.training)
        named_by = None if weights is None else self.arguments.training.load
        with told_by_load(named_by):
            return assemble(
                self.arguments,
                job.device,
                weights=weights,
                load_weights=resume.checkpoint is None,
                packs=bool(self.options.packs),
                given=self.given.model,
                build=self.given.build_model,
                processor=data.train.processor,
            )

    def _build_critic(self, job: Job, assembled: Assembled, record: RunRecord) -> Critic | None:
        """What is trained beside the model; None but in a distillation."""
        if not trains_critic(self.arguments.posttrain):
            return None
        from mindspeed_mm.fsdp.train.distillation.critic import build_critic  # a plain run starts without it

        return build_critic(self.arguments, assembled.model, job.device, note=record.note)

    def _continue_data(self, loader: RunLoader, resume: ResumePoint, state: LoopState, record: RunRecord) -> None:
        """Go on in the data where the checkpoint was saved."""
        assert resume.checkpoint is not None
        note = go_on_in_data(loader, resume.checkpoint, state, accepts_change=self.options.accept_data_change)
        if note:
            record.note(note)

    def _note_jump_of_rate(self, engine: TrainEngine, resume: ResumePoint, record: RunRecord) -> None:
        assert resume.checkpoint is not None
        line = jump_of_rate(resume.checkpoint.context, engine.iteration, engine.schedule, self.arguments.training)
        if line:
            record.note(f"{WARNING}{line}")

    def _note_waits(self, engine: TrainEngine, record: RunRecord) -> None:
        """Say why the host waits for every step, where it does. On a CPU there is nothing to wait for."""
        if engine.device.type == "cpu":
            return
        reason = why_steps_wait(
            self.arguments.parallel,
            self.arguments.training,
            self.arguments.posttrain,
            engine.optimizer,
            engine.ema,
            engine.device,
        )
        first = engine.iteration + 1
        if not reason and first + 1 < engine.last_step:
            for hook in engine.hooks:
                if hook.is_called_at_once(engine, first) and hook.is_called_at_once(engine, first + 1):
                    reason = f"{type(hook).__name__} asks for its numbers"
        if reason:
            record.note(f"the host waits for every step to end before it launches the next one: {reason}")

    def _build_hooks(self, parts: RunParts) -> list[Hook]:
        return build_hooks(parts)

    # --- what is said and written ------------------------------------------------------------------------------------

    def _context(self, data: RunData, loader: RunLoader, job: Job) -> RunContext:
        """What a checkpoint's manifest records and a resume compares."""
        samples = global_batch(self.arguments.training, job.state.data_size)
        mesh = job.state.describe()
        context = run_context(self.config, data.train, world_size=job.world_size, mesh=mesh, global_batch=samples)
        return context | {"batching": loader.batching}

    def _facts(self, context: RunContext, engine: TrainEngine, job: Job) -> dict[str, object]:
        """What `run.json` tells of the run."""
        model_folder = self.arguments.model.model_name_or_path
        return {
            "model_name_or_path": str(Path(model_folder).resolve()) if model_folder else None,
            "model_class": type(engine.model).__name__.removeprefix("FSDP"),
            "seed": self.arguments.training.seed,
            "world_size": job.world_size,
            "mesh": context["mesh"],
            "global_batch": context["global_batch"],
            "total_steps": engine.schedule.total_steps,
            "dataset": context["dataset"],
            "trusted_code": trusted_code(self.arguments.model, self.arguments.data, self.arguments.training),
        }

    def _raise_if_stopped(self, engine: TrainEngine) -> None:
        if not engine.stopping or engine.stop_wanted or engine.iteration >= engine.schedule.total_steps:
            return
        save = self.arguments.training.save
        if save and checkpoint_folder(Path(save), engine.iteration).is_dir():
            raise StoppedAfterSave(
                f"stopped after step {engine.iteration}; the checkpoint is saved",
                where=save,
                way_out="Run the same command again to continue.",
            )
        key, way_out = "training.save", "Set training.save to keep checkpoints."
        if save:
            key, way_out = "training.save_on_signal", "Set training.save_on_signal=true."
        raise StoppedUnsaved(f"stopped after step {engine.iteration}; nothing was saved", key=key, way_out=way_out)


def main() -> None:
    """What `torchrun … mindspeed_mm/fsdp/train/trainer.py run.yaml` runs: `mm train` with the same words."""
    # By name: the command line stands above this layer, and nothing below it imports it.
    importlib.import_module("mindspeed_mm.cli.main").main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    main()
