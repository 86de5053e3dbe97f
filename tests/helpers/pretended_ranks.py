"""A job of several ranks of which only this one is there: enough to build a run up to its first step, or to its
refusal, without the cost of starting processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def first_of(ranks: int) -> Iterator[None]:
    """While inside, this process is rank 0 of `ranks`. Collectives return at once and move nothing; what ranks tell
    one another is what this one says."""
    if ranks == 1:
        yield
        return
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    with mock.patch.dict(os.environ, environment), mock.patch.object(dist, "all_gather_object", _all_say_the_same):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _all_say_the_same(said: list[Any], own: Any, *_args: Any, **_kwargs: Any) -> None:
    said[:] = [own] * len(said)
