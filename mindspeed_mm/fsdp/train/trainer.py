"""The trainer: builds the parts of a run in reading order and hands them to the engine.

`mm train run.yaml` ends here; so does `torchrun … mindspeed_mm/fsdp/train/trainer.py run.yaml`.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_mm import __version__
from mindspeed_mm.core.artifacts import RunFolder
from mindspeed_mm.core.errors import (
    ConfigError,
    ExitCode,
    MachineError,
    MMError,
    StoppedAfterSave,
    StoppedUnsaved,
)
from mindspeed_mm.fsdp.data import DataPosition, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.distributed.launch import initialize_distributed, shutdown_distributed
from mindspeed_mm.fsdp.distributed.parallel_state import destroy_parallel_state, init_parallel_state
from mindspeed_mm.fsdp.distributed.torch_parallelize import set_gradient_sync
from mindspeed_mm.fsdp.loss.objectives import ModelLoss, build_objective
from mindspeed_mm.fsdp.optimizer.adamw import build_optimizer
from mindspeed_mm.fsdp.optimizer.schedules import Schedule
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.checks import unbuilt_features
from mindspeed_mm.fsdp.params.loader import ResolvedConfig, resolved_dict
from mindspeed_mm.fsdp.params.parallel_sizes import resolve_parallel_sizes
from mindspeed_mm.fsdp.params.path_checks import check_save_folder
from mindspeed_mm.fsdp.train.assemble import Assembled, assemble
from mindspeed_mm.fsdp.train.forward_backward import PlainForwardBackward
from mindspeed_mm.fsdp.train.hooks import CheckpointHook, GarbageCollectionHook, LogHook, ValidationHook
from mindspeed_mm.fsdp.train.progress import Progress
from mindspeed_mm.fsdp.train.random_state import restore_rng, seed_everything
from mindspeed_mm.fsdp.train.resume import ResumeOptions, ResumePoint, find_resume_point
from mindspeed_mm.fsdp.train.run_record import RunRecord
from mindspeed_mm.fsdp.train.stop_signal import StopSignal
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine
from mindspeed_mm.fsdp.utils.device import get_device_type, set_local_device, supports_bf16


@dataclass(frozen=True)
class TrainOptions(ResumeOptions):
    """What the command line adds to a configuration."""

    steps: int | None = None
    """Stop after this many steps of this start; the schedule stays that of the whole run."""
    dry_run: bool = False
    """Build everything, run nothing."""


class Trainer:
    """One run, from a resolved configuration to its last step.

    Args:
        config: The configuration.
        options: What the command line adds.
    """

    def __init__(self, config: ResolvedConfig, options: TrainOptions | None = None) -> None:
        self.config = config
        self.arguments: Arguments = config.arguments
        self.options = options or TrainOptions()
        self.run_id = f"{config.path.stem}-{uuid.uuid4().hex[:8]}"

    def train(self) -> TrainEngine | None:
        """Train to the end; returns the engine (None after a dry run).

        Raises:
            StoppedAfterSave: A signal asked for a stop and the state was saved.
            MMError: Anything that a person can act on.
        """
        refuse_unbuilt(self.config)
        with self._distributed(), self._run_folder() as record:
            try:
                engine = self._train(record)
            except MMError as error:
                status = "stopped" if isinstance(error, StoppedAfterSave) else "failed"
                record.end(status, int(error.exit_code))
                raise
            record.end("finished", int(ExitCode.OK))
            return engine

    def _train(self, record: RunRecord) -> TrainEngine | None:
        training = self.arguments.training
        train_set, validation_set = self._build_data()
        context = self._context(train_set)
        resume = find_resume_point(self.arguments, self.options, context, self.progress.note)
        assembled = assemble(
            self.arguments, self.device, weights=resume.weights, load_weights=resume.checkpoint is None
        )
        optimizer = build_optimizer(assembled.model, training)
        seed_everything(training.seed, self.rank)
        state = resume.load(assembled.model, optimizer)
        loader = self._build_loader(train_set, state)
        engine = self._build_engine(assembled, optimizer, total_steps=self._total_steps(loader), state=state)
        engine.hooks = self._build_hooks(record, resume, validation_set)
        self._introduce(assembled, loader, engine)
        record.begin(self.config, self._facts(context, engine))
        if resume.checkpoint is not None:
            record.event("resume", engine.iteration, checkpoint=str(resume.checkpoint.path))
        if self.options.dry_run:
            self.progress.note("dry run: everything was built, nothing was run")
            return None
        engine.train(loader)
        self._after_stop(engine)
        return engine

    # --- the parts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _distributed(self) -> Iterator[None]:
        parallel, training = self.arguments.parallel, self.arguments.training
        joined_already = dist.is_initialized()
        self.rank, local_rank, self.world_size = initialize_distributed(timeout_s=training.setup_timeout_s)
        try:
            self.device = set_local_device(local_rank)
            check_device(self.arguments)
            self.state = init_parallel_state(resolve_parallel_sizes(parallel, self.world_size), self.device.type)
            self.data_group = self.state.get_dp_group() if self.state.data_size > 1 else None
            check_ranks_agree(self.arguments, self.world_size)
            if training.use_deter_comp:
                torch.use_deterministic_algorithms(True)
            yield
        except BaseException:
            leave(joined_already, wait=False)  # the other ranks may never arrive
            raise
        leave(joined_already, wait=True)

    @contextmanager
    def _run_folder(self) -> Iterator[RunRecord]:
        save = self.arguments.training.save
        folder = RunFolder(Path(save)) if save else None
        if folder is not None:
            check_save_folder(folder.path)
        with folder.lock(self.run_id) if folder is not None and self.rank == 0 else nullcontext():
            self.progress = Progress(
                self.rank,
                log_file=folder.log / "train.log" if folder is not None else None,
                tensorboard=folder.tensorboard if folder is not None else None,
            )
            yield RunRecord(folder, self.rank)

    def _build_data(self) -> tuple[Any, Any]:
        data = self.arguments.data
        return build_mm_dataset(
            data.dataset_param, seed=self.arguments.training.seed, val_dataset_param=data.val_dataset_param
        )

    def _build_loader(self, dataset: Any, state: dict[str, Any] | None) -> Any:
        training = self.arguments.training
        return build_mm_dataloader(
            dataset,
            self.arguments.data.dataloader_param,
            micro_batch_size=training.micro_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            dp_rank=self.state.data_rank,
            dp_size=self.state.data_size,
            seed=training.seed,
            position=DataPosition.from_dict(state["data_position"]) if state else DataPosition(0, 0),
        )

    def _total_steps(self, loader: Any) -> int:
        training = self.arguments.training
        if training.train_epochs is None:
            return training.train_iters
        return max(1, loader.steps_for(training.train_epochs))

    def _build_engine(
        self, assembled: Assembled, optimizer: torch.optim.Optimizer, total_steps: int, state: dict[str, Any] | None
    ) -> TrainEngine:
        training = self.arguments.training
        objective = build_objective(self.arguments.features.loss_cfg.loss_type, assembled.model, assembled.head)
        if isinstance(objective, ModelLoss) and not objective.sums_tokens:
            self.progress.note("the model returns a mean loss of its own: it is averaged over micro-batches")
        engine = TrainEngine(
            model=assembled.model,
            objective=objective,
            forward_backward=PlainForwardBackward(assembled.model, objective, set_gradient_sync),
            optimizer=optimizer,
            schedule=build_schedule(self.arguments, total_steps),
            training=training,
            device=self.device,
            data_group=self.data_group,
            towers=assembled.towers,
            stop_signal=StopSignal(),
            stop_after=self.options.steps,
        )
        if state is not None:
            engine.load_state(state)
            if state.get("rng") is not None and not training.no_load_rng:
                restore_rng(state["rng"])
            else:
                seed_everything(training.seed + engine.iteration, self.rank)
        return engine

    def _build_hooks(self, record: RunRecord, resume: ResumePoint, validation_set: Any) -> list[Hook]:
        training = self.arguments.training
        hooks: list[Hook] = [LogHook(record, self.progress, training.log_interval)]
        if validation_set is not None and training.val_interval > 0:
            passes = self._validation_loader(validation_set)
            hooks.append(ValidationHook(passes.one_pass, training.val_interval, record, self.progress))
        if resume.manager is not None:
            hooks.append(
                CheckpointHook(
                    resume.manager,
                    training.save_interval,
                    record,
                    self.progress,
                    on_error=training.on_save_error,
                    save_on_signal=training.save_on_signal,
                    with_rng=not training.no_save_rng,
                )
            )
        if training.manual_gc_interval > 0:
            hooks.append(GarbageCollectionHook(training.manual_gc_interval))
        return hooks

    def _validation_loader(self, dataset: Any) -> Any:
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
        )

    # --- what is said and written ------------------------------------------------------------------------------------

    def _context(self, dataset: Any) -> dict[str, Any]:
        """What a checkpoint's manifest records and a resume compares."""
        training = self.arguments.training
        return {
            "world_size": self.world_size,
            "mesh": self.state.describe(),
            "config": resolved_dict(self.config),
            "dataset": fingerprint(dataset),
            "global_batch": self._global_batch(),
            "seed": training.seed,
            "versions": {"mindspeed-mm": __version__, "torch": torch.__version__},
        }

    def _global_batch(self) -> int:
        training = self.arguments.training
        return training.micro_batch_size * training.gradient_accumulation_steps * self.state.data_size

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
        }

    def _introduce(self, assembled: Assembled, loader: Any, engine: TrainEngine) -> None:
        training = self.arguments.training
        parameters = sum(p.numel() for p in assembled.model.parameters())
        trainable = sum(p.numel() for p in assembled.model.parameters() if p.requires_grad)
        dtype = self.arguments.parallel.fsdp_plan.param_dtype or "fp32"
        note = self.progress.note
        for warning in self.config.warnings:
            note(f"warning: {warning}")
        note(
            f"model  {type(assembled.model).__name__.removeprefix('FSDP')}, {parameters / 1e6:.2f} M parameters "
            f"({trainable / 1e6:.2f} M trained), {dtype}, attention {assembled.attention}"
        )
        note(
            f"data   {len(loader.dataset):,} samples, {loader.steps_per_epoch} steps an epoch, "
            f"global batch {self._global_batch()} = {training.micro_batch_size} × {self.state.data_size} ranks × "
            f"{training.gradient_accumulation_steps} accumulated"
        )
        note(
            f"plan   {get_device_type()} × {self.world_size}, {self.state.describe()}; "
            f"steps {engine.iteration + 1} to {engine.schedule.total_steps}"
        )

    def _after_stop(self, engine: TrainEngine) -> None:
        if not engine.stopping:
            return
        if self.arguments.training.save and self.arguments.training.save_on_signal:
            raise StoppedAfterSave(
                f"stopped after step {engine.iteration}; the checkpoint is saved",
                where=str(self.arguments.training.save),
                way_out="Run the same command again to continue.",
            )
        raise StoppedUnsaved(
            f"stopped after step {engine.iteration}; nothing was saved",
            way_out="Set training.save to keep checkpoints.",
        )


