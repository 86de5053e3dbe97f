"""The load-balancing loss of routers, as a further term of any objective.

For one micro-batch over all data and context ranks, with the choices and probabilities of all layers taken together
(Switch Transformer, arXiv:2101.03961, equations 4 to 6; transformers' `load_balancing_loss_func`), over all stages too:

    aux = E · Σ_e (c_e / R) · (p_e / R)

E experts, R rows (real tokens × layers), c_e how many rows have expert e among their choices, p_e the sum of its
probabilities. Micro-batches of a step are averaged by their tokens. c_e and R are not functions of the weights: only
they go over ranks; p_e carries the gradient and stays local, and the sum over ranks makes term and gradient whole. What
it saves for the backward pass may be kept on the host until then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Objective, Terms
from mindspeed_mm.fsdp.models.facts import facts_of
from mindspeed_mm.fsdp.models.structure.stages import RouterPassing, StageExit, holders_of
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens
from mindspeed_mm.fsdp.utils.host_copies import HostCopies
from mindspeed_mm.fsdp.utils.model_parts import attribute_at, weight_of

TERM = "router_aux"
KEY = "features.loss_cfg.router_aux_loss_coef"


class RouterLogits:
    """Keeps what the routers of a model return in a forward pass.

    Nothing is computed where they are kept: a layer that is computed again in the backward pass must do the same twice.

    Args:
        model: Its transformers classes name their routers (`_can_record_outputs["router_logits"]`). A rank of a
            pipeline may have none of them.

    Raises:
        ConfigError: None does.
    """

    def __init__(self, model: nn.Module) -> None:
        if facts_of(model).share is None:
            check_routers(model)
        self._kept: dict[int, list[torch.Tensor]] | None = None
        self.choices: list[int] = []
        """How many experts a token has, by layer."""
        self.ran: list[int] = []
        """Of the layers that ran last, in the order in which their logits were kept."""
        for number, (module, index) in enumerate(find_routers(model)):
            self.choices.append(_choices(module))
            module.register_forward_hook(partial(self._keep, number, index))

    @contextmanager
    def kept(self) -> Iterator[list[torch.Tensor]]:
        """Filled, when left, with one (T, E) tensor a layer, in the order in which they run; what a layer that takes a
        few rows at a time said of each is one behind the other."""
        found: list[torch.Tensor] = []
        kept: dict[int, list[torch.Tensor]] = {}
        self._kept = kept
        try:
            yield found
        finally:  # also of a stage, which is left by an exception
            self._kept = None
            self.ran = [self.choices[number] for number in kept]
            for parts in kept.values():
                found.append(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _keep(
        self,
        number: int,
        index: int,
        _module: nn.Module,
        _inputs: object,
        output: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        if self._kept is not None:
            logits = output if isinstance(output, torch.Tensor) else output[index]
            self._kept.setdefault(number, []).append(logits)


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Modules that choose experts, with the place of the logits in what they return; none of those parts of a model
    that it runs without a gradient (`run_without_gradient`)."""
    found: dict[nn.Module, int] = {}
    unlearnt: set[nn.Module] = set()
    for name in attribute_at(model, "run_without_gradient", ()):
        unlearnt.update(model.get_submodule(name).modules())
    for parent in model.modules():
        # A class of modules, or transformers' record of one: which of its outputs, and of modules with which names.
        recorder = attribute_at(parent, "_can_record_outputs", {}).get("router_logits")
        target = attribute_at(recorder, "target_class", recorder)
        if parent in unlearnt or not isinstance(target, type):
            continue
        layer = attribute_at(recorder, "layer_name", "")
        for name, module in parent.named_modules():
            if isinstance(module, target) and name.endswith(layer):
                found[module] = attribute_at(recorder, "index", 0)
    return list(found.items())


