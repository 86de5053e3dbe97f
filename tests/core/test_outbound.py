"""The one client for requests to other programs, at each door that has it, against servers that misbehave."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_mm.core.errors import ConfigError, MMError
from mindspeed_mm.core.outbound import OutboundError, RequestLimits, Server, Unreachable, key_header
from mindspeed_mm.fsdp.posttrain_rewards.registry import Judged, build_reward
from mindspeed_mm.fsdp.sampling.answers.choosing import Sampling
from mindspeed_mm.fsdp.sampling.answers.drawn import DrawRule
from mindspeed_mm.fsdp.train.rollouts.server import ServedPrompt, SglangServer, VllmServer
from mindspeed_mm.tasks.answer import remote
from mindspeed_mm.tasks.evaluate import judge
from tests.helpers.hostile import BEHAVIOURS, hostile

LIMIT_S = 0.2
CANARY = "canary-8f3a91"


def ask_reward(url: str, **settings: Any) -> object:
    reward = build_reward("http", 1.0, {"url": url, "timeout_s": LIMIT_S, "retries": 0} | settings)
    return reward(Judged(["?"], ["!"], [{}]))


def ask_vlm_judge(url: str, **settings: Any) -> object:
    settings = {"url": url, "model": "m", "timeout_s": LIMIT_S, "retries": 0} | settings
    return build_reward("vlm_judge", 1.0, settings)(Judged(["?"], ["!"], [{}]))


def ask_judge(url: str) -> object:
    return judge.Judge(url, "m", "CANARY_KEY")._asked(0).answer([{"type": "text", "text": "?"}])


def ask_rollouts(kind: type[SglangServer | VllmServer]) -> Callable[[str], object]:
    rule = DrawRule(8, 1.0, 1.0, 0, ())

    def ask(url: str) -> object:
        return kind(url, LIMIT_S, "CANARY_KEY").draw(ServedPrompt([1], [], [], None), 0, rule, [2])

    return ask


def ask_chat(url: str) -> object:
    talker = remote.RemoteModel(f"{url}/v1", "m", CANARY)
    return talker.answer([{"role": "user", "content": "?"}], [], Sampling(4), lambda _: None)


def ask_models(url: str) -> object:
    return remote.RemoteModel.at(f"{url}/v1", key=CANARY)


DOORS: dict[str, Callable[[str], object]] = {
    "reward": lambda url: ask_reward(url, headers={"X-Api-Key": CANARY}),
    "vlm_judge": lambda url: ask_vlm_judge(url, api_key_env="CANARY_KEY"),
    "judge": ask_judge,
    "sglang": ask_rollouts(SglangServer),
    "vllm": ask_rollouts(VllmServer),
    "chat": ask_chat,
    "models": ask_models,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LIMITS", RequestLimits(LIMIT_S))
    monkeypatch.setattr(judge, "TIMEOUT_S", LIMIT_S)
    monkeypatch.setenv("CANARY_KEY", CANARY)


@pytest.mark.edge("BS4", "BS8")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_every_failure_is_one_error_in_time_without_the_key(behaviour: str, door: str) -> None:
    with hostile(behaviour) as server:
        begun_s = time.monotonic()
        with pytest.raises(MMError) as caught:
            DOORS[door](server.url)
        assert time.monotonic() - begun_s < LIMIT_S + 2.5  # a drip goes on for 3 s
    assert isinstance(caught.value, OutboundError), repr(caught.value)
    assert CANARY not in str(caught.value) and CANARY.encode() in server.first_asked()
    assert "\n" not in str(caught.value)


@pytest.mark.edge("BS6")
@pytest.mark.parametrize("door", DOORS)
def test_keys_follow_no_redirect(door: str) -> None:
    with hostile("null") as other, hostile("a redirect") as server:
        server.elsewhere = other.url
        with pytest.raises(OutboundError, match=rf"redirects to '127.0.0.1:{other.port}' \(307\)"):
            DOORS[door](server.url)
        assert len(server.asked) == 1 and other.asked == []


@pytest.mark.edge("BS4")
@pytest.mark.parametrize("ask", [ask_reward, ask_vlm_judge])
@pytest.mark.parametrize("behaviour", ["half a body", "no status line", "too deep", "half a character", "a redirect"])
def test_retries_and_skip_act_on_every_failure(
    behaviour: str, ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("mindspeed_mm.core.outbound.time.sleep", waits.append)
    patient = {"timeout_s": 20.0}  # a busy machine may read a request late
    with hostile(behaviour) as server:
        assert math.isnan(ask(server.url, retries=2, on_failure="skip", **patient)[0])
        assert len(server.asked) == 3 and [wait for wait in waits if wait >= 0.5] == [0.5, 1.0]
        with pytest.raises(OutboundError, match=r"\(2 attempts\)"):
            ask(server.url, retries=1, **patient)


@pytest.mark.edge("BS14")
@pytest.mark.parametrize("score", [1e300, -1e300, 1.1e9])
def test_rewards_too_large_for_a_mean_are_refused(score: float) -> None:
    with pytest.raises(MMError, match="the reward 'exact_match' returned"):
        reward = build_reward("exact_match")
        object.__setattr__(reward, "judge", lambda prompts, completions, rows: [score])
        reward(Judged(["?"], ["!"], [{}]))
    BEHAVIOURS["a large score"] = lambda _server, _request: iter(
        [b"HTTP/1.1 200 OK\r\n\r\n" + json.dumps({"scores": [score]}).encode()]
    )
    try:
        with hostile("a large score") as server, pytest.raises(OutboundError, match="is not null or a number up to"):
            ask_reward(server.url)
        assert ask_reward(server.url, on_failure="skip") != [score]
    finally:
        del BEHAVIOURS["a large score"]


def test_an_answer_that_announces_too_much_is_not_waited_for() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000001\r\n\r\n"
    BEHAVIOURS["announced"] = lambda _server, _request: iter([head])
    try:
        with hostile("announced") as server, pytest.raises(OutboundError, match="sends more than 1,000,000 bytes"):
            Server(server.url, RequestLimits(30, most_bytes=1_000_000)).ask("GET")
    finally:
        del BEHAVIOURS["announced"]


def test_an_answer_without_end_is_cut_at_the_largest_size() -> None:
    BEHAVIOURS["endless"] = lambda _server, _request: iter(lambda: b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 65536, b"")
    try:
        with hostile("endless") as server, pytest.raises(OutboundError, match="sends more than 1,000,000 bytes"):
            Server(server.url, RequestLimits(30, most_bytes=1_000_000)).ask("GET")
    finally:
        del BEHAVIOURS["endless"]


def test_a_reader_that_takes_a_request_byte_by_byte_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def read() -> None:
            connection, _ = listening.accept()
            with connection:
                while connection.recv(1):
                    time.sleep(0.01)

        threading.Thread(target=read, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}", RequestLimits(LIMIT_S))
        begun_s = time.monotonic()
        with pytest.raises(OutboundError, match=r"did not answer within 0\.2 s"):
            server.ask("POST", content="x" * (32 << 20))
        assert time.monotonic() - begun_s < 10


# --- where requests go ------------------------------------------------------------------------------------------------


def test_nothing_is_taken_from_netrc_or_proxies_for_this_machine(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with hostile("null") as server:
        assert Server(server.url, RequestLimits(5)).ask("GET").body == b"null"
    assert b"authorization" not in server.asked[0].lower()


def test_a_proxy_gets_its_own_password_and_no_key_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile("an error") as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:word@127.0.0.1:{proxy.port}")
        server = Server("https://rewards.example", RequestLimits(5), {"Authorization": f"Bearer {CANARY}"})
        with pytest.raises(OutboundError, match="the proxy of the environment refuses"):
            server.ask("POST", content={})
        monkeypatch.setenv("no_proxy", "rewards.example")
        with pytest.raises(Unreachable):
            server.ask("GET")
    (asked,) = proxy.asked
    assert asked.startswith(b"CONNECT rewards.example:443") and b"Proxy-Authorization: Basic bWU6d29yZA==" in asked
    assert CANARY.encode() not in asked


def test_the_password_of_an_address_is_sent_and_never_shown() -> None:
    with hostile("an error") as server:
        asked = Server(f"http://me:{CANARY}@127.0.0.1:{server.port}", RequestLimits(5))
        with pytest.raises(OutboundError) as caught:
            asked.ask_json({})
    assert b"Authorization: Basic bWU6Y2FuYXJ5LThmM2E5MQ==" in server.asked[0]
    assert CANARY not in str(caught.value) and CANARY not in repr(asked.shown)


@pytest.mark.parametrize(
    "address", ["", "localhost:8000", "ftp://h", "http://", "http://h:port", "http://[::", "http://h\n", "http://a b"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an http address"):
        Server(address, RequestLimits(1))


def test_headers_that_cannot_be_sent_are_refused_without_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("X-Key", f"{CANARY}\nHost: other"), ("X Key", CANARY), ("X-Key", f"{CANARY}é")):
        with pytest.raises(ConfigError, match="holds characters that HTTP headers cannot carry") as caught:
            Server("http://h", RequestLimits(1), {name: value})
        assert CANARY not in str(caught.value)
    with pytest.raises(ConfigError, match="was hidden when the run was recorded"):
        Server("http://h", RequestLimits(1), {"X-Key": "•••"})
    monkeypatch.setenv("CANARY_KEY", f"{CANARY}\n")
    assert key_header("CANARY_KEY", "o") == {"Authorization": f"Bearer {CANARY}"}
    assert key_header("CANARY_KEY", "o", "X-Api-Key") == {"X-Api-Key": CANARY}
