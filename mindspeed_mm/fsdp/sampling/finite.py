"""Refuses numbers that are not finite wherever a model answers or draws: what is chosen by them means nothing.

Scores are checked on the device, by one reduction per token. The host reads the result together with the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mindspeed_mm.core.errors import ModelFolderError, Problem

_SMALLEST_FLOAT_BYTES = 2
"""Of the types that `isfinite` takes."""


class NotFiniteError(ModelFolderError):
    """A model computed NaN or infinity where it chooses a token or denoises a sample."""


def rows_are_finite(scores: torch.Tensor) -> torch.Tensor:
    """Which rows (…, V) of scores a token can be chosen by: (…) booleans.

    NaN and +∞ survive the maximum, and a row of -∞ alone has no other. A single -∞ is no fault: that is how processors
    and models exclude a token.
    """
    return scores.amax(dim=-1).isfinite()


class FiniteScores:
    """A logits processor of transformers that changes nothing, and notes which rows are finite. It goes first: the
    others may hide NaN, or put infinity there on purpose.

    Args:
        rows: Of the batch. Beams of a row stand together.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.seen: list[torch.Tensor] = []
        """(rows,) booleans of each token so far, on the device."""

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (rows × beams, V), as they are."""
        is_finite = rows_are_finite(scores)
        self.seen.append(_of_rows(is_finite, self._rows, dim=1))
        return scores

    def beside(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Tokens (rows, L) with a further column, read together with them: how many tokens were chosen by finite scores
        before the first that was not."""
        good_TB = torch.stack(self.seen).long()
        good_B = good_TB.cumprod(dim=0).sum(dim=0)
        return torch.cat((tokens_BL, good_B[:, None].to(tokens_BL)), dim=1)


def _of_rows(good: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """(rows,) from several booleans a row, which stand together (`dim` 1) or in blocks of one each (0). Where there is
    no telling which row one is of, all rows share all."""
    if len(good) == rows:
        return good
    if len(good) % rows:
        return good.all().repeat(rows)
    if dim:
        return good.view(rows, -1).all(dim=1)
    return good.view(-1, rows).all(dim=0)


def not_finite(what: str, models: Mapping[str, nn.Module], *, where: str = "") -> NotFiniteError:
    """The error of a number that is not finite.

    Args:
        what: Where it was seen first: "the scores of token 1 of the answer".
        models: Are searched for a weight that is not finite, which is slow. By the name that stands before those of
            their weights, with a dot; "" for a model alone.
        where: Row, request or prompt.
    """
    sentence = f"{what} are not finite numbers"
    types: set[torch.dtype] = set()
    for prefix, model in models.items():
        if (name := first_bad_weight(model)) is not None:
            way_out = "Use an earlier checkpoint, or an undamaged copy of the model."
            what = f"{sentence}: the weight '{prefix}{name}' contains NaN or infinity"
            return NotFiniteError(what, where=where, way_out=way_out)
        types |= {parameter.dtype for parameter in model.parameters()}
    way_out = "All weights are finite, so an intermediate value overflows. Remove this input"
    way_out += ', or set "dtype": "bfloat16" in the model\'s config.json.' if torch.float16 in types else "."
    return NotFiniteError(sentence, where=where, way_out=way_out)


@torch.no_grad()
def first_bad_weight(model: nn.Module) -> str | None:
    """The name of the first parameter or buffer, on this rank, that holds NaN or infinity. Buffers may hold -∞: masks
    do."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or not local.is_floating_point() or not local.numel():
            continue
        if local.element_size() < _SMALLEST_FLOAT_BYTES:
            local = local.float()
        is_bad = ~local.isfinite() if isinstance(tensor, nn.Parameter) else local.isnan()
        if is_bad.any():
            return name
    return None


@contextmanager
def placed(where: str) -> Iterator[None]:
    """`NotFiniteError` that passes through here names this place."""

    def at(problem: Problem) -> Problem:
        return replace(problem, where=where)

    try:
        yield
    except NotFiniteError as error:
        error.change_problems(at)
        raise


class FiniteSteps:
    """Watches the denoising of some samples: each prediction of the transformer, and the latents that are decoded. The
    findings stay on the device until somebody asks.

    Args:
        rows: Samples of the batch.
        steps: Denoising steps of each.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps = rows, steps
        self._predicted: list[torch.Tensor] = []
        self._decoded: list[torch.Tensor] = []

    @contextmanager
    def watching(self, transformer: nn.Module, vae: Any) -> Iterator[None]:
        """Inside, what a pipeline does with these parts is looked at.

        Args:
            transformer: Called at each step, once or more often.
            vae: With a method `decode`.
        """

        def predicted(_module: nn.Module, _args: object, output: object) -> None:
            self._predicted.append(self._finite(output))

        def decode(latents: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            self._decoded.append(self._finite(latents))
            return plain(latents, *arguments, **named)

        plain, own = vae.decode, vars(vae).get("decode")
        handle = transformer.register_forward_hook(predicted)
        vae.decode = decode
        try:
            yield
        finally:
            handle.remove()
            if own is None:
                del vae.decode
            else:
                vae.decode = own

    def first_bad(self) -> tuple[int, str] | None:
        """The first sample, by its place in the batch, that is not finite, and where that was seen. Waits for the
        device, once."""
        seen = [*self._predicted, *self._decoded]
        if not seen:
            return None
        for call, good in enumerate(torch.stack(seen).tolist()):
            if not all(good):
                return good.index(False), self._name_of(call)
        return None

    def _name_of(self, call: int) -> str:
        if call >= len(self._predicted):
            return "the latents behind the last step"
        calls_a_step = max(1, len(self._predicted) // self._steps)
        return f"the predictions at step {call // calls_a_step + 1} of {self._steps}"

    def _finite(self, value: object) -> torch.Tensor:
        """(rows,) whether all numbers of each sample are finite; where samples cannot be told apart, of all."""
        found: torch.Tensor | None = None
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, list):  # of single samples
                sizes = torch.stack([torch.linalg.vector_norm(each, ord=torch.inf) for each in part])
            elif isinstance(part, torch.Tensor) and part.is_floating_point():
                sizes = torch.linalg.vector_norm(part.flatten(1), ord=torch.inf, dim=1)
            else:
                continue
            # With guidance the rows come twice, one block after the other.
            good = _of_rows(sizes.isfinite().view(-1), self._rows, dim=0)
            found = good if found is None else found & good
        assert found is not None
        return found
