"""The reward of a server: samples are sent as JSON, scores come back.

Request: `{"samples": [{"id", "prompt", "completion", "media", "row"}]}`; pictures stand in `media` as base64 PNG, and
`completion` is null then. Answer: `{"scores": [number or null, …]}`, one for each sample.
"""

from __future__ import annotations

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.fsdp.posttrain_rewards.registry import Row, reward_register


@reward_register.register("http")
class HttpReward:
    """Scores of a server.

    Args:
        url: Where requests go.
        timeout_s: For one request.
        retries: After a request that failed; the wait between them doubles from half a second on.
        batch_size: Samples in a request.
        concurrency: Requests under way at a time.
        on_failure: `error` ends the run, `null` leaves the samples unjudged.
        headers: Further headers, such as Authorization.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 60.0,
        retries: int = 3,
        batch_size: int = 16,
        concurrency: int = 8,
        on_failure: Literal["error", "null"] = "error",
        headers: dict[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"'{url}' is no http address", key="posttrain.rewards.url", way_out="Begin it with http:// or https://."
            )
        self.url, self.timeout_s, self.retries, self.on_failure = url, timeout_s, retries, on_failure
        self.batch_size, self.concurrency = batch_size, concurrency
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[Any], rows: Sequence[Row], *, ids: Sequence[str] = ()
    ) -> list[float | None]:
        """One score a sample, in order.

        Raises:
            MachineError: The server cannot be reached, is too slow or answers with something else.
        """
        names = list(ids) or [str(number) for number in range(len(prompts))]
        samples = [_sample(*each) for each in zip(names, prompts, completions, rows, strict=True)]
        parts = [samples[i : i + self.batch_size] for i in range(0, len(samples), self.batch_size)]
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [score for part in pool.map(self._score, parts) for score in part]

    def _score(self, samples: list[dict[str, Any]]) -> list[float | None]:
        body = json.dumps({"samples": samples}).encode()
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(0.5 * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self.url, body, self._headers)
                with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                    scores = json.loads(answer.read())["scores"]
                if len(scores) == len(samples):
                    return list(scores)
                failure = f"{len(scores)} scores for {len(samples)} samples"
            except (OSError, ValueError, KeyError, TypeError) as error:
                failure = f"{type(error).__name__}: {error}"
        if self.on_failure == "null":
            return [None] * len(samples)
        raise MachineError(
            f"the reward server did not answer {self.retries + 1} requests: {failure}",
            where=self.url,
            key="posttrain.rewards",
            way_out="See the server's log; raise timeout_s or retries, or set on_failure: null to leave such samples "
            "out.",
        )


def _sample(name: str, prompt: str, completion: Any, row: Row) -> dict[str, Any]:
    is_text = isinstance(completion, str)
    return {
        "id": name,
        "prompt": prompt,
        "completion": completion if is_text else None,
        "media": [] if is_text else [_base64(picture) for picture in _pictures(completion)],
        "row": {key: value for key, value in row.items() if _is_plain(value)},
    }


def _pictures(completion: Any) -> Sequence[Any]:
    return completion if isinstance(completion, list | tuple) else [completion]


def _base64(picture: Any) -> str:
    stream = io.BytesIO()
    picture.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it: pictures within rows stay here."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
