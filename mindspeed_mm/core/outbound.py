"""The one client for requests to other programs: reward servers, judges, rollout servers, models to chat with.

No redirect is followed, a request has a total deadline and its answer a largest size, keys go to their own host alone,
and nothing is taken from `.netrc`. Every failure is an `OutboundError`. A proxy is used only where the environment
names one (`HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY`, except `NO_PROXY`), and never for this machine.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import httpcore2

from mindspeed_mm.core.errors import ConfigError, MachineError
from mindspeed_mm.core.outbound_words import message_in, one_line, phrase_of, read_json, reason_words
from mindspeed_mm.core.redaction import REDACTED, remember_secrets, without_secrets
from mindspeed_mm.core.timed_connection import RequestClock, TimedBackend, trusted_certificates

T = TypeVar("T")

CHECK_S = 5.0
"""Deadline of a request that only asks whether a server is there."""
MOST_BYTES = 64 << 20
_UNFIT = re.compile(r"[^\x20-\x7e\t]")
"""What no header may hold."""
_WRONG_ANSWER = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
"""What reading a JSON value of another form than expected raises."""


class OutboundError(MachineError):
    """A request to another program failed."""


class Unreachable(OutboundError):
    """No connection was made: nothing listens there, its name is unknown, or its certificate is not trusted."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request: how long it may take, and how large its answer may be."""

    total_s: float
    """From the first byte sent to the last one received."""
    silence_s: float | None = None
    """Longest wait for the next bytes; None: only `total_s` counts."""
    most_bytes: int = MOST_BYTES
    """Largest body of an answer."""


@dataclass(frozen=True)
class Reply:
    """An answer that was read whole: its HTTP status and its body."""

    status: int
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Whether the request was carried out."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class StreamedReply:
    """An answer whose head has arrived."""

    status: int
    blocks: Iterator[bytes]
    """Its body, as it arrives."""

    def lines(self) -> Iterator[bytes]:
        """Its body line by line, without the line ends."""
        rest = bytearray()
        for block in self.blocks:
            parts = block.replace(b"\r\n", b"\n").split(b"\n")
            for part in parts[:-1]:
                yield bytes(rest + part).removesuffix(b"\r")
                rest.clear()
            rest += parts[-1]
        if rest:
            yield bytes(rest)


