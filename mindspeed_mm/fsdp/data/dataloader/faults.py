"""What becomes of a sample that cannot be used: it stops the run, or is left out and counted."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mindspeed_mm.core.errors import DataError
from mindspeed_mm.fsdp.data.data_utils.sample import TooLongError, offer_skipping
from mindspeed_mm.fsdp.data.dataset import MMDataset


class SampleFault(NamedTuple):
    """A sample that was not used as it stands."""

    kind: Literal["bad", "too long", "shrunk", "unread"]
    """`unread`: it was used, but its row holds something that nothing reads."""
    sample: str
    reason: str = ""


class Policy:
    """What a data set says about its bad samples and those that exceed a limit.

    Args:
        dataset: Its `on_bad_sample` and `truncation` are read.
    """

    def __init__(self, dataset: MMDataset) -> None:
        self._may_skip = dataset.on_bad_sample == "skip"
        self._may_drop = dataset.truncation != "error"

    def judge(self, error: DataError, sample: str) -> SampleFault:
        """The fault to count.

        Args:
            error: Why the sample cannot be used.
            sample: Its name.

        Raises:
            DataError: The policy is to stop.
        """
        is_too_long = isinstance(error, TooLongError)
        if not (self._may_drop if is_too_long else self._may_skip):
            if not is_too_long:
                error.change_problems(offer_skipping)
            raise error
        return SampleFault("too long" if is_too_long else "bad", sample, str(error))
