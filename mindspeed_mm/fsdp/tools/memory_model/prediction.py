"""The prediction: what one rank holds when it holds most, by category and by module. Pure: no device, no weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.patterns import is_inside
from mindspeed_mm.fsdp.distributed.context.plan import find_decoder
from mindspeed_mm.fsdp.distributed.parallel_plan import ParallelPlan
from mindspeed_mm.fsdp.distributed.pipeline.apply import hidden_dtype
from mindspeed_mm.fsdp.distributed.pipeline.cut import untie
from mindspeed_mm.fsdp.distributed.tensor.apply import divide_heads
from mindspeed_mm.fsdp.distributed.tensor.plan import Style, gathers_features, output_head
from mindspeed_mm.fsdp.ops.linear_cross_entropy import as_computed_on
from mindspeed_mm.fsdp.params.argument import Arguments, ParallelArguments, TrainingArguments
from mindspeed_mm.fsdp.params.rules.posttrain import keeps_a_copy
from mindspeed_mm.fsdp.params.training_args import OPTIMIZERS
from mindspeed_mm.fsdp.plan.model_plan import ModelPlan
from mindspeed_mm.fsdp.tools.memory_model.gathering import Gathering, ShardedUnit
from mindspeed_mm.fsdp.tools.memory_model.ledger import (
    ACTIVATIONS,
    BATCH,
    GATHERED,
    GRADIENTS,
    RECOMPUTED,
    TEMPORARY,
    Label,
    MemoryLedger,
)
from mindspeed_mm.fsdp.tools.memory_model.offload import SimulatedOffload
from mindspeed_mm.fsdp.tools.memory_model.pipeline import SimulatedPipeline
from mindspeed_mm.fsdp.tools.memory_model.repeats import RepeatedBlocks
from mindspeed_mm.fsdp.tools.memory_model.simulation import (
    NOTE,
    Simulation,
    linear_activations,
    pattern_of,
    watch_modules,
)
from mindspeed_mm.fsdp.tools.memory_model.static_part import (
    HeldParameter,
    HeldUnit,
    StaticPart,
    held_units,
    state_bytes,
    static_part,
    step_bytes,
    trained_of,
)
from mindspeed_mm.fsdp.tools.memory_model.unrolling import SimulatedRun, unrolled
from mindspeed_mm.fsdp.utils.model_parts import attribute_at
from mindspeed_mm.fsdp.utils.plugins import place_within

_ABOUT_SHAPES = re.compile(
    r"size of tensor|\bbroadcast|cannot be multiplied|must match (the )?(size|existing)|is invalid for input of size"
    r"|[Ss]izes of tensors must match|shape mismatch|[Ee]xpected (input|size|tensor)"
)
"""What torch says of tensors that do not fit (torch 2.11 to 2.13)."""
_ABOUT_MEDIA = re.compile(r"features and \w+ tokens do not match\W+tokens:?\s*\d+\D+features:?\s*\d+", re.IGNORECASE)
"""What models of transformers say of placeholders that are not as many as what their towers make (5.17)."""
Loss = Callable[[nn.Module, Batch], torch.Tensor]
"""Model and batch → the sum that is minimised."""


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes of one rank of the device; the largest, where ranks differ."""

    static: StaticPart
    """What stays from step to step."""
    at_peak: Mapping[Label, int]
    """What a step adds, at its fullest moment."""
    kept: Mapping[str, int]
    """Activations kept for the backward pass at the end of the forward pass, by module pattern."""
    phase: str
    """When the peak is."""
    buffers: int = 0
    on_host: int = 0
    """What lies on the host instead of on the device."""
    device_static: int = 0
    """Of `static` and `buffers`, what lies on the device."""
    resident: int = 0
    """On a CPU: highest resident size of the process above what its imports take, with what its allocator keeps."""
    approximations: tuple[str, ...] = ()
    """What is not exact in it, in words."""
    reference: int = 0
    """Of the frozen model that the trained one is compared with, what lies on the device. It adds to the peak, for it
    stays from step to step, and to `resident`."""
    critic: int = 0
    """The same of a model that is trained beside, with its optimizer's state."""
    vae: int = 0
    """Of a frozen VAE that encodes pictures of rows while the model is trained, what lies on the device."""
    blocks: int = 0
    """Keys and values of finished blocks of frames, where a sample is drawn in blocks: kept until the backward pass."""
    misfit: str = ""
    """What the model's code said of tensors whose shapes do not fit one another, and where; empty where they do."""
    media_misfit: str = ""
    """What the model's code said of the tokens that stand for media, where they are not as many as it makes features of
    them; empty where they are."""

    @property
    def peak(self) -> int:
        """Most bytes held at once."""
        beside = self.reference + self.critic + self.vae + self.blocks
        return self.device_static + beside + sum(self.at_peak.values())

    @property
    def parameters(self) -> int:
        """Bytes of the shards of all parameters."""
        return self.static.parameters

    @property
    def gradients(self) -> int:
        """Bytes of the gradients' shards, when the backward pass is done."""
        return self.static.gradients

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer's state on this rank."""
        return self.static.optimizer

    @property
    def activations(self) -> int:
        """Kept for the backward pass at its start."""
        return sum(self.kept.values())

    @property
    def of_batch(self) -> int:
        """Of the peak, what grows with the rows and tokens of a micro-batch."""
        if self.phase == "optimizer":
            return 0
        return sum(map(self.category, (ACTIVATIONS, RECOMPUTED, TEMPORARY, BATCH)))

    def category(self, name: str) -> int:
        """What a category has of the peak."""
        return sum(size for label, size in self.at_peak.items() if label.category == name)

    def categories(self) -> dict[str, int]:
        """The peak by category, the largest first."""
        sizes: Counter[str] = Counter(
            {
                "parameters": self.static.parameters + self.buffers,
                "optimizer": self.static.optimizer,
                "copy of the weights": self.static.average,
                "frozen reference": self.reference,
                "critic": self.critic,
                "frozen VAE": self.vae,
                "keys and values of blocks": self.blocks,
            }
        )
        for label, size in self.at_peak.items():
            sizes[label.category] += size
        return {name: size for name, size in sizes.most_common() if size}

    def modules(self) -> dict[str, int]:
        """Activations, temporaries and what is computed again at the peak, by module pattern, the largest first."""
        sizes: Counter[str] = Counter()
        for label, size in self.at_peak.items():
            if label.category in (ACTIVATIONS, RECOMPUTED, TEMPORARY):
                sizes[_shortened(label.module)] += size
        return dict(sizes.most_common())