@dataclass(frozen=True)
class Server:
    """A program that is asked over HTTP.

    Args:
        address: Of http or https; the paths of requests are appended to it.
        limits: Of each request.
        headers: Sent with each request, to this address alone; their values are kept out of messages.
        title: What messages call it, such as "the judge".
        key: The configuration key or option that names it.
        way_out: What may help when a request fails.

    Raises:
        ConfigError: The address is not of http or https, or a header cannot be sent.
    """

    address: str
    limits: RequestLimits
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    title: str = "the server"
    key: str = ""
    way_out: str = "See its log."

    def __post_init__(self) -> None:
        parts = _address_parts(self.address)
        if parts is None:
            shown = f"'{self.address[:100]}'"
            if "@" in self.address:  # it may hold a password, and cannot be taken apart
                shown = REDACTED
            way_out = "Give an address such as http://127.0.0.1:8000."
            raise ConfigError(f"{shown} is not an http address", key=self.key, way_out=way_out)
        for name, value in self._values().items():
            if value == REDACTED:
                way_out = "Give it again in the YAML or on the command line, or name api_key_env."
                what = f"the header '{name}' was hidden when the run was recorded"
                raise ConfigError(what, key=self.key, way_out=way_out)
            if _UNFIT.search(value) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
                what = f"the header '{name[:60]}' holds characters that HTTP headers cannot carry"
                raise ConfigError(what, key=self.key, way_out="Headers and keys are plain ASCII on one line.")

    # --- asking -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `OutboundError` unless something listens at the address. Any answer to a GET is proof of that."""
        asked = Server(self.address, RequestLimits(min(CHECK_S, self.limits.total_s)), self.headers, self.title)
        try:
            with asked.stream("GET", follow=False):
                pass
        except Unreachable as error:
            what, way_out = error.problems[0].what, "Start it, or correct its address."
            raise Unreachable(what, where=self.shown, key=self.key, way_out=way_out) from error
        except OutboundError:  # it listens, and answers nothing but what it is made for
            pass

    def ask(self, method: str, path: str = "", content: object = None) -> Reply:
        """Send a request and read the whole answer, whatever its status.

        Args:
            method: Such as POST.
            path: Appended to the address.
            content: Sent as JSON; None: no body.

        Raises:
            OutboundError: There is no answer, it is a redirect, too large, late, cut off or compressed.
        """
        with self.stream(method, path, content) as reply:
            return Reply(reply.status, b"".join(reply.blocks))

    def ask_json(
        self, content: object, read: Callable[[Any], T] = lambda value: value, *, path: str = "", retries: int = 0
    ) -> T:
        """Post JSON and return what `read` takes from the JSON of the answer.

        Args:
            content: Sent as JSON.
            read: Given the answer; it raises `ValueError`, `KeyError`, `TypeError` or their like for a wrong one.
            path: Appended to the address.
            retries: After a request that failed; the wait between them doubles from half a second on.

        Raises:
            OutboundError: Of the last attempt: see `ask`; or the status is an error, or the answer is a wrong one.
        """
        for attempt in range(retries + 1):
            if attempt:
                time.sleep(0.5 * 2 ** (attempt - 1))
            try:
                return self.read(self.ask("POST", path, content), read)
            except OutboundError as error:
                failure = error
        if retries:
            problem = failure.problems[0]
            what = f"{problem.what} ({retries + 1} attempts)"
            raise OutboundError(what, where=problem.where, key=problem.key, way_out=problem.way_out) from failure
        raise failure

    def read(self, reply: Reply, read: Callable[[Any], T]) -> T:
        """What `read` takes from the JSON of an answer; see `ask_json`.

        Raises:
            OutboundError: The status is an error; the answer is not JSON, holds a number that is not finite or half a
                character; or it has another form.
        """
        if not reply.is_ok:
            raise self.failed(self.refusal(reply))
        try:
            value = read_json(reply.body)
        except ValueError as error:
            raise self.failed(f"answers with something that is not JSON: {error}") from error
        try:
            return read(value)
        except _WRONG_ANSWER as error:
            shown = one_line(json.dumps(value, ensure_ascii=False))[:120]
            raise self.failed(f"gives another answer than expected: {reason_words(error)}, in {shown}") from error

    @contextmanager
    def stream(
        self, method: str, path: str = "", content: object = None, *, follow: bool = True
    ) -> Iterator[StreamedReply]:
        """Send a request; inside, the body of its answer can be read as it arrives.

        Args:
            method: Such as POST.
            path: Appended to the address.
            content: Sent as JSON; None: no body.
            follow: Read on after the head: refuse redirects and compressed bodies.

        Raises:
            OutboundError: See `ask`; also while the body is read.
        """
        clock = RequestClock(self.limits.total_s, self.limits.silence_s)
        body = None
        if content is not None:
            body = json.dumps(content).encode()
        # the body of the `with` of the caller is outside of `_failures`: its own errors are not the server's
        with ExitStack() as held:
            with self._failures():
                pool = httpcore2.ConnectionPool(
                    ssl_context=trusted_certificates() if self._parts.scheme == "https" else None,
                    proxy=self._proxy(),
                    max_connections=1,
                    network_backend=TimedBackend(clock),
                )
                held.enter_context(pool)
                headers = self._sent_headers(body)
                answer = held.enter_context(pool.stream(method, self._url(path), headers=headers, content=body))
                if follow:
                    self._check_head(answer)
            yield StreamedReply(answer.status, self._blocks(answer.iter_stream()))

    def failed(self, what: str, kind: type[OutboundError] = OutboundError) -> OutboundError:
        """The error that reports a failure of this server, without its keys."""
        for value in self._values().values():
            for secret in (value, value.partition(" ")[2]):
                if len(secret) >= 4:
                    what = what.replace(secret, REDACTED)
        return kind(f"{self.title} {without_secrets(what)}", where=self.shown, key=self.key, way_out=self.way_out)

    def refusal(self, reply: Reply) -> str:
        """What an answer with an error status says is wrong, on one line."""
        return f"refuses ({reply.status}): {message_in(reply.body) or phrase_of(reply.status)}"

    @property
    def shown(self) -> str:
        """The address for messages, without a password or a query."""
        parts = self._parts
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    # --- parts of a request -------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> SplitResult:
        parts = _address_parts(self.address)
        assert parts is not None
        return parts

    def _url(self, path: str) -> str:
        parts = self._parts
        host = parts.netloc.rpartition("@")[2]
        url = f"{parts.scheme}://{host}{parts.path}{path}"
        if parts.query:  # behind the path of the request, as some gateways want a key there
            url += f"?{parts.query}"
        return url

    def _values(self) -> dict[str, str]:
        """Header → value; with the password of the address, where it has one."""
        values: dict[str, str] = {}
        for name, value in self.headers.items():
            values[str(name)] = str(value).strip()
        parts = self._parts
        if parts.username is not None and "authorization" not in map(str.lower, values):
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            values["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        return values

    def _sent_headers(self, body: bytes | None) -> list[tuple[str, str]]:
        sent = {"Host": self._parts.netloc.rpartition("@")[2], "User-Agent": "mindspeed-mm", "Connection": "close"}
        sent |= {"Accept-Encoding": "identity"}
        if body is not None:
            sent |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        given = self._values()
        own = set(map(str.lower, given))
        return [*((name, value) for name, value in sent.items() if name.lower() not in own), *given.items()]

    def _proxy(self) -> httpcore2.Proxy | None:
        """The proxy that the environment names for the address."""
        parts = self._parts
        host = str(parts.hostname)
        proxies = getproxies_environment()
        if _is_this_machine(host) or proxy_bypass_environment(host, proxies):
            return None
        url = proxies.get(parts.scheme) or proxies.get("all")
        if not url:
            return None
        if "://" not in url:  # curl and requests take `proxy:3128`, too
            url = f"http://{url}"
        named = _address_parts(url)
        if named is None:
            way_out = "Name one of http or https, or add the host to NO_PROXY."
            raise OutboundError("the proxy of the environment is not of http", where=self.shown, way_out=way_out)
        login = None
        if named.username is not None:
            login = (unquote(named.username), unquote(named.password or ""))
        return httpcore2.Proxy(f"{named.scheme}://{named.netloc.rpartition('@')[2]}", auth=login)

    # --- reading answers ----------------------------------------------------------------------------------------------

    def _check_head(self, answer: httpcore2.Response) -> None:
        heads = {name.lower(): value.decode("latin-1") for name, value in answer.headers}
        if 300 <= answer.status < 400:
            where = ""
            if target := urlsplit(heads.get(b"location", "")).netloc.rpartition("@")[2]:
                where = f" to '{target[:100]}'"
            raise self.failed(f"redirects{where} ({answer.status}), and redirects are not followed: name the address")
        encoding = heads.get(b"content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise self.failed(f"sends a compressed answer ({encoding[:40]}), which was not asked for")
        announced = heads.get(b"content-length", "")
        # 20 digits are enough: Python takes long to read a number of a million digits
        if announced.isdecimal() and int(announced[:20]) > self.limits.most_bytes:
            raise self._too_large()

    def _blocks(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        size = 0
        with self._failures():
            for block in stream:
                size += len(block)
                if size > self.limits.most_bytes:
                    raise self._too_large()
                yield block

    def _too_large(self) -> OutboundError:
        return self.failed(f"sends more than {self.limits.most_bytes:,} bytes")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns whatever goes wrong with a connection into an `OutboundError`."""
        try:
            yield
        except httpcore2.ConnectTimeout as error:
            raise self.failed(
                f"cannot be reached: no connection within {self.limits.total_s:g} s", Unreachable
            ) from error
        except httpcore2.ConnectError as error:
            raise self.failed(f"cannot be reached: {reason_words(error)}", Unreachable) from error
        except httpcore2.TimeoutException as error:
            what = f"did not answer within {self.limits.total_s:g} s"
            if self.limits.silence_s is not None:
                what += f", or was silent for {self.limits.silence_s:g} s"
            raise self.failed(what) from error
        except httpcore2.ProxyError as error:
            raise self.failed(f"is not reached: the proxy of the environment refuses: {reason_words(error)}") from error
        except (httpcore2.LocalProtocolError, httpcore2.UnsupportedProtocol) as error:
            raise self.failed("cannot be sent this request") from error
        except (httpcore2.ProtocolError, httpcore2.NetworkError, OSError) as error:
            raise self.failed(f"did not answer in full: {reason_words(error)}") from error


def key_header(variable: str | None, option: str, header: str = "Authorization") -> dict[str, str]:
    """The header with the key that an environment variable holds; none where no variable is named.

    Args:
        variable: Its name.
        option: The configuration key or option that names it.
        header: Its name; all but `Authorization` hold the key alone, without `Bearer`.

    Raises:
        ConfigError: It is not set.
    """
    if variable is None:
        return {}
    if not (key := os.environ.get(variable, "").strip()):
        what = f"the environment variable {variable} is not set"
        raise ConfigError(what, key=option, way_out="Set it, or name none.")
    remember_secrets(key, "api_key")
    if header.lower() == "authorization":
        key = f"Bearer {key}"
    return {header: key}


def _address_parts(address: str) -> SplitResult | None:
    """The parts of an address of http or https; None for any other text."""
    try:
        parts = urlsplit(address)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        str(parts.hostname).encode("idna")
    except ValueError:  # UnicodeError among them
        return None
    if not is_web or _UNFIT.search(address) or " " in address:
        return None
    return parts._replace(path=parts.path.rstrip("/"), fragment="")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
