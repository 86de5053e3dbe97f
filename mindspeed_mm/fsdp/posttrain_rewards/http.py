"""The reward of a server, and models behind servers: samples are sent as JSON, scores come back.

Request: `{"samples": [{"id", "prompt", "completion", "media", "row"}]}`; pictures are in `media` as base64 PNG, and
`completion` is null then. Answer: `{"scores": [number or null, …]}`, one for each sample.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from mindspeed_mm.core.errors import ConfigError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.outbound import OutboundError, RequestLimits, Server, key_header
from mindspeed_mm.fsdp.posttrain_rewards.pictures import frames_of
from mindspeed_mm.fsdp.posttrain_rewards.registry import KEY, MOST_REWARD, Row, reward_register

if TYPE_CHECKING:
    from PIL import Image

OnFailure = Literal["error", "skip"]
"""What is done about a server that fails: the run ends, or the samples stay unjudged."""
_SETTINGS = f"{KEY}.settings"


def reward_server(url: str, timeout_s: float, headers: Mapping[str, str], name: str) -> Server:
    """The server of a reward.

    Args:
        url: Where requests go.
        timeout_s: For one request, from its beginning to the last byte of the answer.
        headers: Sent with each request.
        name: Of the reward.

    Raises:
        ConfigError: The address is not of http, or a header cannot be sent.
    """
    return Server(
        url,
        RequestLimits(timeout_s),
        headers,
        title=f"the server of the reward '{name}'",
        key=f"{_SETTINGS}.url",
        way_out="See the server's log; raise timeout_s, or in its settings set retries higher or on_failure: skip, "
        "which leaves such samples out.",
    )


@dataclass(frozen=True)
class AskedModel:
    """A model behind a server of OpenAI's interface (`mm serve`, vLLM, SGLang).

    Args:
        server: Its server, with `/v1`.
        name: What the server calls it.
        retries: After a request that failed.
    """

    server: Server
    name: str
    retries: int = 0

    def answer(self, parts: Sequence[Mapping[str, object]]) -> str:
        """Its answer to texts and pictures, by its likeliest tokens.

        Args:
            parts: Of the one turn, as OpenAI's interface has them.

        Raises:
            OutboundError: The server cannot be reached, is too slow or answers with something else.
        """
        turn = {"role": "user", "content": list(parts)}
        request = {"model": self.name, "temperature": 0, "messages": [turn]}
        return self.server.ask_json(request, _words_of, path="/chat/completions", retries=self.retries)


def _words_of(content: Any) -> str:
    words = content["choices"][0]["message"]["content"]
    if not isinstance(words, str):
        raise TypeError(f"the answer is {type(words).__name__}, not text")
    return words


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


@reward_register.register("http")
class HttpReward:
    """Scores of a server.

    Args:
        url: Where requests go.
        timeout_s: For one request, from its beginning to the last byte of the answer.
        retries: After a request that failed; the wait between them doubles from half a second on.
        batch_size: Samples in a request.
        concurrency: Requests under way at a time.
        on_failure: `error` ends the run, `skip` leaves the samples unjudged.
        headers: Further headers. They are sent to this server alone, and hidden wherever the run is recorded.
        api_key_env: Name of the environment variable that holds the key of the server.
        api_key_header: Header that the key is sent in: `Authorization` with `Bearer`, any other one without.
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
        api_key_env: str | None = None,
        api_key_header: str = "Authorization",
    ) -> None:
        if not isinstance(headers, dict | None):
            way_out = "Write one below the other, as name: value."
            raise ConfigError("headers are names with values", key=f"{_SETTINGS}.headers", way_out=way_out)
        key = key_header(api_key_env, f"{_SETTINGS}.api_key_env", api_key_header)
        self._server = reward_server(url, timeout_s, {**(headers or {}), **key}, "http")
        self._skips, self._batch_size, self._concurrency = skips_failures(on_failure), batch_size, concurrency
        self._retries = retries

    def check_server(self) -> None:
        """Raise `MachineError` where the server is not there, and is needed."""
        if not self._skips:
            self._server.check()

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[object], rows: Sequence[Row], *, ids: Sequence[str] = ()
    ) -> list[float | None]:
        """One score a sample, in order.

        Raises:
            OutboundError: The server cannot be reached, is too slow or answers with something else.
        """
        names = list(ids) or list(map(str, range(len(prompts))))
        samples = list(map(_request_sample, names, prompts, completions, rows))
        parts = [samples[i : i + self._batch_size] for i in range(0, len(samples), self._batch_size)]
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(chain.from_iterable(pool.map(self._score, parts)))

    def _score(self, samples: list[JsonObject]) -> list[float | None]:
        def read(answer: Any) -> list[float | None]:
            scores = answer["scores"]
            if not isinstance(scores, list) or len(scores) != len(samples):
                raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
            for score in scores:
                # NaN lies in no range and is refused, too.
                if isinstance(score, bool) or not (
                    score is None or (isinstance(score, int | float) and abs(score) <= MOST_REWARD)
                ):
                    raise ValueError(f"the score {str(score)[:40]} is not null or a number up to ±{MOST_REWARD:g}")
            return scores

        try:
            return self._server.ask_json({"samples": samples}, read, retries=self._retries)
        except OutboundError:
            if self._skips:
                return [None] * len(samples)
            raise


def _request_sample(name: str, prompt: str, completion: object, row: Row) -> JsonObject:
    text, media = None, []
    if isinstance(completion, str):
        text = completion
    else:
        media = list(map(picture_as_base64, frames_of(completion)))
    plain = {key: value for key, value in row.items() if _is_plain(value)}
    return {"id": name, "prompt": prompt, "completion": text, "media": media, "row": plain}


def picture_as_base64(picture: Image.Image) -> str:
    """Encode a picture as PNG, and that as base64 text."""
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