def _choices(router: nn.Module) -> int:
    for owner in (router, attribute_at(router, "config")):
        for name in ("top_k", "num_experts_per_tok", "moe_top_k"):
            count = attribute_at(owner, name)
            if isinstance(count, int):
                return count
    raise ConfigError(
        f"{type(router).__name__} does not say how many experts it chooses (top_k)",
        key=KEY,
        way_out="Set it to 0 for this model.",
    )


class WithRouterAux:
    """An objective with the routers' term beside its own.

    Args:
        objective: What is trained for.
        model: Sharded or not.
        coefficient: `features.loss_cfg.router_aux_loss_coef`; in the term already, as it is logged.
        groups: Over which one micro-batch is spread: data ranks, context ranks.
        offload: `features.loss_cfg.router_aux_loss_offload`.

    Raises:
        ConfigError: The model has no routers.
    """

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        coefficient: float,
        groups: Sequence[dist.ProcessGroup] = (),
        *,
        offload: bool = False,
    ) -> None:
        self._objective, self._coefficient, self._groups = objective, coefficient, groups
        called = []
        for holder in holders_of(model):  # the model itself, or stages around their parts of it
            called.append(holder if holder is model else holder.get_submodule("model"))
        self._routers, self._real_tokens = RouterLogits(model), RealTokens(*called)
        self._passing = facts_of(model).noted(RouterPassing)
        self._saving = SavedOnHost() if offload else nullcontext
        self._where = ", its statistics on the host" if offload else ""

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """Prepare a batch on the host as the inner objective does."""
        return self._objective.prepare(batch, training=training)

    def tokens(self, batch: Batch) -> BatchTokens:
        """Count the tokens of a prepared batch as the inner objective does."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Return the inner objective's denominators, and the number of real tokens for the routers' term."""
        real_tokens = sum(self._objective.tokens(batch).real for batch in batches)
        return self._objective.count(batches) | {TERM: real_tokens}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and this rank's share of coefficient × tokens × aux. Of the stages of a pipeline the last
        one returns it; the others hand on what their routers and those in front of them said."""
        logits: list[torch.Tensor] = []
        try:
            with self._routers.kept() as logits:
                terms = self._objective.terms(model, batch)
        except StageExit:
            if self._passing is not None:
                self._passing.sent = self._summed(logits).joined(self._passing.dtype)
            raise
        with self._saving():
            share = share_of(self._summed(logits), self._groups)
        return terms | {TERM: self._coefficient * share}

    def _summed(self, logits: Sequence[torch.Tensor]) -> RouterSums:
        """Return the sums over all layers that have run, those of earlier stages included."""
        before = None
        if self._passing is not None and self._passing.received is not None:
            before = RouterSums.parted(self._passing.received)
        if logits:
            real_T = self._real_tokens.mask(logits[0].numel() // logits[0].shape[-1])
            own = sum_routers(logits, self._routers.ran, real_T)
            if before is None:
                return own
            return before.plus(own)
        if before is None:  # a first stage without routers
            assert self._passing is not None
            before = RouterSums.parted(torch.zeros(self._passing.numbers, dtype=self._passing.dtype))
        return before

    def describe(self) -> str:
        """Return the inner objective's description with the balancing coefficient, for the log."""
        return f"{self._objective.describe()}; router balance {self._coefficient:g}{self._where}"


class RouterSums(NamedTuple):
    """What the routers of some layers said of a micro-batch, summed over its real tokens. E experts."""

    counts: torch.Tensor
    """(E + 2,) fp64: how often each expert was chosen, rows (real tokens × layers), layers."""
    probabilities_E: torch.Tensor
    """(E,), differentiable."""

    def plus(self, other: RouterSums) -> RouterSums:
        """Return the sums over the layers of both."""
        return RouterSums(self.counts + other.counts, self.probabilities_E + other.probabilities_E)

    def joined(self, dtype: torch.dtype) -> torch.Tensor:
        """Return counts and probabilities in one tensor, (2 E + 2,), which passes between stages."""
        return torch.cat([self.counts.to(dtype), self.probabilities_E.to(dtype)])

    @classmethod
    def parted(cls, numbers: torch.Tensor) -> RouterSums:
        """Rebuild the sums from the tensor that `joined` makes; the counts are detached."""
        counted = len(numbers) // 2 + 1
        return cls(numbers[:counted].detach().double(), numbers[counted:])