def _shortened(module: str) -> str:
    """Return a pattern as far as the level below its block: `model.layers.{*}.mlp.act_fn` → `model.layers.{*}.mlp`."""
    before, repeated, behind = module.rpartition(".{*}.")
    return f"{before}{repeated}{behind.partition('.')[0]}" or "loss and others"


def predict_memory(
    model: nn.Module,
    plan: ModelPlan,
    arguments: Arguments,
    batch: Batch,
    loss: Loss,
    *,
    device_type: str = "cpu",
    media: Sequence[str] = (),
    whole: bool = False,
) -> MemoryPrediction:
    """Predict the memory of a training step from the second one on.

    Args:
        model: Whole, parameters on meta, real buffers, adapters in it; features that change single modules
            (recompute …) are applied, offloading and the parallel plan are not. It is of no use afterwards.
        plan: Resolved for it.
        arguments: The configuration.
        batch: One micro-batch, prepared by the objective; real, or fake floats of the same shapes.
        loss: What is minimised.
        device_type: Where it will run: on a CPU what is "on the host" is the same memory.
        media: Batch keys that feed what a pipeline's first stage alone has.
        whole: Simulate every block. Otherwise a few of each kind are simulated, for all.

    Returns:
        Of the rank of a pipeline that holds most.

    Raises:
        NotAlike: Blocks cannot stand for one another. After this and any other error a model that is built anew must be
            simulated whole.
    """
    stages, count = plan.parallel.stages, 1
    if stages is not None:
        untie(model, stages)
        count = stages.ranks
    ranks = range(count)
    units = [held_units(model, plan.parallel, rank) for rank in ranks]
    simulated = _Step(arguments, model, plan, units, device_type, whole=whole)
    simulated.spread(plan.parallel)
    try:
        with as_computed_on(device_type):
            simulated.run(batch, loss, media)
    # The model's code may look at what is not there.
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        if simulated.leaves_out:
            raise
        simulated.approximate(batch, error)
    predictions = [simulated.prediction(rank, device_type) for rank in ranks]
    return max(predictions, key=lambda prediction: prediction.peak)


