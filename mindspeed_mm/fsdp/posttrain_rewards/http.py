"""Servers that are asked, and the reward of one: samples are sent as JSON, scores come back.

Request: `{"samples": [{"id", "prompt", "completion", "media", "row"}]}`; pictures stand in `media` as base64 PNG, and
`completion` is null then. Answer: `{"scores": [number or null, …]}`, one for each sample.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.posttrain_rewards.pictures import frames_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import KEY, Row, reward_register

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")

CHECK_S = 5.0
"""For a server that is asked whether it is there."""
OnFailure = Literal["error", "skip"]
"""What is done about a server that fails: the run ends, or the samples stay unjudged."""


@dataclass(frozen=True)
class AskedServer:
    """A server that answers JSON with JSON.

    Args:
        url: Where requests go.
        timeout_s: For one request.
        retries: After a request that failed; the wait between them doubles from half a second on.
        headers: Further headers.
        title: What it is called when it fails.
        key: Of the configuration, or the option, that names it.
        way_out: What may help when it fails.
    """

    url: str
    timeout_s: float
    retries: int
    headers: Mapping[str, str] = field(default_factory=dict)
    title: str = "the reward server"
    key: str = f"{KEY}.settings.url"
    way_out: str = (
        "See the server's log; raise timeout_s, or among its settings set retries higher or on_failure: skip, which "
        "leaves such samples out."
    )

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"'{self.url}' is no http address",
                key=self.key,
                way_out="Begin it with http:// or https://.",
            )

    def check(self) -> None:
        """Raise `MachineError` where nothing listens. Whatever it answers to a GET shows that something does."""
        try:
            request = urllib.request.Request(self.url, headers=dict(self.headers))
            urllib.request.urlopen(request, timeout=min(CHECK_S, self.timeout_s)).close()
        except urllib.error.HTTPError:
            pass
        except (urllib.error.URLError, http.client.InvalidURL) as error:
            raise MachineError(
                f"{self.title} is not there: {getattr(error, 'reason', error)}",
                where=self.url,
                key=self.key,
                way_out="Start it, or correct its address.",
            ) from error
        except (OSError, http.client.HTTPException):  # it listens, and takes nothing but what it is made for
            pass

    def ask(self, content: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """What `read` takes from the answer; it raises `ValueError`, `KeyError` or `TypeError` for another answer.

        Raises:
            MachineError: The server cannot be reached, is too slow or answers with something else.
        """
        body = json.dumps(content).encode()
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(0.5 * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json", **self.headers})
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    return read(json.loads(answer.read()))
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise MachineError(
            f"{self.title} did not answer {self.retries + 1} requests: {failure}",
            where=self.url,
            key=self.key,
            way_out=self.way_out,
        )


@dataclass(frozen=True)
class AskedModel:
    """A model behind a server of OpenAI's interface (`mm serve`, vLLM, SGLang).

    Args:
        server: Its server.
        name: What the server calls it.
    """

    server: AskedServer
    name: str

    def answer(self, parts: Sequence[Mapping[str, Any]]) -> str:
        """What it says to texts and pictures, by its likeliest tokens.

        Args:
            parts: Of the one turn, as OpenAI's interface has them.

        Raises:
            MachineError: The server cannot be reached, is too slow or answers with something else.
        """
        turn = {"role": "user", "content": list(parts)}
        request = {"model": self.name, "temperature": 0, "messages": [turn]}
        return self.server.ask(request, lambda content: str(content["choices"][0]["message"]["content"]))


def chat_address(url: str) -> str:
    """Where a server takes conversations, from its address up to `/v1`."""
    return f"{url.rstrip('/')}/chat/completions"


def skips_failures(on_failure: str) -> bool:
    """Whether samples stay unjudged where the server of a reward fails.

    Args:
        on_failure: The setting.

    Raises:
        ConfigError: It is neither `error` nor `skip`.
    """
    if on_failure not in ("error", "skip"):
        raise ConfigError(
            f"{on_failure!r} is not one of error, skip",
            key=f"{KEY}.settings.on_failure",
            way_out="error ends the run when the server fails, skip leaves its samples unjudged.",
        )
    return on_failure == "skip"


def key_headers(variable: str | None, option: str) -> dict[str, str]:
    """The headers with the key that an environment variable holds; none where no variable is named.

    Args:
        variable: Its name.
        option: Of the configuration or the command line, that names it.

    Raises:
        ConfigError: It is not set.
    """
    if variable is None:
        return {}
    if not (key := os.environ.get(variable)):
        what = f"the environment variable {variable} is not set"
        raise ConfigError(what, key=option, way_out="Set it, or name none.")
    return {"Authorization": f"Bearer {key}"}


@reward_register.register("http")
class HttpReward:
    """Scores of a server.

    Args:
        url: Where requests go.
        timeout_s: For one request.
        retries: After a request that failed; the wait between them doubles from half a second on.
        batch_size: Samples in a request.
        concurrency: Requests under way at a time.
        on_failure: `error` ends the run, `skip` leaves the samples unjudged.
        headers: Further headers, such as Authorization.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 60.0,
        retries: int = 3,
        batch_size: int = 16,
        concurrency: int = 8,
        on_failure: OnFailure = "error",
        headers: dict[str, str] | None = None,
    ) -> None:
        self._server = AskedServer(url, timeout_s, retries, headers or {}, "the server of the reward 'http'")
        self._skips, self._batch_size, self._concurrency = skips_failures(on_failure), batch_size, concurrency

    def check_server(self) -> None:
        """Raise `MachineError` where the server is not there, and is needed."""
        if not self._skips:
            self._server.check()

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[Any], rows: Sequence[Row], *, ids: Sequence[str] = ()
    ) -> list[float | None]:
        """One score a sample, in order.

        Raises:
            MachineError: The server cannot be reached, is too slow or answers with something else.
        """
        names = list(ids) or list(map(str, range(len(prompts))))
        samples = list(map(_sample, names, prompts, completions, rows))
        parts = [samples[i : i + self._batch_size] for i in range(0, len(samples), self._batch_size)]
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(chain.from_iterable(pool.map(self._score, parts)))

    def _score(self, samples: list[dict[str, Any]]) -> list[float | None]:
        def read(answer: Any) -> list[float | None]:
            scores = list(answer["scores"])
            if len(scores) != len(samples):
                raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
            return scores

        try:
            return self._server.ask({"samples": samples}, read)
        except MachineError:
            if self._skips:
                return [None] * len(samples)
            raise


def _sample(name: str, prompt: str, completion: Any, row: Row) -> dict[str, Any]:
    text, media = None, []
    if isinstance(completion, str):
        text = completion
    else:
        media = list(map(picture_as_base64, frames_of(completion)))
    plain = {key: value for key, value in row.items() if _is_plain(value)}
    return {"id": name, "prompt": prompt, "completion": text, "media": media, "row": plain}


def picture_as_base64(picture: Image.Image) -> str:
    """A picture as PNG."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _is_plain(value: object) -> bool:
    """Whether JSON can hold it: pictures within rows stay here."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
