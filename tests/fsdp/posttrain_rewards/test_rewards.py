"""Rewards: the rules, a server's scores, and what is said of a reward that answers badly."""

import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML

from mindspeed_mm.core.errors import ConfigError, DataError, MachineError
from mindspeed_mm.fsdp.posttrain_rewards import reward_register
from mindspeed_mm.fsdp.posttrain_rewards.registry import (
    Judged,
    build_reward,
    check_judged,
    check_judges,
    scores_of,
    solution_of,
)


def scored(name: str, completions: list[Any], solution: Any = None, **options: Any) -> list[float]:
    rows = [{"id": "r", "solution": solution} for _ in completions]
    ids = [list(range(len(str(text).split()))) for text in completions]
    return build_reward(name, 1.0, options)(Judged(["?"] * len(completions), completions, rows, ids))


@contextmanager
def registered(name: str, reward: Any) -> Iterator[None]:
    reward_register.register(name)(reward)
    try:
        yield
    finally:
        reward_register._entries.pop(name)


def test_rules_that_compare_with_a_solution() -> None:
    assert scored("exact_match", [" 3 1 4\n", "3 1", "3  1 4"], "3 1 4") == [1, 0, 0]
    assert scored("exact_match", ["Seven", "seven"], "seven") == [0, 1]
    assert scored("exact_match", ["Seven"], "seven", ignore_case=True) == [1]
    assert scored("contains", ["It is a SEVEN.", "six"], ["seven"]) == [1, 0]
    assert scored("number", ["so 12, then 1,234.50", "1234.5 or 7", "none"], "#### 1234.5") == [1, 0, 0]


def test_rules_of_form() -> None:
    assert scored("regex", ["a\nb", "b"], pattern="^a.b$") == [1, 0]
    thoughts = [
        "<think>so</think> 4",
        "<think></think>",
        "4",
        "<think>a<think>b</think></think>c",
        "x<think>a</think>4",
    ]
    assert scored("think_format", thoughts) == [1, 0, 0, 0, 0]
    assert scored("json", ['{"a": 1}', "[1]", "{"], keys=["a"]) == [1, 0, 0]
    assert scored("json", ["[1]", ""]) == [1, 0]
    words = [" ".join("w" * n) for n in (6, 8, 9, 10, 11)]
    assert scored("length", words, max_tokens=10, soft_tokens=4) == [0, -0.5, -0.75, -1, -1]
    assert scored("length", words[3:], max_tokens=10) == [0, -1]
    assert scored("repetition", ["a b c d", "a a a a a", "a b"]) == [0, pytest.approx(-2 / 3), 0]


def test_what_rewards_judge() -> None:
    check_judges("jpeg_size", "pictures")
    check_judges("http", "texts")
    check_judges("of_a_plugin", "texts")
    for name, completions in (("jpeg_size", "texts"), ("regex", "pictures")):
        with pytest.raises(ConfigError, match=f"'{name}' does not judge {completions}"):
            check_judges(name, completions)  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["(", 3])
def test_a_pattern_that_is_none(pattern: Any) -> None:
    with pytest.raises(ConfigError, match="is no regular expression"):
        build_reward("regex", 1.0, {"pattern": pattern})


def test_the_size_of_a_picture_as_jpeg() -> None:
    plain = Image.new("RGB", (64, 64))
    noisy = Image.effect_noise((64, 64), 90)
    smooth, rough = scored("jpeg_size", [plain, noisy])
    assert rough < smooth < 0
    assert scored("jpeg_size", [noisy], sign=1) == [-rough]


def test_solutions_by_the_names_of_other_tools() -> None:
    for row in (
        {"solution": "4", "answer": "5"},
        {"answer": "4"},
        {"ground_truth": "4"},
        {"reward_model": {"style": "rule", "ground_truth": "4"}},
    ):
        assert solution_of(row) == "4"
    assert solution_of({"problem": "?"}) is None
    with pytest.raises(DataError, match="no solution"):
        scored("exact_match", ["4"])


def test_scores_of_several_rewards() -> None:
    rewards = [build_reward("contains"), build_reward("regex", 0.5, {"pattern": "b"})]
    scores = scores_of(rewards, Judged(["", ""], ["a", "b"], [{"answer": "a"}] * 2))
    assert scores.tolist() == [[1, 0], [0, 1]] and scores.dtype == torch.float64


