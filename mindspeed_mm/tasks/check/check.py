"""`mm check`: what is wrong with a configuration, from its text to its first batch, before anything is trained.

The stages run in the order in which a run would meet their faults; a stage that needs an earlier one which failed is
skipped, the others go on, so that one call shows all that can be known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.core.batch import ENGINE_KEYS, Batch
from mindspeed_mm.core.errors import (
    CheckpointError,
    CollectedErrors,
    ConfigError,
    ExitCode,
    MMError,
    ModelFolderError,
    Problem,
)
from mindspeed_mm.core.model_kinds import kind_of_folder
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.loader import Given, Override, PluginKeys, ResolvedConfig, load_config, read_plugins
from mindspeed_mm.fsdp.params.rules.distillation import reads_trajectories, trains_critic
from mindspeed_mm.fsdp.params.rules.path import check_paths
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples, reference_kind
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, least_sizes, resolve_parallel_sizes
from mindspeed_mm.fsdp.params.yaml.overrides import CONFIGURATION
from mindspeed_mm.fsdp.train.run.train_options import ResumeOptions
from mindspeed_mm.fsdp.utils.at_hand import arguments_at_hand

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.checkpoint.committed import CommittedCheckpoint
    from mindspeed_mm.fsdp.checkpoint.loop_state import LoopState
    from mindspeed_mm.fsdp.data.dataset import MMDataset
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
    from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
    from mindspeed_mm.fsdp.plan.outline import Outline
    from mindspeed_mm.fsdp.train.run.data import RunOrder
    from mindspeed_mm.fsdp.train.run.job import DataShare


@dataclass(frozen=True)
class Finding:
    """One problem that `mm check` found, with its stage and the exit code that a run would end with."""

    stage: str
    problem: Problem
    exit_code: int
    headline: str = ""
    """Of several problems that are told together: what they are, and what to do about all of them."""


@dataclass
class CheckResult:
    """Holds what `mm check` found in a configuration: stages passed and skipped, problems, warnings and predicted
    memory."""

    path: Path
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Stage → the failed stage that is the first cause of its being skipped."""
    findings: list[Finding] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    """Keys that only a plugin can judge that was not imported."""

    notes: list[str] = field(default_factory=list)
    """Worth knowing of this machine; nothing to change."""

    speed: list[str] = field(default_factory=list)
    """Who makes fused kernels and compiles blocks on this machine, and why, in lines."""

    memory: list[str] = field(default_factory=list)
    """What a rank would hold with the first batch, in lines."""
    predicted_memory: dict[str, object] = field(default_factory=dict)
    """The same for machines, in bytes."""

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong: what, where, under which key, and the way out."""
        return [finding.problem for finding in self.findings]

    @property
    def headlines(self) -> list[str]:
        """What stands over problems that are told together, each once."""
        return list(dict.fromkeys(finding.headline for finding in self.findings if finding.headline))

    @property
    def exit_code(self) -> int:
        """That of the first finding: what a run would have ended with."""
        return self.findings[0].exit_code if self.findings else int(ExitCode.OK)


def run(
    given: Given,
    overrides: Sequence[Override] = (),
    *,
    config_only: bool = False,
    nproc: int | None = None,
    options: ResumeOptions | None = None,
) -> CheckResult:
    """Check a configuration.

    Args:
        given: The YAML, or a mapping of its sections.
        overrides: `section.key=value`, or mappings of sections.
        config_only: Only what needs neither plugins nor torch.
        nproc: Number of ranks that the parallel sizes are checked for; not given: `WORLD_SIZE`, if it is set.
        options: What the start of the run would say.
    """
    check = _Check(given, overrides, nproc, options or ResumeOptions())
    check.attempt("configuration", check.configuration if config_only else check.configuration_and_run)
    if check.nproc:
        check.attempt("parallel sizes", check.parallel_sizes, needs=["configuration"])
    if not config_only:
        check.attempt("plugins", check.plugins, needs=["configuration"])
        check.attempt("features", check.features, needs=["configuration"])
        check.attempt("paths", check.paths, needs=["configuration"])
        check.attempt("module patterns", check.module_patterns, needs=["plugins"])
        check.attempt("first samples", check.first_samples, needs=["plugins"])
        check.attempt("resume", check.resume, needs=["paths", "first samples"])
        check.attempt("batch keys", check.batch_keys, needs=["module patterns", "first samples"])
        check.attempt("samples", check.samples, needs=["module patterns"])
        check.attempt("first held-out question", check.first_held_out_question, needs=["paths", "module patterns"])
        # Of ranks that cannot be, nothing is predicted.
        ranks_fit = ["parallel sizes"] if check.nproc else []
        check.attempt("memory", check.memory, needs=[*ranks_fit, "features", "batch keys"])
    return check.result


class _Check:
    """The stages of one check, and what later ones take from earlier ones."""

    def __init__(self, given: Given, overrides: Sequence[Override], nproc: int | None, options: ResumeOptions) -> None:
        self.given = given
        self.overrides = overrides
        world_size = os.environ.get("WORLD_SIZE", "")
        if not nproc and world_size.isdigit():
            nproc = int(world_size)
        self.nproc = nproc or 0
        self.result = CheckResult(given if isinstance(given, Path) else Path(CONFIGURATION))
        self.options = options
        self.failed = set[str]()
        self.read: ResolvedConfig | None = None
        # What stages find for those that need them:
        self.outline: Outline
        self.plan: ModelPlan
        self.dataset: MMDataset
        self.order: RunOrder
        self.batch: Batch = {}
        self.processor: object = None

    @property
    def config(self) -> ResolvedConfig:
        """The configuration, for the stages that need it."""
        assert self.read is not None
        return self.read

    def attempt(self, name: str, stage: Callable[[], None], needs: Sequence[str] = ()) -> None:
        """Run a stage unless one that it needs has not passed."""
        for need in needs:
            if need not in self.result.passed:
                self.result.skipped[name] = self.result.skipped.get(need, need)
                return
        self.stage = name
        held = nullcontext() if self.read is None else arguments_at_hand(self.read.arguments)
        try:
            with held:
                stage()
        except MMError as error:
            self.add(error)
        if name not in self.failed:
            self.result.passed.append(name)

    def add(self, error: MMError) -> None:
        """File every problem of an error that no earlier stage has told: who reads an absent path would repeat it."""
        problems = list(error.problems if self.read is None else self.read.locate(error.problems))
        headline = ""
        if isinstance(error, CheckpointError | ModelFolderError):  # those of others only count
            headline = error.headline
        known, absent = set(), set()
        for finding in self.result.findings:
            known.add(finding.problem)
            if finding.stage == "paths" != self.stage:
                absent.add(finding.problem.key)
        for problem in problems:
            if problem not in known and problem.key not in absent:
                self.result.findings.append(Finding(self.stage, problem, int(error.exit_code), headline))
        self.failed.add(self.stage)

    def configuration(self) -> None:
        """Text, keys, values and the rules between them."""
        self._keep(load_config(self.given, self.overrides, ranks=self.nproc or None))

    def configuration_and_run(self) -> None:
        """The same; where the model is a run, its checkpoint can be trained on."""
        from mindspeed_mm.tasks.given.run_as_model import words_of_run

        self.configuration()
        words, line = words_of_run(self.config)
        if words:
            self.overrides = (*self.overrides, *words)
            self.result.notes.append(line)
            self.configuration()

    def _keep(self, config: ResolvedConfig) -> None:
        from mindspeed_mm.fsdp.train.run.began import as_run_began

        self.read = config = as_run_began(config, self.options)
        self.result.warnings = list(config.warnings)
        self.result.unchecked = list(config.unchecked)

    def parallel_sizes(self) -> None:
        """Sizes of the groups multiply to the number of ranks."""
        resolve_parallel_sizes(self.config.arguments.parallel, self.nproc)

    def plugins(self) -> None:
        """Plugins import, ids are registered, and the keys that plugins declare hold."""
        from mindspeed_mm.fsdp.utils.register import data_register, import_plugin, model_register
        from mindspeed_mm.fsdp.utils.torchvision_guard import clash

        plugins, model_id, dataset_type = read_plugins(self.given, self.overrides)
        note = clash() if plugins else None  # who has no code of his own has nothing to do about it
        if note:
            self.result.notes.append(note)
        self._collect([partial(import_plugin, [plugin]) for plugin in plugins])
        keys = PluginKeys()
        if model_id:
            self._collect([partial(model_register.get, model_id)])
            keys = replace(keys, model=model_register.config_keys(model_id))
        if dataset_type:
            self._collect([partial(data_register.get, dataset_type)])
            keys = replace(keys, dataset=data_register.config_keys(dataset_type))
        if plugins and not any(finding.stage == self.stage for finding in self.result.findings):
            self._keep(load_config(self.given, self.overrides, plugin_keys=keys, ranks=self.nproc or None))

    def _collect(self, steps: Iterable[Callable[[], object]]) -> None:
        """Run independent steps; one that fails does not stop the next."""
        for step in steps:
            try:
                step()
            except MMError as error:
                self.add(error)

    def features(self) -> None:
        """Nothing is asked for that this version does not have."""
        from mindspeed_mm.fsdp.train.run.start_checks import check_save_format
        from mindspeed_mm.fsdp.train.run.trackers import check_trackers

        self.config.check_built()
        self.config.check_revealed()
        check_save_format(self.config.arguments.model, self.config.arguments.training)
        # Another device may train: that this one cannot is only a warning.
        from mindspeed_mm.fsdp.train.run.start_checks import check_device

        try:
            check_device(self.config.arguments.parallel)
        except MMError as error:
            self.result.warnings += [str(problem) for problem in self.config.locate(error.problems)]
        check_trackers(self.config.arguments.training.report_to)
        self._profilers()

    def _profilers(self) -> None:
        """Profilers can record on this device; their ranks are there, where the number of ranks is known."""
        from mindspeed_mm.fsdp.train.hooks.profiles import build_memory_profile_hook, build_time_profile_hook

        run = self.config.arguments
        ranks = self.nproc or 1 + max(0, *run.tools.profile.ranks, *run.tools.memory_profile.dump_ranks)
        build_memory_profile_hook(run.tools.memory_profile, run.features, run.training, 0, ranks, lambda _note: None)
        build_time_profile_hook(run.tools.profile, run.training, 0, ranks, lambda _note: None)

    def paths(self) -> None:
        """Inputs exist; the run folder can be written."""
        for error in check_paths(self.config.arguments, self.config.path):
            self.add(error)

    def module_patterns(self) -> None:
        """The model builds, without weights; its plan is resolved, as training resolves it, and the folder has the
        weights that it asks for."""
        # Imported here: what stands above answers without torch.
        from mindspeed_mm.fsdp.models.behaviour.attention import attention_name
        from mindspeed_mm.fsdp.models.diffusion.few_steps import few_steps_kept
        from mindspeed_mm.fsdp.models.facts import facts_of
        from mindspeed_mm.fsdp.plan.outline import build_outline
        from mindspeed_mm.fsdp.plan.resolve import resolve_plan
        from mindspeed_mm.fsdp.plan.speed_facts import describe_choices
        from mindspeed_mm.tasks.check.model import check_critic, check_reference, check_weights_and_names

        arguments = self.config.arguments
        if arguments.model.model_name_or_path is None and arguments.model.model_id is None:
            raise ConfigError("is not given", key="model.model_name_or_path", way_out="Name the model's folder.")
        errors = CollectedErrors()
        self.outline = build_outline(arguments, errors=errors)
        facts = facts_of(self.outline.model)
        added = facts.added_tokens
        self.result.notes.append(f"attention on this machine: {attention_name(self.outline.model)}")
        if facts.attention is not None and facts.attention.install:
            self.result.notes.append(facts.attention.install)
        if added is not None and added.known:
            self.result.warnings.append(f"model.add_tokens: {added}")
        errors.attempt(check_weights_and_names, self.outline, arguments.model, arguments.training)
        try:
            self.plan = resolve_plan(self.outline, arguments, self._sizes(), errors=errors)
        except MMError:
            for error in errors.errors:
                self.add(error)
        else:
            self.result.warnings += self.plan.parallel.warnings
            self.result.speed = describe_choices(self.outline.model, self.plan.features)
        few = facts.adapter.few_steps if facts.adapter is not None else None
        if kept := few_steps_kept(few, arguments.posttrain.method):
            self.result.warnings.append(kept)
        if reference_kind(arguments) in ("adapters_off", "frozen"):
            self._collect([partial(check_reference, arguments, self.outline.model)])
        if trains_critic(arguments.posttrain):
            self._collect([partial(check_critic, arguments, self.outline.model)])

    def _sizes(self) -> ParallelSizes | None:
        """Sizes of the groups; None where nobody says how many ranks there are, or they do not fit, which is told
        already."""
        if "parallel sizes" not in self.result.passed:
            return None
        return resolve_parallel_sizes(self.config.arguments.parallel, self.nproc)

    def _data_share(self) -> DataShare:
        """The first rank's share of the samples: of the fewest ranks that fit, where their number is not known."""
        from mindspeed_mm.fsdp.train.run.job import DataShare

        return DataShare(ranks=(self._sizes() or least_sizes(self.config.arguments.parallel)).dp)

    def first_samples(self) -> None:
        """The data set opens and its first batch is made; that of validation, too."""
        from mindspeed_mm.fsdp.data import build_mm_dataset
        from mindspeed_mm.fsdp.train.run.data import build_loader, build_validation_loader
        from mindspeed_mm.fsdp.train.run.start_checks import check_encoders, check_rows_of_features
        from mindspeed_mm.tasks.check.batch import notes_on_epochs, warnings_of_samples

        arguments = in_one_process(self.config.arguments)
        if draws_samples(arguments.posttrain):
            self._first_rollout()
            return
        param = self._before_extraction(arguments.data.dataset_param)
        dataset, validation = build_mm_dataset(
            param,
            seed=arguments.training.seed,
            val_dataset_param=arguments.data.val_dataset_param,
            encode_ahead=False,
        )
        if param is arguments.data.dataset_param:
            self._collect([partial(check_encoders, (dataset, validation))])
        if reference_kind(arguments) == "stored":
            sets = [each for each in (dataset, validation) if each]
            self._collect([partial(self._stored_reference, sets)])
        self.result.warnings += check_rows_of_features((dataset, validation), accept=self.options.accept_data_change)
        share = self._data_share()
        loader = build_loader(arguments.data, arguments.training, arguments.posttrain, share, dataset)
        self._keep_data(dataset, loader)
        self.batch = next(iter(loader))[0]
        self.result.warnings += warnings_of_samples(loader)
        self.result.notes += notes_on_epochs(loader)
        if arguments.posttrain.dpo.histogram_path:
            self._collect([partial(self._weigh_pairs, arguments.posttrain.dpo.histogram_path)])
        if validation is not None and arguments.training.val_interval:
            next(build_validation_loader(arguments.data, arguments.training, share, validation).one_pass(), None)

    def _keep_data(self, dataset: MMDataset, order: RunOrder) -> None:
        """What later stages take from the data; profiles are of steps that there are."""
        from mindspeed_mm.fsdp.train.hooks.profiles import check_steps_of_profiles
        from mindspeed_mm.fsdp.train.run.data import total_steps_of

        self.dataset, self.order, self.processor = dataset, order, dataset.processor
        self.total_steps = total_steps_of(self.config.arguments.model, self.config.arguments.training, order)
        self._collect([partial(check_steps_of_profiles, self.config.arguments.tools, self.total_steps)])

    def _first_rollout(self) -> None:
        """The prompts open, and are enough; what is drawn from them is as large as it may be."""
        from mindspeed_mm.fsdp.train.rollouts.build import build_rollout_order, rewards_with_servers
        from mindspeed_mm.fsdp.utils.model_parts import longest_of
        from mindspeed_mm.tasks.check.rollouts import check_server, first_answers, first_blanks, open_prompts

        arguments = self.config.arguments
        kind = kind_of_folder(arguments.model.model_name_or_path)
        self._collect(
            [partial(rewards_with_servers, arguments.posttrain, kind), partial(check_server, arguments.posttrain)]
        )
        dataset = open_prompts(arguments.data, arguments.training)
        order = build_rollout_order(arguments, self._data_share(), dataset)
        self._keep_data(dataset, order)
        prompts = next(iter(order.prompts))[0]["prompts"]
        if not kind.has_tokens:
            self._collect([dataset.check_encoders])
            self.batch = first_blanks(arguments.data, arguments.training)
            return
        longest = longest_of(self.outline.model.config) if "module patterns" in self.result.passed else None
        self.batch = first_answers(
            arguments.data, arguments.training, arguments.posttrain, self.dataset, prompts, longest
        )

    def _stored_reference(self, sets: list[MMDataset]) -> None:
        """What was stored of the reference is there, and is of these weights and rows."""
        if reads_trajectories(self.config.arguments.posttrain):
            from mindspeed_mm.fsdp.train.distillation.trajectories import TrajectoryFolder

            TrajectoryFolder.of_run(
                self.config.arguments.model, self.config.arguments.training, self.config.arguments.posttrain
            ).check()
            return
        from mindspeed_mm.fsdp.train.stored_reference import opened_reference

        opened_reference(self.config.arguments, sets)

    def _weigh_pairs(self, path: str) -> None:
        """The histogram by which pairs are weighed can be read, and the first ones have scores that lie in it."""
        from mindspeed_mm.fsdp.loss.flow_pair_objective import ScoreHistogram, pair_weights

        pair_weights(ScoreHistogram.read(path), self.batch, self.config.arguments.posttrain.dpo)

    def _before_extraction(self, param: DatasetParam) -> DatasetParam:
        """Where features are still to be made, the media that they will be made of are looked at instead."""
        from mindspeed_mm.tasks.data.opening import before_extraction

        found = before_extraction(param)
        if found is not param:
            folder = param.basic_parameters.get("features_dir")
            self.result.warnings.append(
                f"features_dir {folder} does not exist yet: the media are checked instead. Run mm extract first"
            )
        return found

    def resume(self) -> None:
        """What `training.save` or `training.load` holds can be gone on from, by its manifest, its index, the state of
        the loop and the sizes of its files; their content is compared when it is read."""
        training = self.config.arguments.training
        if not (training.save or training.load):
            return
        from mindspeed_mm.fsdp.train.run.resume import find_resume_point

        verify = "none" if training.verify_checkpoint == "none" else "size"
        as_checked = training.model_copy(update={"verify_checkpoint": verify, "save_async": False})
        arguments = self.config.arguments.model_copy(update={"training": as_checked})
        # A run may be saving there right now: nothing is cleared.
        silent: Callable[[str], None] = lambda _line: None  # noqa: E731
        point = find_resume_point(
            arguments.training, self.options, self._context(), note=silent, say=silent, clears_drafts=False
        )
        if point.checkpoint is None or point.iteration >= self.total_steps:
            return
        if "module patterns" in self.result.passed:
            self._collect([partial(point.check_tensors, self.outline.model)])
        state = point.read_loop_state()
        if state is not None:
            self._collect([partial(self._go_on_in_data, point.checkpoint, state)])

    def _go_on_in_data(self, checkpoint: CommittedCheckpoint, state: LoopState) -> None:
        """The place in the data can be kept: where samples of several sizes share steps, of as many ranks as these."""
        from mindspeed_mm.fsdp.data import DataPosition
        from mindspeed_mm.fsdp.train.rollouts.order import RolloutOrder
        from mindspeed_mm.fsdp.train.run.data import go_on_in_data

        if self._sizes() is not None:
            go_on_in_data(self.order, checkpoint, state, accepts_change=self.options.accept_data_change)
        elif isinstance(self.order, RolloutOrder):
            self.order.check_kept(DataPosition.from_dict(state["data_position"]))

    def _context(self) -> dict[str, object]:
        from mindspeed_mm.fsdp.train.run.introduction import global_batch
        from mindspeed_mm.fsdp.train.run.resume import run_context

        sizes = self._sizes()
        samples = global_batch(self.config.arguments.training, sizes.dp) if sizes is not None else None
        context = run_context(self.config, self.dataset, world_size=self.nproc, mesh="", global_batch=samples)
        return context | {"batching": self.order.batching}

    def batch_keys(self) -> None:
        """The model's forward takes what the batch holds, and asks for nothing else; its tokens are the model's."""
        from mindspeed_mm.fsdp.loss.objectives import is_models_own
        from mindspeed_mm.fsdp.models.vocabulary import check_processor
        from mindspeed_mm.tasks.check.batch import check_arguments, notes_on_beginnings, notes_on_keys

        model = self.outline.model
        self._collect([partial(check_processor, model, self.processor)])
        has_tokens = self.outline.kind.has_tokens
        given = self.batch.keys() - ENGINE_KEYS if has_tokens else set(self._generator_inputs())
        loss_type = self.config.arguments.features.loss_cfg.loss_type
        if has_tokens and is_models_own(loss_type, has_head=bool(self.outline.spec.head)):
            given |= {"labels"} & self.batch.keys()
        taken = check_arguments(model, given)
        if has_tokens:
            collator = self.config.arguments.data.dataloader_param.collate_param.model_name
            self.result.notes += notes_on_keys(self.processor, self.dataset.plugin, collator, given, taken)
            if "input_ids" in self.batch:
                self.result.notes += notes_on_beginnings(self.processor, self.batch["input_ids"])
            self._forward_on_meta(given)
        elif not draws_samples(self.config.arguments.posttrain):
            self._dropped_captions()

    def _dropped_captions(self) -> None:
        """The empty caption is there, where captions are dropped."""
        from mindspeed_mm.fsdp.loss.denoising import check_caption_dropout

        assert self.adapter is not None
        dataset, diffusion = self.dataset, self.config.arguments.training.diffusion
        has_empty_caption = dataset.null_text() is not None
        check_caption_dropout(self.adapter, diffusion, encodes=dataset.is_raw, has_empty_caption=has_empty_caption)

    def _forward_on_meta(self, given: set[str]) -> None:
        """Give the model the first batch without data: a `forward` that takes any keyword says only then what it lacks.
        What cannot be computed without data is not looked at."""
        import torch

        from mindspeed_mm.fsdp.models.forward_arguments import refusals_explained

        model = self.outline.model
        inputs = dict(self.batch)
        for key in inputs.keys() - given:
            del inputs[key]
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                inputs[key] = value.to("meta")
        try:
            with refusals_explained(model, given), torch.no_grad():
                model(**inputs)
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError):
            return  # an operator that needs data

    @property
    def adapter(self) -> DiffusionAdapter | None:
        """The family's adapter when the model is a generator, else None."""
        return self.outline.adapter

    def _generator_inputs(self) -> dict[str, object]:
        """What the family makes of the first batch."""
        import torch

        from mindspeed_mm.fsdp.distributed.context.plan import check_sample_tokens
        from mindspeed_mm.fsdp.models.diffusion.few_steps import FewSteps
        from mindspeed_mm.fsdp.train.memory.forecast import features_of

        adapter = self.adapter
        assert adapter is not None  # asked of generators alone
        batch = features_of(self.batch, adapter) if "pixels" in self.batch else self.batch
        latents = batch["latents"]
        if (
            few := FewSteps.of_run(self.config.arguments.training, self.config.arguments.posttrain)
        ) is not None and few.num_frame_per_block is not None:
            few.blocks(latents.shape[2])
        inputs: dict[str, object] = adapter.inputs(latents, torch.ones(len(latents)), batch, guidance=1.0)
        if self.plan.parallel.context is not None:
            check_sample_tokens(self.outline.model, latents, self.plan.parallel.context)
        return inputs

    def samples(self) -> None:
        """What is sampled while training has prompts, pictures and a size that the model takes."""
        training = self.config.arguments.training
        if self.adapter is None or not training.sampling.interval:
            return
        from mindspeed_mm.fsdp.train.hooks.sampling import check_sampling

        check_sampling(self.adapter, training.sampling, training.save)

    def first_held_out_question(self) -> None:
        """What is asked while training can be read, its first question shown, and the model answers."""
        arguments = self.config.arguments
        asked = arguments.training.evaluate
        if not asked.interval:
            return
        from mindspeed_mm.fsdp.train.hooks.evaluation import HeldOutQuestions, check_generates

        check_generates(self.outline.model)
        held_out = HeldOutQuestions.of(asked, arguments.data.dataset_param, arguments.model)
        held_out.encoder.encode(held_out.questions[0].sample, held_out.media())

    def memory(self) -> None:
        """What a rank would hold with the first batch; a warning where the device has less."""
        from mindspeed_mm.tasks.check.memory import predict

        lines, record, warnings = predict(self.outline, self.plan, self.config.arguments, self.batch)
        self.result.memory, self.result.predicted_memory = lines, record
        self.result.warnings += warnings


def in_one_process(arguments: Arguments) -> Arguments:
    """The configuration without worker processes for its data."""
    alone = {"num_workers": 0, "prefetch_factor": None}
    loader = arguments.data.dataloader_param.model_copy(update=alone)
    return arguments.model_copy(update={"data": arguments.data.model_copy(update={"dataloader_param": loader})})