def router_numbers(model: nn.Module) -> int:
    """How many numbers pass between stages of a whole model (`RouterSums.joined`)."""
    router, _ = find_routers(model)[0]
    return 2 * len(weight_of(router)) + 2


def sum_routers(logits: Sequence[torch.Tensor], choices: Sequence[int], real_T: torch.Tensor | None) -> RouterSums:
    """The sums over some layers.

    Args:
        logits: A (…, E) tensor for each layer.
        choices: Experts that each layer chooses for a token.
        real_T: Which tokens are not padding; all when None.
    """
    experts = logits[0].shape[-1]
    sums_E, counts = 0.0, torch.zeros(experts + 2, dtype=torch.float64, device=logits[0].device)
    for layer, chosen in zip(logits, choices, strict=True):
        layer_TE = layer.reshape(-1, experts)
        wide = torch.promote_types(layer_TE.dtype, torch.float32)
        probabilities_TE = layer_TE.softmax(dim=-1, dtype=wide)
        real_T1 = torch.ones_like(probabilities_TE[:, :1]) if real_T is None else real_T[:, None].to(wide)
        sums_E = sums_E + (probabilities_TE * real_T1).sum(dim=0)
        best_TK = probabilities_TE.detach().topk(chosen, dim=-1).indices
        picked_TE = torch.zeros_like(probabilities_TE).scatter(1, best_TK, 1.0) * real_T1
        counts[:-2] += picked_TE.detach().sum(dim=0, dtype=torch.float64)
        counts[-2] += real_T1.sum(dtype=torch.float64)
        counts[-1] += 1
    return RouterSums(counts, sums_E)  # type: ignore[arg-type]


def share_of(sums: RouterSums, groups: Sequence[dist.ProcessGroup] = ()) -> torch.Tensor:
    """This rank's share of (tokens of the micro-batch) × aux, differentiable; the sum over ranks is the whole.

    Args:
        sums: Over all layers of the model.
        groups: Ranks with other tokens of the same micro-batch.
    """
    counts, layers = sums.counts[:-1].clone(), sums.counts[-1]
    for group in groups:
        dist.all_reduce(counts, group=group)
    experts = len(counts) - 1
    fractions_E = (counts[:-1] / counts[-1].clamp(min=1)).to(sums.probabilities_E.dtype)
    return experts / layers.to(fractions_E.dtype) * (fractions_E * sums.probabilities_E).sum()


def leave_router_loss_to_us(model: nn.Module) -> None:
    """Let the model add no balancing loss of its own: its folder states a coefficient, the training file decides."""
    for module in model.modules():
        for key in ("config", "config.text_config"):
            config = attribute_at(module, key)
            if attribute_at(config, "output_router_logits", False):
                config.output_router_logits = False


def check_routers(model: nn.Module) -> None:
    """Raise `ConfigError` unless the model's classes name their routers."""
    if not find_routers(model):
        raise ConfigError(
            f"{type(model).__name__} names no router", key=KEY, way_out="Set it to 0 for models without experts."
        )


# --- saved on the host ------------------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    on_host: torch.Tensor
    device: torch.device


class SavedOnHost:
    """A place on the host. Copies run beside the computation; on a CPU they are done when they return."""

    def __init__(self) -> None:
        self._copies = HostCopies()
        self._leaving: list[torch.Tensor] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is computed inside saves its tensors there."""
        if not torch.is_grad_enabled():
            yield
            return
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._copies.wait(self._copies.mark())
        self._leaving.clear()  # their memory is given to what is computed after the copies

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        source = tensor.detach().contiguous()
        self._leaving.append(source)
        return _Saved(self._copies.to_host(source), tensor.device)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        tensor = self._copies.to_device(saved.on_host, saved.device)
        self._copies.wait(self._copies.mark())
        return tensor
