"""What a request may ask of the choice of tokens beyond a generation configuration: penalties, biases,
log-probabilities and a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from mindspeed_mm.core.errors import MachineError, UsageError

END_THOUGHT = "</think>"
_BLANKS = r"[\x20\x0A\x0D\x09]{1,16}"
"""Between the parts of JSON. Without an end, models go on with line breaks for ever."""
_LONGEST_MARK = 16
"""Tokens within which the end of a thought is looked for."""


@dataclass(frozen=True)
class Steering:
    """The formulas are those of OpenAI's interface and of vLLM (`vllm/model_executor/layers/utils.py`)."""

    frequency_penalty: float = 0.0
    """Subtracted from the score of a token for each time that the answer contains it."""
    presence_penalty: float = 0.0
    """Subtracted once from the score of each token that the answer contains."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token and what is added to its score."""
    ignores_end: bool = False
    """An end token does not end the answer."""
    log_probs: int | None = None
    """How many of the likeliest tokens are reported with each token and its log-probability; None: nothing is."""
    grammar: str | None = None
    """Of `json_grammar`; the answer follows it, after what the model thinks."""

    @property
    def changes_scores(self) -> bool:
        """Whether tokens cannot be chosen by the scores as they are, or are reported on."""
        return self != Steering(ignores_end=self.ignores_end)


NOTHING_ASKED = Steering()


@dataclass(frozen=True)
class TokenLogProb:
    """Of one token of an answer, under the model's own distribution: before penalties, biases and temperature."""

    token: int
    log_prob: float
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, and their log-probabilities."""


class LogProbs:
    """Notes the log-probabilities of an answer's tokens on the device.

    Args:
        likeliest: How many others are noted with each.
    """

    def __init__(self, likeliest: int) -> None:
        self._likeliest = likeliest
        self._noted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self, raw_1V: torch.Tensor, chosen_1: torch.Tensor) -> None:
        """The next token, of all scores."""
        # Of the raw scores: before penalties, biases and temperature.
        log_probs_V = raw_1V[0].log_softmax(dim=-1)
        top = log_probs_V.topk(min(self._likeliest, len(log_probs_V)))
        ids = torch.cat((chosen_1, top.indices))
        self._noted.append((ids, torch.cat((log_probs_V[chosen_1], top.values))))

    def read(self, count: int) -> list[TokenLogProb]:
        """Of the first tokens. Waits for the device."""
        found = []
        for ids, values in self._noted[:count]:
            (token, *others), (log_prob, *theirs) = ids.tolist(), values.tolist()
            found.append(TokenLogProb(token, log_prob, tuple(zip(others, theirs, strict=True))))
        return found


class Biases:
    """Adds to the scores of some tokens.

    Args:
        biases: Token and what is added.
    """

    def __init__(self, biases: Sequence[tuple[int, float]]) -> None:
        self._tokens = torch.tensor([token for token, _ in biases])
        self._added = torch.tensor([added for _, added in biases])

    def __call__(self, _ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, V) with the biases added to their tokens."""
        self._tokens, self._added = self._tokens.to(scores_1V.device), self._added.to(scores_1V)
        return scores_1V.index_add(1, self._tokens, self._added[None])


