"""From a configuration to its opened data, without a model: only processor or tokenizer are read of its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_mm.core.errors import ConfigError, UsageError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.fsdp.data import MMDataLoader, MMDataset, build_mm_dataloader, build_mm_dataset
from mindspeed_mm.fsdp.data.build import collator_of
from mindspeed_mm.fsdp.data.data_utils.data_collator import Collator
from mindspeed_mm.fsdp.data.data_utils.token_arrays import check_lengths
from mindspeed_mm.fsdp.data.data_utils.training_view import view_processor
from mindspeed_mm.fsdp.data.document_pieces import in_pieces
from mindspeed_mm.fsdp.data.open_files import check_keeps_no_file_open
from mindspeed_mm.fsdp.params.argument import Arguments
from mindspeed_mm.fsdp.params.data_args import DatasetParam
from mindspeed_mm.fsdp.params.loader import ResolvedConfig
from mindspeed_mm.fsdp.params.rules.distillation import micro_batches_of_step
from mindspeed_mm.fsdp.params.rules.posttrain import draws_samples
from mindspeed_mm.fsdp.params.sizes.parallel import resolve_parallel_sizes
from mindspeed_mm.fsdp.train.configuration import load_with_plugins
from mindspeed_mm.fsdp.train.run.data import prompts_of
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.processor import tokenizer_of


@dataclass(frozen=True)
class OpenedData:
    """The rows of a configuration."""

    config: ResolvedConfig
    dataset: MMDataset
    """The training rows, or those for validation where they were asked for."""
    is_validation: bool = False

    @property
    def arguments(self) -> Arguments:
        """The checked configuration, as `Arguments`, that the data was opened with."""
        return self.config.arguments

    @property
    def param(self) -> DatasetParam:
        """The section that describes the rows."""
        data = self.arguments.data
        if not self.is_validation:
            return data.dataset_param
        return data.val_dataset_param or data.dataset_param

    @property
    def rows(self) -> int:
        """How many there are, with those of a generator's that were left out when they were opened; a row that an epoch
        reads several times counts once."""
        return self.distinct + len(self.dataset.left_out)

    @property
    def distinct(self) -> int:
        """How many of them are samples."""
        return len(self.first_samples)

    @property
    def first_samples(self) -> Sequence[int]:
        """The first sample of each row; the others repeat rows."""
        numbers = self.dataset.row_numbers
        if numbers is None:
            return range(len(self.dataset))
        # backwards, so that the first sample of a row is the one that stays
        seen = dict(zip(reversed(numbers), reversed(range(len(numbers))), strict=True))
        return sorted(seen.values())

    def processor(self) -> Any:
        """The processor or tokenizer that renders the rows; None where no folder is named, and for generators, whose
        samples have sizes instead of tokens."""
        found = self.dataset.processor
        folder = self.param.preprocess_parameters.model_name_or_path
        if found is None and folder is not None and self.dataset.sizes is None:
            found = view_processor(folder, self.param.preprocess_parameters)
        return found

    def tokenizer(self) -> Any:
        """The tokenizer, or None as above."""
        processor = self.processor()
        if processor is not None:
            return tokenizer_of(processor)
        return None

    def sample_check(self) -> Callable[[object], None] | None:
        """What raises `DataError` for a sample that training refuses; None: the rows are read here."""
        if self.dataset.has_rows:
            return None
        try:
            collate = collator_of(
                self.dataset,
                self.arguments.data.dataloader_param,
                processor=self.processor(),
                dataset_param=self.param,
            )
        except ConfigError:  # there is none, which is said where a batch is made
            return check_lengths
        check: Callable[[Any], None] = attribute_at(collate, "check_sample", check_lengths)
        return check

    def own_collator(self) -> Collator | None:
        """What joins samples that are not encoded from rows here, where their data set brings it; None elsewhere."""
        if self.dataset.has_rows:
            return None
        collate_param = self.arguments.data.dataloader_param.collate_param
        return self.dataset.collate_fn or self.dataset.build_collator(collate_param)

    def global_batch(self, ranks: int) -> int:
        """Samples of an optimizer step over so many ranks.

        Raises:
            ConfigError: The parallel sizes do not multiply to it.
        """
        training = self.arguments.training
        data_ranks = resolve_parallel_sizes(self.arguments.parallel, ranks).dp
        return training.micro_batch_size * training.gradient_accumulation_steps * data_ranks

    def loader(self, ranks: int = 1) -> MMDataLoader:
        """The loader of the first of so many data ranks, in this process.

        Raises:
            MMError: Order or batches are off.
        """
        training = self.arguments.training
        param = self.arguments.data.dataloader_param
        dataset = in_pieces(self.dataset, estimates=True)
        if self.param.basic_parameters.streaming:
            dataset, _ = build_mm_dataset(self.param, seed=training.seed, encode_ahead=False)
        return build_mm_dataloader(
            dataset,
            param.model_copy(update={"num_workers": 0, "prefetch_factor": None, "pin_memory": False}),
            micro_batch_size=training.micro_batch_size,
            gradient_accumulation_steps=micro_batches_of_step(self.arguments.training, self.arguments.posttrain),
            dp_rank=0,
            dp_size=resolve_parallel_sizes(self.arguments.parallel, ranks).dp,
            seed=training.seed,
            processor=self.processor(),
            dataset_param=self.param,
        )


def open_data(
    config_path: Path,
    overrides: Sequence[str] = (),
    *,
    validation: bool = False,
    patient: bool = False,
    pieces: bool = False,
) -> OpenedData:
    """Open the rows that a configuration names.

    Args:
        config_path: The YAML.
        overrides: `section.key=value`.
        validation: Use the validation rows instead of the training rows.
        patient: Open files although some of their first rows are bad.
        pieces: Samples are those of training, long documents in pieces; otherwise each is a row.

    Raises:
        ConfigError: The configuration is off, or asks for something that is not built.
        DataError: Files are missing or broken, or no row fits.
        UsageError: There are no rows for validation, or the rows are prompts of a generator, which have no samples.
    """
    config = load_with_plugins(config_path, overrides)
    data = config.arguments.data
    if draws_samples(config.arguments.posttrain):
        data = prompts_of(data)
    held_out_param = data.val_dataset_param
    if held_out_param is not None:
        held_out_param = _looked_at(held_out_param, patient)
    train, held_out = build_mm_dataset(
        _looked_at(data.dataset_param, patient),
        seed=config.arguments.training.seed,
        val_dataset_param=held_out_param,
        encode_ahead=False,
        rows_whole=not pieces,
    )
    if data.dataloader_param.num_workers:
        check_keeps_no_file_open(train)
    if train.prompts_for == GENERATOR:
        raise UsageError(
            f"{len(train)} prompts are read, and no samples: training draws from prompts, all of one size",
            where=str(config_path),
            way_out="mm check says whether they can be drawn from.",
        )
    if not validation:
        return OpenedData(config, train)
    if held_out is None:
        raise UsageError(
            "the configuration names no validation rows",
            where=str(config_path),
            way_out="Set data.dataset_param.basic_parameters.val_dataset or val_rate, or leave --validation out.",
        )
    return OpenedData(config, held_out, is_validation=True)


def _looked_at(param: DatasetParam, patient: bool) -> DatasetParam:
    """The same rows, to be looked at: indexed where training streams them."""
    update: JsonObject = {"streaming": False, "truncation": param.basic_parameters.if_too_long}
    if patient:
        update["on_bad_sample"] = "skip"
    if patient and "features_dir" in param.basic_parameters:  # of a generator: its rows are read at the start
        update["max_bad_fraction"] = 1.0
    basic = before_extraction(param).basic_parameters.model_copy(update=update)
    return param.model_copy(update={"basic_parameters": basic})


def before_extraction(param: DatasetParam) -> DatasetParam:
    """The section; where features are still to be made, with the media that they will be made of instead."""
    basic = param.basic_parameters
    folder = basic.get("features_dir")
    if folder is None or basic.dataset is None or Path(folder).exists():
        return param
    update = {"features_dir": None}
    if basic.val_dataset is not None:
        update["val_features_dir"] = None
    return param.model_copy(update={"basic_parameters": basic.model_copy(update=update)})
