"""The trainer: builds the parts of a run in reading order and hands them to the engine.

`mm train run.yaml` ends here; so does `torchrun … mindspeed_mm/fsdp/train/trainer.py run.yaml`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.artifacts import RunFolder, make_writable_folder
from mindspeed_mm.core.errors import ExitCode, StoppedAfterSave, StoppedUnsaved
from mindspeed_mm.core.run_ownership import mark_run_folder
from mindspeed_mm.fsdp.checkpoint.layout import checkpoint_folder
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader, MMDataset, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.data_utils.view_files import view_writer
from mindspeed_mm.fsdp.data.dataset import as_mm_dataset
from mindspeed_mm.fsdp.distributed.job.launch import (
    gather_hosts,
    initialize_distributed,
    resolve_launch,
    shutdown_distributed,
)
from mindspeed_mm.fsdp.distributed.job.watchdog import Watchdog
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.sharding.fully_shard import gathered_before
from mindspeed_mm.fsdp.distributed.torch_parallelize import set_gradient_sync
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.optimizer.build import build_optimizer
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.optimizer.loss_scale import LossScale
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import Given, ResolvedConfig
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.generator import GeneratorParts
from mindspeed_mm.fsdp.train.hooks.adapter_start import adapter_start_hooks
from mindspeed_mm.fsdp.train.hooks.hooks import (
    CallbackHook,
    CheckpointHook,
    DataHook,
    GarbageCollectionHook,
    ValidationHook,
)
from mindspeed_mm.fsdp.train.hooks.log import LogHook
from mindspeed_mm.fsdp.train.hooks.profile import build_profile_hooks
from mindspeed_mm.fsdp.train.hooks.speed import speed_hooks
from mindspeed_mm.fsdp.train.hooks.trackers import Tracker, Trackers
from mindspeed_mm.fsdp.train.memory.advice import memory_report
from mindspeed_mm.fsdp.train.run.context import base_of_adapters, run_context
from mindspeed_mm.fsdp.train.run.failures import PeersLost, ending_of, explained, has_lost_peers
from mindspeed_mm.fsdp.train.run.hf_saves import HuggingFaceSaves
from mindspeed_mm.fsdp.train.run.introduction import global_batch, introduce
from mindspeed_mm.fsdp.train.run.launched import LaunchFolder, tell_of_hang
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.train.run.random_state import restore_rng, seed_everything
from mindspeed_mm.fsdp.train.run.record import RunRecord, trusted_code
from mindspeed_mm.fsdp.train.run.resume import ResumeOptions, ResumePoint, find_resume_point
from mindspeed_mm.fsdp.train.run.start_checks import (
    check_config,
    check_device,
    check_encoders,
    check_ranks_agree,
    check_rows_of_features,
    check_same_data,
)
from mindspeed_mm.fsdp.train.run.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.run.summary import SummaryHook
from mindspeed_mm.fsdp.train.step.forward_backward import (
    ForwardBackward,
    PlainForwardBackward,
    PregatheredForwardBackward,
)
from mindspeed_mm.fsdp.train.step.objective import build_language_objective
from mindspeed_mm.fsdp.train.step.pipeline import PipelineForwardBackward
from mindspeed_mm.fsdp.train.train_engine import Hook, Phase, StepResult, TrainEngine, without_limit
from mindspeed_mm.fsdp.utils.device import (
    allow_short_fp32,
    check_device_count,
    deterministic_kernels,
    set_local_device,
)
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype

PATIENCE_S = 60.0
"""How much longer a collective waits than the watchdog."""
RECORD_S = 2.0
"""How long a job that hangs tries to record its end."""


@dataclass(frozen=True)
class GivenObjects:
    """What a caller in Python has built itself."""

    model: nn.Module | None = None
    """Trained in place: it keeps its values, and has the trained ones afterwards."""
    train_set: Any = None
    """As a plugin's data set: samples by number, and a `collate_fn`."""
    validation_set: Any = None


