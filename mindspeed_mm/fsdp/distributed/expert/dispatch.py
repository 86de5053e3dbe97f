"""Brings tokens to the ranks that hold their experts, and the outputs back, with copies of busy experts on idle ranks
where they are asked for.

Ranks of an expert group hold different tokens and different experts. Rows go to the rank that has their expert and come
back; gradients take the same way in the other direction.

T tokens of this rank, K experts a token, S pairs of a token and one of its experts, E experts of a layer, L of them on
each rank, R ranks, H hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from typing_extensions import override

from mindspeed_mm.fsdp.ops.collectives import (
    AxisRanks,
    all_gather_single,
    exchange_rows,
    reduce_scatter_single,
    with_gradient,
)
from mindspeed_mm.fsdp.ops.experts import (
    ExpertModule,
    ExpertsForward,
    Weights,
    combine,
    run_experts,
    sort_pairs,
    spread,
    taken,
)
from mindspeed_mm.fsdp.ops.forward_stack import Args, Forward, Kwargs
from mindspeed_mm.fsdp.ops.real_tokens import RealTokens


class AllToAll(ExpertsForward):
    """Each pair travels to the rank of its expert and back: what is sent grows with K, not with R.

    Args:
        ranks: Who shares the experts.
        real_tokens: Given: padding goes through no expert.
    """

    def __init__(self, ranks: ExpertRanks, real_tokens: RealTokens | None = None) -> None:
        super().__init__(real_tokens)
        self.ranks = ranks

    def outputs(self, module: ExpertModule, rows_SH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Send the rows to the ranks of their experts and bring the outputs back, in the same order. Ranks own
        consecutive experts, so rows sorted by expert lie by rank, too."""
        sent_RL = counts_E.view(self.ranks.size, -1)
        received_RL = exchange_counts(sent_RL, self.ranks)
        send, receive = torch.stack([sent_RL.sum(dim=1), received_RL.sum(dim=1)]).tolist()  # the host waits, once
        arrived = exchange_rows(rows_SH, send, receive, self.ranks.group)
        outputs = run_sorted(module, Weights.of(module), arrived, received_RL)
        return exchange_rows(outputs, receive, send, self.ranks.group)


