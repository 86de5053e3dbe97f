"""Who may ask a server of ours, and under which names: the same for every command that listens."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.tasks.requests.shared import read_key


@dataclass(frozen=True)
class Access:
    """Who may ask, and what they may name."""

    key: str | None = None
    """Asked of everybody; None: of nobody."""
    hosts: frozenset[str] | None = None
    """Names that the server answers to; None: any."""
    origins: frozenset[str] = frozenset()
    """Addresses of pages that may ask, beside this server's own: `https://models.example.org`."""
    media_folder: Path | None = None
    """Requests may name files below it."""
    remote_hosts: frozenset[str] = frozenset()
    """Requests may name addresses on these."""


def access_of(host: str, key_file: Path | None, origins: Collection[str]) -> Access:
    """Who may ask a server that listens at an address.

    Args:
        host: The address.
        key_file: File with the key that requests must send; None: none is asked for.
        origins: Addresses of pages that may ask, beside the server's own.

    Raises:
        UsageError: Other machines could ask without a key; the file holds none; or an origin is not one.
    """
    key = read_key(key_file)
    if not is_loopback(host) and not key:
        raise UsageError(
            f"{host} can be reached from other machines, and there is no key",
            key="--host",
            way_out="Give --key-file FILE, or leave --host out.",
        )
    own_names = frozenset({"127.0.0.1", "localhost", "::1", host.lower()})
    pages = frozenset(origin.lower().rstrip("/") for origin in origins)
    _check_origins(pages)
    return Access(key, own_names if is_loopback(host) else None, pages)


def _check_origins(origins: Collection[str]) -> None:
    """Raise `UsageError` for what no browser names as an origin."""
    for origin in origins:
        scheme, separator, host = origin.partition("://")
        if scheme not in ("http", "https") or not separator or not host or set(host) & set("/?#@ "):
            way_out = "Give scheme, host and port as a browser shows them: https://models.example.org"
            raise UsageError(f"'{origin}' is not the address of pages", key="--allow-origin", way_out=way_out)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
