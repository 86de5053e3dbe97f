"""A vision-language model as the judge: what it is asked, and what is read of its answer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, build_reward
from tests.helpers.judging import JudgingServer, judging


@pytest.fixture
def server() -> Iterator[JudgingServer]:
    with judging({}) as serving:
        yield serving


def scores(server: JudgingServer, completions: list[Any], **options: Any) -> list[float]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    prompts = list(server.answers)
    reward = build_reward("vlm_judge", 1.0, {"url": url, "model": "judge", "retries": 0, **options})
    return reward(Judged(prompts, completions, [{}] * len(prompts)))


def test_its_number_is_the_score(server: JudgingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answers = {"a box": "7", "a line": "I say 2.5.", "grain": "none", "{red}": "12"}
    picture = Image.new("RGB", (4, 4))
    found = scores(server, [picture, [picture] * 8, "text", picture], api_key_env="JUDGE_KEY")
    assert found[:2] == [0.7, 0.25] and all(math.isnan(each) for each in found[2:])
    by_prompt = {next(p for p in server.answers if p in r["messages"][0]["content"][0]["text"]): (path, r)
                 for path, r in server.asked}  # fmt: skip
    path, request = by_prompt["a box"]
    assert path == "/v1/chat/completions Bearer secret" and request["model"] == "judge" and request["temperature"] == 0
    assert [part["type"] for part in by_prompt["a line"][1]["messages"][0]["content"]] == ["text"] + ["image_url"] * 4
    assert by_prompt["grain"][1]["messages"][0]["content"][1] == {"type": "text", "text": "text"}


def test_a_judge_that_fails(server: JudgingServer) -> None:
    server.answers = {"a box": ""}
    with pytest.raises(MachineError, match="KeyError"):
        scores(server, ["x"])
    assert math.isnan(scores(server, ["x"], on_failure="skip")[0])
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        scores(server, ["x"], api_key_env="NO_SUCH_KEY")
