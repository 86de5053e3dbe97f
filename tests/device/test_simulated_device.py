"""The checker sees a planted race, and none where there is none."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.simulated_device import NAME, races


def copied_beside(wait: bool) -> None:
    """A copy to the host in a queue of its own, whose source is given up at once."""
    device = torch.device(NAME, 0)
    source, target = torch.ones(4096, device=device), torch.empty(4096, pin_memory=True)
    queue = torch.Stream(device)
    queue.wait_stream(torch.accelerator.current_stream(device))
    with queue:
        target.copy_(source, non_blocking=True)
    if wait:
        torch.accelerator.current_stream(device).wait_stream(queue)
    del source
    torch.accelerator.synchronize()


@pytest.mark.parametrize("wait", [True, False])
def test_the_checker_sees_a_race(wait: bool, capfd: pytest.CaptureFixture[str]) -> None:
    copied_beside(wait)
    found = races(capfd.readouterr().err)
    assert [race for race in found if "freed while copy" in race] == found
    assert bool(found) is not wait
