"""How tokens are chosen in a batch whose rows have settings of their own.

`generate` has one setting for all rows, and draws from one stream of random numbers. Here each row has its own of both,
so that what it says does not depend on who shares its batch. A row that samples with a seed says what transformers says
alone after `torch.manual_seed` with that seed, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.seeds import derive_seed
from mindspeed_mm.fsdp.sampling.answers.steering import (
    NOTHING_ASKED,
    Biases,
    GrammarFollower,
    Grammars,
    LogProbs,
    Penalties,
    Steering,
    TokenLogProb,
)
from mindspeed_mm.fsdp.sampling.finite import rows_are_finite

LEAST_TEMPERATURE = 0.001
"""Of sampling. Far below it, logits that are divided by it overflow, and another token than the likeliest is taken."""
Chooser = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Ids (1, L) and scores (1, V) → scores whose largest is the next token."""
MOST_BEAMS = 1024
"""Searches of more gain nothing, and each beam is a row of the batch."""


def check_temperature(temperature: float | None, chosen: str) -> None:
    """Raise `UsageError` for a temperature that scores cannot be divided by; `chosen` names what is chosen by them."""
    if temperature and temperature < LEAST_TEMPERATURE:
        what = f"temperature {temperature:g} is below {LEAST_TEMPERATURE}, and is not 0"
        raise UsageError(what, key="--temperature", way_out=f"0 always takes the likeliest {chosen}.")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. What is None is as the model's generation configuration says."""

    max_new_tokens: int = 512
    temperature: float | None = None
    """0: the likeliest token, always."""
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    """0: all tokens."""
    min_p: float | None = None
    repetition_penalty: float | None = None
    beams: int | None = None
    """More than 1: beam search, which neither samples nor tells an answer while it is made."""
    steering: Steering = field(default=NOTHING_ASKED, repr=False)
    """Of requests alone; files of answers are told apart by the repr of the rest."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for a temperature that logits cannot be divided by, and for more beams than fit."""
        check_temperature(self.temperature, "token")
        if self.beams and self.beams > MOST_BEAMS:
            what = f"{self.beams:,} beams are too many: each takes the memory of a row"
            raise UsageError(what, key="--beams", way_out=f"Give up to {MOST_BEAMS}.")

    def of_row(self, row: int) -> Sampling:
        """The same, with a seed of the row's own where there is one."""
        if self.seed is None:
            return self
        return replace(self, seed=derive_seed(self.seed, row) % 2**63)


@dataclass(frozen=True)
class TokenChoice:
    """How the tokens of a row are chosen, with nothing left open."""

    temperature: float
    """0: the likeliest token."""
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    steering: Steering = NOTHING_ASKED

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken by the scores as they are."""
        return not self.temperature and self.repetition_penalty == 1 and not self.steering.changes_scores

    @classmethod
    def of(cls, sampling: Sampling, configured: object) -> TokenChoice:
        """What is asked for, else what the generation configuration says, else transformers' defaults.

        Args:
            sampling: What is asked for. A temperature or another setting of sampling switches sampling on.
            configured: The model's `generation_config`.
        """

        def said(name: str, default: float) -> float:
            asked, known = getattr(sampling, name), getattr(configured, name, None)
            if asked is not None:
                return float(asked)
            return float(default if known is None else known)

        asks = any(
            value is not None for value in (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        )
        is_sampled = asks or bool(getattr(configured, "do_sample", False))
        temperature = said("temperature", 1.0) if is_sampled else 0.0
        return cls(
            # Published configurations say 0.000001 (Qwen2.5-VL), and mean the likeliest token.
            temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
            top_k=int(said("top_k", 50)),
            top_p=said("top_p", 1.0),
            min_p=said("min_p", 0.0),
            repetition_penalty=said("repetition_penalty", 1.0),
            seed=sampling.seed,
            steering=sampling.steering,
        )


@dataclass(frozen=True)
class RowStart:
    """Where the answer of a row begins."""

    padding: int
    """Tokens of padding that the row begins with."""
    asked: int
    """Tokens of its question."""
    thinks: bool = False
    """Whether the question ends within a thought."""


class RowChoices:
    """A logits processor of transformers that makes the next token of each row the likeliest.

    Args:
        choices: Of each row.
        starts: Of each row.
        device: Of the scores.
        grammars: Over the tokens of the model; needed where a row has one.
        generators: Of each row, where others draw from them as well; None: of its own, by the seed of its choice.
    """

    def __init__(
        self,
        choices: Sequence[TokenChoice],
        starts: Sequence[RowStart],
        device: torch.device,
        grammars: Grammars | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> None:
        self._choices, self._starts = choices, starts
        self._filters: list[list[Any]] = []
        self._log_probs: list[LogProbs | None] = []
        for choice, start in zip(choices, starts, strict=True):
            self._filters.append(_filters(choice, start, _follower(choice, start, grammars)))
            noted = choice.steering.log_probs
            self._log_probs.append(None if noted is None else LogProbs(noted))
        self._generators = generators or [generator_of(choice, device) for choice in choices]

    @property
    def changes_scores(self) -> bool:
        """Whether a row samples, or its scores are changed or noted; otherwise every row takes its likeliest token."""
        return any(map(self._acts_on, range(len(self._choices))))

    def _acts_on(self, row: int) -> bool:
        return bool(self._filters[row] or self._choices[row].temperature or self._log_probs[row])

    def log_probs(self, row: int, count: int) -> list[TokenLogProb]:
        """Of the first tokens of a row; none where they were not asked for. Waits for the device."""
        noted = self._log_probs[row]
        if noted is None:
            return []
        return noted.read(count)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) → the same, those of rows that sample replaced by what their largest is drawn by."""
        for row, choice in enumerate(self._choices):
            noted = self._log_probs[row]
            if not self._acts_on(row):
                continue
            ids_1L, scores_1V = input_ids[row : row + 1, self._starts[row].padding :], scores[row : row + 1]
            raw_1V = scores_1V.clone() if noted else scores_1V
            for change in self._filters[row]:
                scores_1V = change(ids_1L, scores_1V)
            scores[row : row + 1] = self._drawn(row, scores_1V) if choice.temperature else scores_1V
            if noted:
                noted.note(raw_1V, scores[row : row + 1].argmax(dim=-1))
        return scores

    def _drawn(self, row: int, scores_1V: torch.Tensor) -> torch.Tensor:
        """Probabilities over exponential variates: the largest is a draw (torch.multinomial does the same)."""
        shares = torch.softmax(scores_1V, dim=-1)
        return shares / torch.empty_like(shares).exponential_(1, generator=self._generators[row])


