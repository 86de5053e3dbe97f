"""`mm check`: what is wrong with a configuration, from its text to its first batch, before anything is trained.

The stages run in the order in which a run would meet their faults; a stage that needs an earlier one which failed is
skipped, the others go on, so that one call shows all that can be known.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mindspeed_mm.core.batch import ENGINE_KEYS, Batch
from mindspeed_mm.core.errors import CollectedErrors, ConfigError, ExitCode, MMError, ModelFolderError, Problem
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.loader import Given, Override, PluginKeys, ResolvedConfig, load_config, read_plugins
from mindspeed_mm.fsdp.params.rules.all import unbuilt_features
from mindspeed_mm.fsdp.params.rules.path import check_paths
from mindspeed_mm.fsdp.params.rules.posttrain import reference_kind
from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes, least_ranks, resolve_parallel_sizes
from mindspeed_mm.fsdp.params.yaml.overrides import CONFIGURATION

if TYPE_CHECKING:
    from mindspeed_mm.fsdp.data.dataset import MMDataset
    from mindspeed_mm.fsdp.models.diffusion.adapter import DiffusionAdapter
    from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
    from mindspeed_mm.fsdp.plan.outline import Outline


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    stage: str
    problem: Problem
    exit_code: int


@dataclass
class CheckResult:
    """What a check found."""

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

    memory: list[str] = field(default_factory=list)
    """What a rank would hold with the first batch, in lines."""
    predicted_memory: dict[str, object] = field(default_factory=dict)
    """The same for machines, in bytes."""

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong: what, where, under which key, and the way out."""
        return [finding.problem for finding in self.findings]

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
    accept_data_change: bool = False,
) -> CheckResult:
    """Check a configuration.

    Args:
        given: The YAML, or a mapping of its sections.
        overrides: `section.key=value`, or mappings of sections.
        config_only: Only what needs neither plugins nor torch.
        nproc: Number of ranks that the parallel sizes are checked for; not given: `WORLD_SIZE`, if it is set.
        accept_data_change: Features may be of rows that have changed.
    """
    check = _Check(given, overrides, nproc)
    check.accepts_data_change = accept_data_change
    check.attempt("configuration", check.configuration)
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
        check.attempt("held-out questions", check.held_out_questions, needs=["paths", "module patterns"])
        # Of ranks that cannot be, nothing is predicted.
        ranks_fit = ["parallel sizes"] if check.nproc else []
        check.attempt("memory", check.memory, needs=[*ranks_fit, "features", "batch keys"])
    return check.result


