"""`mm serve --plan`: a model that ranks share says what it says in one process, whoever leaves or breaks off."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm.core.errors import MachineError, UsageError
from mindspeed_mm.fsdp.data.data_utils.encode import EncodedQuestion
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.live import LiveAnswer
from mindspeed_mm.fsdp.utils.ranks import PATIENCE_S, Ranks
from mindspeed_mm.tasks.answer.generation import load_generator
from mindspeed_mm.tasks.answer.view import rows_view
from mindspeed_mm.tasks.model_source import ModelSource
from mindspeed_mm.tasks.requests.serve import ServeRequest, check_request
from mindspeed_mm.tasks.serve import serve
from mindspeed_mm.tasks.serve.serve import load_shared
from tests.helpers.distributed import RanksFailed, run_ranks
from tests.helpers.tiny_models import make_tiny_qwen3

TOKENS = 8
FSDP = "{param_dtype: fp32, reduce_dtype: fp32}"
PLANS = {
    "tp": f"tensor_parallel_size: 2, fsdp_plan: {FSDP}",
    "fsdp": f"fully_shard_parallel_size: auto, fsdp_plan: {FSDP}",
}


def question(*ids: int) -> EncodedQuestion:
    return EncodedQuestion(np.array(ids), [])


def rows() -> list[LiveAnswer]:
    return [
        LiveAnswer(question(20, 21, 22), Sampling(TOKENS, temperature=0)),
        LiveAnswer(question(30, 31), Sampling(TOKENS - 2, temperature=1.5, seed=5)),
    ]


def answer_on_ranks(model: str, plan: str) -> Any:
    source, ranks = ModelSource(Path(model)), Ranks(60)
    mine = load_shared(source, rows_view(source, None), Path(plan), ranks)
    if not ranks.is_first:
        return mine.follow()
    found = [answer.token_ids for answer in mine.answer(rows())]

    broken_off, left = rows()
    pieces: list[str] = []
    broken_off.tell, broken_off.stop = pieces.append, [mine.generator.tokenizer.decode(found[0][2:3])]
    left.give_up()
    mine.answer([broken_off, left])  # its ranks do not know of texts that end it, nor of clients that leave
    assert (broken_off.ending, left.ending) == ("stop", "given up")
    with pytest.raises(RuntimeError, match="partly streamed"):
        mine.answer([broken_off])
    with pytest.raises(UsageError, match="beams are not searched"):
        mine.answer([LiveAnswer(question(20), Sampling(TOKENS, beams=2))])
    again = [answer.token_ids for answer in mine.answer(rows())]
    mine.end()
    return found, again


@pytest.mark.parametrize("name", ["tp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_answer_together(tmp_path: Path, name: str) -> None:
    model = make_tiny_qwen3(tmp_path / "model", initializer_range=0.4)
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"model: {{model_name_or_path: {model}}}\nparallel: {{{PLANS[name]}}}\n")
    (found, again), _ = run_ranks(2, answer_on_ranks, str(model), str(plan))
    expected = [answer.token_ids for answer in load_generator(model).answer_live(rows())]
    assert found == again == expected
    assert len(set(found[0])) > 2


def lone_failure(model: str, plan: str, failing: int) -> None:
    """One rank, but not the others, cannot answer a batch."""
    source, ranks = ModelSource(Path(model)), Ranks(60)
    serve.LONE_FAILURE_S = 3.0 - PATIENCE_S
    mine = load_shared(source, rows_view(source, None), Path(plan), ranks)
    ended: list[int] = []
    os.kill = lambda _pid, number: ended.append(number)  # in a process of its own
    answer = mine.generator.answer_live
    batches = []

    def answer_once(rows: Any) -> Any:
        batches.append(rows)
        if len(batches) == 2 and ranks.rank == failing:
            raise RuntimeError("out of memory")
        return answer(rows)

    mine.generator.answer_live = answer_once  # type: ignore[method-assign]
    if not ranks.is_first:
        mine.follow()
        return
    assert len(mine.answer(rows())) == 2
    with pytest.raises((MachineError, RuntimeError)):
        mine.answer(rows())
    assert ended == [signal.SIGTERM] and mine.failure is not None
    mine.answer(rows())  # whoever asks again hears it too, at once


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_alone_ends_all(tmp_path: Path, failing: int) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"model: {{model_name_or_path: {model}}}\nparallel: {{{PLANS['tp']}}}\n")
    begun_s = time.monotonic()
    with pytest.raises(
        RanksFailed, match=f"MachineError: rank {failing} failed to answer: RuntimeError: out of memory"
    ):
        run_ranks(2, lone_failure, str(model), str(plan), failing)
    assert time.monotonic() - begun_s < 200  # not the limit of a collective


def test_what_is_not_spread(tmp_path: Path) -> None:
    model = make_tiny_qwen3(tmp_path / "model")
    (tmp_path / "plan.yaml").write_text("parallel: {tensor_parallel_size: 2}\n")
    asked = {"port": 0, "plan": tmp_path / "plan.yaml"}
    for more, message in [
        ({}, "one process holds the whole model"),
        ({"engine": "vllm"}, "package's own engine"),
        ({"adapters": (f"terse={tmp_path}",)}, "adapters are not spread"),
    ]:
        with pytest.raises(UsageError, match=message):
            request = ServeRequest(model, **asked, **more)  # type: ignore[arg-type]
            serve.run(request, check_request(request), print)
