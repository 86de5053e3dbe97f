"""Whether continuous batching gives a model's own answers: what can be seen of it, and a trial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.choosing import Chooser, Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.sampling.finite import NotFiniteError

_NEEDS_TRANSFORMERS = "5.23"
"""Earlier ones name its settings otherwise, and their paged attention refuses the plain pass of `try_out`."""
_HONOURED = frozenset(
    ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "bos_token_id",
     "pad_token_id", "max_length", "max_new_tokens", "transformers_version", "use_cache", "_from_model_config")
)  # fmt: skip
"""Fields of a generation configuration that are heeded here, or that change nothing."""
_PROBES = ((5, 3), (11, 7))
"""Length and first token of the questions by which a model is tried."""
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_SHORT_TOLERANCE = 0.05
"""How far scores may differ from those of a plain pass, as a share of their range: types of 16 bits round more."""


def is_new_enough() -> bool:
    """Whether the installed transformers is one whose continuous batching is used here."""
    return TorchVersion(version("transformers")) >= _NEEDS_TRANSFORMERS


def unfit(reason: str) -> UsageError:
    """The error of a model that is not answered so."""
    what = f"this model is not answered by continuous batching: {reason.rstrip('.')}"
    return UsageError(what, key="--engine", way_out="Leave it out, or choose batches.")


def why_not(generator: Generator) -> str | None:
    """What keeps a model from being answered so; None: nothing that can be seen without trying."""
    model = generator.model
    if not is_new_enough():
        return f"that needs transformers {_NEEDS_TRANSFORMERS}, and {version('transformers')} is installed"
    if generator.adapters:
        return "rows choose among adapters by name"
    if generator.encoder.processor is not generator.encoder.tokenizer:
        return "the model takes pictures, videos or sounds"
    if model.config._attn_implementation != "sdpa":
        return f"its attention is '{model.config._attn_implementation}', and no other than sdpa is left as it is"
    border = generator.longest_alike
    if border is not None and (generator.longest is None or generator.longest > border):
        return f"its rotary frequencies follow the longest row of a pass, behind {border:,} tokens"
    settings = model.generation_config.to_diff_dict()
    others = sorted(key for key in set(settings) - _HONOURED if settings[key] not in (None, False))
    if others:
        return f"its generation configuration has {', '.join(others)}"
    return None


def try_out(generator: Generator, ask: Callable[[LiveAnswer, Callable[[], Chooser | None]], Future[Answer]]) -> None:
    """Have two questions answered at a time, and compare the scores with those of a plain pass: nothing else tells
    whether all layers of a model read the paged cache, the positions and the masks that they are handed.

    Args:
        generator: The model, which nobody else uses.
        ask: Has a question answered by continuous batching, its tokens chosen by what the second argument makes.

    Raises:
        NotFiniteError: The model's scores are not finite.
        UsageError: The model fails, or its scores are others.
    """
    vocabulary = generator.model.get_input_embeddings().num_embeddings
    asked = []
    for length, first in _PROBES:
        ids, scores = (first + 7 * np.arange(length)) % vocabulary, _Scores()
        row = LiveAnswer(EncodedQuestion(ids, []), Sampling(3, temperature=0))
        asked.append((ids.tolist(), scores, ask(row, scores.chooser)))
    try:
        said = [future.result().token_ids for _, _, future in asked]
    except NotFiniteError:
        raise
    except Exception as error:  # whatever a model raises that cannot be answered so
        raise unfit(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]) from error
    # Only now: for the length of a pass, transformers 5.23 writes whether it is causal into the model's configuration,
    # where a pass of another thread reads it.
    for (ids, scores, _), tokens in zip(asked, said, strict=True):
        _check_scores(generator.model, torch.cat(scores.seen), [*ids, *tokens], len(ids))


def _check_scores(model: Any, paged_NV: torch.Tensor, ids: Sequence[int], asked: int) -> None:
    """Raise `UsageError` unless a plain pass gives these scores of the tokens behind the question."""
    with torch.no_grad():
        plain_LV = model(input_ids=torch.tensor([ids], device=model.device)).logits[0].float()
    plain_NV = plain_LV[asked - 1 : -1]
    share = (plain_NV - paged_NV[: len(plain_NV)]).abs().max() / (plain_NV.max() - plain_NV.min())
    if not share <= _TOLERANCE.get(model.dtype, _SHORT_TOLERANCE):
        raise unfit("its scores are not those of a plain pass through the model")


class _Scores:
    """Takes the likeliest token, and keeps what it was chosen by."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def chooser(self) -> Chooser:
        """This one, also for an answer that begins again."""
        return self

    def __call__(self, _ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        self.seen.append(scores_1V.clone())
        return scores_1V