class _SimulatedRank:
    """The books of one rank of a pipeline, or of the only kind of rank that there is."""

    def __init__(self, units: Sequence[HeldUnit]) -> None:
        self.units = units
        self.ledger = MemoryLedger()
        self.gathering: Gathering | None = None
        self.kept: dict[str, int] = {}

    def unroll(self, runs: Sequence[SimulatedRun]) -> None:
        """Write into the books what was left out of the simulation, and read what they noted."""
        self.ledger = MemoryLedger(unrolled(self.ledger.log, runs))
        for moment in self.ledger.log.moments:
            sizes = self._kept_at(moment)
            if sizes.total() >= sum(self.kept.values()):
                self.kept = dict(sizes.most_common())

    def _kept_at(self, moment: int) -> Counter[str]:
        """Activations that are alive, by module."""
        sizes: Counter[str] = Counter()
        for label, size in self.ledger.alive_at(moment).items():
            if label.category == ACTIVATIONS:
                sizes[label.module or "loss and others"] += size
        return sizes


class _Step:
    """The simulated step, with books for each rank of a pipeline."""

    def __init__(
        self,
        arguments: Arguments,
        model: nn.Module,
        plan: ModelPlan,
        units: Sequence[Sequence[HeldUnit]],
        device_type: str,
        *,
        whole: bool,
    ) -> None:
        self.approximations: list[str] = []
        self.misfit = self.media_misfit = ""
        self._arguments, self._model, self._plan = arguments, model, plan
        self._is_host, self._whole = device_type == "cpu", whole
        self._repeats: RepeatedBlocks | None = None
        self._ranks = [_SimulatedRank(of_rank) for of_rank in units]
        self._simulation = Simulation(self._ranks[0].ledger)
        self._compute, self._reduce = plan.precision.compute, plan.precision.reduce
        held: dict[str, HeldParameter] = {}
        sharded: set[str] = set()
        for rank in self._ranks:
            for unit in rank.units:
                of_unit = {parameter.name: parameter for parameter in unit.parameters}
                held |= of_unit
                if unit.shards:
                    sharded |= of_unit.keys()

        def as_computed(name: str, parameter: nn.Parameter) -> tuple[Sequence[int], torch.dtype]:
            shape: Sequence[int] = parameter.shape
            dtype = parameter.dtype
            if name in held and len(shape) > 0:
                shape = held[name].computed
            if name in sharded:
                dtype = self._computed(dtype)
            return shape, dtype

        # What passes between stages has the type of the parameters as they are stored: asked before they are faked.
        self._hidden_dtype = hidden_dtype(model, plan.parallel.section)
        self._simulation.fake_parameters(model, as_computed)
        self._divide_layers()
        self._parts: dict[str, float] = {}
        """Parameter → share of it that this rank computes with."""
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            if name in held:
                self._parts[name] = _part(held[name], parameter)
        for rank in self._ranks:
            with self._simulation.writing(rank.ledger):
                units_of_rank = [self._sharded(unit, parameters) for unit in rank.units if unit.shards]
                rank.gathering = Gathering(self._simulation, units_of_rank)

    def _divide_layers(self) -> None:
        """Let attention expect as many heads as a rank of tensor parallelism has, and layers whose features leave whole
        return those of all ranks."""
        parallel, model = self._plan.parallel, self._model
        if parallel.tensor is None:
            return
        attentions = {name.rpartition(".")[0] for name in parallel.tensor.names(Style.COLUMN)}
        for attention in attentions:
            divide_heads(model.get_submodule(attention), parallel.sizes.tp)
        head = output_head(model)
        for name, rule in parallel.tensor.cuts.items():
            if gathers_features(name, rule, head, gather_logits=parallel.gathers_logits):
                model.get_submodule(name).register_forward_hook(partial(_gathered, ranks=parallel.sizes.tp))

    def spread(self, plan: ParallelPlan) -> None:
        """Simulated are whole sequences: a rank has a share of that."""
        sizes = plan.sizes
        if plan.towers is not None:
            self.approximations.append("media that ranks share unevenly")
        if sizes.cp > 1:
            self.approximations.append("keys and values that ranks exchange; activations are divided evenly")
        if sizes.ep > 1:
            self.approximations.append("uneven loads of experts and buffers of tokens on their way")
        if sizes.tp > 1:
            self.approximations.append("buffers of partial sums that ranks add up")
        if plan.stages is not None:
            self.approximations.append("micro-batches that differ in size; counted is the rank that holds most")
        towers: tuple[str, ...] = ()
        share_of_towers = 1.0
        if plan.towers is not None:
            towers = tuple(map(pattern_of, plan.towers.towers))
            share_of_towers = 1 / (plan.towers.sizes.parts * plan.towers.sizes.copies)
        is_divided = self._divided(plan)

        def share_of(module: str) -> float:
            if module.startswith(towers):
                return share_of_towers
            return 1 / sizes.cp if is_divided(module) else 1.0

        self._simulation.share_of = share_of

    def _divided(self, plan: ParallelPlan) -> Callable[[str], bool]:
        """Which modules, by pattern, work on a share of a sequence: the decoder but for its embedding, what follows it,
        and blocks and mergers of a tower that is spread, too. What leads to the decoder works on whole sequences; an
        output head may stand beside it."""
        context = plan.context
        if context is None or context.spreads_samples:
            return lambda module: True
        names = {module: pattern_of(name) for name, module in self._model.named_modules()}
        decoder = names[find_decoder(self._model)]
        embedding = names[self._model.get_input_embeddings()]  # type: ignore[operator]
        head = names.get(attribute_at(self._model, "get_output_embeddings", lambda: None)())
        before = decoder.rpartition(".")[0]
        spread = tuple({pattern_of(block) for block in self._plan.blocks if is_inside(block, context.towers)})

        def is_divided(module: str) -> bool:
            if module.startswith(decoder) or module == head:
                return module != embedding
            leads_to_decoder = bool(before) and module.startswith(before)
            return not leads_to_decoder or module.startswith(spread)

        return is_divided

    def _computed(self, stored: torch.dtype) -> torch.dtype:
        """What sharding gathers a parameter in: bytes of a packed one stay bytes."""
        if self._compute is not None and stored.is_floating_point:
            return self._compute
        return stored

    def _sharded(self, unit: HeldUnit, parameters: Mapping[str, nn.Parameter]) -> ShardedUnit:
        plan = self._plan.parallel.sharding.section
        own: list[nn.Parameter] = []
        trained: list[HeldParameter] = []
        whole_bytes = trained_numel = 0
        for held in unit.parameters:
            own.append(parameters[held.name])
            whole_bytes += held.padded_numel * self._computed(held.dtype).itemsize
            if held.is_trained:
                trained.append(held)
                trained_numel += held.padded_numel
        master = trained[0].dtype if trained else torch.float32
        compute = self._compute or master
        # The root, and modules that are gathered together, stay gathered between forward and backward pass.
        stays_gathered = len(unit.names) > 1 or unit.names[0] == ""
        offloads = plan.cpu_offload or self._arguments.features.enable_gradient_offload
        return ShardedUnit(
            names=unit.names,
            parameters=tuple(own),
            whole_bytes=whole_bytes,
            trained_numel=trained_numel,
            shards=unit.shards,
            compute=compute,
            reduce=self._reduce or compute,
            master=master,
            frees_after_forward=plan.reshard_after_forward is not False and not stays_gathered,
            on_host=offloads and not self._is_host,
        )

    def run(self, batch: Batch, loss: Loss, media: Sequence[str]) -> None:
        """A whole step, from the first forward pass to the gradients."""
        SimulatedOffload(self._simulation, is_same_memory=self._is_host).attach(
            self._model, self._plan.features.offloaded
        )
        if not self._whole:
            units = [rank.units for rank in self._ranks]
            self._repeats = RepeatedBlocks(self._simulation, self._model, self._plan.blocks, units)
            self._repeats.attach()
        watch_modules(self._model, self._simulation)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._simulation.on_gradient(parameter, _Gradient(self._simulation, name, self._parts.get(name, 0.0)))
        stages = self._plan.parallel.stages
        for rank in self._ranks:
            assert rank.gathering is not None
            if self._repeats is not None:
                rank.gathering.block_of = self._repeats.block_of
            rank.gathering.attach(self._model)  # behind the hooks above: it takes gradients away
        waiting = self._arguments.training.gradient_accumulation_steps - 1
        with torch.random.fork_rng(devices=[]), self._simulation:
            for number, rank in enumerate(self._ranks):
                with self._simulation.writing(rank.ledger):
                    rank.ledger.take(Label(GATHERED, "weights from the host"), self._travelling())
                    # All micro-batches of a step are there from its beginning.
                    rank.ledger.take(Label(BATCH), waiting * _bytes_of(batch))
                    if stages is None:
                        self._run_plainly(rank, batch, loss)
                    else:
                        stage_rank = SimulatedPipeline(
                            self._simulation, self._model, stages, number, self._hidden_dtype, media
                        )
                        self._run_stages(rank, stage_rank, batch, loss)

    @property
    def leaves_out(self) -> bool:
        """Whether blocks are left out of the simulation."""
        return self._repeats is not None and self._repeats.leaves_out

    def _travelling(self) -> int:
        """Bytes of the weights from the host that are on the device together: of a block and of the next one."""
        waiting, held = set(self._plan.parallel.sharding.on_host), dict(self._model.named_parameters())
        sizes = [0]
        for block in self._plan.features.waiting:
            sizes.append(_sum_bytes(held[name] for name in waiting if name.startswith(f"{block}.")))
        return max(map(sum, pairwise(sizes)), default=0)

    def _run_plainly(self, rank: _SimulatedRank, batch: Batch, loss: Loss) -> None:
        """All micro-batches that differ in memory: the first of several, and the last."""
        gathering = rank.gathering
        assert gathering is not None
        count = min(self._arguments.training.gradient_accumulation_steps, 2)
        for index in range(count):
            gathering.reduces = index == count - 1
            own = self._batch(batch)
            with self._simulation.phase("forward"):
                value = loss(self._model, own)
            rank.ledger.note()
            with self._simulation.phase("backward", TEMPORARY):
                value.backward()  # type: ignore[no-untyped-call]
            gathering.finish()
            del own, value

    def _run_stages(self, rank: _SimulatedRank, stages: SimulatedPipeline, batch: Batch, loss: Loss) -> None:
        """All micro-batches that are under way together, with gradients summed over ranks at the end."""
        gathering, settings = rank.gathering, self._plan.parallel.section.pp_plan
        assert gathering is not None
        count = settings.micro_batches or self._arguments.training.gradient_accumulation_steps
        gathering.reduces = False

        def forward_ended() -> None:
            gathering.forward_ended()
            rank.ledger.note()

        stages.run(settings, self._batch(batch), count, loss, forward_ended)
        gathering.reduces = True
        with self._simulation.phase("backward", TEMPORARY):
            gathering.finish()

    def _batch(self, batch: Batch) -> Batch:
        dtype = None
        if self._plan.parallel.sharding.is_sharded and self._plan.precision.casts_inputs:
            dtype = self._compute
        return self._simulation.fake_batch(batch, dtype)

    def approximate(self, batch: Batch, error: Exception) -> None:
        """Instead of `run`, which ended in this error: what linear layers keep, and all gradients."""
        self.approximations.append(NOTE)
        if _ABOUT_MEDIA.search(str(error)):
            self.media_misfit = " ".join(str(error).split())
        elif _ABOUT_SHAPES.search(str(error)):
            self.misfit = f"{' '.join(str(error).split())} ({place_within(type(self._model), error)})"
        kept = linear_activations(self._model, batch, self._compute or torch.float32)
        for rank in self._ranks:
            rank.ledger, rank.kept = MemoryLedger(), kept
            rank.ledger.begin("forward")
            for module, size in kept.items():
                rank.ledger.take(Label(ACTIVATIONS, module), size)
            rank.ledger.begin("backward")
            gradients = sum(parameter.bytes for parameter in trained_of(rank.units))
            rank.ledger.take(Label(GRADIENTS, ""), gradients)

    def prediction(self, number: int, device_type: str) -> MemoryPrediction:
        """What came of it on one rank."""
        rank, arguments = self._ranks[number], self._arguments
        rank.unroll(self._repeats.runs() if self._repeats is not None else ())
        ledger, training = rank.ledger, arguments.training
        ledger.begin("optimizer")
        taken = step_bytes(trained_of(rank.units), training, device_type)
        ledger.give_back(ledger.take(Label(TEMPORARY, "optimizer"), taken))
        matrices = {name for name, settings in self._plan.groups.settings.items() if settings.matrices}
        state = partial(state_bytes, training=training, matrices=matrices)
        static = static_part(rank.units, state, averages=keeps_a_copy(arguments.training, arguments.posttrain))
        buffers = _sum_bytes(self._model.buffers())
        waiting, weights = set(self._plan.parallel.sharding.on_host), 0
        for unit in rank.units:
            weights += sum(parameter.bytes for parameter in unit.parameters if parameter.name in waiting)
        on_host = _host_bytes(static, arguments.parallel, arguments.training, device_type, weights)
        on_device = static.parameters + static.optimizer + static.average + buffers - on_host
        moment = ledger.peak()
        return MemoryPrediction(
            static,
            ledger.alive_at(moment),
            rank.kept,
            ledger.phase_at(moment),
            buffers,
            on_host,
            on_device,
            on_device + ledger.resident(),
            tuple(self.approximations),
            misfit=self.misfit,
            media_misfit=self.media_misfit,
        )


