"""From the `dataloader_param` section and what a data set knows of itself to the order of its samples."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed_mm.core.errors import ConfigError, DataError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.fsdp.data.data_utils.data_collator import padding_multiple
from mindspeed_mm.fsdp.data.data_utils.rows.row_table import Part
from mindspeed_mm.fsdp.data.dataloader.buckets import TOKENS_KEY, BucketOrder, MixedBucketOrder
from mindspeed_mm.fsdp.data.dataloader.buffered import BufferedOrder
from mindspeed_mm.fsdp.data.dataloader.mixing import MixedSampler, MixShares, weighted_parts
from mindspeed_mm.fsdp.data.dataloader.order import Deal, GlobalOrder, Order
from mindspeed_mm.fsdp.data.dataloader.pairing import PairedOrder
from mindspeed_mm.fsdp.data.dataloader.planning import BatchShape
from mindspeed_mm.fsdp.data.dataloader.sampler import (
    BUCKET_SAMPLERS,
    BUDGET_SAMPLER,
    SAMPLER_KEY,
    EpochSampler,
    StreamSampler,
    build_sampler,
    check_sampler_name,
    keeps_order,
)
from mindspeed_mm.fsdp.data.dataloader.sizes import Measurer, SizeBook
from mindspeed_mm.fsdp.data.dataset import MMDataset
from mindspeed_mm.fsdp.params.data_args import BasicParameters, DataloaderParam, MixPlan

_PATCHES_KEY = "data.dataloader_param.max_patches_per_batch"
_MODE_KEY = "data.dataloader_param.dataloader_mode"
_BASIC = "data.dataset_param.basic_parameters"
PROBED_ROWS = 256
"""Rows of each data set whose lengths give its mean, for shares of tokens."""


def build_order(
    dataset: MMDataset,
    dataloader_param: DataloaderParam,
    deal: Deal,
    seed: int,
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = 600.0,
    for_passes: bool = False,
) -> tuple[Order, MixShares | None]:
    """The order of the samples, and what counts the shares of a mix.

    Args:
        dataset: The samples.
        dataloader_param: The section.
        deal: Micro-batches of a step.
        seed: Of the order.
        group: Ranks that tell each other the sizes of samples.
        timeout_s: Longest wait for them.
        for_passes: Nothing but passes over all rows is asked of the order: shares do not matter.

    Raises:
        ConfigError: A sampler, a mode or a limit is unknown, or does not go with the data set.
        DataError: The data set is smaller than one global batch and `drop_last` is set.
    """
    check_sampler_name(dataloader_param.sampler_type)
    if dataloader_param.dataloader_mode == "custom":
        raise ConfigError("'custom' is not built yet", key=_MODE_KEY)
    if dataset.sizes is not None:
        mix_plan = None
        if not for_passes:
            mix_plan = dataset.basic_parameters.mix
        return _by_media_size(dataset, dataloader_param, deal, seed, mix_plan, for_passes=for_passes)
    basic = dataset.basic_parameters
    sizes = SizeBook(Measurer(dataset, seed), deal.dp_rank, deal.dp_size, group, timeout_s)
    known = dataset.known_sizes()
    if known is not None:
        sizes.learn(known)
    if for_passes:
        basic = basic.model_copy(update={"mix": None})
    sampler, mix = _sampler(dataset, basic, dataloader_param, sizes, seed)
    shape = _shape(dataloader_param, deal, basic, dataset.rows_of_a_sample)
    if shape is None:
        return GlobalOrder(sampler, deal, dataloader_param.drop_last), mix
    if shape.patches is not None:
        _check_patches_are_told(type(dataset.origin))
    return BufferedOrder(sampler, sizes, shape, deal, drop_last=dataloader_param.drop_last), mix


def _by_media_size(
    dataset: MMDataset,
    dataloader_param: DataloaderParam,
    deal: Deal,
    seed: int,
    mix: MixPlan | None,
    *,
    for_passes: bool,
) -> tuple[BucketOrder, MixShares | None]:
    """Micro-batches of one size each, for generators."""
    if dataloader_param.sampler_type == BUDGET_SAMPLER and dataloader_param.max_tokens_per_batch is None:
        raise ConfigError(
            f"{BUDGET_SAMPLER} has no budget",
            key=TOKENS_KEY,
            way_out="Set it to the most latent tokens of a micro-batch.",
        )
    if dataloader_param.max_patches_per_batch is not None:
        raise ConfigError("generators have no patches", key=_PATCHES_KEY, way_out=f"Set {TOKENS_KEY} instead.")
    is_sequential = dataloader_param.sampler_type == "SequentialSampler" or keeps_order(dataloader_param)
    assert dataset.sizes is not None and dataset.geometry is not None
    settings: JsonObject = {
        "seed": seed,
        "shuffle": not is_sequential,
        "drop_last": dataloader_param.drop_last,
        "max_tokens": dataloader_param.max_tokens_per_batch,
    }
    sizes, geometry = dataset.sizes, dataset.geometry
    if mix is None and dataset.is_prior is not None and not for_passes:
        return PairedOrder(dataset.is_prior, sizes, geometry, deal, **settings), None
    if mix is None:
        return BucketOrder(sizes, geometry, deal, **settings), None
    parts, weights = _weighted(dataset, mix)
    if mix.by == "samples":
        return MixedBucketOrder(parts, weights, sizes, geometry, deal, **settings), MixShares(parts)
    tokens = [geometry.tokens(geometry.latent_shape(size)) for size in sizes]
    means = [sum(tokens[part.first : part.end]) / (part.end - part.first) for part in parts]
    shares = [weight / mean for weight, mean in zip(weights, means, strict=True)]
    return MixedBucketOrder(parts, shares, sizes, geometry, deal, **settings), MixShares(parts, means)


def _weighted(dataset: MMDataset, mix: MixPlan) -> tuple[list[Part], list[float]]:
    """The parts that are drawn from, with their weights. Raises `ConfigError` as `weighted_parts`."""
    if not dataset.parts:
        raise ConfigError(
            f"{type(dataset.origin).__name__} does not name its parts", key=f"{_BASIC}.mix", way_out="Leave mix out."
        )
    return weighted_parts(dataset.parts, mix.weights)


def _shape(dataloader_param: DataloaderParam, deal: Deal, basic: BasicParameters, rows: int) -> BatchShape | None:
    """What a micro-batch may hold, of samples that are so many rows each; None: so many samples as they come."""
    tokens, patches = dataloader_param.max_tokens_per_batch, dataloader_param.max_patches_per_batch
    of_cutoff = deal.micro_batch_size * rows * basic.cutoff_len
    multiple = rows * padding_multiple(dataloader_param.collate_param)
    if basic.packs:
        return BatchShape("packed", tokens or of_cutoff, patches)
    has_budget = dataloader_param.sampler_type == BUDGET_SAMPLER or dataloader_param.dataloader_mode == "variable"
    if has_budget or tokens is not None:
        return BatchShape("padded", tokens or -(-of_cutoff // multiple) * multiple, patches, multiple=multiple)
    if dataloader_param.sampler_type in BUCKET_SAMPLERS:
        return BatchShape("rows", of_cutoff, patches, rows=deal.micro_batch_size, multiple=multiple)
    if patches is not None:
        raise ConfigError(
            f"micro-batches of {deal.micro_batch_size} samples, whatever they hold, keep no limit",
            key=_PATCHES_KEY,
            way_out=f"Set packing: true, max_tokens_per_batch, or {SAMPLER_KEY}: {BUDGET_SAMPLER}.",
        )
    return None


def _check_patches_are_told(kind: type) -> None:
    """Raise where the samples of a data set would have to be encoded to know their sizes: that tells their tokens."""
    if getattr(kind, "measure", MMDataset.measure) is MMDataset.measure:
        raise ConfigError(
            f"{kind.__name__} does not tell how many patches its samples have, so the limit would not be kept",
            key=_PATCHES_KEY,
            way_out="Give it a measure(index) that returns SampleSize(tokens, patches); or leave the limit out.",
        )


def _sampler(
    dataset: MMDataset, basic: BasicParameters, dataloader_param: DataloaderParam, sizes: SizeBook, seed: int
) -> tuple[EpochSampler, MixShares | None]:
    if basic.mix is not None and dataset.streams:
        raise ConfigError(
            "shares of data sets that are streamed are not kept", key=f"{_BASIC}.mix", way_out="Set streaming: false."
        )
    is_sequential = dataloader_param.sampler_type == "SequentialSampler" or keeps_order(dataloader_param)
    if dataset.streams:
        window = dataloader_param.shuffle_window
        if is_sequential:
            window = 1
        return StreamSampler(dataset.has, window, seed), None
    if basic.mix is None:
        return build_sampler(dataloader_param, len(dataset), seed), None
    parts, weights = _weighted(dataset, basic.mix)
    if basic.mix.by == "samples":
        return MixedSampler(parts, weights, seed, shuffle=not is_sequential), MixShares(parts)
    means = [mean_tokens(sizes, part.first, part.end) for part in parts]
    shares = [weight / mean for weight, mean in zip(weights, means, strict=True)]
    return MixedSampler(parts, shares, seed, shuffle=not is_sequential), MixShares(parts, means)


def mean_tokens(sizes: SizeBook, first: int, end: int) -> float:
    """Mean length of the samples of a part, from some of them, evenly spread over it.

    Raises:
        DataError: None of them can be used.
    """
    count = min(PROBED_ROWS, end - first)
    found = sizes.of([first + place * (end - first) // count for place in range(count)])
    tokens, errors = [], []
    for size in found:
        if isinstance(size, DataError):
            errors.append(size)
        else:
            tokens.append(size.tokens)
    if not tokens:
        raise errors[0]
    return sum(tokens) / len(tokens)
