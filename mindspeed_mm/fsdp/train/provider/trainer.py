"""The trainer of runs whose model, data or forward step are functions of the user, on the engine of every run. A model
that such a function has built must be the same on all ranks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.data.dataloader.order import Deal
from mindspeed_mm.fsdp.loss.objectives import Objective
from mindspeed_mm.fsdp.models.loading.meta_device import parameters_on_meta
from mindspeed_mm.fsdp.params.loader import Given, ResolvedConfig
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.family import Family
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks, Provided, name_of
from mindspeed_mm.fsdp.train.provider.hooks import (
    ArgumentsHook,
    MegatronSaves,
    ReportHook,
    SaveLineHook,
    TestSetHook,
    division_of,
    why_not,
)
from mindspeed_mm.fsdp.train.provider.live import LIVE, ModelFront
from mindspeed_mm.fsdp.train.provider.loader import ProvidedDataset, ProvidedLoader
from mindspeed_mm.fsdp.train.provider.objective import PerTokenForwardBackward, ProviderObjective
from mindspeed_mm.fsdp.train.run.data import Pass, RunData, RunLoader
from mindspeed_mm.fsdp.train.run.job import Job
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.run.random_state import seed_everything
from mindspeed_mm.fsdp.train.run.record import RunRecord
from mindspeed_mm.fsdp.train.run.resume import ResumePoint
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import Hook, StepResult, TrainEngine
from mindspeed_mm.fsdp.train.trainer import GivenObjects, Trainer
from mindspeed_mm.fsdp.utils.torchvision_guard import prepare_for_transformers


@dataclass(frozen=True)
class ProviderOptions:
    """What flags say that no key of the configuration does."""

    per_token: bool = False
    """`--calculate-per-token-loss`."""
    eval_iters: int = 100
    """Steps of a pass over the user's own validation or test data."""
    writes_megatron: bool = False
    """`--ckpt-format torch`: beside each checkpoint, Megatron's files."""
    eval_interval: int = 0
    """Steps between two passes over the user's own validation data, in place of `training.val_interval`, which needs
    rows that the configuration names; 0: it stays."""


