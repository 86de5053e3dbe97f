"""Media from the network, where a user allows it: http and https, bounded in bytes, time and redirects.

A URL in a row is data, perhaps a stranger's: it must not make the trainer talk to machines that only the trainer can
reach. So every address behind a host must be public, the connection goes to the address that was checked (a name could
lead elsewhere a moment later), and a redirect is checked like the first URL. Proxies of the environment are not used.
Hosts of one's own are allowed by a URL among the media roots.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Collection, Sequence
from contextlib import suppress

from mindspeed_mm.core.errors import DataError

MOST_SECONDS = 60.0
"""For one medium, redirects and all."""
MOST_REDIRECTS = 5
_BLOCK_BYTES = 2**16
_WAY_OUT = "Download the media and give local paths, or drop the row."


def fetch(url: str, url_roots: Sequence[str], most_bytes: int, hosts: Collection[str] | None = None) -> bytes:
    """The bytes behind a URL.

    Args:
        url: Of http or https.
        url_roots: URLs that may lie on private hosts, with all that begins with them.
        most_bytes: Refuse more.
        hosts: Ask these alone, in lower case, each with its port where that is not the usual one; None: any.

    Raises:
        DataError: The URL is refused, or is not answered in full.
    """
    deadline_s = time.monotonic() + MOST_SECONDS
    for _ in range(MOST_REDIRECTS + 1):
        parts = _parts(url)
        if hosts is not None and parts.netloc.lower() not in hosts:
            raise DataError(f"'{url[:100]}' lies on a host that is not allowed", way_out="Name the host.")
        answer = _request_once(parts, url, url_roots, most_bytes, deadline_s)
        if isinstance(answer, bytes):
            return answer
        # Around the loop again: the new URL goes through the same checks.
        url = urllib.parse.urljoin(url, answer)
    raise DataError(f"'{url[:100]}': more than {MOST_REDIRECTS} redirects", way_out=_WAY_OUT)


def _request_once(
    parts: urllib.parse.SplitResult, url: str, url_roots: Sequence[str], most_bytes: int, deadline_s: float
) -> bytes | str:
    """What a URL answers: the medium, or where it is to be found."""
    connection = _connection(parts, _address(parts, url, url_roots), deadline_s)
    cut = _cut_at(deadline_s, connection.sock)
    try:
        _secure(connection, parts)
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        # `identity`: a small compressed answer must not unfold into a huge one.
        connection.request("GET", path, headers={"User-Agent": "mindspeed-mm", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308) and response.getheader("Location"):
            return str(response.getheader("Location"))
        if response.status != http.client.OK:
            raise DataError(f"'{url[:100]}' answers {response.status} {response.reason}", way_out=_WAY_OUT)
        return _body(response, connection, url, most_bytes, deadline_s)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = str(error) or type(error).__name__
        if time.monotonic() >= deadline_s:
            reason = _too_late()
        raise DataError(f"'{url[:100]}' cannot be fetched: {reason}", way_out=_WAY_OUT) from error
    finally:
        cut.cancel()
        connection.close()


def _cut_at(deadline_s: float, connected: socket.socket) -> threading.Timer:
    """Breaks a connection off at the deadline: limits on single reads do not bound a header that comes in drops."""
    handle = connected.dup()  # TLS takes the socket over

    def cut() -> None:
        with suppress(OSError), handle:
            handle.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), cut)
    timer.daemon = True
    timer.start()
    return timer


def _parts(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_web = False
    if not is_web:
        raise DataError(f"'{url[:100]}' is not an address of the web (http, https)", way_out=_WAY_OUT)
    return parts


def _address(parts: urllib.parse.SplitResult, url: str, url_roots: Sequence[str]) -> str:
    """The address to connect to: the first of the host, all of them public."""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise DataError(f"'{url[:100]}' cannot be fetched: {error}", way_out=_WAY_OUT) from error
    addresses = [str(entry[4][0]) for entry in found]
    is_ours = any(_lies_in(parts, root) for root in url_roots)
    private = [address for address in addresses if not _is_public(address)]
    if private and not is_ours:
        raise DataError(
            f"'{url[:100]}' leads to {private[0]}, an address that is not public",
            key="data.dataset_param.basic_parameters.media_roots",
            way_out="List the beginning of the URL in media_roots if the host is yours.",
        )
    return addresses[0]


def _lies_in(parts: urllib.parse.SplitResult, url_root: str) -> bool:
    """Whether a URL begins with another: by its parts, for `http://10.0.0.5` also begins `http://10.0.0.5.example`."""
    root = urllib.parse.urlsplit(url_root)
    is_same_host = (parts.scheme, parts.netloc.lower()) == (root.scheme, root.netloc.lower())
    return is_same_host and parts.path.startswith(root.path) and ".." not in parts.path.split("/")


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.split("%")[0])
    inner = found
    if isinstance(found, ipaddress.IPv6Address):  # it may stand for an address of the older kind
        inner = found.ipv4_mapped or found.sixtofour or found
    return inner.is_global and not inner.is_multicast


def _connection(parts: urllib.parse.SplitResult, address: str, deadline_s: float) -> http.client.HTTPConnection:
    """A connection to an address that answers to the host's name."""
    host, left_s = str(parts.hostname), _left_s(deadline_s)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = http.client.HTTPConnection(host, port, timeout=left_s)
    try:
        connection.sock = socket.create_connection((address, port), timeout=left_s)
    except OSError as error:
        connection.close()
        raise DataError(f"'{host}' cannot be reached: {error}", way_out=_WAY_OUT) from error
    return connection


def _secure(connection: http.client.HTTPConnection, parts: urllib.parse.SplitResult) -> None:
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection.sock = context.wrap_socket(connection.sock, server_hostname=str(parts.hostname))


def _body(
    response: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    url: str,
    most_bytes: int,
    deadline_s: float,
) -> bytes:
    declared = response.length
    if declared is not None and declared > most_bytes:
        raise DataError(f"'{url[:100]}' has {declared} bytes, more than {most_bytes}", way_out=_WAY_OUT)
    blocks, size = [], 0
    while block := response.read1(_BLOCK_BYTES):
        size += len(block)
        if size > most_bytes:
            raise DataError(f"'{url[:100]}' has more than {most_bytes} bytes", way_out=_WAY_OUT)
        blocks.append(block)
        if connection.sock is not None:
            connection.sock.settimeout(_left_s(deadline_s))
    _left_s(deadline_s)  # what was cut off looks like an end
    if declared is not None and size < declared:
        raise DataError(f"'{url[:100]}' broke off after {size} of {declared} bytes", way_out=_WAY_OUT)
    if not size:
        raise DataError(f"'{url[:100]}' is empty (0 bytes)", way_out=_WAY_OUT)
    return b"".join(blocks)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(_too_late())
    return left_s


def _too_late() -> str:
    return f"not done after {MOST_SECONDS:.0f} s"
