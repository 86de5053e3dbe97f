"""What is odd about the first samples, although training would take them."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_mm.fsdp.data import DataPosition, MMDataLoader
from mindspeed_mm.fsdp.data.data_utils.token_arrays import labels_apart


def warnings_of_samples(loader: MMDataLoader) -> Iterator[str]:
    """Warnings about the data of a run: a data set that is smaller than a step, and samples of the first micro-batch
    whose labels are not as long as their tokens, which a collator of their own joins.

    Args:
        loader: Of the training data.
    """
    if loader.repeat_note:
        yield f"{loader.repeat_note}: lower micro_batch_size or gradient_accumulation_steps, or give more data"
    dataset = loader.dataset
    if dataset.has_rows or dataset.collate_fn is None:
        return
    for pick in loader.order.step(DataPosition(0, 0)).step[0].picks:
        apart = labels_apart(dataset.item(pick.row, pick.epoch))
        if apart:
            yield f"sample {dataset.place(pick.row)} has {apart}: its collate_fn must give each token its own label"
            return


def notes_on_epochs(loader: MMDataLoader) -> Iterator[str]:
    """What epochs leave out at their ends."""
    if dropped := loader.order.dropped:
        yield f"each epoch leaves out {dropped} at its end, too few for a step (drop_last: false uses all)"