class ProviderTrainer(Trainer):
    """A run whose parts are functions of the user; those that are not given are as the configuration says.

    Args:
        config: As of `Trainer`. Where the forward step is the user's, the loss is computed by it, whatever
            `features.loss_cfg` says.
        callbacks: The user's functions.
        scaling: What flags say beside the configuration.
        args: The namespace that `get_args()` returns.
        options: As of `Trainer`.
        hooks: As of `Trainer`.
    """

    def __init__(
        self,
        config: ResolvedConfig | Given | str,
        callbacks: Callbacks,
        scaling: ProviderOptions | None = None,
        *,
        args: Namespace | None = None,
        options: TrainOptions | None = None,
        hooks: Sequence[Hook | Callable[[StepResult], object]] = (),
    ) -> None:
        if not isinstance(config, ResolvedConfig):
            config = load_with_plugins(Path(config) if isinstance(config, str) else config)
        builds = callbacks.model_provider is not None
        given = GivenObjects(build_model=self._build_model if builds else None)
        self.callbacks, self.scaling = callbacks, scaling or ProviderOptions()
        super().__init__(as_provided(config, callbacks, self.scaling), options, hooks, given=given)
        self.args = args or Namespace()
        self.front: ModelFront | None = None
        """What the forward step is called with in place of the planned model."""
        self.engine: TrainEngine | None = None
        self.notes: tuple[str, ...] = ()
        """Sentences about what was given and has no effect, to be told before the first step."""
        self._provided = Provided()

    def train(self) -> TrainEngine | None:
        """As of `Trainer`; `get_args()` works meanwhile."""
        check_callbacks(self.config, self.callbacks)
        with _live(self):
            return super().train()

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _build_data(self, job: Job) -> RunData:
        provider = self.callbacks.data_provider
        if provider is None:
            return super()._build_data(job)
        return RunData(ProvidedDataset(name_of(provider)))

    def _build_loader(self, job: Job, data: RunData) -> RunLoader:
        if not isinstance(data.train, ProvidedDataset):
            return super()._build_loader(job, data)
        training = self.arguments.training
        deal = Deal(
            training.micro_batch_size, training.gradient_accumulation_steps, job.state.data_rank, job.state.data_size
        )
        return ProvidedLoader(data.train, deal, self.arguments.data.dataloader_param, job.data_group)

    def _build_objective(self, family: Family, assembled: Assembled, job: Job, data: RunData) -> Objective:
        if self.callbacks.forward_step is None:
            return super()._build_objective(family, assembled, job, data)
        present = self.front.present if self.front is not None else None
        has_stages = assembled.applied.pipeline is not None
        return ProviderObjective(
            self.callbacks, per_token=self.scaling.per_token, present=present, needs_ids=has_stages
        )

    def _build(
        self,
        job: Job,
        record: RunRecord,
        data: RunData,
        loader: RunLoader,
        resume: ResumePoint,
        total_steps: int,
    ) -> tuple[TrainEngine, RunParts]:
        engine, parts = super()._build(job, record, data, loader, resume, total_steps)
        self.engine = engine
        for note in self.notes:
            record.note(note)
        if isinstance(engine.objective, ProviderObjective) and self.scaling.per_token:
            self._divide_by_tokens(engine, engine.objective, job)
        if self.scaling.writes_megatron:
            parts = self._with_megatron_saves(parts, record)
        if isinstance(loader, ProvidedLoader):
            with job.setup("building the data"):
                self._open(loader, engine, total_steps)
            if loader.was_spread:
                record.note(
                    f"{name_of(self.callbacks.data_provider)} returned a loader that knows nothing of ranks: torch's "
                    "DistributedSampler was put into it"
                )
        return engine, parts

    def _open(self, loader: ProvidedLoader, engine: TrainEngine, total_steps: int) -> None:
        """Ask for the data, now that the model stands as the run goes on with it."""
        ArgumentsHook(self.args).on_train_begin(engine)
        deal, interval = loader.deal, self.arguments.training.val_interval
        validations = (total_steps // interval + 1) if interval else 0
        steps = (total_steps, validations * self.scaling.eval_iters, self.scaling.eval_iters)
        self._provided = self.callbacks.build_data([number * deal.global_batch for number in steps])
        loader.open(self._provided.train, range(engine.iteration, total_steps))

    def _with_megatron_saves(self, parts: RunParts, record: RunRecord) -> RunParts:
        if reason := why_not(self.arguments):
            record.note(f"--ckpt-format torch: checkpoints are distributed ones alone: {reason}")
            return parts
        training, plan = self.arguments.training, parts.assembled.plan.parallel
        folder = Path(str(self.arguments.model.model_name_or_path))
        saves = MegatronSaves(Path(str(training.save)), division_of(plan.sizes, plan.stages, folder))
        arguments = self.arguments.model_copy(update={"training": training.model_copy(update={"save_format": "hf"})})
        return replace(parts, arguments=arguments, write_beside=saves)

    def _divide_by_tokens(self, engine: TrainEngine, objective: ProviderObjective, job: Job) -> None:
        groups = [] if job.data_group is None else [job.data_group]
        if engine.pipeline is not None:
            groups.append(engine.pipeline.group)
        engine.forward_backward = PerTokenForwardBackward(
            engine.forward_backward, engine.model, objective, groups, job.state.data_size, job.device
        )

    def _held_out(self, job: Job, data: RunData) -> Pass | None:
        if not isinstance(data.train, ProvidedDataset):
            return super()._held_out(job, data)
        return self._pass_over(self._provided.validation)

    def _pass_over(self, source: object) -> Pass | None:
        if source is None or self.engine is None or self.scaling.eval_iters == 0:
            return None
        loader = self.engine.loader
        assert isinstance(loader, ProvidedLoader)
        return loader.one_pass(source, self.scaling.eval_iters * loader.deal.gradient_accumulation_steps)

    def _build_hooks(self, parts: RunParts) -> list[Hook]:
        hooks: list[Hook] = [ArgumentsHook(self.args)]
        assert self.engine is not None
        if isinstance(
            objective := self.engine.objective, ProviderObjective
        ):  # before a checkpoint says the step is done
            interval = self.arguments.training.log_interval
            hooks.append(ReportHook(objective, parts.record, interval, self.engine.all_ranks))
        hooks += super()._build_hooks(parts)
        if self.options.plain_lines and self.arguments.training.save:
            hooks.append(SaveLineHook(Path(self.arguments.training.save), parts.record))
        test = self._pass_over(self._provided.test)
        if test is None:
            return hooks
        return [*hooks, TestSetHook(test, parts.record)]

    def _build_model(self) -> nn.Module:
        """What the model provider makes, the same on all ranks; of a front the module inside."""
        training = self.arguments.training
        prepare_for_transformers()
        seed_everything(training.seed, 0)
        with parameters_on_meta() if training.init_model_with_meta_device else nullcontext():
            built = self.callbacks.build_model()
        self.front, model = None, built
        if isinstance(built, ModelFront):
            self.front, model = built, built.model
        check_same_model(model)
        self.notes += self._notes_on_types(model)
        return model

    def _notes_on_types(self, model: nn.Module) -> tuple[str, ...]:
        """What is said of a model in fp64, which is trained in the type of the configuration."""
        chosen = self.arguments.parallel.fsdp_plan.param_dtype
        if chosen == "fp64" or all(p.dtype != torch.float64 for p in model.parameters()):
            return ()
        return (
            f"model_provider returned parameters in fp64, which are trained in {chosen or 'fp32'}; "
            "parallel.fsdp_plan.param_dtype=fp64 (--mm-set) keeps their type",
        )


def as_provided(config: ResolvedConfig, callbacks: Callbacks, scaling: ProviderOptions) -> ResolvedConfig:
    """The configuration where functions of the user take the place of a part: their loss is not one that the model's
    output head could compute, and a model that no folder is named for begins from scratch."""
    arguments = config.arguments
    if callbacks.forward_step is not None:
        loss_cfg = arguments.features.loss_cfg.model_copy(update={"loss_type": "raw"})
        features = arguments.features.model_copy(update={"loss_cfg": loss_cfg})
        arguments = arguments.model_copy(update={"features": features})
    if callbacks.model_provider is not None and arguments.model.model_name_or_path is None:
        model = arguments.model.model_copy(update={"train_from_scratch": True})
        arguments = arguments.model_copy(update={"model": model})
    if callbacks.data_provider is not None and scaling.eval_interval:
        training = arguments.training.model_copy(update={"val_interval": scaling.eval_interval})
        arguments = arguments.model_copy(update={"training": training})
    return replace(config, arguments=arguments)


def check_callbacks(config: ResolvedConfig, callbacks: Callbacks) -> None:
    """Raise `ConfigError` for what functions of the user cannot do."""
    parallel = config.arguments.parallel
    ranks = parallel.ring_attention_size * parallel.ulysses_parallel_size
    own = callbacks.forward_step is not None or callbacks.data_provider is not None
    if own and ranks > 1:
        raise ConfigError(
            f"{ranks}, but own callbacks see whole sequences", key="--context-parallel-size", way_out="Set 1."
        )


@contextmanager
def _live(trainer: ProviderTrainer) -> Iterator[None]:
    before = LIVE.args, LIVE.trainer
    LIVE.args, LIVE.trainer = trainer.args, trainer
    try:
        yield
    finally:
        LIVE.args, LIVE.trainer = before


# --- the same model on all ranks --------------------------------------------------------------------------------------


def check_same_model(model: nn.Module) -> None:
    """Raise `MachineError` where ranks have built different models: sharding keeps of each rank's values its own part,
    which would go unnoticed. Names, shapes and sums of the values are compared before anything is sharded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {name: _mark_of_values(parameter) for name, parameter in model.named_parameters()}
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for rank, other in enumerate(everyone):
        names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
        if names:
            me, what = dist.get_rank(), f"'{names[0]}' differs"
            if len(names) > 1:
                what = f"'{names[0]}' and {len(names) - 1} more parameters differ"
            raise MachineError(
                f"ranks {min(rank, me)} and {max(rank, me)} have built different models: {what}",
                key="model_provider",
                way_out="Draw no numbers that depend on the rank while the model is built: all ranks have the seed of "
                "training.seed (--seed) there.",
            )


@torch.no_grad()
def _mark_of_values(parameter: torch.Tensor) -> tuple[tuple[int, ...], str, float, float]:
    """Shape, type, and two sums of the values."""
    shape, dtype = tuple(parameter.shape), str(parameter.dtype)
    if parameter.is_meta:
        return shape, dtype, 0.0, 0.0
    values = parameter.detach().reshape(-1)
    sums = torch.stack([values.sum(dtype=torch.float32), values.abs().sum(dtype=torch.float32)])
    # A value that is not a number equals no other: two ranks that have it are alike.
    first, second = sums.nan_to_num().tolist()
    return shape, dtype, first, second