class RequestChoices:
    """Stands for the logits processors of transformers' continuous batching, which share one setting or are dropped:
    here each request has its own.

    Args:
        end: A token that ends every request. A request whose scores are not finite takes it, so that it ends at once
            without a read by the host; `was_finite` tells it from others that end. None: there is none.
    """

    tensors_required, do_processing = 0, True

    def __init__(self, end: int | None = None) -> None:
        self.of: dict[str, Chooser] = {}
        """By the name of a request; a request without takes the likeliest token."""
        self.passes = 0
        self._end = end
        self._states: list[Any] = []
        self._finite: dict[str, list[torch.Tensor]] = {}

    def was_finite(self, name: str, token: int) -> bool:
        """Whether a token of a request, counted from 0, was chosen by finite scores. Waits for the device."""
        return bool(self._finite[name][token])

    def forget(self, name: str) -> None:
        """Keep nothing of a request that is over."""
        self.of.pop(name, None)
        self._finite.pop(name, None)

    def fill_defaults(self, _storage: torch.Tensor) -> None:
        """Leave the storage as it is: there are no default settings to write."""

    def check_kwargs(self, _settings: Mapping[str, object]) -> None:
        """Check nothing: requests are added without settings, which stand in `of`."""

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        """Note the requests whose next token comes out of the pass that begins, in the order of its scores."""
        self.passes += 1
        self._states = [each.state for each in requests_in_batch if each.has_new_token]
        return arg_storage

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor, _arguments: torch.Tensor) -> torch.Tensor:
        """Scores (rows, V) → the same, the largest of each row being its next token."""
        good = rows_are_finite(scores)
        for row, state in enumerate(self._states):
            self._finite.setdefault(state.request_id, []).append(good[row])
            choose = self.of.get(state.request_id)
            if choose is not None:
                ids_1L = torch.tensor([state.initial_tokens + state.generated_tokens], device=scores.device)
                scores[row : row + 1] = choose(ids_1L, scores[row : row + 1])
        if self._end is not None:
            bad = ~good[: len(self._states)]
            scores[: len(bad)].masked_fill_(bad[:, None], -torch.inf)
            scores[: len(bad), self._end].masked_fill_(bad, 0)
        return scores


def _follower(choice: TokenChoice, start: RowStart, grammars: Grammars | None) -> GrammarFollower | None:
    grammar = choice.steering.grammar
    if grammar is None or grammars is None:
        return None
    return grammars.follower(grammar, start.asked, thinks=start.thinks)


def _filters(choice: TokenChoice, start: RowStart, follower: GrammarFollower | None) -> list[object]:
    """transformers' own processors, in the order in which `generate` applies them; those that requests may add stand
    where vLLM has them."""
    from transformers import generation as made  # seconds

    filters: list[object] = []
    if choice.steering.logit_bias:
        filters.append(Biases(choice.steering.logit_bias))
    if choice.repetition_penalty != 1:
        filters.append(made.RepetitionPenaltyLogitsProcessor(choice.repetition_penalty))
    if choice.steering.frequency_penalty or choice.steering.presence_penalty:
        filters.append(Penalties(choice.steering, start.asked))
    if follower is not None:
        filters.append(follower)
    if not choice.temperature:
        return filters
    if choice.temperature != 1:
        filters.append(made.TemperatureLogitsWarper(choice.temperature))
    if choice.top_k:
        filters.append(made.TopKLogitsWarper(choice.top_k))
    if choice.top_p < 1:
        filters.append(made.TopPLogitsWarper(choice.top_p))
    if choice.min_p:
        filters.append(made.MinPLogitsWarper(choice.min_p))
    return filters


def generator_of(choice: TokenChoice, device: torch.device) -> torch.Generator:
    """What the tokens of a row are drawn by: by its seed, or by chance where it has none."""
    generator = torch.Generator(device)
    if choice.seed is None:
        generator.seed()
    else:
        generator.manual_seed(choice.seed)
    return generator
