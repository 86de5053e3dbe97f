"""`pretrain` with functions of your own, called as Megatron-LM and MindSpeed-MM call them, on the engine of `mm train`.

An entry is a script that ends in `pretrain(...)`. Its flags are those of `mindspeed_mm.arguments`, and stand for the
same configuration that a YAML is.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from torch import nn

from mindspeed_mm.arguments import fill_absent, parse_args
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonMapping
from mindspeed_mm.core.run_ownership import leaving_no_unbegun_run
from mindspeed_mm.fsdp.params.cards import model_modules
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.train.provider.callbacks import Callbacks
from mindspeed_mm.fsdp.train.provider.entry import end_scripts_by_their_errors
from mindspeed_mm.fsdp.train.provider.hooks import AfterStepHook, reported
from mindspeed_mm.fsdp.train.provider.json_section import JsonSection
from mindspeed_mm.fsdp.train.provider.live import LIVE, live_args, live_trainer
from mindspeed_mm.fsdp.train.provider.loader import as_batch
from mindspeed_mm.fsdp.train.provider.objective import ProviderObjective
from mindspeed_mm.fsdp.train.provider.trainer import ProviderOptions, ProviderTrainer
from mindspeed_mm.fsdp.train.run.train_options import TrainOptions
from mindspeed_mm.fsdp.train.train_engine import TrainEngine
from mindspeed_mm.fsdp.utils.dtypes import torch_dtype
from mindspeed_mm.fsdp.utils.register import model_register
from mindspeed_mm.models.configured import with_sized_folder
from mindspeed_mm.provider.flag_words import told_in_flags
from mindspeed_mm.provider.translate import Translated, translate

UserFunction: TypeAlias = Callable[..., Any]
"""A function of the user's, called as Megatron-LM calls it."""
Models: TypeAlias = nn.Module | Sequence[nn.Module] | None
"""The live model as Megatron hands it around: alone, in a list, or not at all."""

__all__ = [
    "forward_step",
    "get_args",
    "pretrain",
    "set_args",
    "train",
    "train_step",
    "train_valid_test_datasets_provider",
]


def forward_step(data_iterator: Iterator[Mapping[str, object]], model: nn.Module) -> tuple[object, UserFunction]:
    """The suite's own: handed to `pretrain` as it is, the engine computes the loss that the configuration names, under
    every parallel plan. Called by a function of yours, it returns what the model returns and its loss.

    Args:
        data_iterator: Yields dicts of what the model takes.
        model: Returns an object or a dict with `loss`.
    """
    output = model(**next(data_iterator))
    return output, lambda returned: returned["loss"] if isinstance(returned, Mapping) else returned.loss


def train_valid_test_datasets_provider(*_args: object, **_kwargs: object) -> NoReturn:
    """The suite's own: handed to `pretrain` as it is, the data are those of `--mm-data`.

    Raises:
        ConfigError: A function of yours has called it.
    """
    raise ConfigError(
        "is not a function to call: it stands for the data of --mm-data",
        key="train_valid_test_datasets_provider",
        way_out="Hand it to pretrain as it is, or build data of your own.",
    )


def pretrain(
    train_valid_test_dataset_provider: UserFunction,
    model_provider: Callable[..., nn.Module],
    model_type: object,
    forward_step_func: UserFunction,
    process_non_loss_data_func: UserFunction | None = None,
    extra_args_provider: UserFunction | None = None,
    args_defaults: JsonMapping | None = None,
) -> None:
    """Train as the flags of this process say, with functions of your own.

    Args:
        train_valid_test_dataset_provider: Returns training, validation and test data; called when the model is loaded.
        model_provider: Returns the whole model.
        model_type: Megatron's enum; a model is what it is here.
        forward_step_func: `(data_iterator, model)`: returns the model's output, and a function that makes the loss of
            it: `loss`, `(loss, report)` or `(loss, tokens, report)`.
        process_non_loss_data_func: None: outputs other than the loss are not collected.
        extra_args_provider: Adds flags of your own.
        args_defaults: Values of flags that are not given; `init_func`, a function, is called first.

    Raises:
        MMError: Anything that a person can act on. A script that does not catch it ends with its message and exit code,
            and without a traceback (with one where `MM_TRACEBACK=1`).
    """
    end_scripts_by_their_errors()
    if process_non_loss_data_func is not None:
        raise ConfigError(
            "outputs other than the loss are not collected here",
            key="process_non_loss_data_func",
            way_out="Leave it out, and report numbers in the dict that loss_func returns.",
        )
    defaults = dict(args_defaults or {})
    init_func = defaults.pop("init_func", None)
    args = parse_args(extra_args_provider)
    fill_absent(args, defaults)
    set_args(args)
    if init_func is not None:
        init_func()
    callbacks = Callbacks(model_provider, _own(train_valid_test_dataset_provider), _own(forward_step_func))
    with told_in_flags():
        _train(args, callbacks)


def _own(function: UserFunction) -> UserFunction | None:
    """A function of the user's; None for those of this module, which stand for the engine's own."""
    if function in (forward_step, train_valid_test_datasets_provider):
        return None
    return function


def _train(args: Namespace, callbacks: Callbacks) -> None:
    translated = translate(args, reads_data=callbacks.data_provider is None)
    config = _with_own_class(translated.config, translated.model_json.get("model_id"))
    _add_sections(args, translated)
    has_folder = config.arguments.model.model_name_or_path is not None
    if callbacks.data_provider is None and not has_folder and "predictor" in translated.model_json:
        config = with_sized_folder(config, translated.model_json, args.mm_model)  # its rows are read by the folder
    scaling = ProviderOptions(
        per_token=args.calculate_per_token_loss,
        eval_iters=args.eval_iters,
        writes_megatron=args.ckpt_format == "torch",
        eval_interval=args.eval_interval,
    )
    options = TrainOptions(
        plain_lines=True,
        weights_only=args.weights_only,
        allow_fresh=args.allow_fresh,
        accept_data_change=args.accept_data_change,
    )
    trainer = ProviderTrainer(config, callbacks, scaling, args=args, options=options)
    trainer.notes = translated.notes
    if callbacks.forward_step is not None and args.calculate_per_sample_loss:
        trainer.notes += ("--calculate-per-sample-loss has no effect: your own forward step computes the loss.",)
    save = config.arguments.training.save
    with leaving_no_unbegun_run(Path(save) if save else None):
        trainer.train()


