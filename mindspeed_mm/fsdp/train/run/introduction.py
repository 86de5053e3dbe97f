"""The head of a run's log: warnings, run folder, model, data and plan; with `--verbose` also how the model was split,
packed and sped up."""

from __future__ import annotations

from pathlib import Path

from mindspeed_mm.core.counts import short_count
from mindspeed_mm.core.run_ownership import others_files
from mindspeed_mm.fsdp.data.data_utils.data_collator import padding_multiple
from mindspeed_mm.fsdp.distributed.parallel_state import ParallelState
from mindspeed_mm.fsdp.features.speed.apply_speed import describe_speed
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.modelhub import LoadReport
from mindspeed_mm.fsdp.models.structure.stages import whole_of
from mindspeed_mm.fsdp.ops.forward_stack import describe_forwards
from mindspeed_mm.fsdp.params.data_args import CollateParam
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.run_length import run_length
from mindspeed_mm.fsdp.params.training_args import TrainingArguments
from mindspeed_mm.fsdp.plan.speed_facts import describe_choices
from mindspeed_mm.fsdp.train.assemble import Assembled
from mindspeed_mm.fsdp.train.run.began import kept_defaults
from mindspeed_mm.fsdp.train.run.data import RunLoader
from mindspeed_mm.fsdp.train.run.progress import Progress
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils.device import get_device_type


def introduce(
    progress: Progress,
    config: ResolvedConfig,
    assembled: Assembled,
    loader: RunLoader,
    engine: TrainEngine,
    state: ParallelState,
    *,
    verbose: bool,
) -> None:
    """Print warnings and four lines (run, model, data, plan).

    Args:
        progress: Prints them; what is not printed goes to its log file.
        config: Of the run.
        assembled: The model.
        loader: The data.
        engine: Knows its steps.
        state: The ranks.
        verbose: Print every line: what was done to the model, the loss, padding, what inference takes over.
    """
    note = progress.note
    detail = progress.note if verbose else progress.keep
    for warning in (*config.warnings, *assembled.plan.parallel.warnings, *assembled.loaded.warnings):
        note(f"warning: {warning}")
    if config.arguments.training.save:
        note(f"run    {_run_folder(Path(config.arguments.training.save), config, is_new=engine.iteration == 0)}")
    note(f"model  {_model(config, assembled)}")
    for word, part in _parts(assembled).items():
        detail(f"{word:<6} {part}")
    for line in describe_choices(whole_of(assembled.model), assembled.plan.features):
        (detail if get_device_type() == "cpu" else note)(f"speed  {line}")
    facts = facts_of(whole_of(assembled.model))
    if facts.attention is not None and facts.attention.install:
        note(f"faster {facts.attention.install}")
    added = facts.added_tokens
    if added is not None:
        note(f"tokens {added}")
    if config.arguments.training.lr == 0:
        note("lr     0: nothing will be learned")
    detail(f"loss   {engine.objective.describe()}")
    note(f"data   {loader.describe()}, {_batch(config.arguments.training, state, loader.most_tokens)}")
    if loader.dataset.collate_fn is None:
        detail(f"data   {_padding(config.arguments.data.dataloader_param.collate_param)}")
    for line in loader.dataset.view_notes():
        detail(f"data   {line}; inference and the exported folder take it over")
    for line in loader.dataset.row_notes():
        note(f"data   {line}")
    if loader.estimate_note:
        detail(f"data   {loader.estimate_note}")
    note(
        f"plan   {get_device_type()} × {state.sizes.world}, {state.describe()}; "
        f"steps {engine.iteration + 1} to {engine.schedule.total_steps}"
    )
    if taken := _defaults_taken(config):
        note(f"unset  {'; '.join(taken)}")
    if kept := kept_defaults(config):
        note(f"kept   as this run began, though the defaults are others now: {kept}")


def _defaults_taken(config: ResolvedConfig) -> list[str]:
    """What the run does because the configuration does not say otherwise: its length, schedule and checkpoints."""
    training = config.arguments.training
    unset = {name for name in type(training).model_fields if _is_default(config, f"training.{name}")}
    taken = []
    length = run_length(config.arguments.model, config.arguments.training)
    if not length.is_given:
        taken.append(f"{length} (neither train_iters nor train_epochs is set)")
    if "lr_decay_style" in unset:
        taken.append(f"{training.lr_decay_style} learning rate")
    if "lr_warmup_ratio" in unset:
        taken.append(f"{training.lr_warmup_ratio:.0%} warm-up")
    if "save_total_limit" in unset and training.save:
        taken.append(f"the newest {training.save_total_limit} checkpoints and the best are kept")
    return taken


def _is_default(config: ResolvedConfig, key: str) -> bool:
    origin = config.origins.get(key)
    return origin is not None and origin.kind == "default"


def _run_folder(save: Path, config: ResolvedConfig, *, is_new: bool) -> str:
    others = others_files(save, config.path) if is_new else 0
    if not others:
        return f"{save.resolve()}"
    verb = "file lies" if others == 1 else "files lie"
    return f"{save.resolve()}; {others} other {verb} there and will be left alone"


def global_batch(training: TrainingArguments, data_ranks: int) -> int:
    """Samples of one optimizer step."""
    return training.micro_batch_size * training.gradient_accumulation_steps * data_ranks


def _model(config: ResolvedConfig, assembled: Assembled) -> str:
    whole = whole_of(assembled.model)
    parameters = trainable = 0
    for parameter in whole.parameters():
        parameters += parameter.numel()
        if parameter.requires_grad:
            trainable += parameter.numel()
    if assembled.lora is not None and assembled.lora.token_rows:
        trainable = assembled.lora.parameters  # of an embedding the new rows alone
    dtype = assembled.plan.precision.name
    return (
        f"{type(assembled.model).__name__.removeprefix('FSDP')}, {short_count(parameters)} parameters "
        f"({short_count(trainable)} trained), {dtype}, attention {assembled.attention}"
        f"{_weights_words(assembled.loaded)}"
    )


def _parts(assembled: Assembled) -> dict[str, str]:
    """A line for each thing that was done to the model."""
    described = {}
    if assembled.lora is not None:
        described["lora"] = str(assembled.lora)
    described |= assembled.plan.describe()
    adapter = facts_of(whole_of(assembled.model)).adapter
    if adapter is not None and adapter.quantize_encoders:
        described["encode"] = f"text and picture encoders in {adapter.quantize_encoders}"
    described["layers"] = describe_forwards(assembled.model)
    described["flops"] = assembled.utilisation.describe()
    return {word: text for word, text in (described | describe_speed(whole_of(assembled.model))).items() if text}


def _batch(training: TrainingArguments, state: ParallelState, most: int | None) -> str:
    shares = f"{state.data_size} ranks × {training.gradient_accumulation_steps} accumulated"
    if most is not None:
        return f"global batch of at most {most:,} tokens × {shares}"
    return f"global batch {global_batch(training, state.data_size)} = {training.micro_batch_size} × {shares}"


def _padding(collate_param: CollateParam) -> str:
    is_given = collate_param.pad_to_multiple_of is not None
    source = "as pad_to_multiple_of says" if is_given else f"no pad_to_multiple_of; device {get_device_type()}"
    return f"rows padded to multiples of {padding_multiple(collate_param)} tokens ({source})"


def _weights_words(loaded: LoadReport) -> str:
    """Where the weights came from; nothing when a checkpoint fills them."""
    if loaded.folder:
        return f", weights from {loaded.folder} ({loaded.size_bytes / 2**30:.2f} GiB in {loaded.seconds:.1f} s)"
    if loaded.initialized:
        return ", weights from scratch"
    return ""
