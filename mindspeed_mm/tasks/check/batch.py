"""What `mm check` remarks on the first samples and on a batch, where training or use may still differ from what is
meant; and whether the batch has the arguments of the model's `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import nn

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader
from mindspeed_mm.fsdp.data.data_utils.data_collator import keys_beside
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import MM_PLUGINS
from mindspeed_mm.fsdp.data.data_utils.plugins.media_features import complete_of, marks_left_to_collators
from mindspeed_mm.fsdp.data.data_utils.token_arrays import labels_apart, token_arrays
from mindspeed_mm.fsdp.models.forward_arguments import COLLATOR_KEY
from mindspeed_mm.fsdp.params.cards import dataset_modules
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.processor import beginning_of, tokenizer_of


def notes_on_keys(
    processor: object, plugin: object, collator: str | None, given: Collection[str], taken: Collection[str]
) -> list[str]:
    """Remarks on inputs that the released model has and training lacks, and on those that training alone has.

    Args:
        processor: Of the model.
        plugin: The media plugin of the rows; None of a data set without one.
        collator: `collate_param.model_name`.
        given: Keys of the first batch that the model is given.
        taken: Arguments of its forward.
    """
    notes = []
    marks = marks_left_to_collators(processor)
    if marks is not None and marks in taken and marks not in given:
        notes.append(
            f"the batch has no {marks}, which {type(processor).__name__} gives and the model's forward "
            "takes: attention may differ from the released model's; a collator can add them (docs/data.md, B)"
        )
    of_text = sorted(attribute_at(plugin, "of_text", frozenset()) & set(taken) - set(given))
    if of_text and any(key.startswith("pixel_values") for key in given):
        notes.append(
            f"the batch has no {', '.join(of_text)}, which {type(processor).__name__} makes of whole texts and the "
            "model's forward takes: without it rows may see each other's pictures; make it in `complete` of the media "
            "plugin (docs/data.md, B)"
        )
    added = sorted(keys_beside(collator) & set(given) & set(taken))
    if added and plugin is not None and complete_of(plugin) is None:
        notes.append(
            f"questions of mm infer, mm evaluate and rollouts are given no {', '.join(added)}, which the collator "
            f"'{collator}' adds for training: if answers need them, make them in `complete` of the media plugin "
            "(docs/data.md, B)"
        )
    return notes


def notes_on_beginnings(processor: object, input_ids_BL: torch.Tensor) -> list[str]:
    """A remark where a processor begins every text with tokens that rows of a batch lack, as Molmo2's does, which
    neither the tokenizer nor the chat template writes.

    Args:
        processor: Of the model.
        input_ids_BL: Of the first batch, padded on the right.
    """
    beginning = beginning_of(processor)
    if not beginning or all(row[: len(beginning)] == beginning for row in input_ids_BL.tolist()):
        return []
    written = tokenizer_of(processor).decode(beginning)
    return [
        f"{type(processor).__name__} begins every text with {written!r}, the rows do not: the model may answer worse; "
        "set chat_template to a file with the model's own template behind it (docs/data.md, B)"
    ]


# --- first samples ----------------------------------------------------------------------------------------------------


def warnings_of_samples(loader: MMDataLoader) -> Iterator[str]:
    """Warnings about the data of a run: a data set that is smaller than a step, and samples of the first micro-batch
    whose labels are not as long as their tokens, which a collator of their own joins.

    Args:
        loader: Of the training data.
    """
    if loader.repeat_note:
        yield f"{loader.repeat_note}: lower {loader.size_keys}, or give more data"
    dataset = loader.dataset
    yield from _joined_openings(loader)
    yield from _sizes_apart(loader)
    if dataset.has_rows or dataset.collate_fn is None:
        return
    for pick in loader.order.step(DataPosition(0, 0)).step[0].picks:
        apart = labels_apart(dataset.item(pick.row, pick.epoch))
        if apart:
            yield f"sample {dataset.place(pick.row)} has {apart}: its collate_fn must give each token its own label"
            return


def _sizes_apart(loader: MMDataLoader) -> Iterator[str]:
    """A warning where packs or budgets count with another length of a first sample than it has, as code from outside
    may make them."""
    dataset = loader.dataset
    is_built_in = type(dataset.origin).__module__ in dataset_modules().values()
    if loader.order.shape is None or (is_built_in and type(dataset.plugin) not in MM_PLUGINS.loaded().values()):
        return
    for pick in loader.order.step(DataPosition(0, 0)).step[0].picks:
        told = dataset.measure(pick.row)
        if told is None:
            return  # samples are encoded to know it
        try:
            sample = dataset.item(pick.row, pick.epoch)
        except DataError:
            continue  # the batch of it tells
        if "input_ids" not in sample:
            return  # a pair
        tokens = len(token_arrays(sample).ids)
        if tokens != told.tokens:
            yield (
                f"sample {dataset.place(pick.row)} has {tokens} tokens, and packs and budgets count with "
                f"{told.tokens}: measure of a data set or of a media plugin must give the size that encoding gives"
            )
            return


def _joined_openings(loader: MMDataLoader) -> Iterator[str]:
    """A warning where the first sample is trained on other tokens than the model is asked with."""
    dataset = loader.dataset
    if not dataset.has_rows:
        return
    first = loader.order.step(DataPosition(0, 0)).step[0].picks[0]
    try:
        joined = dataset.joined_opening(first.row)
    except DataError:
        return  # the batch of it tells
    if joined:
        yield (
            f"sample {dataset.place(first.row)}: the words that open an answer end with {joined!r}, which the "
            "tokenizer joins to the answer's first word: a question alone ends in other tokens than were trained, and "
            "answers go wrong; let what the template writes for add_generation_prompt end with a line break, or "
            "without the blank"
        )


def notes_on_epochs(loader: MMDataLoader) -> Iterator[str]:
    """What epochs leave out at their ends."""
    if dropped := loader.order.dropped:
        yield f"each epoch leaves out {dropped} at its end, too few for a step (drop_last: false uses all)"


# --- arguments of the model -------------------------------------------------------------------------------------------


def check_arguments(model: nn.Module, given: Collection[str]) -> set[str]:
    """The names of the arguments that a model's `forward` takes.

    Args:
        model: May be on meta.
        given: Keys of the batch, as far as they are handed to the model.

    Raises:
        ConfigError: The batch has a key that `forward` does not take, or lacks one that it requires.
    """
    parameters = inspect.signature(model.forward).parameters
    too_many = sorted(set(given) - parameters.keys())
    missing = []
    for name, parameter in sorted(parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            too_many = []  # it takes any
        if _is_required(parameter) and name not in given:
            missing.append(name)
    if too_many or missing:
        raise ConfigError(
            f"{type(model).__name__}.forward {_unfit(too_many, missing)}",
            key=COLLATOR_KEY,
            way_out=_fitting(parameters, too_many),
        )
    return set(parameters)


def _unfit(too_many: Sequence[str], missing: Sequence[str]) -> str:
    """How a batch's keys differ from the arguments of a forward."""
    parts = []
    if too_many:
        parts.append(f"does not take {', '.join(too_many)}, which the batch holds")
    if missing:
        parts.append(f"needs {', '.join(missing)}, which the batch lacks")
    return " and ".join(parts)


def _fitting(parameters: Iterable[str], too_many: Sequence[str]) -> str:
    """What to change about the model or the batch."""
    told = f"It takes {', '.join(parameters)}. "
    if list(too_many) == ["labels"]:
        return f"{told}Take labels and return a loss, or define get_output_embeddings() and return logits."
    return f"{told}Choose the collator of this model, or add the arguments to its forward."


def _is_required(parameter: inspect.Parameter) -> bool:
    is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    return is_named and parameter.default is parameter.empty
