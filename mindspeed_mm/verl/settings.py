"""verl's configuration of a model and its optimizer in the words of this package's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.loader import Given, load_config

_STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
_ONE = ("pipeline_parallel_size", "ulysses_parallel_size", "ring_attention_size")
"""Keys of `parallel` that verl's batches do not go together with."""


def arguments_of(model: Any, engine: Any, optimizer: object | None) -> Arguments:
    """The whole configuration: the YAML that `engine.config` names, with what verl says of model and optimizer.

    Args:
        model: verl's `HFModelConfig`.
        engine: `MindSpeedMMEngineConfig`.
        optimizer: verl's `FSDPOptimizerConfig`; None where nothing is trained.

    Raises:
        ConfigError: It contradicts itself, or asks for a plan that verl's batches do not go together with.
    """
    given: Given = Path(engine.config) if engine.config else {}
    words = [f"model.model_name_or_path={model.local_path}", *_of_lora(model), *_of_optimizer(optimizer)]
    arguments = load_config(given, [*words, *engine.overrides]).arguments
    for name in _ONE:
        value = getattr(arguments.parallel, name, 1)
        if value not in (None, 1):
            raise ConfigError(
                f"{value}: under verl a model is sharded, or split by tensors or experts",
                key=f"parallel.{name}",
                way_out="Leave it out.",
            )
    if arguments.features.compile == "auto":  # passes with and without gradients are compared: they must round alike
        features = arguments.features.model_copy(update={"compile": False})
        return arguments.model_copy(update={"features": features})
    return arguments


def _of_lora(model: Any) -> list[str]:
    rank = int(getattr(model, "lora_rank", 0) or 0)
    if not rank:
        return []
    words = ["training.lora.enable=true", f"training.lora.rank={rank}", f"training.lora.alpha={model.lora_alpha}"]
    targets = getattr(model, "target_modules", None)
    if targets and targets != "all-linear":
        names = [targets] if isinstance(targets, str) else list(targets)
        words.append(f"training.lora.target_modules=[{', '.join(names)}]")
    return words


def _of_optimizer(optimizer: Any | None) -> list[str]:
    if optimizer is None:
        return []
    style = str(getattr(optimizer, "lr_scheduler_type", None) or "constant")
    if style not in _STYLES:
        raise ConfigError(
            f"'{style}' is not one of {', '.join(_STYLES)}", key="optim.lr_scheduler_type", way_out="Choose one."
        )
    steps = max(1, int(getattr(optimizer, "total_training_steps", 0) or 0))
    warmup = int(getattr(optimizer, "lr_warmup_steps", -1) or 0)
    ratio = warmup / steps if warmup > 0 else float(getattr(optimizer, "lr_warmup_steps_ratio", 0.0) or 0.0)
    beta1, beta2 = optimizer.betas
    return [
        f"training.lr={optimizer.lr}",
        f"training.weight_decay={optimizer.weight_decay}",
        f"training.adam_beta1={beta1}",
        f"training.adam_beta2={beta2}",
        f"training.clip_grad={optimizer.clip_grad}",
        f"training.lr_decay_style={_STYLES[style]}",
        f"training.lr_warmup_ratio={min(1.0, ratio)}",
        f"training.train_iters={steps}",
    ]
