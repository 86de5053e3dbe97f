"""One rank of `mm doctor --nproc N`: joins a group on this host, adds numbers over it and compares the sum."""

from __future__ import annotations

import os
from datetime import timedelta

_TIMEOUT_S = 60.0


def main() -> None:
    """Join, add and leave.

    Raises:
        RuntimeError: The sum is not that of all ranks.
    """
    import torch
    import torch.distributed as dist

    from mindspeed_mm.fsdp.utils.device import check_device_count, distributed_backend, set_local_device

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_device_count(ranks)
    device = set_local_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(distributed_backend(), timeout=timedelta(seconds=_TIMEOUT_S))
    # rank r adds r + 1, so that a rank that is missing or counted twice changes the sum
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    expected = ranks * (ranks + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"rank {rank} got {float(numbers[0])} where the sum is {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