def fingerprint(dataset: Any) -> dict[str, Any]:
    """What tells a data set from another; a plugin's without a `fingerprint` is told by its class and length."""
    if hasattr(dataset, "fingerprint"):
        return dataset.fingerprint()
    return {"class": type(dataset).__qualname__, "rows": len(dataset)}


def leave(joined_already: bool, *, wait: bool) -> None:
    """Undo what `_distributed` set up; a process group that the caller had made stays the caller's."""
    destroy_parallel_state()
    if not joined_already:
        shutdown_distributed(wait=wait)


def build_schedule(arguments: Arguments, total_steps: int) -> Schedule:
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


def refuse_unbuilt(config: ResolvedConfig) -> None:
    """Raise one error that names every key whose feature this version does not have yet."""
    problems = config.locate(unbuilt_features(config.arguments))
    if problems:
        raise ConfigError(f"{len(problems)} of the features asked for are not in this version", problems=problems)


def check_device(arguments: Arguments) -> None:
    """Raise when the device cannot compute what the plan asks for."""
    if arguments.parallel.fsdp_plan.param_dtype == "bf16" and not supports_bf16():
        raise MachineError(
            f"this {get_device_type()} does not compute in bf16",
            key="parallel.fsdp_plan.param_dtype",
            way_out="Set fp16 or fp32.",
        )


def check_ranks_agree(arguments: Arguments, world_size: int) -> None:
    """Raise when ranks were started with different configurations or versions; the message is the difference."""
    if world_size == 1:
        return
    mine = {"config": arguments.model_dump(mode="json"), "version": __version__, "torch": torch.__version__}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True, default=str).encode()).hexdigest()
    digests: list[Any] = [None] * world_size
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    rank = next(r for r in range(world_size) if digests[r] != digests[0])
    differences = sorted(_differences(everyone[0], everyone[rank]))
    raise MachineError(
        f"rank 0 and rank {rank} were started differently: {'; '.join(differences[:5])}",
        way_out="Start every rank with the same YAML, overrides and versions.",
    )


def _differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted({*left, *right}):
            yield from _differences(left.get(key), right.get(key), f"{path}.{key}" if path else key)
    elif left != right:
        yield f"{path.removeprefix('config.')} is {left!r} here and {right!r} there"


if __name__ == "__main__":
    import importlib
    import sys

    # By name: the command line stands above this layer, and nothing below it imports it.
    importlib.import_module("mindspeed_mm.cli.main").main(["train", *sys.argv[1:]])
