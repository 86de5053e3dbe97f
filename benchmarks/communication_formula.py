"""Bytes that one rank sends in an optimizer step, from the model's shapes and the plan alone. Pure.

What is counted is what a ring algorithm sends, of n ranks and a tensor of `size` bytes: an all-gather and a
reduce-scatter (n − 1) / n · size (of the whole tensor), an all-reduce twice that, an all-to-all what leaves the rank,
and from one rank to another the size. Symbols and a worked example: docs/parallelism.md.

Text decoders as Qwen3 and Qwen3-MoE are, without adapters, recompute and prefetch of other steps. Sizes divide evenly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from mindspeed_mm.fsdp.params.sizes.parallel import ParallelSizes

COUNT_BYTES = 8
"""Of a whole number: how many rows there are, which expert is meant."""
EXACT_BYTES = 4
"""Of what is always in fp32: the loss over parts of the vocabulary, gradients of norms and of travelling keys."""


@dataclass(frozen=True)
class Decoder:
    """Shape of a text decoder."""

    layers: int
    hidden: int
    intermediate: int
    """Features inside an MLP, or inside one expert."""
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool = False
    """Whether embedding and output head share their weight."""
    experts: int = 0
    """Of a layer; 0: a plain MLP."""
    chosen: int = 0
    """Experts that a token goes to."""

    @property
    def attention(self) -> int:
        """Parameters of the four projections of a layer."""
        return self.hidden * self.head_width * (2 * self.heads + 2 * self.key_heads)

    @property
    def norms(self) -> int:
        """Parameters of the norms of a layer: before attention and MLP, of queries and of keys."""
        return 2 * self.hidden + 2 * self.head_width

    @property
    def mlp(self) -> int:
        """Parameters of a layer's MLP, or of all of its experts."""
        return 3 * self.hidden * self.intermediate * max(1, self.experts)

    @property
    def router(self) -> int:
        """Parameters that choose the experts of a layer."""
        return self.hidden * self.experts

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        layer = self.attention + self.norms + self.mlp + self.router
        return self.layers * layer + self.embedding * (1 if self.tied else 2) + self.hidden


@dataclass(frozen=True)
class Plan:
    """What of a plan decides about communication."""

    sizes: ParallelSizes
    keeps_parameters: bool = False
    """`fsdp_plan.reshard_after_forward: false`, ZeRO-2."""
    sequence_parallel: bool = False
    """`tp_plan.sequence_parallel` names the norms of the blocks."""
    splits_embedding: bool = True
    """The model's own plan cuts its embedding; those of older releases of transformers do not."""
    dispatcher: str = "alltoall"
    pipeline_rank: int = 0
    """Place of this rank in its pipeline."""
    chunks: int = 1
    """Stages on each rank, all of equally many layers."""
    is_v: bool = False
    """Stages go from the first rank to the last and back (zbv), instead of round and round."""

    @property
    def last_stage(self) -> int:
        """Number of the last stage of all ranks."""
        return self.sizes.pp * self.chunks - 1

    def rank_of(self, stage: int) -> int:
        """The rank in the pipeline that has a stage."""
        lap, place = divmod(stage, self.sizes.pp)
        return self.sizes.pp - 1 - place if self.is_v and lap % 2 else place

    @property
    def is_first(self) -> bool:
        """Whether this rank has the embedding."""
        return self.rank_of(0) == self.pipeline_rank

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last norm and the head."""
        return self.rank_of(self.last_stage) == self.pipeline_rank

    @property
    def stage_ends(self) -> int:
        """Ends of this rank's stages behind or in front of which another rank's stage stands."""
        borders = ((self.rank_of(stage), self.rank_of(stage + 1)) for stage in range(self.last_stage))
        return sum(self.pipeline_rank in border for border in borders if border[0] != border[1])

    def layers(self, model: Decoder) -> float:
        """Layers on this rank."""
        return model.layers / self.sizes.pp

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are laid out apart from the rest of the model."""
        return self.sizes.ep > 1


@dataclass(frozen=True)
class Step:
    """The micro-batches of this rank."""

    micro_batches: int
    tokens: int
    """Of a micro-batch, padding included: rows × length, of the whole sequence where ranks share it."""
    labelled: int
    """Tokens of a micro-batch that this rank takes a loss from."""
    compute_bytes: int = 2
    """Of a number of `param_dtype`."""
    reduce_bytes: int = 4
    """Of a number of `reduce_dtype`."""