def get_args() -> Namespace:
    """The flags of the run, with `mm.model`, `mm.data` and `mm.tool`, `params_dtype`, and, while it trains, `iteration`
    and `consumed_train_samples`.

    Raises:
        ConfigError: There is no run.
    """
    return live_args()


def set_args(args: Namespace) -> None:
    """Make `args` what `get_args()` returns, for scripts that parse flags themselves."""
    LIVE.args = args


def train(
    forward_step_func: UserFunction,
    model: Models,
    optimizer: object,
    opt_param_scheduler: object,
    train_data_iterator: object,
    valid_data_iterator: object,
    process_non_loss_data_func: UserFunction | None,
    config: object,
    call_backs: Sequence[Callable[[nn.Module], object]] | None = None,
) -> tuple[int, int]:
    """Run the live run's steps to their end, for functions that `pretrain` has called.

    Args:
        forward_step_func: Called for each micro-batch, in place of the one that `pretrain` was given.
        model: The live one, or a list that holds it.
        optimizer: The live one, or None.
        opt_param_scheduler: Not read: the schedule is the configuration's.
        train_data_iterator: Not read: the data are those of the run, whose place in them is saved.
        valid_data_iterator: Not read, likewise.
        process_non_loss_data_func: None.
        config: Not read.
        call_backs: Called with the model after each update.

    Returns:
        Steps done, and 0: floating-point operations are in `metrics.jsonl`.

    Raises:
        ConfigError: No run is under way, or the model is another one.
    """
    engine = _live_engine("train", model, optimizer)
    _use(engine, forward_step_func)
    if call_backs:
        engine.hooks.append(AfterStepHook(call_backs))
    engine.train()
    return engine.iteration, 0


def train_step(
    forward_step_func: UserFunction,
    data_iterator: Iterator[object],
    model: Models,
    optimizer: object,
    opt_param_scheduler: object,
    config: object,
    call_backs: Sequence[Callable[[nn.Module], object]] | None = None,
) -> tuple[dict[str, float], int, float, int | None]:
    """One optimizer step of the live run, on micro-batches of `data_iterator`.

    Args:
        forward_step_func: Called for each micro-batch.
        data_iterator: Yields this rank's micro-batches.
        model: The live one, or a list that holds it.
        optimizer: The live one, or None.
        opt_param_scheduler: Not read: the schedule is the configuration's.
        config: Not read.
        call_backs: Called with the model after the update.

    Returns:
        What the loss function reported, as means over micro-batches and ranks; 1 where the step was left out, else 0;
        the gradients' norm; None, the number of zeros in them, which is not counted.

    Raises:
        ConfigError: No run is under way, or the model is another one.
    """
    engine = _live_engine("train_step", model, optimizer)
    objective = _use(engine, forward_step_func)
    training = live_trainer("train_step").arguments.training
    numbers = range(training.gradient_accumulation_steps)
    given = [as_batch(next(data_iterator), number, training.micro_batch_size) for number in numbers]
    engine.train_step(given)
    result = engine.settle()
    for function in call_backs or ():
        function(engine.model)
    return reported(objective.take_reports(), engine.all_ranks), int(bool(result.skipped)), result.grad_norm, None


def _live_engine(name: str, model: Models, optimizer: object) -> TrainEngine:
    trainer = live_trainer(name)
    engine = trainer.engine
    models = model if isinstance(model, list | tuple) else [model]
    own = {id(None), id(trainer.front)}
    if engine is not None:
        own.add(id(engine.model))
    if engine is None or not own.issuperset(map(id, models)):
        raise ConfigError("is given another model than the run's", key=name, way_out="Hand on what pretrain has built.")
    if optimizer not in (None, engine.optimizer):
        raise ConfigError("is given another optimizer than the run's", key=name, way_out="Give None, or the run's own.")
    return engine


def _use(engine: TrainEngine, forward_step_func: UserFunction) -> ProviderObjective:
    """Have the live run's steps computed by a function."""
    objective = engine.objective
    if not isinstance(objective, ProviderObjective):
        raise ConfigError(
            "needs a run whose forward step is a function of yours",
            key="train",
            way_out="Give pretrain a forward_step_func of your own.",
        )
    objective.use(forward_step_func)
    return objective


def _add_sections(args: Namespace, translated: Translated) -> None:
    """What functions of the user read from `args.mm`, and the type that the model computes in."""
    parts = {"model": translated.model_json, "data": translated.data_json, "tool": translated.tools_json}
    args.mm = JsonSection(parts)
    LIVE.data_json = translated.data_json
    args.params_dtype = torch_dtype(translated.arguments.parallel.fsdp_plan.computed_in)
    args.iteration = args.curr_iteration = args.consumed_train_samples = 0


def _with_own_class(config: ResolvedConfig, model_id: object) -> ResolvedConfig:
    """The configuration with a class that the script has registered under the `model_id` of model.json."""
    own = model_register.loaded().keys() - model_modules().keys()
    if model_id not in own:
        return config
    model = config.arguments.model.model_copy(update={"model_id": model_id})
    return replace(config, arguments=config.arguments.model_copy(update={"model": model}))