class _Gradient:
    """Hook on a parameter: what was accumulated is a gradient, of which this rank has a part."""

    def __init__(self, simulation: Simulation, name: str, part: float) -> None:
        self._simulation, self._part = simulation, part
        self._label = Label(GRADIENTS, pattern_of(name.rpartition(".")[0]))

    def __call__(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        entry = self._simulation.entry_of(parameter.grad)
        if entry is not None:
            self._simulation.ledger.relabel(entry, self._label)
            size = parameter.grad.numel() * parameter.grad.element_size()  # whole, also where activations are divided
            self._simulation.ledger.resize(entry, round(size * self._part))


def _gathered(_module: nn.Module, _args: object, own: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """(…, F) → (…, ranks · F), as `gather_features` does; the gradient is this rank's part."""
    return torch.cat([own, *(torch.empty_like(own) for _ in range(ranks - 1))], dim=-1)


def _part(held: HeldParameter, simulated: nn.Parameter) -> float:
    """Share of a simulated parameter that this rank computes with: experts are simulated whole."""
    whole = simulated.numel()
    return math.prod(held.shape) / whole if whole else 1.0


def _bytes_of(batch: Batch) -> int:
    return _sum_bytes(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _sum_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _host_bytes(
    static: StaticPart, parallel: ParallelArguments, training: TrainingArguments, device_type: str, weights: int
) -> int:
    """`weights`: of blocks that wait for their turn."""
    if device_type == "cpu":
        return 0
    if parallel.fsdp_plan.cpu_offload:
        return static.parameters + static.optimizer + static.average
    if OPTIMIZERS[training.optimizer].moments_on_host:
        return weights + static.optimizer
    return weights