class BalancedAllToAll(AllToAll):
    """The same, with copies of busy experts on idle ranks: their weights are fetched for the call, their gradients go
    back to the owner.

    Args:
        ranks: Who shares the experts.
        most_copies: Copies that a rank may hold.
        real_tokens: Given: padding goes through no expert.
    """

    def __init__(self, ranks: ExpertRanks, most_copies: int, real_tokens: RealTokens | None = None) -> None:
        super().__init__(ranks, real_tokens)
        self.most_copies = most_copies

    @override
    def outputs(self, module: ExpertModule, rows_SH: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        loads_RE = gather(counts_E[None], self.ranks).cpu().numpy()
        plan = plan_balance(loads_RE, self.most_copies)
        sent_RE, received_RE = map(torch.from_numpy, plan.traffic_of(self.ranks.rank, loads_RE))  # on the host
        send, receive = sent_RE.sum(dim=1).tolist(), received_RE.sum(dim=1).tolist()
        # Rows lie by expert; those of an expert by rank.
        order = groups_by_line(sent_RE.T.to(rows_SH.device)).argsort(stable=True)
        arrived = exchange_rows(taken(rows_SH, order), send, receive, self.ranks.group)
        # Rows arrive by expert, own ones and copies mixed; the weights of copies lie behind the own ones.
        held = torch.tensor(own_experts(module.num_experts, self.ranks) + list(plan.copies[self.ranks.rank]))
        slots = held.argsort()
        received_RL = received_RE[:, held[slots]].to(rows_SH.device)
        outputs = run_sorted(module, self.weights(module, plan), arrived, received_RL, slots.tolist())
        returned = exchange_rows(outputs, receive, send, self.ranks.group)
        return torch.empty_like(returned).index_copy(0, order, returned)

    def weights(self, module: ExpertModule, plan: BalancePlan) -> Weights:
        """Those of this rank's experts, and behind them the copies."""
        own = Weights.of(module)
        if not any(plan.copies):
            return own
        with_copies: list[torch.Tensor | None] = []
        for weight_L in own:
            if weight_L is None:
                with_copies.append(None)
            else:
                with_copies.append(self._with_copies(weight_L, plan, module.num_experts))
        return Weights(*with_copies)  # type: ignore[arg-type]

    def _with_copies(self, weight_L: torch.Tensor, plan: BalancePlan, experts: int) -> torch.Tensor:
        rank, own = self.ranks.rank, experts // self.ranks.size
        send, receive = [0] * self.ranks.size, [0] * self.ranks.size
        chosen: list[int] = []  # own experts that others hold a copy of, rank by rank
        for holder, copies in enumerate(plan.copies):
            for expert in copies:
                owner = expert // own
                if owner == rank:
                    send[holder] += 1
                    chosen.append(expert - rank * own)
                if holder == rank:
                    receive[owner] += 1
        asked = torch.tensor(chosen, dtype=torch.long, device=weight_L.device)
        arrived = exchange_rows(weight_L.index_select(0, asked), send, receive, self.ranks.group)
        return torch.cat([weight_L, arrived])


class AllGather(AllToAll):
    """Every rank sees all tokens of the group and computes its own experts' part of the outputs, which are summed: two
    collectives of equal sizes, for groups of not many more ranks than a token has experts."""

    @override
    def __call__(
        self, module: ExpertModule, hidden_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        experts_TK, _ = self.without_padding(experts_TK, module.num_experts)
        tokens = len(hidden_TH)
        # Ranks may have different numbers of tokens, and collectives are of equal sizes.
        longest = int(gather(torch.tensor([tokens], device=hidden_TH.device), self.ranks).max())
        chosen_GK = gather(fill_up(experts_TK, longest, value=module.num_experts), self.ranks)
        hidden_GH = gather_rows(fill_up(hidden_TH, longest), self.ranks)
        weights_GK = gather_rows(fill_up(weights_TK, longest), self.ranks)
        own = module.num_experts // self.ranks.size
        mine_GK = chosen_GK - self.ranks.rank * own
        pairs = sort_pairs(mine_GK.masked_fill((mine_GK < 0) | (mine_GK >= own), own), own, number=None)
        rows_SH = spread(hidden_GH, pairs.slots_S, chosen_GK.shape[1])
        outputs_SH = run_experts(module, Weights.of(module), rows_SH, pairs.counts_E)
        whole = sum_of_own_rows(combine(outputs_SH, pairs, weights_GK), self.ranks).to(hidden_TH.dtype)
        if tokens == longest:
            return whole
        return whole[:tokens].clone()  # sharding warns of modules that return views


@dataclass(frozen=True)
class PluginExpertForward:
    """A module's own `ep_forward(hidden_states, …, ep_group=…)` in place of its forward. It may ask for `ep_group` and
    `ep_plan`, by name or as its first arguments."""

    method: Forward
    leading: Args
    named: Kwargs

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call `ep_forward` with the given arguments; the group and plan that it asked for come first or by name."""
        return self.method(*self.leading, *args, **self.named, **kwargs)


def run_sorted(
    module: ExpertModule,
    weights: Weights,
    arrived: torch.Tensor,
    counts_RL: torch.Tensor,
    slots: Sequence[int] | None = None,
) -> torch.Tensor:
    """Rows as they arrived, by source and then by expert → outputs in the same order.

    Args:
        module: Of experts.
        weights: Of the L experts.
        arrived: From the first source, then from the second, …
        counts_RL: Rows of each source for each expert.
        slots: Where the weights of each column of `counts_RL` lie; the same order when None.
    """
    columns, counts = groups_by_line(counts_RL), counts_RL.sum(dim=0)
    if slots is not None:
        place = torch.tensor(slots, device=counts.device)
        columns, counts = place[columns], torch.empty_like(counts).index_copy(0, place, counts)
    order = columns.argsort(stable=True)
    outputs = run_experts(module, weights, taken(arrived, order), counts)
    return torch.empty_like(outputs).index_copy(0, order, outputs)


def groups_by_line(counts_RL: torch.Tensor) -> torch.Tensor:
    """The column of each row, when rows lie line by line and `counts_RL` says how many are in each place."""
    columns = torch.arange(counts_RL.shape[1], device=counts_RL.device).repeat(counts_RL.shape[0])
    return columns.repeat_interleave(counts_RL.flatten())


def own_experts(experts: int, ranks: ExpertRanks) -> list[int]:
    """Numbers of the experts that this rank owns."""
    own = experts // ranks.size
    return list(range(ranks.rank * own, (ranks.rank + 1) * own))


# --- copies of busy experts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BalancePlan:
    """Who computes how many rows of which expert."""

    shares_RE: np.ndarray
    """Rows that a rank computes of each expert, its own and copies."""
    copies: tuple[tuple[int, ...], ...]
    """[rank] experts of other ranks that a rank holds a copy of, in rising order."""

    def traffic_of(self, rank: int, loads_RE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a rank sends to each rank, and those that it receives from each, by expert: two (R, E).

        Rows of an expert are numbered through all sources, and cut into one stretch for each rank that computes some.
        """
        held, computed = _Stretches(loads_RE), _Stretches(self.shares_RE)
        return held.line(rank).shared_with(computed), computed.line(rank).shared_with(held)


class _Stretches:
    """Rows of each expert, numbered from rank to rank.

    Args:
        counts_RE: Of each rank.
        ends_RE: Where those of a rank end; worked out when None.
    """

    def __init__(self, counts_RE: np.ndarray, ends_RE: np.ndarray | None = None) -> None:
        self._counts, self._ends = counts_RE, counts_RE.cumsum(axis=0) if ends_RE is None else ends_RE

    def line(self, rank: int) -> _Stretches:
        """The stretches of a single rank."""
        return _Stretches(self._counts[rank], self._ends[rank])

    def shared_with(self, others: _Stretches) -> np.ndarray:
        """How many rows lie in both."""
        begin = np.maximum(self._ends - self._counts, others._ends - others._counts)
        return np.maximum(np.minimum(self._ends, others._ends) - begin, 0)


def plan_balance(loads_RE: np.ndarray, most_copies: int) -> BalancePlan:
    """Greedy: the fullest rank hands rows of its busiest expert to the emptiest one, until no rank is above the mean or
    none may hold another copy. Only an expert's owner hands on.

    Args:
        loads_RE: Rows that each rank's tokens have for each expert; ranks own equally many experts, rank 0 the first.
        most_copies: Copies that a rank may hold.
    """
    ranks, experts = loads_RE.shape
    own = experts // ranks
    # Before anything is handed on, owners compute all rows of their experts.
    shares = np.where(np.arange(experts) // own == np.arange(ranks)[:, None], loads_RE.sum(axis=0), 0)
    full = shares.sum(axis=1)
    most = -(-int(full.sum()) // ranks)
    held, count = np.zeros((ranks, experts), dtype=bool), np.zeros(ranks, dtype=np.int64)
    while True:
        giver = int(full.argmax())
        expert = giver * own + int(shares[giver, giver * own : (giver + 1) * own].argmax())
        takes = (full < most) & (held[:, expert] | (count < most_copies))
        if full[giver] <= most or not takes.any():
            return BalancePlan(shares, tuple(tuple(line.nonzero()[0].tolist()) for line in held))
        taker = int(np.where(takes, full, most).argmin())
        moved = min(full[giver] - most, most - full[taker], shares[giver, expert])
        count[taker] += not held[taker, expert]
        held[taker, expert] = True
        shares[giver, expert] -= moved
        shares[taker, expert] += moved
        full[giver] -= moved
        full[taker] += moved


# --- collectives ------------------------------------------------------------------------------------------------------


class ExpertRanks(AxisRanks):
    """The ranks that share the experts of a layer with this one (axis `ep`)."""


def gather_rows(rows_R: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(R, …) → (ranks × R, …), the same R on every rank; each uses them for its own experts: gradients are summed."""
    return with_gradient(rows_R, ranks, gather, _sum_of_own)


def sum_of_own_rows(rows_RR: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(ranks × R, …) → (R, …): the sum over ranks, of this rank's rows."""
    return with_gradient(rows_RR, ranks, _sum_of_own, gather)


def exchange_counts(counts_RL: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(ranks, L) numbers, a line for each rank → (ranks, L) of which line r came from rank r."""
    received = torch.empty_like(counts_RL)
    dist.all_to_all_single(received, counts_RL.contiguous(), group=ranks.group)
    return received


def gather(rows: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    """(R, …) → (ranks × R, …), without a gradient."""
    whole = rows.new_empty(ranks.size * rows.shape[0], *rows.shape[1:])
    all_gather_single(whole, rows.contiguous(), group=ranks.group)
    return whole


def fill_up(rows: torch.Tensor, length: int, value: float = 0) -> torch.Tensor:
    """Rows (R, K) with more behind them, of that value, until there are `length`."""
    return F.pad(rows, (0, 0, 0, length - len(rows)), value=value)


def _sum_of_own(rows: torch.Tensor, ranks: ExpertRanks) -> torch.Tensor:
    own = rows.new_empty(rows.shape[0] // ranks.size, *rows.shape[1:])
    reduce_scatter_single(own, rows.contiguous(), group=ranks.group)
    return own