def bytes_sent(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Bytes by mesh axis; axes that send nothing are left out.

    Raises:
        ValueError: Experts together with tensor or pipeline parallelism, which this formula does not know.
    """
    if model.experts and plan.sizes.tp * plan.sizes.pp > 1:
        raise ValueError("no formula for experts together with tensor or pipeline parallelism")
    sent = Counter(_sharding(model, plan, step))
    for part in (_tensor, _ring, _ulysses, _pipeline, _experts):
        sent.update(part(model, plan, step))
    return {axis: size for axis, size in sent.items() if size}


def _sharding(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """FSDP: parameters are gathered, gradients reduced and scattered, and summed over copies."""
    sizes = plan.sizes
    cut = model.attention + (0 if model.experts else model.mlp)  # what tensor parallelism cuts
    experts = model.mlp if model.experts else 0
    layer = cut / sizes.tp + model.norms + model.router + (0 if plan.spreads_experts else experts)
    blocks = layer * plan.layers(model)
    ends = model.embedding / sizes.tp * (1 if model.tied else plan.is_first + plan.is_last)
    last_norm = model.hidden * plan.is_last
    own = blocks + ends + last_norm
    # Tied ends are one unit, which stays gathered for a step, as does what belongs to the root.
    kept = last_norm + (ends if model.tied else 0)
    keeps_all = plan.keeps_parameters or sizes.pp > 1
    gathered = own if keeps_all else 2 * step.micro_batches * (own - kept) + kept
    sent = _sharded("fsdp", "dp_replicate", sizes.fsdp, sizes.dp_replicate, gathered, own, step)
    if plan.spreads_experts:
        own = experts * model.layers / sizes.ep
        gathered = own if plan.keeps_parameters else 2 * step.micro_batches * own
        sent |= _sharded("efsdp", "edp", sizes.efsdp, sizes.edp, gathered, own, step)
    return sent


def _sharded(
    axis: str, copies_axis: str, shards: int, copies: int, gathered: float, reduced: float, step: Step
) -> dict[str, float]:
    gradients = step.reduce_bytes * reduced
    return {
        axis: _share(shards) * (step.compute_bytes * gathered + gradients),
        copies_axis: 2 * _share(copies) * gradients / shards,
    }


def _tensor(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Four crossings of all tokens a layer, each an all-reduce, or (sequence parallelism) an all-gather and a
    reduce-scatter; one behind the embedding; the labelled tokens on their way back from the head; three numbers a
    labelled token for the loss; gradients of norms."""
    tokens, layers = step.tokens / plan.sizes.cp, plan.layers(model)
    labelled = step.labelled * plan.is_last
    crossings = 4 * layers * tokens + tokens * (plan.is_first and plan.splits_embedding) + labelled
    norms = 2 * model.head_width
    if plan.sequence_parallel:
        crossings += tokens  # gradients in front of the blocks, outputs behind them: half a crossing each
        norms = model.norms
    exact = 3 * labelled + norms * layers
    each = 2 * (crossings * model.hidden * step.compute_bytes + exact * EXACT_BYTES)
    return {"tp": _share(plan.sizes.tp) * each * step.micro_batches}


def _ring(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Keys and values of every rank but the next one go on, once forward and once backward, where the sums of their
    gradients travel behind them."""
    sizes = plan.sizes
    numbers = 2 * step.tokens / sizes.ring * model.key_heads / sizes.ulysses / sizes.tp * model.head_width
    each = (sizes.ring - 1) * numbers * (2 * step.compute_bytes + EXACT_BYTES)
    return {"ring": each * plan.layers(model) * step.micro_batches}


def _ulysses(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Queries, keys and values of own tokens leave for the ranks of their heads, outputs come back; backward mirrors
    it."""
    sizes = plan.sizes
    heads = (2 * model.heads + 2 * model.key_heads) / sizes.tp
    each = 2 * _share(sizes.ulysses) * step.tokens / sizes.cp * heads * model.head_width * step.compute_bytes
    return {"ulysses": each * plan.layers(model) * step.micro_batches}


def _pipeline(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Hidden states to the next stage, their gradients to the one before, and the loss to all."""
    sizes = plan.sizes
    if sizes.pp == 1:
        return {}
    hidden = step.tokens / sizes.cp * model.hidden * step.compute_bytes
    return {"pp": plan.stage_ends * hidden * step.micro_batches + 2 * _share(sizes.pp) * EXACT_BYTES}


def _experts(model: Decoder, plan: Plan, step: Step) -> dict[str, float]:
    """Tokens to their experts and back, forward and backward. Routing is even, or the same on all of two ranks."""
    ranks = plan.sizes.ep
    tokens = step.tokens / plan.sizes.cp
    if plan.dispatcher == "alltoall":
        rows = 4 * tokens * model.chosen * model.hidden * step.compute_bytes
        each = _share(ranks) * (rows + model.experts * COUNT_BYTES)
    else:
        rows = 4 * tokens * model.hidden * step.compute_bytes
        weights = 2 * tokens * model.chosen * step.compute_bytes
        each = (ranks - 1) * (rows + weights + COUNT_BYTES * (1 + tokens * model.chosen))
    return {"ep": each * model.layers * step.micro_batches}


def _share(ranks: int) -> float:
    """(n − 1) / n: the part of a tensor that a rank does not have, or does not keep."""
    return (ranks - 1) / ranks


QWEN3_8B = Decoder(
    layers=36, hidden=4096, intermediate=12288, heads=32, key_heads=8, head_width=128, vocabulary=151_936
)
QWEN3_30B_A3B = Decoder(
    layers=48, hidden=2048, intermediate=768, heads=32, key_heads=4, head_width=128, vocabulary=151_936,
    experts=128, chosen=8,
)  # fmt: skip


def example() -> dict[str, dict[str, float]]:
    """GB by axis that one of 8 ranks sends in a step of 32,768 tokens, all labelled, in bf16 with fp32 gradients: of
    Qwen3-8B, and behind it of Qwen3-30B-A3B. As it stands in docs/parallelism.md."""
    fsdp = ParallelSizes(world=8, pp=1, dp_replicate=1, dp_shard=8, ring=1, ulysses=1, tp=1, edp=1, efsdp=8, ep=1)
    alone = replace(fsdp, dp_shard=1)
    own_rows, all_rows, own_labels = Step(1, 4096, 4096), Step(1, 32768, 32768), Step(1, 32768, 4096)
    dense = {
        "fsdp 8": (Plan(fsdp), own_rows),
        "fsdp 8, ZeRO-2": (Plan(fsdp, keeps_parameters=True), own_rows),
        "hsdp, 2 copies × 4 shards": (Plan(replace(fsdp, dp_replicate=2, dp_shard=4)), own_rows),
        "replicated 8": (Plan(replace(alone, dp_replicate=8)), own_rows),
        "fsdp 4 × tp 2": (Plan(replace(fsdp, dp_shard=4, tp=2)), Step(1, 8192, 8192)),
        "tp 8": (Plan(replace(alone, tp=8)), all_rows),
        "tp 8, sequence parallel": (Plan(replace(alone, tp=8), sequence_parallel=True), all_rows),
        "ulysses 8": (Plan(replace(alone, ulysses=8)), own_labels),
        "ring 8": (Plan(replace(alone, ring=8)), own_labels),
        "ring 2 × ulysses 4": (Plan(replace(alone, ring=2, ulysses=4)), own_labels),
        "pp 4 × fsdp 2, a middle stage": (Plan(replace(fsdp, pp=4, dp_shard=2), pipeline_rank=1), Step(4, 4096, 4096)),
    }
    experts = {
        "30B-A3B: fsdp 8": (Plan(fsdp), own_rows),
        "30B-A3B: ep 8, alltoall": (Plan(replace(fsdp, efsdp=1, ep=8)), own_rows),
        "30B-A3B: ep 8, allgather": (Plan(replace(fsdp, efsdp=1, ep=8), dispatcher="allgather"), own_rows),
        "30B-A3B: ep 2 × efsdp 4": (Plan(replace(fsdp, efsdp=4, ep=2)), own_rows),
    }
    sent = {name: bytes_sent(QWEN3_8B, *case) for name, case in dense.items()}
    sent |= {name: bytes_sent(QWEN3_30B_A3B, *case) for name, case in experts.items()}
    return {name: {axis: size / 1e9 for axis, size in axes.items()} for name, axes in sent.items()}


if __name__ == "__main__":
    for title, axes in example().items():
        parts = ", ".join(f"{axis} {size:.2f}" for axis, size in axes.items())
        print(f"| {title} | {sum(axes.values()):.1f} | {parts} |")