class _Check:
    """The stages of one check, and what later ones take from earlier ones."""

    def __init__(self, given: Given, overrides: Sequence[Override], nproc: int | None) -> None:
        self.given = given
        self.overrides = overrides
        world_size = os.environ.get("WORLD_SIZE", "")
        if not nproc and world_size.isdigit():
            nproc = int(world_size)
        self.nproc = nproc or 0
        self.result = CheckResult(given if isinstance(given, Path) else Path(CONFIGURATION))
        self.accepts_data_change = False
        self.failed = set[str]()
        self.read: ResolvedConfig | None = None
        # What stages find for those that need them:
        self.outline: Outline
        self.plan: ModelPlan
        self.dataset: MMDataset
        self.batching: dict[str, object] = {}
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
        try:
            stage()
        except MMError as error:
            self.add(error)
        if name not in self.failed:
            self.result.passed.append(name)

    def add(self, error: MMError) -> None:
        """File every problem of an error that no earlier stage has told: who reads an absent path would repeat it."""
        problems = error.problems if self.read is None else self.read.locate(error.problems)
        known, absent = set(), set()
        for finding in self.result.findings:
            known.add(finding.problem)
            if finding.stage == "paths" != self.stage:
                absent.add(finding.problem.key)
        for problem in problems:
            if problem not in known and problem.key not in absent:
                self.result.findings.append(Finding(self.stage, problem, int(error.exit_code)))
        self.failed.add(self.stage)

    def configuration(self) -> None:
        """Text, keys, values and the rules between them."""
        self._keep(load_config(self.given, self.overrides, ranks=self.nproc or None))

    def _keep(self, config: ResolvedConfig) -> None:
        self.read = config
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

        problems = unbuilt_features(self.config.arguments)
        if problems:
            raise ConfigError("features", problems=problems)
        check_save_format(self.config.arguments)
        check_trackers(self.config.arguments.training.report_to)
        self._profilers()

    def _profilers(self) -> None:
        """Profilers can record on this device; their ranks are there, where the number of ranks is known."""
        from mindspeed_mm.fsdp.train.hooks.memory_profile import build_memory_profile_hook
        from mindspeed_mm.fsdp.train.hooks.time_profile import build_time_profile_hook

        tools = self.config.arguments.tools
        ranks = self.nproc or 1 + max(0, *tools.profile.ranks, *tools.memory_profile.dump_ranks)
        for build in (build_memory_profile_hook, build_time_profile_hook):
            build(self.config.arguments, 0, ranks, lambda _note: None)

    def paths(self) -> None:
        """Inputs exist; the run folder can be written."""
        for error in check_paths(self.config.arguments, self.config.path):
            self.add(error)

    def module_patterns(self) -> None:
        """The model builds, without weights; its plan is resolved, as training resolves it, and the folder has the
        weights that it asks for."""
        # Imported here: what stands above answers without torch.
        from mindspeed_mm.fsdp.plan.outline import build_outline
        from mindspeed_mm.fsdp.plan.resolve import resolve_plan
        from mindspeed_mm.tasks.check.model import check_reference, check_stored_weights

        arguments = self.config.arguments
        if arguments.model.model_name_or_path is None and arguments.model.model_id is None:
            raise ModelFolderError("is not given", key="model.model_name_or_path", way_out="Name the model's folder.")
        errors = CollectedErrors()
        self.outline = build_outline(arguments, errors=errors)
        errors.attempt(check_stored_weights, self.outline, arguments)
        sizes, ranks_known = self._sizes()
        try:
            self.plan = resolve_plan(self.outline, arguments, sizes, ranks_known=ranks_known, errors=errors)
        except MMError:
            for error in errors.errors:
                self.add(error)
        else:
            self.result.warnings += self.plan.parallel.warnings
        if reference_kind(arguments) in ("adapters_off", "frozen"):
            self._collect([partial(check_reference, arguments, self.outline.model)])

    def _sizes(self) -> tuple[ParallelSizes, bool]:
        """Sizes of the groups, and whether they are those of the run: of the fewest ranks that fit, where nobody says
        how many there are or what was said does not fit, which is told already."""
        parallel = self.config.arguments.parallel
        if self.nproc and "parallel sizes" in self.result.passed:
            return resolve_parallel_sizes(parallel, self.nproc), True
        return resolve_parallel_sizes(parallel, least_ranks(parallel)), False

    def first_samples(self) -> None:
        """The data set opens and its first batch is made."""
        from mindspeed_mm.fsdp.data import build_mm_dataloader, build_mm_dataset
        from mindspeed_mm.fsdp.train.hooks.profiled_steps import check_steps_of_profiles
        from mindspeed_mm.fsdp.train.run.start_checks import check_encoders, check_rows_of_features

        arguments = self.config.arguments
        if arguments.posttrain.rewards:
            from mindspeed_mm.fsdp.train.rollouts.build import rewards_with_servers

            judged = _MADE.get(arguments.data.dataset_param.dataset_type or "")
            self._collect([partial(rewards_with_servers, arguments, judged=judged)])
        if draws_from_prompts(arguments):
            self._first_rollout()
            return
        seed = arguments.training.seed
        param = self._before_extraction(arguments.data.dataset_param)
        dataset, validation = build_mm_dataset(
            param,
            seed=seed,
            val_dataset_param=arguments.data.val_dataset_param,
            encode_ahead=False,
        )
        if param is arguments.data.dataset_param:
            self._collect([partial(check_encoders, (dataset, validation))])
        if reference_kind(arguments) == "stored":
            sets = [each for each in (dataset, validation) if each]
            self._collect([partial(self._stored_reference, sets)])
        if arguments.posttrain.dpo.histogram_path:
            self._collect([partial(self._histogram, arguments.posttrain.dpo.histogram_path)])
        self.result.warnings += check_rows_of_features((dataset, validation), accept=self.accepts_data_change)
        in_this_process = {"num_workers": 0, "prefetch_factor": None}
        loader = build_mm_dataloader(
            dataset,
            arguments.data.dataloader_param.model_copy(update=in_this_process),
            micro_batch_size=arguments.training.micro_batch_size,
            gradient_accumulation_steps=arguments.training.gradient_accumulation_steps,
            dp_rank=0,
            dp_size=self._sizes()[0].dp,
            seed=seed,
            dataset_param=arguments.data.dataset_param,
        )
        epochs = arguments.training.train_epochs
        steps = arguments.training.train_iters if epochs is None else loader.steps_for(epochs)
        self._collect([partial(check_steps_of_profiles, arguments.tools, steps)])
        self.dataset, self.batching = dataset, loader.batching
        self.batch, self.processor = next(iter(loader))[0], dataset.processor
        if validation is not None:
            validation[0]

    def _first_rollout(self) -> None:
        """The prompts open, and are enough; what is drawn from them is as large as it may be."""
        from mindspeed_mm.fsdp.models.structure.positions import longest_of
        from mindspeed_mm.tasks.check.rollouts import check_server, first_answers, first_blanks, opened_prompts

        arguments = self.config.arguments
        self._collect([partial(check_server, arguments)])
        self.dataset, self.batching, prompts = opened_prompts(arguments, self._sizes()[0].dp)
        self.processor = self.dataset.processor
        if arguments.data.dataset_param.dataset_type == "generation_prompts":
            self._collect([self.dataset.check_encoders])
            self.batch = first_blanks(arguments)
            return
        longest = longest_of(self.outline.model.config) if "module patterns" in self.result.passed else None
        self.batch = first_answers(arguments, self.dataset, prompts, longest)

    def _stored_reference(self, sets: list[MMDataset]) -> None:
        """The reference's log-probabilities are there, and are of these weights and rows."""
        from mindspeed_mm.fsdp.train.stored_reference import opened_reference

        opened_reference(self.config.arguments, sets)

    def _histogram(self, path: str) -> None:
        """The histogram by which pairs are weighed can be read."""
        from mindspeed_mm.fsdp.loss.flow_pairs import ScoreHistogram

        ScoreHistogram.read(path)

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
        """What `training.save` or `training.load` holds can be gone on from, by its manifest and the sizes of its
        files; their content is compared when it is read."""
        training = self.config.arguments.training
        if not (training.save or training.load):
            return
        from mindspeed_mm.fsdp.train.run.resume import ResumeOptions, find_resume_point

        verify = "none" if training.verify_checkpoint == "none" else "size"
        as_checked = training.model_copy(update={"verify_checkpoint": verify, "save_async": False})
        arguments = self.config.arguments.model_copy(update={"training": as_checked})
        options = ResumeOptions(accept_data_change=self.accepts_data_change)
        # A run may be saving there right now: nothing is cleared.
        silent: Callable[[str], None] = lambda _line: None  # noqa: E731
        find_resume_point(arguments, options, self._context(), note=silent, say=silent, clears_drafts=False)

    def _context(self) -> dict[str, object]:
        from mindspeed_mm.fsdp.train.run.context import run_context
        from mindspeed_mm.fsdp.train.run.introduction import global_batch

        training, parallel = self.config.arguments.training, self.config.arguments.parallel
        data_ranks = resolve_parallel_sizes(parallel, self.nproc).dp if self.nproc else 0
        samples = global_batch(training, data_ranks) or None
        batching = dict(self.batching)
        if batching and not draws_from_prompts(self.config.arguments):
            batching["micro_batches_per_step"] = training.gradient_accumulation_steps * data_ranks
        context = run_context(self.config, self.dataset, world_size=self.nproc, mesh="", global_batch=samples)
        return context | {"batching": batching}

    def batch_keys(self) -> None:
        """The model's forward takes what the batch holds, and asks for nothing else; its tokens are the model's."""
        from mindspeed_mm.fsdp.models.vocabulary import check_processor

        model = self.outline.model
        self._collect([partial(check_processor, model, self.processor)])
        parameters = inspect.signature(model.forward).parameters
        has_tokens = self.outline.kind.has_tokens
        given = self.batch.keys() - ENGINE_KEYS if has_tokens else set(self._generator_inputs())
        too_many = sorted(given - parameters.keys())
        missing = []
        for name, parameter in sorted(parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                too_many = []  # it takes any
            if _is_required(parameter) and name not in given:
                missing.append(name)
        if too_many or missing:
            raise ConfigError(
                f"{type(model).__name__}.forward does not take {too_many} and misses {missing}",
                key="data.dataloader_param.collate_param.model_name",
                way_out=f"It takes {', '.join(parameters)}. Choose the collator of this model.",
            )
        if has_tokens:
            self._forward_on_meta(given)

    def _forward_on_meta(self, given: set[str]) -> None:
        """Give the model the first batch without data: a `forward` that takes any keyword says only then what it lacks.
        What cannot be computed without data is not looked at."""
        import torch

        model = self.outline.model
        inputs = dict(self.batch)
        for key in inputs.keys() - given:
            del inputs[key]
        for key, value in inputs.items():
            if isinstance(value, torch.Tensor):
                inputs[key] = value.to("meta")
        try:
            with torch.no_grad():
                model(**inputs)
        except (TypeError, ValueError) as error:
            if not _ABOUT_KEYS.search(str(error)):
                return
            raise ConfigError(
                f"{type(model).__name__}.forward refuses the batch: {str(error).splitlines()[-1]}",
                key="data.dataloader_param.collate_param.model_name",
                way_out=f"The batch holds {', '.join(sorted(given))}. Choose the collator of this model.",
            ) from error
        except (RuntimeError, IndexError, KeyError, AttributeError):
            return  # an operator that needs data

    @property
    def adapter(self) -> DiffusionAdapter | None:
        """The family's adapter when the model is a generator, else None."""
        return self.outline.adapter

    def _generator_inputs(self) -> dict[str, object]:
        """What the family makes of the first batch."""
        import torch

        from mindspeed_mm.fsdp.distributed.context.plan import check_sample_tokens
        from mindspeed_mm.fsdp.train.memory.forecast import features_of

        adapter = self.adapter
        assert adapter is not None  # asked of generators alone
        batch = features_of(self.batch, adapter) if "pixels" in self.batch else self.batch
        latents = batch["latents"]
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

    def held_out_questions(self) -> None:
        """What is asked while training can be read and shown, and the model answers."""
        arguments = self.config.arguments
        if not arguments.training.evaluate.interval:
            return
        from mindspeed_mm.fsdp.train.hooks.evaluation import HeldOutQuestions, check_generates

        check_generates(self.outline.model)
        held_out = HeldOutQuestions.of(arguments)
        held_out.encoder.encode(held_out.questions[0].sample, held_out.media())

    def memory(self) -> None:
        """What a rank would hold with the first batch; a warning where the device has less."""
        from mindspeed_mm.tasks.check.memory import predict

        lines, record, warnings = predict(self.outline, self.plan, self.config.arguments, self.batch)
        self.result.memory, self.result.predicted_memory = lines, record
        self.result.warnings += warnings


def draws_from_prompts(arguments: Arguments) -> bool:
    """Whether a model is trained on what it makes of prompts itself."""
    methods = {"huggingface": ("grpo",), "generation_prompts": ("grpo", "nft")}
    return arguments.posttrain.method in methods.get(arguments.data.dataset_param.dataset_type or "", ())


_MADE: dict[str, Literal["texts", "pictures"]] = {"huggingface": "texts", "generation_prompts": "pictures"}
"""Type of a data set → what a model makes of its prompts."""
_ABOUT_KEYS = re.compile(
    r"unexpected keyword|required positional argument|multiple values for|have to specify|must specify"
)
"""What a `forward` says of arguments that it lacks or does not know."""


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty
