"""How long a run is: what the configuration says, or what is usual for its kind of model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.json_file import parse_json
from mindspeed_mm.core.model_kinds import GENERATOR, GENERATOR_INDEX, kind_of_folder
from mindspeed_mm.fsdp.params.argument import TrainingArguments
from mindspeed_mm.fsdp.params.cards import ModelCard, families, transformer_ids
from mindspeed_mm.fsdp.params.model_args import ModelArguments

GENERATOR_STEPS = 500
"""Steps of a generator's run without a length: those of the training commands in diffusers' own pages for FLUX, FLUX.2,
SD3, Sana, Lumina 2, Qwen-Image and Z-Image (examples/dreambooth/README_*.md at 58eb52c0). The default of their scripts
is one epoch, which is five steps for the five pictures of a subject."""
_PICTURE_TASKS = ("draw", "film")


@dataclass(frozen=True)
class RunLength:
    """The length of a run, in one of the two units."""

    steps: int | None = None
    epochs: int | None = None
    is_given: bool = True
    """Whether the configuration sets it."""

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps:,} steps"
        if self.epochs == 1:
            return "one epoch"
        return f"{self.epochs} epochs"


def run_length(model: ModelArguments, training: TrainingArguments) -> RunLength:
    """The length of a run: `train_epochs`, else `train_iters`; without both, that of the model's family."""
    if training.train_epochs is not None:
        return RunLength(epochs=training.train_epochs)
    if training.train_iters is not None:
        return RunLength(steps=training.train_iters)
    card = _card(model)
    is_generator = kind_of_folder(model.model_name_or_path) is GENERATOR
    if card is not None and card.epochs is not None:
        return RunLength(epochs=card.epochs, is_given=False)
    if is_generator or (card is not None and card.task in _PICTURE_TASKS):
        return RunLength(steps=GENERATOR_STEPS, is_given=False)
    return RunLength(epochs=1, is_given=False)


def _card(model: ModelArguments) -> ModelCard | None:
    """The card of the family that is trained; None where no card lists it."""
    identity = model.model_id or _id_in_folder(model.model_name_or_path)
    return next((card for card in families() if identity in card.ids), None)


def _id_in_folder(folder: str | None) -> str | None:
    """The id of the family whose transformer a folder in diffusers' layout names."""
    if folder is None:
        return None
    try:
        index = parse_json((Path(folder) / GENERATOR_INDEX).read_bytes())
        return transformer_ids().get(index["transformer"][1])
    except (OSError, ValueError, LookupError, TypeError):
        return None
