"""`build_mm_dataset` and `build_mm_dataloader`: from the `data` section to batches, a part of them set aside for
validation."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_mm.core.errors import ConfigError, Problem, told_as
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator, build_collator
from mindspeed_mm.fsdp.data.data_utils.mm_plugin import build_mm_plugin
from mindspeed_mm.fsdp.data.data_utils.positions import KEY as PACKING_KEY
from mindspeed_mm.fsdp.data.data_utils.positions import build_positions
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.data_utils.training_view import view_processor
from mindspeed_mm.fsdp.data.dataloader.buckets import BucketOrder
from mindspeed_mm.fsdp.data.dataloader.build_order import build_order
from mindspeed_mm.fsdp.data.dataloader.dataloader import MMDataLoader
from mindspeed_mm.fsdp.data.dataloader.order import DataPosition, Deal, Order
from mindspeed_mm.fsdp.data.dataloader.sampler import permutation
from mindspeed_mm.fsdp.data.dataloader.transport import SLOT_BYTES
from mindspeed_mm.fsdp.data.dataloader.worker_pool import WorkerOptions
from mindspeed_mm.fsdp.data.dataset import DatasetView, MMDataset, as_mm_dataset
from mindspeed_mm.fsdp.data.document_pieces import in_pieces
from mindspeed_mm.fsdp.data.sample_cache import (
    can_keep_samples,
    check_can_be_encoded_up_front,
    encoded_up_front,
)
from mindspeed_mm.fsdp.params.cards import dataset_cards
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam, DatasetParam, PreprocessParameters
from mindspeed_mm.fsdp.utils.device import get_device_type
from mindspeed_mm.fsdp.utils.plugins import call_plugin
from mindspeed_mm.fsdp.utils.processor import tokenizer_of
from mindspeed_mm.fsdp.utils.register import data_register

_BASIC = "data.dataset_param.basic_parameters"
_TYPE = "data.dataset_param.dataset_type"
_VALIDATION = {f"{_BASIC}.{name}": f"{_BASIC}.val_{name}" for name in ("dataset", "max_samples", "features_dir")}
_PIXEL_BYTES = 3


def build_mm_dataset(
    dataset_param: DatasetParam,
    *,
    seed: int = 42,
    val_dataset_param: DatasetParam | None = None,
    encode_ahead: bool = True,
    rows_whole: bool = False,
) -> tuple[MMDataset, MMDataset | None]:
    """The training data set and, where the configuration asks for one, the validation data set.

    Args:
        dataset_param: The `dataset_param` section; `preprocess_parameters.model_name_or_path` filled in.
        seed: Of the split by `val_rate`, and of the captions that generators draw.
        val_dataset_param: A section of its own for validation.
        encode_ahead: Whether `preprocess_on_fly: false` is followed; who looks at a few samples says False.
        rows_whole: Samples are rows, documents that training takes in pieces too; otherwise these are cut.

    Raises:
        ConfigError: Unknown `dataset_type`, more than one way to validate, or something not built yet.
        DataError: Files are missing or broken.
    """
    train, validation = _of_rows(dataset_param, seed, val_dataset_param, encode_ahead)
    if rows_whole:
        return train, validation
    estimates = not encode_ahead
    train = in_pieces(train, estimates=estimates)
    return train, None if validation is None else in_pieces(validation, estimates=estimates)


def _of_rows(
    dataset_param: DatasetParam, seed: int, val_dataset_param: DatasetParam | None, encode_ahead: bool
) -> tuple[MMDataset, MMDataset | None]:
    """Both data sets with whole rows as samples; arguments as of `build_mm_dataset`."""
    basic = dataset_param.basic_parameters
    # `val_rate: 0` and `val_max_samples: 0` both switch validation off; a features_dir alone also names rows.
    own_rows = basic.val_dataset
    if own_rows is None:
        own_rows = basic.get("val_features_dir")
    rate = basic.val_rate or None
    if basic.val_max_samples == 0:
        own_rows = rate = None
    asked = {"data.val_dataset_param": val_dataset_param, f"{_BASIC}.val_dataset": own_rows, f"{_BASIC}.val_rate": rate}
    ways = [key for key, value in asked.items() if value is not None]
    if len(ways) > 1:
        raise ConfigError(f"validation data come from {' and '.join(ways)}", key=ways[0], way_out="Keep one of them.")
    train, own_validation = _build(dataset_param, encode_ahead, seed)
    if own_validation is not None or not ways:
        return train, own_validation
    if val_dataset_param is not None:
        # Errors name `data.val_dataset_param…`, where the user wrote the value.
        with told_as(_of_own_section):
            return train, _build(_read_whole(val_dataset_param), encode_ahead, seed)[0]
    if own_rows is not None:
        param = _read_whole(_for_validation(dataset_param))
        with told_as(_of_validation):
            return train, _build(param, encode_ahead, seed)[0]
    return split_dataset(train, rate or 0.0, seed, most=basic.val_max_samples)


def build_mm_dataloader(
    dataset: object,
    dataloader_param: DataloaderParam,
    *,
    packs: bool | None = None,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    dp_rank: int,
    dp_size: int,
    seed: int,
    position: DataPosition | None = None,
    processor: object = None,
    dataset_param: DatasetParam | None = None,
    timeout_s: float | None = None,
    group: object = None,
    for_passes: bool = False,
    pixels_as_bytes: bool = False,
) -> MMDataLoader:
    """The loader of one data rank.

    Args:
        dataset: Of `build_mm_dataset`, or of the caller's own.
        dataloader_param: The `dataloader_param` section.
        packs: Put all samples of a micro-batch into one row, or each into its own; None: as configured.
        micro_batch_size: Rows of a micro-batch.
        gradient_accumulation_steps: Micro-batches of a step.
        dp_rank: This rank among those that hold different samples.
        dp_size: How many there are.
        seed: Of the order.
        position: Where to start; None: at the beginning.
        processor: For a plugin's data set without `collate_fn`, whose samples a built-in collator joins.
        dataset_param: Names the folder of that processor, where it is not given.
        timeout_s: Longest wait for a micro-batch; None: that of the section.
        group: The `dp_size` ranks, which tell each other the sizes of samples; None: this one finds out all of them.
        for_passes: Nothing but `one_pass` is asked of the loader, as for validation.
        pixels_as_bytes: Pictures come from workers as bytes, and batches are used by `move` alone, which makes numbers
            of them on the device.

    Raises:
        ConfigError: A sampler, a mode, a limit or a collator is unknown, or does not go with the data set.
        DataError: The data set is smaller than one global batch and `drop_last` is set.
    """
    dataset, pin = as_mm_dataset(dataset), dataloader_param.pin_memory
    timeout_s = dataloader_param.timeout if timeout_s is None else timeout_s
    deal = Deal(micro_batch_size, gradient_accumulation_steps, dp_rank, dp_size)
    order, mix = build_order(
        dataset, dataloader_param, deal, seed, group=group, timeout_s=timeout_s, for_passes=for_passes
    )
    return MMDataLoader(
        dataset,
        collator_of(dataset, dataloader_param, packs=packs, processor=processor, dataset_param=dataset_param),
        order,
        deal,
        seed=seed,
        position=position or DataPosition(0, 0),
        mix=mix,
        preload=dataloader_param.enable_preload,
        workers=WorkerOptions(
            *_processes(dataset, dataloader_param, micro_batch_size),
            pin_memory=get_device_type() != "cpu" and pin is not False,
            pixels_as_bytes=pixels_as_bytes,
            timeout_s=timeout_s,
            # A slot is memory that a worker shares with this process: it is sized for the largest micro-batch.
            slot_bytes=_slot_bytes(dataset, order),
        ),
    )


def _processes(dataset: MMDataset, dataloader_param: DataloaderParam, micro_batch_size: int) -> tuple[int, int]:
    """Worker processes, and micro-batches that each holds ready. `async_preprocess` asks for one at least, and for so
    many samples."""
    workers, ahead = dataloader_param.num_workers, dataloader_param.prefetch_factor or 2
    basic = dataset.basic_parameters
    if not basic.async_preprocess:
        return workers, ahead
    workers = max(1, workers)
    return workers, max(ahead, math.ceil((basic.async_preprocess_buffer_size or 0) / (workers * micro_batch_size)))


def _slot_bytes(dataset: MMDataset, order: Order) -> int:
    """Room for a micro-batch: pixels of clips are larger than anything else that is sent."""
    if isinstance(order, BucketOrder) and dataset.is_raw:
        # 1 MiB more, for what goes with the pixels: ids, captions, sizes.
        return max(SLOT_BYTES, _PIXEL_BYTES * order.most_pixels + 2**20)
    return SLOT_BYTES


def _build(dataset_param: DatasetParam, encode_ahead: bool, seed: int) -> tuple[MMDataset, MMDataset | None]:
    made = _make(dataset_param)
    own_train, own_validation = made if isinstance(made, tuple) else (made, None)
    train = as_mm_dataset(own_train)
    validation = None if own_validation is None else as_mm_dataset(own_validation)
    basic = dataset_param.basic_parameters
    for dataset in (train, validation):
        if dataset is not None:
            dataset.draw_captions(seed)
            if dataset_param.dataset_type not in dataset_cards():
                _follow_configuration(dataset, basic)
            if not basic.preprocess_on_fly:
                check_can_be_encoded_up_front(dataset)
    # To cut documents their lengths are needed, so they are encoded once where there is a place to keep them.
    keeps = train.cuts_documents and train.is_deterministic and can_keep_samples(basic)
    if not encode_ahead or (basic.preprocess_on_fly and not keeps):
        return train, validation
    encoded = None if validation is None else encoded_up_front(validation, dataset_param)
    return encoded_up_front(train, dataset_param), encoded


def _follow_configuration(dataset: MMDataset, basic: BasicParameters) -> None:
    """Give a plugin's data set the settings of the YAML that it does not set itself.

    Raises:
        ConfigError: Rows are to be packed, and the data set joins its samples itself.
    """
    if dataset.on_bad_sample == MMDataset.on_bad_sample:
        dataset.on_bad_sample = basic.on_bad_sample
    if dataset.max_bad_fraction == MMDataset.max_bad_fraction:
        dataset.max_bad_fraction = basic.max_bad_fraction
    if basic.stage == "rm":
        dataset.rows_of_a_sample = 2
    if dataset.basic_parameters is not MMDataset.basic_parameters:
        return
    if basic.packs and dataset.collate_fn is not None:
        raise ConfigError(
            f"{type(dataset.origin).__name__} has a collate_fn, which makes rows of its own",
            key=PACKING_KEY,
            way_out="Set it to false; or leave collate_fn out, and a built-in collator packs its samples; or, if "
            "collate_fn makes one row of all its samples, set self.basic_parameters = basic_param in the data set.",
        )
    dataset.basic_parameters = basic


def _make(dataset_param: DatasetParam) -> Any:
    """What the registered function or class gives, called with those of the sections that it takes."""
    name = dataset_param.dataset_type
    entry = data_register.get(name)
    sections = {
        "basic_param": dataset_param.basic_parameters,
        "preprocess_param": dataset_param.preprocess_parameters,
        "dataset_param": dataset_param,
    }
    if name in dataset_cards():
        # Built-in data sets take the three sections in this order; a plugin those that its signature names.
        return entry(*sections.values())
    whole_names = {"basic_parameters": "basic_param", "preprocess_parameters": "preprocess_param"}
    offered = sections | {whole: sections[short] for whole, short in whole_names.items()}
    return call_plugin(entry, offered, order=tuple(sections), spread=tuple(sections), key=_TYPE, name=name)


def _read_whole(dataset_param: DatasetParam) -> DatasetParam:
    """For validation, which is a pass over all rows: they are not streamed, and have no shares."""
    # `model_copy` leaves the training section as it is: both data sets are built from one configuration.
    own = {"mix": None, "streaming": False}
    return dataset_param.model_copy(update={"basic_parameters": dataset_param.basic_parameters.model_copy(update=own)})


def _for_validation(dataset_param: DatasetParam) -> DatasetParam:
    basic = dataset_param.basic_parameters
    own: dict[str, Any] = {"dataset": basic.val_dataset, "max_samples": basic.val_max_samples}
    if basic.get("features_dir") is not None:
        own["features_dir"] = basic.get("val_features_dir")
        if own["features_dir"] is None:
            raise ConfigError(
                f"'{basic.val_dataset}' has no features, and the training data have",
                key=f"{_BASIC}.val_features_dir",
                way_out="Set it to where mm extract should put them; or leave val_dataset out and set val_rate.",
            )
    return dataset_param.model_copy(update={"basic_parameters": basic.model_copy(update=own)})


def _of_validation(problem: Problem) -> Problem:
    """A problem of rows for validation, which a data set of their own has read under the keys of any."""
    return replace(problem, key=_VALIDATION.get(problem.key, problem.key))


def _of_own_section(problem: Problem) -> Problem:
    return replace(problem, key=re.sub(r"^data\.dataset_param\b", "data.val_dataset_param", problem.key))


def collator_of(
    dataset: MMDataset,
    dataloader_param: DataloaderParam,
    *,
    packs: bool | None = None,
    processor: object = None,
    dataset_param: DatasetParam | None = None,
) -> Collator:
    """What joins the samples of a data set: its own `collate_fn` comes first, then what its samples need, then what the
    configuration names. Arguments as of `build_mm_dataloader`.

    Raises:
        ConfigError: The data set has no collator, and there is no processor for a built-in one.
    """
    own = dataset.collate_fn or dataset.build_collator(dataloader_param.collate_param, packs=packs)
    if own is not None:
        return own
    preprocess = PreprocessParameters()
    if dataset_param is not None:
        preprocess = dataset_param.preprocess_parameters
    if processor is None and preprocess.model_name_or_path is not None:
        processor = view_processor(preprocess.model_name_or_path, preprocess)
    if processor is None:
        raise ConfigError(
            f"{type(dataset.origin).__name__} has no collate_fn",
            key=_TYPE,
            way_out="Give the data set a `collate_fn(samples) -> batch`, or name a model folder with a tokenizer, with "
            "which a built-in collator joins samples that have `input_ids` and `labels`.",
        )
    positions = None
    if dataset.basic_parameters.packs if packs is None else packs:
        positions = build_positions(
            preprocess.model_name_or_path or tokenizer_of(processor).name_or_path,
            processor,
            trust_remote_code=preprocess.trust_remote_code,
        )
    plugin = build_mm_plugin(processor, PreprocessParameters())
    pairs = dataset_param is not None and dataset_param.basic_parameters.stage == "rm"
    return build_collator(processor, plugin, dataloader_param.collate_param, positions=positions, pairs=pairs)


# --- a part set aside for validation ----------------------------------------------------------------------------------


_SPLIT_STREAM = 2**64 - 1
"""Beside the streams of the epochs."""


class DatasetPart(DatasetView):
    """Some of the samples of a data set.

    Args:
        whole: The data set.
        indices: Which samples, ascending.
        name: For the fingerprint.
    """

    def __init__(self, whole: MMDataset, indices: np.ndarray, name: str) -> None:
        super().__init__(whole)
        self._indices, self._name = indices, name
        self.parts = [self._remaining(part) for part in whole.parts]
        if whole.sizes is not None:
            self.sizes = list(map(whole.sizes.__getitem__, indices.tolist()))
        if whole.is_prior is not None:
            self.is_prior = list(map(whole.is_prior.__getitem__, indices.tolist()))
        if whole.row_numbers is not None:
            self.row_numbers = list(map(whole.row_numbers.__getitem__, indices.tolist()))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._number(index)]

    def item(self, index: int, epoch: int) -> Any:
        """Sample `index` as it is in an epoch."""
        return self._whole.item(self._number(index), epoch)

    def fingerprint(self) -> JsonObject:
        """That of the whole, and which part this is."""
        return {**self._whole.fingerprint(), "part": self._name, "rows": len(self)}

    def known_sizes(self) -> np.ndarray | None:
        """Tokens and patches of the samples of this part; None: those of the whole are not known."""
        sizes = self._whole.known_sizes()
        if sizes is None:
            return None
        return sizes[self._indices]

    def _number(self, index: int) -> int:
        return int(self._indices[index])

    def _remaining(self, part: Part) -> Part:
        """The rows of an entry that are in this part: they stay together, since the indices ascend."""
        # Indices into this part, not into the whole: `_indices` is ascending, so a range stays a range.
        first, end = np.searchsorted(self._indices, (part.first, part.end)).tolist()
        return Part(part.name, first, end)


def split_dataset(
    dataset: MMDataset, rate: float, seed: int, *, most: int | None = None
) -> tuple[DatasetPart, DatasetPart]:
    """Training and validation part, chosen by the seed.

    Args:
        dataset: The data set.
        rate: Share of the samples that go to validation.
        seed: Of the choice.
        most: Upper bound of the validation part.

    Raises:
        ConfigError: One of the parts would be empty.
    """
    if dataset.streams:
        raise ConfigError(
            "streamed rows cannot be held out: their number is not known",
            key="data.dataset_param.basic_parameters.val_rate",
            way_out="Give val_dataset, or set streaming: false.",
        )
    rows = np.arange(len(dataset)) if dataset.row_numbers is None else np.asarray(dataset.row_numbers)
    size = int(rows.max(initial=-1)) + 1
    # Rows are held out, not samples: otherwise a repeated row would be in both parts.
    held_out = max(1, round(rate * size)) if rate else 0
    if not 0 < held_out < size:
        raise ConfigError(
            f"{rate} of {size} samples leaves one side empty",
            key="data.dataset_param.basic_parameters.val_rate",
            way_out="Take a share between 0 and 1 of two rows or more, or give val_dataset.",
        )
    order = permutation(size, seed, _SPLIT_STREAM)
    _, first = np.unique(rows, return_index=True)  # sample of each row: held-out rows are read once
    validation = np.sort(first[order[:held_out]])[:most]
    training = np.flatnonzero(np.isin(rows, order[held_out:]))
    return DatasetPart(dataset, training, "training"), DatasetPart(dataset, validation, "validation")
