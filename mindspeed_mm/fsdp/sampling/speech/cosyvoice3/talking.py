"""Generates speech tokens with CosyVoice3's language model and the published sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from mindspeed_mm.fsdp.data.datasets.cosyvoice.sequences import SpeechRows
from mindspeed_mm.fsdp.models.cosyvoice3.language_model import CosyVoice3LM
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.finite import not_finite, rows_are_finite

LEAST_PER_TOKEN, MOST_PER_TOKEN = 2, 20
"""Speech tokens for each token of text."""
_TOP_P, _TOP_K = 0.8, 25
_WINDOW, _MOST_ALIKE = 10, 1
"""A token that occurs this often among the last `_WINDOW` is drawn again, from all tokens."""
_SILENT = frozenset({1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323})
"""Tokens of silence and breath, as listed in the published code."""
_MOST_SILENT = 5


@dataclass(frozen=True)
class RepetitionAware:
    """Repetition aware sampling (VALL-E 2, arXiv:2406.05370): a token of the nucleus; if it repeats itself, one of all
    tokens."""

    temperature: float
    """0 always takes the likeliest token."""
    top_p: float
    top_k: int
    """0: all tokens."""
    generator: torch.Generator

    @classmethod
    def of(cls, sampling: Sampling) -> RepetitionAware:
        """The sampling of a job, with published defaults."""
        generator = torch.Generator()
        if sampling.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sampling.seed)
        return cls(
            1.0 if sampling.temperature is None else sampling.temperature,
            _TOP_P if sampling.top_p is None else sampling.top_p,
            _TOP_K if sampling.top_k is None else sampling.top_k,
            generator,
        )

    def choose(self, scores_V: torch.Tensor, said: Sequence[int]) -> int:
        """The next token.

        Args:
            scores_V: Logits on the CPU.
            said: Tokens so far.
        """
        if not self.temperature:
            return int(scores_V.argmax())
        scores_V = scores_V / self.temperature
        token = self._from_nucleus(scores_V)
        if list(said[-_WINDOW:]).count(token) >= _MOST_ALIKE:
            scores_V[token] = -torch.inf
            token = self._drawn(scores_V.softmax(dim=0))
        return token

    def _from_nucleus(self, scores_V: torch.Tensor) -> int:
        shares, tokens = scores_V.softmax(dim=0).sort(descending=True, stable=True)
        kept = 1 + int((shares.cumsum(dim=0)[:-1] < self.top_p).sum())  # the last of them reaches the border
        kept = min(kept, self.top_k or kept)
        return int(tokens[self._drawn(shares[:kept])])

    def _drawn(self, shares: torch.Tensor) -> int:
        return int(shares.multinomial(1, replacement=True, generator=self.generator))


class TokenSpeaker:
    """The language model, ready to generate speech tokens.

    Args:
        model: The model on its device.
    """

    def __init__(self, model: CosyVoice3LM) -> None:
        self.model = model.eval()
        config = model.config
        self._codec: int = config.speech_token_size
        self._rows = SpeechRows(config.llm_config.vocab_size, self._codec, *config.mix_ratio)

    @torch.inference_mode()
    def talk(
        self,
        prompt: Sequence[int],
        text: Sequence[int],
        reference: Sequence[int],
        choice: RepetitionAware,
        most: int,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[list[int], bool]:
        """Speech tokens of a text, and whether the model ended by itself.

        Args:
            prompt: Text tokens of the instruction and of the words of the reference.
            text: Text tokens to say.
            reference: Speech tokens of the reference, which are continued.
            choice: How tokens are chosen.
            most: Maximum number of tokens; `MOST_PER_TOKEN` for each token of text is another limit.
            is_given_up: Asked between tokens.

        Raises:
            NotFiniteError: Scores are not finite.
        """
        ids, _ = self._rows.whole(prompt, text, reference).arrays()
        ids_1L = torch.from_numpy(ids[None, :-1])  # without the end mark
        least, most = LEAST_PER_TOKEN * len(text), min(MOST_PER_TOKEN * len(text), most)
        cache, said = DynamicCache(config=self.model.config.llm_config), list[int]()
        while len(said) < most and not is_given_up():
            inputs = ids_1L.to(self.model.device)
            logits_1LV = self.model(input_ids=inputs, past_key_values=cache, use_cache=True).logits
            scores_V = logits_1LV[0, -1].float().cpu()
            if not rows_are_finite(scores_V):
                raise not_finite(f"the scores of speech token {len(said) + 1}", {"": self.model})
            if len(said) < least:
                scores_V[self._codec :] = -torch.inf
            token = choice.choose(scores_V, said)
            if token >= self._codec:
                return said, True
            said.append(token)
            ids_1L = torch.tensor([[self._rows.text_rows + token]])
        return said, False


def without_long_silence(tokens: Sequence[int]) -> list[int]:
    """The tokens, with at most five of silence or breath in a row, as published."""
    kept, silent = list[int](), 0
    for token in tokens:
        silent = silent + 1 if token in _SILENT else 0
        if silent <= _MOST_SILENT:
            kept.append(token)
    return kept
