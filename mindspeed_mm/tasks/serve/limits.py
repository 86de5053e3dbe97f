"""What the server refuses, and how it says so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.core.errors import MachineError, MMError, ModelFolderError
from mindspeed_mm.core.json_file import JsonObject
from mindspeed_mm.core.request import Request, option

_LONGEST_MESSAGE = 300
_YAML_SECTION = "data."
_SAID_BY = {
    "tools": "tools",
    "messages": "messages",
    "media_roots": "--media-folder",
    "allow_remote_media": "--allow-remote-media",
}
"""Last part of a key of the YAML → a field of requests, or an option of `mm serve`."""


class RefusedError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP's number.
        message: What is wrong, in one line.
        param: The field of the request, or the option of `mm serve` that sets a limit.
        code: One word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self.param, self.code = status, param, code
        self.message = " ".join(message.split())[:_LONGEST_MESSAGE]
        super().__init__(self.message)

    @classmethod
    def of(cls, error: MMError, param: str | None = None) -> RefusedError:
        """From an error of the package. Status 400: the request is wrong. The way out is for the operator and is left
        out; a key of a YAML is replaced by the field of the request, or the option of `mm serve`, for the same setting.
        Status 501: the server lacks something, such as a package, and the message says how to add it.

        Args:
            error: Of the package.
            param: The field of the request; None: as the error's key says.
        """
        problem = error.problems[0]
        key = re.sub(r"^message (\d+)", r"messages[\1]", problem.key)
        if key.startswith(_YAML_SECTION):
            key = _SAID_BY.get(key.rpartition(".")[2], "")
        what, named = problem.what.rstrip(".") + ".", param or key or None
        if isinstance(error, MachineError | ModelFolderError):
            return cls(501, f"{what} {problem.way_out}", param=named, code="unavailable")
        return cls(400, what, param=named, code="invalid_value")

    def body(self) -> JsonObject:
        """Return the error in the form of OpenAI's errors, as the JSON body of a response."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _limit(default: float, told: str) -> Any:
    is_whole = isinstance(default, int)
    return option(told, default, **{"least": 1} if is_whole else {"above": 0})


@dataclass(frozen=True)
class WireLimits(Request):
    """How many requests a server takes, how large and how slow. Each is an option of its command."""

    max_requests: int = _limit(64, "Maximum number of requests at a time, waiting ones included")
    max_seconds: float = _limit(
        300.0, "Maximum duration of a request in seconds, from its first byte to the last byte of the answer"
    )
    max_connections_per_address: int = _limit(
        128, "Maximum number of connections per client address. The one that has waited longest for a request is closed"
    )
    max_head_seconds: float = _limit(10.0, "Longest time in seconds that the headers of a request may take to arrive")
    max_body_mib: float = _limit(64.0, "Maximum size of a request in MiB")
    max_body_seconds: float = _limit(30.0, "Longest time in seconds that the body of a request may take to arrive")

    def check(self, name: str, value: float, what: str, *, status: int = 413) -> None:
        """Raise when a value is above a limit.

        Args:
            name: Of the limit.
            value: What a request has.
            what: The value in words: "the picture has 90,000,000 pixels".
            status: HTTP's number.

        Raises:
            RefusedError: Naming the limit.
        """
        if value > getattr(self, name):
            raise self.reached(name, what, status)

    def reached(self, name: str, what: str, status: int) -> RefusedError:
        """The error of a limit."""
        option, limit = option_of(name), getattr(self, name)
        return RefusedError(status, f"{what}, more than {option} {limit:,}.", param=option, code=name)


@dataclass(frozen=True)
class Limits(WireLimits):
    """How much of everything a request to a model may have. Each is an option of `mm serve`."""

    max_media: int = _limit(16, "Maximum number of pictures, videos and audio files in a request")
    max_media_mib: float = _limit(32.0, "Maximum size of a media file in MiB")
    max_pixels: int = _limit(32_000_000, "Maximum height × width of a picture or of a video frame")
    max_media_seconds: float = _limit(600.0, "Maximum length of a video or audio file in seconds")
    max_characters: int = _limit(500_000, "Maximum number of characters of text in a request")
    max_prompt_tokens: int = _limit(32768, "Maximum number of tokens in a prompt, media included")
    max_new_tokens: int = _limit(4096, "Maximum number of tokens in an answer, also where a request does not say")
    max_samples: int = _limit(4, "Maximum number of answers, pictures or clips in one request")
    max_steps: int = _limit(100, "Maximum number of denoising steps of a picture or clip")
    max_frames: int = _limit(256, "Maximum number of frames of a clip")


def option_of(name: str) -> str:
    """Return the option of `mm serve` that sets a limit: `max_body_mib` gives `--max-body-mib`."""
    return f"--{name.replace('_', '-')}"
