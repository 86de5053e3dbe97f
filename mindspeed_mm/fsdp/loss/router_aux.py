"""The load-balancing loss of routers, as a further term of any objective.

For one micro-batch over all data and context ranks, with the choices and probabilities of all layers taken together
(Switch Transformer, arXiv:2101.03961, equations 4 to 6; transformers' `load_balancing_loss_func`):

    aux = E · Σ_e (c_e / R) · (p_e / R)

E experts, R rows (real tokens × layers), c_e how many rows have expert e among their choices, p_e the sum of its
probabilities. Micro-batches of a step are averaged by their tokens. c_e and R are not functions of the weights: only
they go over ranks; p_e carries the gradient and stays local, and the sum over ranks makes term and gradient whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mindspeed_mm.core.batch import Batch
from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.fsdp.loss.objectives import BatchTokens, Objective, Terms
from mindspeed_mm.fsdp.loss.saved_on_host import SavedOnHost
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens

TERM = "router_aux"
KEY = "features.loss_cfg.router_aux_loss_coef"


class RouterLogits:
    """Keeps what the routers of a model return in a forward pass.

    Nothing is computed where they are kept: a layer that is computed again in the backward pass must do the same twice.

    Args:
        model: Its transformers classes name their routers (`_can_record_outputs["router_logits"]`).

    Raises:
        ConfigError: None does.
    """

    def __init__(self, model: nn.Module) -> None:
        check_routers(model)
        self._kept: dict[int, list[torch.Tensor]] | None = None
        self.choices: list[int] = []
        """How many experts a token has, by layer."""
        for number, (module, index) in enumerate(find_routers(model)):
            self.choices.append(_choices(module))
            module.register_forward_hook(
                lambda _module, _inputs, output, number=number, index=index: self._keep(number, output, index)
            )

    @contextmanager
    def kept(self) -> Iterator[list[torch.Tensor]]:
        """Filled, when left, with one (T, E) tensor a layer, in the order in which they run; what a layer that takes a
        few rows at a time said of each is one behind the other."""
        found: list[torch.Tensor] = []
        kept: dict[int, list[torch.Tensor]] = {}
        self._kept = kept
        try:
            yield found
            found += [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in kept.values()]
        finally:
            self._kept = None

    def _keep(self, number: int, output: Any, index: int) -> None:
        if self._kept is not None:
            logits = output[index] if isinstance(output, tuple | list) else output
            self._kept.setdefault(number, []).append(logits)


def find_routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Modules that choose experts, with the place of the logits in what they return; none of those parts of a model
    that it runs without a gradient (`run_without_gradient`)."""
    found: dict[nn.Module, int] = {}
    unlearnt = [model.get_submodule(name) for name in getattr(model, "run_without_gradient", ())]
    left_out = {module for part in unlearnt for module in part.modules()}
    for parent in model.modules():
        if parent in left_out:
            continue
        recorder = (getattr(parent, "_can_record_outputs", None) or {}).get("router_logits")
        target = getattr(recorder, "target_class", recorder)
        if not isinstance(target, type):
            continue
        layer = getattr(recorder, "layer_name", None)
        for name, module in parent.named_modules():
            if isinstance(module, target) and (layer is None or name.endswith(layer)):
                found[module] = getattr(recorder, "index", 0)
    return list(found.items())


def _choices(router: nn.Module) -> int:
    names = ("top_k", "num_experts_per_tok", "moe_top_k")
    owners = (router, getattr(router, "config", None))
    count = next((v for owner in owners for name in names if isinstance(v := getattr(owner, name, None), int)), None)
    if count is None:
        raise ConfigError(
            f"{type(router).__name__} does not say how many experts it chooses (top_k)",
            key=KEY,
            way_out="Set it to 0 for this model.",
        )
    return count


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
        self._routers, self._real_tokens = RouterLogits(model), RealTokens(model)
        self._saving = SavedOnHost() if offload else nullcontext
        self._where = ", its statistics on the host" if offload else ""

    def prepare(self, batch: Batch, *, training: bool = True) -> Batch:
        """As the objective does."""
        return self._objective.prepare(batch, training=training)

    def tokens(self, batch: Batch) -> BatchTokens:
        """As the objective counts them."""
        return self._objective.tokens(batch)

    def count(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The objective's, and real tokens."""
        return self._objective.count(batches) | {TERM: sum(self._objective.tokens(batch).real for batch in batches)}

    def terms(self, model: nn.Module, batch: Batch) -> Terms:
        """The objective's, and this rank's share of coefficient × tokens × aux."""
        with self._routers.kept() as logits:
            terms = self._objective.terms(model, batch)
        real_T = self._real_tokens.mask(len(logits[0].reshape(-1, logits[0].shape[-1])))
        with self._saving():
            share = balance_share(logits, self._routers.choices, real_T, self._groups)
        return terms | {TERM: self._coefficient * share}

    def describe(self) -> str:
        """For the log."""
        return f"{self._objective.describe()}; router balance {self._coefficient:g}{self._where}"


def balance_share(
    logits: Sequence[torch.Tensor],
    choices: Sequence[int],
    real_T: torch.Tensor | None,
    groups: Sequence[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """This rank's share of (tokens of the micro-batch) × aux, differentiable; the sum over ranks is the whole.

    Args:
        logits: A (…, E) tensor for each layer.
        choices: Experts that each layer chooses for a token.
        real_T: Which tokens are not padding; all when None.
        groups: Ranks with other tokens of the same micro-batch.
    """
    experts = logits[0].shape[-1]
    sums_E, counts = 0.0, torch.zeros(experts + 1, dtype=torch.float64, device=logits[0].device)
    for layer, chosen in zip(logits, choices, strict=True):
        layer_TE = layer.reshape(-1, experts)
        wide = torch.promote_types(layer_TE.dtype, torch.float32)
        probabilities_TE = layer_TE.softmax(dim=-1, dtype=wide)
        real_T1 = torch.ones_like(probabilities_TE[:, :1]) if real_T is None else real_T[:, None].to(wide)
        sums_E = sums_E + (probabilities_TE * real_T1).sum(dim=0)
        best_TK = probabilities_TE.detach().topk(chosen, dim=-1).indices
        picked_TE = torch.zeros_like(probabilities_TE).scatter(1, best_TK, 1.0) * real_T1
        counts[:-1] += picked_TE.detach().sum(dim=0, dtype=torch.float64)
        counts[-1] += real_T1.sum(dtype=torch.float64)
    for group in groups:
        dist.all_reduce(counts, group=group)
    fractions_E = (counts[:-1] / counts[-1].clamp(min=1)).to(sums_E.dtype)  # type: ignore[attr-defined]
    return experts / len(logits) * (fractions_E * sums_E).sum()


def leave_router_loss_to_us(model: nn.Module) -> None:
    """Let the model add no balancing loss of its own: its configuration has a coefficient that nobody asked for."""
    for module in model.modules():
        for config in (getattr(module, "config", None), getattr(getattr(module, "config", None), "text_config", None)):
            if getattr(config, "output_router_logits", False):
                config.output_router_logits = False  # type: ignore[union-attr]


def check_routers(model: nn.Module) -> None:
    """Raise `ConfigError` unless the model's classes name their routers."""
    if next(iter(find_routers(model)), None) is None:
        raise ConfigError(
            f"{type(model).__name__} names no router", key=KEY, way_out="Set it to 0 for models without experts."
        )