class Penalties:
    """Lowers the scores of tokens that the answer contains.

    Args:
        steering: With penalties.
        asked: Tokens of the question, which do not count.
    """

    def __init__(self, steering: Steering, asked: int) -> None:
        self._steering, self._asked = steering, asked

    def __call__(self, ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, V) less the penalties of tokens that the answer contains."""
        answer_1L = ids_1L[:, self._asked :]
        ones_1L = torch.ones_like(answer_1L, dtype=scores_1V.dtype)
        times_1V = torch.zeros_like(scores_1V).scatter_add_(1, answer_1L, ones_1L)
        steering = self._steering
        return scores_1V - steering.frequency_penalty * times_1V - steering.presence_penalty * (times_1V > 0)


class Grammars:
    """Grammars over the tokens of a model, by the library llguidance.

    Args:
        tokenizer: A fast tokenizer of transformers.
        ends: The tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int]) -> None:
        self._tokenizer, self._ends = tokenizer, list(ends)

    @cached_property
    def tokens(self) -> Any:
        """The tokenizer as llguidance has it; a second of work.

        Raises:
            UsageError: It takes fast tokenizers alone.
        """
        from llguidance.hf import from_tokenizer  # optional

        try:
            return from_tokenizer(self._tokenizer, eos_token=self._ends or None)
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"answers of this model cannot follow a schema: {error}"[:200]) from error

    def check(self, grammar: str) -> None:
        """Raise `UsageError` for a grammar that cannot be followed."""
        from llguidance import LLMatcher  # optional

        if problem := LLMatcher.validate_grammar(grammar, self.tokens):
            raise UsageError(f"the schema cannot be followed: {(problem.splitlines() or [''])[0]}"[:300])

    def follower(self, grammar: str, asked: int, *, thinks: bool) -> GrammarFollower:
        """What lets an answer follow a grammar.

        Args:
            grammar: Of `json_grammar`.
            asked: Tokens of the question.
            thinks: Whether the answer begins within a thought, which is free.
        """
        from llguidance import LLMatcher  # optional

        return GrammarFollower(LLMatcher(self.tokens, grammar), asked, self._tokenizer if thinks else None)

    def check_followed(self, grammar: str, token_ids: Sequence[int], *, thinks: bool) -> None:
        """Raise `UsageError` for an answer that ended before it was what the grammar asks for: llguidance ends it where
        no token of the vocabulary goes on. One that ended within its thought is passed over.

        Args:
            grammar: Of `json_grammar`.
            token_ids: Of the answer.
            thinks: Whether it begins within a thought.
        """
        from llguidance import LLMatcher  # optional

        said = [token for token in token_ids if token not in self._ends]
        if thinks:
            behind = (n for n in range(1, len(said) + 1) if _ends_thought(self._tokenizer, said[:n]))
            if (start := next(behind, None)) is None:
                return
            said = said[start:]
        matcher = LLMatcher(self.tokens, grammar)
        if not (matcher.consume_tokens(said) and matcher.is_accepting()):
            what = "no answer fits the schema: the model has no token that goes on as it asks"
            raise UsageError(what, key="response_format")


def _ends_thought(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    return END_THOUGHT in tokenizer.decode(list(token_ids[-_LONGEST_MARK:]))


class GrammarFollower:
    """Excludes tokens that a grammar does not allow next. Reads the tokens so far, one wait for the device a token.

    Args:
        matcher: Of llguidance.
        asked: Tokens of the question.
        thinking: The tokenizer, where the answer begins within a thought: its end is looked for.
    """

    def __init__(self, matcher: Any, asked: int, thinking: object | None) -> None:
        self._matcher, self._read, self._thinking = matcher, asked, thinking

    def __call__(self, ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        """Scores of the tokens that are allowed, -∞ elsewhere."""
        new = ids_1L[0, self._read :].tolist()
        self._read += len(new)
        if self._thinking is not None:
            if _ends_thought(self._thinking, ids_1L[0].tolist()):
                self._thinking = None
                new = []
            else:
                return scores_1V
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        # Behind a token that leads nowhere the matcher allows an end alone; `check_followed` refuses what stands there.
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8)
        allowed_V = torch.zeros(scores_1V.shape[1], dtype=torch.bool)
        count = min(len(allowed), len(allowed_V))
        allowed_V[:count] = torch.from_numpy(allowed[:count] > 0)
        return scores_1V.masked_fill(~allowed_V.to(scores_1V.device), -torch.inf)


def json_grammar(schema: Mapping[str, object] | None) -> str:
    """The grammar of JSON that fits a schema; None: of any object.

    Raises:
        MachineError: llguidance is not installed.
        UsageError: It is no schema that can be followed.
    """
    if find_spec("llguidance") is None:
        way_out = "Install the extra: pip install 'mindspeed-mm[serve]'."
        raise MachineError("answers that follow a schema need llguidance, which is not installed", way_out=way_out)
    from llguidance import LLMatcher  # optional

    text = json.dumps({"type": "object"} if schema is None else schema)
    options: Any = {"whitespace_pattern": _BLANKS, "lenient": False}  # a schema may not loosen them
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    except ValueError as error:
        raise UsageError(f"the schema cannot be followed: {(str(error).splitlines() or [''])[0]}"[:300]) from error
