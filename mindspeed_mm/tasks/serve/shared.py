"""A server whose model does not fit one device: it is spread over the ranks of a job by the plan of a YAML. The first
rank hears the clients, and sends each batch to the others, which compute it together with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_mm.core.errors import MachineError, MMError, UsageError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.asking import RowsView
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.generator import Generator
from mindspeed_mm.fsdp.sampling.answers.live import Answer, LiveAnswer
from mindspeed_mm.fsdp.utils.ranks import Ranks
from mindspeed_mm.tasks.answer.generation import load_on_ranks
from mindspeed_mm.tasks.model_source import ModelSource

_BETWEEN_REQUESTS = timedelta(days=365)
"""Ranks wait for the next batch as long as nobody asks. One whose peers are gone hears of it at once."""
LONE_FAILURE_S = 60.0
"""What fails on one rank alone leaves the others within a collective that never ends. Ranks finish a batch within
moments of one another: after so long, a rank knows that the others will not come."""
_LONGEST_MESSAGE = 300
_START_AGAIN = "See what the ranks printed, and start the server again."
_Sent = list[tuple[EncodedQuestion, Sampling]]


class SharedModel:
    """A model whose parts lie on all ranks of a job, so that all of them answer each batch.

    Args:
        generator: This rank's part.
        ranks: All of them; every rank makes this object.
    """

    def __init__(self, generator: Generator, ranks: Ranks) -> None:
        self.generator, self._ranks = generator, ranks
        self._calls = dist.new_group(backend="gloo", timeout=_BETWEEN_REQUESTS)
        self._outcomes = Ranks(LONE_FAILURE_S)
        self.failure: MachineError | None = None
        """Set once ranks have lost one another: nothing can be answered any more."""

    def answer(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """Answer a batch, as `Generator.answer_live` does, on all ranks. Called by the first one.

        Raises:
            MMError: Some rank failed.
        """
        if self.failure is not None:
            raise self.failure
        for row in rows:
            row.check_untold()  # the others begin with what they are sent, and cannot be called back
        try:
            self._call([(row.question, row.sampling) for row in rows])
            return self._answer(rows)
        except (MachineError, RuntimeError) as error:
            self.failure = error if isinstance(error, MachineError) else _ranks_are_gone(error)
            os.kill(os.getpid(), signal.SIGTERM)  # the server ends, and this error is told
            raise

    def follow(self) -> None:
        """Take part in every batch until the first rank ends. Called by the others.

        Raises:
            MachineError: Ranks have lost one another.
        """
        while (batch := self._call(None)) is not None:
            try:
                self._answer([LiveAnswer(question, sampling) for question, sampling in batch])
            except MachineError:
                raise
            except MMError:
                pass  # all ranks have failed alike: the first one tells whoever asked

    def end(self) -> None:
        """Let the other ranks end. Called by the first one."""
        if self.failure is None:
            self._call(None)

    def _call(self, batch: _Sent | None) -> _Sent | None:
        """What the first rank calls the others to do; None: to end."""
        called: list[Any] = [batch]
        dist.broadcast_object_list(called, group=self._calls, group_src=0)
        found: _Sent | None = called[0]
        return found

    def _answer(self, rows: Sequence[LiveAnswer]) -> list[Answer]:
        """The answers; the same error on all ranks where some failed.

        Raises:
            MachineError: This rank failed, and others compute on; or others are gone.
        """
        own_failures: list[Exception] = []

        def answer() -> list[Answer]:
            try:
                return self.generator.answer_live(rows)
            except Exception as error:
                own_failures.append(error)
                raise

        try:
            return self._outcomes.together("answering", answer)
        except MachineError as error:
            if not own_failures:
                raise
            (failure,) = own_failures
            first_line = (str(failure).splitlines() or [""])[0][:_LONGEST_MESSAGE]
            what = f"rank {self._ranks.rank} failed to answer: {type(failure).__name__}: {first_line}"
            raise MachineError(what, way_out=_START_AGAIN) from error


def _ranks_are_gone(error: RuntimeError) -> MachineError:
    return MachineError(f"ranks are gone: {error}", way_out=_START_AGAIN)


def load_shared(source: ModelSource, view: RowsView, plan: Path, ranks: Ranks) -> SharedModel:
    """This rank's part of a model. Every rank calls it.

    Raises:
        UsageError: The model searches beams, which ranks that share it do not.
        MMError: As `load_on_ranks`.
    """
    generator = load_on_ranks(source, view, plan, ranks)
    beams = getattr(generator.model.generation_config, "num_beams", None) or 1
    if beams > 1:
        raise UsageError(
            f"the model's generation configuration asks for {beams} beams, which are not searched by a model that is "
            "spread over ranks",
            where=str(source.folder / "generation_config.json"),
            key="num_beams",
            way_out="Set it to 1, or leave --plan out.",
        )
    return SharedModel(generator, ranks)