def test_a_reward_of_a_plugin() -> None:
    class Counting:
        def __init__(self, most: int = 3) -> None:
            self.most = most

        def __call__(self, prompts: Any, completions: Any, rows: Any) -> list[float | None]:
            return [None if not text else float(len(text) <= self.most) for text in completions]

    with registered("counting", Counting):
        first, second = scored("counting", ["", "abcd"], most=4)
        assert math.isnan(first) and second == 1
        with pytest.raises(ConfigError, match="takes most"):
            build_reward("counting", 1.0, {"least": 3})
    with pytest.raises(ConfigError, match="'counting' is not registered"):
        build_reward("counting")


def test_a_reward_as_trl_has_them() -> None:
    """Columns come as lists under their names; a setting is not taken for one, nor one for a setting."""
    seen: list[dict[str, Any]] = []

    def long(prompts: Any, completions: Any, answer: Any, most: int = 3, **kwargs: Any) -> list[float]:
        seen.append({"prompts": prompts, "answer": answer, **kwargs})
        return [float(len(text) <= most) for text in completions]

    def named(completions: Any, answer: Any) -> list[float]:
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    judged = Judged(["p", "q"], ["abcd", "b"], [{"answer": "b", "most": 1}, {"answer": "b", "hint": "h"}], [[1], [2]])
    with registered("long", long), registered("named", named):
        assert build_reward("long", 1.0, {"most": 4})(judged) == [1, 1]
        assert build_reward("named")(judged) == [0, 1]
        with pytest.raises(DataError, match=r"needs answer, which the rows do not have\. They have id;"):
            build_reward("named")(Judged(["p"], ["a"], [{"id": "r"}]))
        with pytest.raises(ConfigError, match="'mots'"):
            build_reward("long", 1.0, {"mots": 4})
    ids = {"completion_ids": [[1], [2]]}
    assert seen == [{"prompts": ["p", "q"], "answer": ["b", "b"], "hint": [None, "h"], **ids}]


def test_a_reward_that_cannot_be_called_is_found_when_it_is_built() -> None:
    class Two:
        def __call__(self, texts: Any, rows: Any) -> list[float]:
            return [0.0 for _ in texts]

    for reward in (lambda texts: [0.0 for _ in texts], Two):
        told = r"too many positional arguments.*\(prompts, completions, rows\)"
        with registered("wrong", reward), pytest.raises(ConfigError, match=told):
            build_reward("wrong")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        (None, "returned NoneType"),
        ([1.0, float("nan")], "returned nan for b"),
        ([1.0, "1"], "returned '1' for b"),
    ],
)
def test_a_reward_that_answers_badly(returned: Any, message: str) -> None:
    with registered("bad", lambda prompts, completions, rows: returned), pytest.raises(DataError, match=message):
        build_reward("bad")(Judged(["", ""], ["", ""], [{}, {}], ids=["a", "b"]))


def test_a_reward_that_fails_is_named() -> None:
    """A mistake in a function of the user's, settings that it cannot work with, and what it does not judge."""
    told = r"the reward 'broken' failed: ZeroDivisionError: .*test_rewards\.py:\d+"
    with registered("broken", lambda prompts, completions, rows: [1 / 0]), pytest.raises(DataError, match=told):
        scored("broken", ["a"])
    with pytest.raises(DataError, match=r"'jpeg_size' failed: .*given 1 completions \(str\)"):
        scored("jpeg_size", ["a"])


def test_a_reward_that_fails_while_it_is_built_is_named() -> None:
    """`mm check` builds all rewards: what a class makes of its settings is told as a problem of the configuration."""

    class Half:
        def __init__(self, share: float) -> None:
            self.inverse = 1 / share

        def __call__(self, prompts: Any, completions: Any, rows: Any) -> list[float]:
            return [self.inverse for _ in completions]

    told = r"the reward 'half' cannot be built: ZeroDivisionError: .*test_rewards\.py:\d+"
    with registered("half", Half), pytest.raises(ConfigError, match=told):
        build_reward("half", 1.0, {"share": 0})


def test_a_reward_that_runs_out_of_memory_is_left_to_the_run() -> None:
    def full(prompts: Any, completions: Any, rows: Any) -> list[float]:
        raise torch.OutOfMemoryError("full")

    with registered("full", full), pytest.raises(torch.OutOfMemoryError):
        scored("full", ["a"])


def test_scores_may_be_of_numpy() -> None:
    with registered("counted", lambda prompts, completions, rows: np.array([len(text) for text in completions])):
        assert scored("counted", ["ab", ""]) == [2, 0]
    with registered("small", lambda prompts, completions, rows: [np.float32(0.5)]):
        assert scored("small", ["ab"]) == [0.5]