@dataclass(frozen=True)
class TrainOptions(ResumeOptions):
    """What the command line adds to a configuration."""

    steps: int | None = None
    """Stop after this many steps of this start; the schedule stays that of the whole run."""
    dry_run: bool = False
    """Build everything, run nothing."""
    progress_to_stderr: bool = False
    """Leave stdout to the result."""
    raises_on_second_interrupt: bool = False
    """Raise `KeyboardInterrupt` at the second signal instead of ending the process, which belongs to somebody else."""
    packs: bool | None = None
    """Put the samples of a micro-batch into one row, or each into its own, whatever the configuration says: to compare
    the two."""


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
        if not isinstance(config, ResolvedConfig):
            config = load_with_plugins(Path(config) if isinstance(config, str) else config)
        self.config = config
        self.arguments: Arguments = config.arguments
        self.options = options or TrainOptions()
        self.hooks = tuple(hook if isinstance(hook, Hook) else CallbackHook(hook) for hook in hooks)
        self.given = given or GivenObjects()
        self.trackers = tuple(trackers)
        self.run_id = f"{config.path.stem}-{uuid.uuid4().hex[:8]}"
        self.generator: GeneratorParts | None = None
        self.iteration = 0
        """Steps done, by this start and those before it."""
        self._record: RunRecord | None = None

    def train(self) -> TrainEngine | None:
        """Train to the end; returns the engine (None after a dry run, and when there was nothing left to do).

        Raises:
            StoppedAfterSave: A signal asked for a stop and the state was saved.
            MMError: Anything that a person can act on.
        """
        check_config(self.config)
        if self.arguments.training.save:
            mark_run_folder(Path(self.arguments.training.save))
        with self._watchdog(), explained(), self._distributed(), self._run_folder() as record:
            try:
                with explained():  # what is recorded is what the process ends with
                    engine = self._train(record)
            except BaseException as error:
                record.end(*ending_of(error))
                raise
            is_finished = engine is None or engine.iteration >= engine.schedule.total_steps
            record.end("finished" if is_finished else "stopped", int(ExitCode.OK))
            return engine

    def _train(self, record: RunRecord) -> TrainEngine | None:
        train_set, validation_set = self._build_data()
        with self._setup("comparing the data"):
            check_encoders((train_set, validation_set))
            for line in check_rows_of_features((train_set, validation_set), accept=self.options.accept_data_change):
                self.progress.note(line)
            check_same_data({"data": train_set, "validation": validation_set}, self.world_size)
            loader = self._build_loader(train_set)
            context = self._context(train_set) | {"batching": loader.batching}
            total_steps = self._total_steps(loader)
        with self._setup("looking for a checkpoint"):
            resume = find_resume_point(self.arguments, self.options, context, self.progress.note)
        self.iteration = resume.iteration
        if self.iteration >= total_steps:
            self.progress.note(f"nothing to do: all {total_steps} steps are done")
            return None
        with self._setup("building the model"):
            weights = resume.weights or base_of_adapters(self.arguments.training)
            assembled = assemble(
                self.arguments,
                self.device,
                weights=weights,
                load_weights=resume.checkpoint is None,
                packs=bool(self.options.packs),
                given=self.given.model,
                processor=train_set.processor,
            )
            optimizer = build_optimizer(assembled.model, self.arguments.training, self.arguments.features)
            ema = Ema(assembled.model, self.arguments.training.ema) if self.arguments.training.ema.enable else None
        with self._setup("loading the checkpoint"):
            seed_everything(self.arguments.training.seed, self.state.random_rank)
            state = resume.load(assembled.model, optimizer, ema)
        if state:
            self._take_up_data(loader, resume, DataPosition.from_dict(state["data_position"]))
            # Of other data they may be repaired.
            loader.learn_bad_samples({} if self.options.accept_data_change else state.get("bad_samples", {}))
        objective = self._build_objective(assembled, train_set, validation_set)
        engine = self._build_engine(assembled, objective, optimizer, ema, total_steps, state)
        fresh, rows = resume.checkpoint is None, partial(self._validation_loader, train_set)
        starts = adapter_start_hooks(self.arguments, fresh, rows, self.progress.note)
        summary = SummaryHook(self.progress.note, self.arguments.training.save, is_generator=self.generator is not None)
        own = self._build_hooks(assembled, record, resume, loader, validation_set)
        engine.hooks = [*starts, *own, *self.hooks, summary]
        introduce(self.progress.note, self.config, assembled, loader, engine, self.state)
        if self.options.dry_run:
            self.progress.note("dry run: everything was built, nothing was run")
            return None
        record.begin(self.config, self._facts(context, engine), engine.iteration + 1)
        if resume.checkpoint is not None:
            record.event("resume", engine.iteration, checkpoint=str(resume.checkpoint.path))
        # What has been built lives to the end: the collector need not look at it, nor workers copy its pages.
        gc.freeze()
        gc.enable()
        raises = self.options.raises_on_second_interrupt
        with StopSignal(LaunchFolder.of_this_rank(), record.break_off, raises=raises) as engine.stop_signal:
            engine.train(loader)
        self.iteration = engine.iteration
        self._raise_if_stopped(engine)
        return engine

    # --- the parts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _watchdog(self) -> Iterator[None]:
        """Phases are watched where there are other ranks to wait for."""
        save = self.arguments.training.save
        self.watchdog: Watchdog | None = None
        self.phase: Phase = without_limit
        if resolve_launch(os.environ).world_size == 1:
            yield
            return
        folder = RunFolder(save).log if save else None
        if folder is not None:
            make_writable_folder(folder)
        self.watchdog = watchdog = Watchdog(folder, tell=tell_of_hang(save), leave=self._leave_hung)
        self.phase = watchdog.phase
        try:
            yield
        finally:
            watchdog.close()

    def _leave_hung(self, exit_code: int) -> None:
        """What the watchdog does last. On a thread: the run folder may be what hangs."""
        if self._record is not None:
            recording = threading.Thread(target=self._record.break_off, args=("failed", exit_code), daemon=True)
            recording.start()
            recording.join(RECORD_S)
        os._exit(exit_code)

    def _setup(self, what: str) -> AbstractContextManager[None]:
        return self.phase(what, self.arguments.training.setup_timeout_s)

    @contextmanager
    def _distributed(self) -> Iterator[None]:
        parallel, training = self.arguments.parallel, self.arguments.training
        joined_already = dist.is_initialized()
        with self._setup("joining the job"):
            check_device_count(resolve_launch(os.environ).local_rank + 1)
            # Collectives wait longer than the watchdog does: it can say who is missing.
            longest_s = max(training.setup_timeout_s, training.step_timeout_s, training.save_timeout_s)
            self.rank, local_rank, self.world_size = initialize_distributed(timeout_s=longest_s + PATIENCE_S)
        try:
            with self._setup("comparing the ranks"):
                check_ranks_agree(self.arguments, self.world_size)
                if self.watchdog is not None:
                    self.watchdog.hosts = gather_hosts()
                check_device(self.arguments)
                self.device = set_local_device(local_rank)
                self.state = init_parallel_state(resolve_parallel_sizes(parallel, self.world_size), self.device.type)
                self.data_group = self.state.get_dp_group() if self.state.data_size > 1 else None
            with numerics(self.arguments):
                yield
        except BaseException as error:
            absent = self.watchdog.absent() if self.watchdog is not None and has_lost_peers(error) else ""
            leave(joined_already, wait=False)  # the other ranks may never arrive
            if absent:
                raise PeersLost(f"lost other ranks: {absent}", way_out="See there what happened.") from error
            raise
        with self._setup("leaving together"):
            leave(joined_already, wait=True)

    @contextmanager
    def _run_folder(self) -> Iterator[RunRecord]:
        save = self.arguments.training.save
        folder = RunFolder(save) if save else None
        with folder.lock(self.run_id) if folder is not None and self.rank == 0 else nullcontext():
            self.progress = Progress(
                self.rank,
                log_file=folder.log / "train.log" if folder is not None else None,
                stream=sys.stderr if self.options.progress_to_stderr else sys.stdout,
            )
            try:
                names = self.arguments.training.report_to if self.rank == 0 else ()
                trackers = Trackers.of(names, self.trackers, self.progress.note)
                self._record = RunRecord(folder, self.rank, self.progress.note, trackers)
                yield self._record
            finally:
                self.progress.close()

    def _build_data(self) -> tuple[MMDataset, MMDataset | None]:
        """The data sets. Encoding samples up front may take hours: one process does it, those that wait for it wait in
        no collective, and nothing limits them."""
        if self.given.train_set is not None:
            own = self.given.validation_set
            return as_mm_dataset(self.given.train_set), None if own is None else as_mm_dataset(own)
        data = self.arguments.data
        sections = [section for section in (data.dataset_param, data.val_dataset_param) if section is not None]
        is_short = all(section.basic_parameters.preprocess_on_fly for section in sections)
        with self._setup("reading the data") if is_short else nullcontext():
            return build_mm_dataset(
                data.dataset_param, seed=self.arguments.training.seed, val_dataset_param=data.val_dataset_param
            )

    def _build_loader(self, dataset: MMDataset) -> MMDataLoader:
        training = self.arguments.training
        return build_mm_dataloader(
            dataset,
            self.arguments.data.dataloader_param,
            packs=self.options.packs,
            micro_batch_size=training.micro_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            dp_rank=self.state.data_rank,
            dp_size=self.state.data_size,
            seed=training.seed,
            dataset_param=self.arguments.data.dataset_param,
            group=self.data_group,
        )

    def _take_up_data(self, loader: MMDataLoader, resume: ResumePoint, position: DataPosition) -> None:
        before = resume.checkpoint.context.get("batching") if resume.checkpoint is not None else None
        if note := loader.go_on(position, before, may_skip=self.options.accept_data_change):
            self.progress.note(note)

    def _total_steps(self, loader: MMDataLoader) -> int:
        training = self.arguments.training
        if training.train_epochs is None:
            return training.train_iters
        return max(1, loader.steps_for(training.train_epochs))

    def _build_objective(self, assembled: Assembled, *datasets: MMDataset | None) -> Objective:
        if assembled.adapter is not None:
            self.generator = GeneratorParts(assembled.adapter, self.arguments, self.device)
            return self.generator.build_objective(*datasets)
        return build_language_objective(self.arguments, assembled, self.state)

    def _build_engine(
        self,
        assembled: Assembled,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        ema: Ema | None,
        total_steps: int,
        state: dict[str, Any] | None,
    ) -> TrainEngine:
        training = self.arguments.training
        engine = TrainEngine(
            model=assembled.model,
            objective=objective,
            forward_backward=self._forward_backward(assembled, objective),
            optimizer=optimizer,
            schedule=build_lr_schedule(self.arguments, total_steps),
            training=training,
            device=self.device,
            data_group=self.data_group,
            all_ranks=dist.group.WORLD if self.world_size > 1 else None,
            counts_samples=self.state.is_first_of_its_samples,
            context=assembled.context,
            pipeline=assembled.pipeline,
            towers=assembled.towers,
            ema=ema,
            stop_after=self.options.steps,
            rank=self.rank,
            phase=self.phase,
            autopsy=partial(memory_report, self.arguments, self.world_size, self.device.type),
            meter=assembled.utilisation.meter if assembled.utilisation is not None else None,
            loss_scale=build_loss_scale(self.arguments),
        )
        if state is not None:
            engine.load_state(state)
            if state.get("rng") is not None and not training.no_load_rng:
                restore_rng(state["rng"])
            else:
                seed_everything(training.seed, self.state.random_rank, engine.iteration)
        return engine

    def _forward_backward(self, assembled: Assembled, objective: Objective) -> ForwardBackward:
        if assembled.pipeline is None:
            offloads = self.arguments.features.enable_gradient_offload  # the host adds gradients up that are summed
            sync = (lambda _model, _enabled: None) if offloads else set_gradient_sync
            plain = PlainForwardBackward(assembled.model, objective, sync)
            pregathers = self.arguments.parallel.fsdp_plan.pregather
            return PregatheredForwardBackward(plain, assembled.model, gathered_before) if pregathers else plain
        pp_plan = self.arguments.parallel.pp_plan
        return PipelineForwardBackward(assembled.pipeline, objective, pp_plan, self.device)

    def _build_hooks(
        self,
        assembled: Assembled,
        record: RunRecord,
        resume: ResumePoint,
        loader: MMDataLoader,
        validation_set: MMDataset | None,
    ) -> list[Hook]:
        """In the order in which they come to their turn after a step."""
        training = self.arguments.training
        log = (training.log_interval, assembled.utilisation, assembled.media, loader)
        hooks: list[Hook] = [LogHook(record, self.progress, *log)]
        if resume.manager is not None:
            hooks.append(CheckpointHook(resume.manager, training, record, self.progress, self._hugging_face_saves()))
        if validation_set is not None and training.val_interval > 0:
            passes = self._validation_loader(validation_set)
            hooks.append(ValidationHook(passes.one_pass, training.val_interval, record, self.progress))
        if self.generator is not None:
            samples = self.generator.build_sample_hook(
                assembled.model, self.state, self.data_group, record, self.progress
            )
            hooks += [samples] if samples is not None else []
        hooks.append(DataHook(loader, self.data_group, record, self.progress))
        hooks += speed_hooks(self.arguments, assembled.model, self.progress.note)
        if training.manual_gc_interval > 0:
            hooks.append(GarbageCollectionHook(training.manual_gc_interval))
        return [*hooks, *build_profile_hooks(self.arguments, self.rank, self.world_size, self.progress.note)]

    def _hugging_face_saves(self) -> HuggingFaceSaves | None:
        training = self.arguments.training
        model_folder = base_of_adapters(self.arguments.training) or self.arguments.model.model_name_or_path
        if training.save_format != "hf" or not training.save or not model_folder:
            return None
        dtype = torch_dtype(training.save_ckpt_dtype)
        write_view = view_writer(self.arguments.data.dataset_param, Path(model_folder))
        return HuggingFaceSaves(Path(training.save), Path(model_folder), dtype, training.save_timeout_s, write_view)

    def _validation_loader(self, dataset: MMDataset) -> MMDataLoader:
        training, param = self.arguments.training, self.arguments.data.dataloader_param
        return build_mm_dataloader(
            dataset,
            # In this process: workers of its own would cost more to start than a pass takes to read.
            param.model_copy(update={"num_workers": 0, "drop_last": False}),
            micro_batch_size=training.val_micro_batch_size or training.micro_batch_size,
            gradient_accumulation_steps=1,
            dp_rank=self.state.data_rank,
            dp_size=self.state.data_size,
            seed=training.seed,
            dataset_param=self.arguments.data.dataset_param,
            group=self.data_group,
            for_passes=True,
        )

    # --- what is said and written ------------------------------------------------------------------------------------

    def _context(self, dataset: MMDataset) -> dict[str, Any]:
        """What a checkpoint's manifest records and a resume compares."""
        samples = global_batch(self.arguments.training, self.state.data_size)
        mesh = self.state.describe()
        return run_context(self.config, dataset, world_size=self.world_size, mesh=mesh, global_batch=samples)

    def _facts(self, context: dict[str, Any], engine: TrainEngine) -> dict[str, Any]:
        model_folder = self.arguments.model.model_name_or_path
        return {
            "model_name_or_path": str(Path(model_folder).resolve()) if model_folder else None,
            "model_class": type(engine.model).__name__.removeprefix("FSDP"),
            "seed": self.arguments.training.seed,
            "world_size": self.world_size,
            "mesh": context["mesh"],
            "global_batch": context["global_batch"],
            "total_steps": engine.schedule.total_steps,
            "dataset": context["dataset"],
            "trusted_code": trusted_code(self.arguments),
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
        raise StoppedUnsaved(
            f"stopped after step {engine.iteration}; nothing was saved",
            key="training.save_on_signal" if save else "training.save",
            way_out="Set training.save_on_signal=true." if save else "Set training.save to keep checkpoints.",
        )


def leave(joined_already: bool, *, wait: bool) -> None:
    """Undo what `_distributed` set up; a process group that the caller had made stays the caller's."""
    destroy_parallel_state()
    if not joined_already:
        shutdown_distributed(wait=wait)


def build_lr_schedule(arguments: Arguments, total_steps: int) -> Schedule:
    """The learning-rate schedule of the configuration."""
    training = arguments.training
    return Schedule(
        style=training.lr_decay_style,
        lr=training.lr,
        lr_min=training.lr_min,
        lr_start=training.lr_start,
        warmup_steps=round(training.lr_warmup_ratio * total_steps),
        decay_ratio=training.lr_decay_ratio,
        total_steps=total_steps,
    )


def build_loss_scale(arguments: Arguments) -> LossScale | None:
    """The scale that gradients in fp16 need; None for other types."""
    training, plan = arguments.training, arguments.parallel.fsdp_plan
    if "fp16" not in (plan.param_dtype, plan.reduce_dtype):
        return None
    return LossScale(training.initial_loss_scale, training.loss_scale_window, training.min_loss_scale)


@contextmanager
def numerics(arguments: Arguments) -> Iterator[None]:
    """What the configuration says of the device's arithmetic."""
    training = arguments.training
    if training.allow_hf32 is not None:
        allow_short_fp32(training.allow_hf32)
    with deterministic_kernels() if training.use_deter_comp else nullcontext():
        yield


if __name__ == "__main__":
    import importlib

    # By name: the command line stands above this layer, and nothing below it imports it.
    importlib.import_module("mindspeed_mm.cli.main").main(["train", *sys.argv[1:]])
