"""What stands in the books while a simulated model is gathered: no more than `fully_shard` holds."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_mm.fsdp.tools.memory_model.gathering import Gathering, ShardedUnit
from mindspeed_mm.fsdp.tools.memory_model.ledger import ACTIVATIONS, TEMPORARY, MemoryLedger
from mindspeed_mm.fsdp.tools.memory_model.simulation import Simulation

ROWS, WIDTH, BLOCKS = 64, 16, 6


class ShiftedBlock(nn.Module):
    """A block that all blocks' common input shifts. It saves nothing as large as its output for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return 2 * hidden + self.shift(time)


class ShiftedBlocks(nn.Module):
    """Blocks that all read the embedding of a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([ShiftedBlock() for _ in range(BLOCKS)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time = self.embed(rows[:1])
        hidden = rows * time
        for block in self.blocks:
            hidden = block(hidden, time)
        return hidden.mul(2).sum()


def unit(names: tuple[str, ...], module: nn.Module) -> ShardedUnit:
    parameters = tuple(module.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    fp32 = torch.float32
    return ShardedUnit(names, parameters, 4 * numel, numel, shards=2, compute=fp32, reduce=fp32, master=fp32)


def most_held(*, gathers: bool) -> int:
    """Most bytes of activations and of their gradients at one moment of a step."""
    ledger, model = MemoryLedger(), ShiftedBlocks()
    with Simulation(ledger) as simulation:
        simulation.fake_parameters(model, lambda _, parameter: (parameter.shape, parameter.dtype))
        if gathers:
            units = [unit((f"blocks.{place}",), block) for place, block in enumerate(model.blocks)]
            gathering = Gathering(simulation, [*units, unit(("",), model.embed)])
            gathering.attach(model)
        else:  # a weight's gradient goes when it is there, as it does where it is reduced
            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        with simulation.phase("forward"):
            loss = model(simulation.empty((ROWS, WIDTH), torch.float32))
        with simulation.phase("backward", TEMPORARY):
            loss.backward()
            del loss
        if gathers:
            gathering.finish()
    moments = map(ledger.alive_at, range(ledger.now + 1))
    kinds = (ACTIVATIONS, TEMPORARY)
    return max(sum(size for label, size in alive.items() if label.category in kinds) for alive in moments)


def test_gradients_of_blocks_that_share_an_input_are_not_kept() -> None:
    """That input's gradient is whole only behind the first block. What came of the others by then is not held: a step
    that gathers holds as much as one that does not."""
    assert most_held(gathers=True) == most_held(gathers=False)
