"""The plans whose bytes are counted, and the two tiny models that they are counted on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.communication_formula import Decoder

DENSE = Decoder(layers=4, hidden=64, intermediate=128, heads=8, key_heads=4, head_width=16, vocabulary=320)
TIED = Decoder(layers=4, hidden=64, intermediate=128, heads=8, key_heads=4, head_width=16, vocabulary=320, tied=True)
EXPERTS = Decoder(
    layers=2, hidden=64, intermediate=48, heads=8, key_heads=4, head_width=16, vocabulary=320, experts=8, chosen=2
)
MODELS = {"dense": DENSE, "tied": TIED, "experts": EXPERTS}

ROWS_A_STEP = 8
TP, ULYSSES, RING = (f"parallel.{axis}=2" for axis in
                     ("tensor_parallel_size", "ulysses_parallel_size", "ring_attention_size"))  # fmt: skip
PP_SIZE, SCHEDULE = "parallel.pipeline_parallel_size=2", "parallel.pp_plan.schedule"
PP = (PP_SIZE, "parallel.pp_plan.split_points=[model.layers.2]")
PP_CHUNKS = (PP_SIZE, "parallel.pp_plan.split_points=[model.layers.1, model.layers.2, model.layers.3]")
EP, ALLGATHER = "parallel.expert_parallel_size=2", "parallel.ep_plan.dispatcher=allgather"
ZERO_2 = "parallel.fsdp_plan.reshard_after_forward=false"


def sequence_of(layers: str) -> str:
    """The override that makes the blocks of a decoder work on slices of the sequence."""
    norms = (f'"{layers}.{{*}}.{name}"' for name in ("input_layernorm", "post_attention_layernorm"))
    return f"parallel.tp_plan.sequence_parallel=[{', '.join(norms)}]"


SEQUENCE = sequence_of("model.layers")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    ranks: int
    micro_batches: int
    plan: tuple[str, ...] = ()
    """Overrides."""

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides, without the rows of a micro-batch, which follow from the number of data ranks."""
        return (*self.plan, f"training.gradient_accumulation_steps={self.micro_batches}")

    def rows(self, data_ranks: int) -> str:
        """The override that makes `ROWS_A_STEP` rows a step of all ranks."""
        return f"training.micro_batch_size={ROWS_A_STEP // data_ranks // self.micro_batches}"


CASES = {
    "fsdp2": Case("dense", 2, 1),
    "fsdp2, 2 micro-batches": Case("dense", 2, 2),
    "fsdp2, tied ends": Case("tied", 2, 1),
    "zero-2": Case("dense", 2, 2, (ZERO_2,)),
    "replicated": Case("dense", 2, 1, ("parallel.fully_shard_parallel_size=1",)),
    "tp2": Case("dense", 2, 2, (TP,)),
    "tp2, tied ends": Case("tied", 2, 1, (TP,)),
    "tp2, sequence parallel": Case("dense", 2, 1, (TP, SEQUENCE)),
    "ulysses2": Case("dense", 2, 1, (ULYSSES,)),
    "ring2": Case("dense", 2, 2, (RING,)),
    "pp2, 1f1b": Case("dense", 2, 4, PP),
    "pp2, interleaved1f1b, 2 chunks": Case(
        "dense", 2, 4, (*PP_CHUNKS, f"{SCHEDULE}=interleaved1f1b", "parallel.pp_plan.virtual_stages=2")
    ),
    "pp2, zbv": Case("dense", 2, 4, (*PP_CHUNKS, f"{SCHEDULE}=zbv")),
    "fsdp2, experts": Case("experts", 2, 1),
    "ep2, alltoall": Case("experts", 2, 1, (EP,)),
    "ep2, allgather": Case("experts", 2, 1, (EP, ALLGATHER)),
    "fsdp4": Case("dense", 4, 1),
    "hsdp 2 × 2": Case("dense", 4, 1, ("parallel.fully_shard_parallel_size=2",)),
    "fsdp2 × tp2": Case("dense", 4, 1, (TP,)),
    "fsdp2 × tp2, sequence parallel": Case("dense", 4, 1, (TP, SEQUENCE)),
    "fsdp2 × ring2": Case("dense", 4, 1, (RING,)),
    "ulysses2 × ring2": Case("dense", 4, 1, (ULYSSES, RING)),
    "tp2 × ulysses2": Case("dense", 4, 1, (TP, ULYSSES)),
    "pp2 × fsdp2": Case("dense", 4, 2, PP),
    "pp2 × tp2": Case("dense", 4, 2, (*PP, TP)),
    "ep2 × efsdp2": Case("experts", 4, 1, (EP,)),
    "ep2 × edp2, hsdp": Case("experts", 4, 1, (EP, "parallel.fully_shard_parallel_size=2")),
}
"""Each model's rows are all alike, so that no padding is needed and every rank's tokens choose the same experts."""
