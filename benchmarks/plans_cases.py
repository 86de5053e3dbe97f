"""The plans that are timed on two ranks, and the models that they train. Pure."""

from __future__ import annotations

from benchmarks.communication_cases import ALLGATHER, EP, RING, TP, ULYSSES, ZERO_2, Case, sequence_of
from benchmarks.communication_formula import Decoder

RANKS = 2
ROWS_A_STEP = 8
TOKENS_A_ROW = 64
WARM_UP_STEPS = 3
MEASURED_STEPS = 20

SHAPES = {
    "dense": Decoder(
        layers=4, hidden=256, intermediate=512, heads=8, key_heads=4, head_width=32, vocabulary=320
    ),
    "experts": Decoder(
        layers=4, hidden=256, intermediate=128, heads=8, key_heads=4, head_width=32, vocabulary=320, experts=8, chosen=2
    ),
}  # fmt: skip
FLOORS = {"dense": "fsdp2", "experts": "fsdp2"}
"""What the others are compared with."""

PP = "parallel.pipeline_parallel_size=2"
PLANS = {
    "dense": {
        "fsdp2": Case("dense", RANKS, 1),
        "zero-2": Case("dense", RANKS, 1, (ZERO_2,)),
        "replicated": Case("dense", RANKS, 1, ("parallel.fully_shard_parallel_size=1",)),
        "tp2": Case("dense", RANKS, 1, (TP,)),
        "tp2, sequence parallel": Case("dense", RANKS, 1, (TP, sequence_of("model.layers"))),
        "ulysses2": Case("dense", RANKS, 1, (ULYSSES,)),
        "ring2": Case("dense", RANKS, 1, (RING,)),
        "pp2, 1f1b": Case("dense", RANKS, 4, (PP,)),
        "pp2, gpipe": Case("dense", RANKS, 4, (PP, "parallel.pp_plan.schedule=gpipe")),
        "pp2, zbv": Case("dense", RANKS, 4, (PP, "parallel.pp_plan.schedule=zbv")),
    },
    "experts": {
        "fsdp2": Case("experts", RANKS, 1),
        "ep2, alltoall": Case("experts", RANKS, 1, (EP,)),
        "ep2, allgather": Case("experts", RANKS, 1, (EP, ALLGATHER)),
    },
}