def test_nothing_judged_is_an_error() -> None:
    check_judged(torch.tensor([[math.nan], [1.0]]), ["contains"])
    with pytest.raises(DataError, match="no reward judged any answer"):
        check_judged(torch.full((2, 1), math.nan), ["contains"])


# --- a server --------------------------------------------------------------------------------------------------------


class _Server(ThreadingHTTPServer):
    requests: list[dict[str, Any]]
    failures = 0
    delay_s = 0.0
    at_once = most_at_once = 0


class _Scores(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(asked)
        self.server.at_once += 1
        self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        time.sleep(self.server.delay_s)
        self.server.at_once -= 1
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        body = json.dumps({"scores": [len(each["completion"] or "") for each in asked["samples"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    serving = _Server(("127.0.0.1", 0), _Scores)
    serving.requests = []
    threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
    yield serving
    serving.shutdown()
    serving.server_close()


def test_a_server_scores_in_order_with_few_requests_at_a_time(server: _Server) -> None:
    server.delay_s = 0.02
    texts = ["a" * n for n in range(20)]
    url = f"http://127.0.0.1:{server.server_port}/score"
    assert scored("http", texts, "x", url=url, batch_size=3, concurrency=2) == list(range(20))
    assert len(server.requests) == 7 and server.most_at_once <= 2
    sample = server.requests[0]["samples"][0]
    assert sample["row"] == {"id": "r", "solution": "x"} and sample["prompt"] == "?"
    assert scored("http", [Image.new("RGB", (2, 2))], url=url) == [0]
    assert len(server.requests[-1]["samples"][0]["media"]) == 1


def test_a_server_that_fails_is_asked_again(server: _Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}/score"
    server.failures = 1
    assert scored("http", ["ab"], url=url, retries=1) == [2]
    server.failures = 2
    failed = r"the server of the reward 'http' refuses \(503\): Service Unavailable"
    with pytest.raises(MachineError, match=failed) as caught:
        scored("http", ["ab"], url=url, retries=0)
    (advice,) = re.findall(r"on_failure: \w+", caught.value.problems[0].way_out)
    assert math.isnan(scored("http", ["ab"], url=url, retries=0, **YAML(typ="safe").load(advice))[0])
    server.delay_s = 0.5
    with pytest.raises(MachineError, match=r"did not answer within 0\.05 s"):
        scored("http", ["ab"], url=url, retries=0, timeout_s=0.05)


@pytest.mark.parametrize("more", [{"name": "http"}, {"name": "vlm_judge", "model": "judge"}])
def test_a_server_is_asked_whether_it_is_there(server: _Server, more: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{server.server_port}"
    name, settings = more["name"], {"url": url} | {key: value for key, value in more.items() if key != "name"}
    reward = build_reward(name, 1.0, settings, key="posttrain.rewards[1]")
    reward.check_server()  # it answers 501 to a GET
    assert server.requests == []
    server.shutdown()
    server.server_close()
    with pytest.raises(MachineError, match=f"the server of the reward '{name}' cannot be reached: .*refused") as caught:
        reward.check_server()
    assert caught.value.problems[0].key == "posttrain.rewards[1].settings.url"
    with pytest.raises(MachineError, match=r"cannot be reached: .*refused") as caught:
        build_reward(name, 1.0, settings | {"retries": 0}, key="posttrain.rewards[1]")(Judged([""], [""], [{}]))
    assert caught.value.problems[0].key == "posttrain.rewards[1].settings.url"
    build_reward(name, 1.0, settings | {"on_failure": "skip"}).check_server()
    with pytest.raises(ConfigError, match="'http://localhost:port' is not an http address"):
        build_reward(name, 1.0, settings | {"url": "http://localhost:port"})
    with pytest.raises(ConfigError, match=r"rewards\.settings\.on_failure.*'null' is not one of error, skip"):
        build_reward(name, 1.0, settings | {"on_failure": "null"})


def test_a_server_that_takes_no_other_requests_is_there() -> None:
    """It closes the connection of a GET without a word, or says nothing in time."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        build_reward("http", 1.0, {"url": url, "timeout_s": 0.05}).check_server()
        closing = threading.Thread(target=lambda: [listening.accept()[0].close() for _ in range(2)])
        closing.start()
        build_reward("http", 1.0, {"url": url}).check_server()
        closing.join()
