"""Before the first step: adapters that start from data (EVA, CorDA) see some batches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from typing_extensions import override

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.fsdp.models.lora.calibration import calibration
from mindspeed_mm.fsdp.models.lora.first_values import FROM_DATA
from mindspeed_mm.fsdp.optimizer.ema import Ema
from mindspeed_mm.fsdp.params.lora_args import LoraArguments
from mindspeed_mm.fsdp.train.run.data import build_pass_loader
from mindspeed_mm.fsdp.train.run.parts import RunParts
from mindspeed_mm.fsdp.train.train_engine import Hook, TrainEngine


def adapter_start_hook(parts: RunParts) -> Hook | None:
    """The hook, where adapters start from data and no checkpoint says what they are."""
    training = parts.arguments.training
    is_from_data = training.lora.enable and training.lora.init_lora_weights in FROM_DATA
    if not is_from_data or parts.resume.checkpoint is not None:
        return None
    loader = build_pass_loader(parts.arguments, parts.job.data_share, parts.data.train)
    return AdapterStartHook(loader.one_pass, training.lora, training.seed, parts.record.note)


class AdapterStartHook(Hook):
    """Runs `init_batches` micro-batches of the training data through the model and starts the adapters from what went
    into their layers. What is trained on afterwards begins with the first batch all the same.

    Args:
        batches: Makes a pass over the training data.
        lora: The `training.lora` section.
        seed: Of the run.
        note: Tells the user.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[list[Batch]]],
        lora: LoraArguments,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self._batches, self._lora, self._seed, self._note = batches, lora, seed, note

    @override
    def on_train_begin(self, engine: TrainEngine) -> None:
        how = str(self._lora.init_lora_weights)
        self._note(f"{how}: looking at {self._lora.init_batches} micro-batches")
        with calibration(engine.model, how) as seen:
            engine.validate(islice(self._batches(), self._lora.init_batches))
        seen.start_adapters(self._seed)
        if engine.ema is not None:
            _copy_into(engine.ema, engine)


@torch.no_grad()
def _copy_into(ema: Ema, engine: TrainEngine) -> None:
    """An average starts as a copy of the weights."""
    averages = ema.tensors()
    for name, parameter in engine.model.named_parameters():
        if name in averages:
            averages[name].copy_(parameter)
