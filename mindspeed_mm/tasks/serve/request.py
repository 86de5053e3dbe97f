"""What is asked of `mm serve`, and what of it does not go together: known before torch is imported."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_mm.core.errors import UsageError
from mindspeed_mm.core.model_kinds import GENERATOR
from mindspeed_mm.tasks.model_kind import kind_of_path
from mindspeed_mm.tasks.serve.limits import Limits

OWN, BATCHES, CONTINUOUS = "own", "batches", "continuous"


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


@dataclass(frozen=True)
class ServeRequest:
    """What is to be served, and how."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any that is free."""
    name: str = ""
    """Of the model; empty: its folder's."""
    key: str | None = None
    media_folder: Path | None = None
    remote_hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    """As `Access` has them."""
    limits: Limits = field(default_factory=Limits)
    batch_size: int = 32
    """Questions, or samples of a generator, at a time."""
    lora: Path | None = None
    config: Path | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of adapters by the names that requests call them by, as a model of its own."""
    engine: str = OWN
    """Who answers: this package, in the way that suits the model or in one of its two, or one of `backend.ENGINES`."""
    plan: Path | None = None
    """A YAML whose section `parallel` spreads the model over the ranks of this job."""

    @property
    def shown_name(self) -> str:
        """What requests call the model."""
        return self.name or self.model.resolve().name

    @property
    def is_own(self) -> bool:
        """Whether this package answers itself, instead of an engine such as vLLM."""
        return self.engine in (OWN, BATCHES, CONTINUOUS)


def check_request(request: ServeRequest) -> Access:
    """Who may ask.

    Raises:
        UsageError: Other machines could ask without a key; the folder of media is none; or options do not go together.
    """
    _check_engine(request, kind_of_path(request.model) is GENERATOR)
    _check_adapters(request, kind_of_path(request.model) is GENERATOR)
    if not is_loopback(request.host) and not request.key:
        raise UsageError(
            f"{request.host} can be reached from other machines, and there is no key",
            key="--host",
            way_out="Give --key-file FILE, or leave --host out.",
        )
    if request.media_folder is not None and not request.media_folder.is_dir():
        way_out = f"Relative paths start at '{Path.cwd()}'."
        raise UsageError(
            "there is no such folder", where=str(request.media_folder), key="--media-folder", way_out=way_out
        )
    own_names = frozenset({"127.0.0.1", "localhost", "::1", request.host.lower()})
    hosts = own_names if is_loopback(request.host) else None
    _check_origins(request.origins)
    return Access(request.key, hosts, request.origins, request.media_folder, request.remote_hosts)


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


def _check_engine(request: ServeRequest, is_generator: bool) -> None:
    """Raise `UsageError` where what is served is not answered so, or not by several processes."""
    if is_generator and request.plan is not None:
        raise UsageError("pictures and clips are made by one process", key="--plan", way_out="Leave it out.")
    if is_generator and request.engine != OWN:
        raise UsageError("pictures and clips are made here alone", key="--engine", way_out="Leave it out.")
    if request.plan is not None and not request.is_own:
        way_out = f"Leave it out: {request.engine} has its own settings for spreading a model."
        raise UsageError("is for the package's own engine", key="--plan", way_out=way_out)
    if request.engine != CONTINUOUS:
        return
    if request.plan is not None:
        what = "a model that is spread over ranks is answered in batches"
        raise UsageError(what, key="--engine", way_out="Leave it out, or choose batches.")
    if request.adapters:
        what = "adapters that requests choose are asked for in batches"
        raise UsageError(what, key="--engine", way_out="Leave it out, or give one folder of adapters: --lora.")


def _check_adapters(request: ServeRequest, is_generator: bool) -> None:
    """Raise `UsageError` where requests could not choose adapters."""
    if not request.adapters:
        return
    if request.plan is not None:
        raise UsageError("adapters are not spread over ranks", key="--adapter", way_out="Merge them first: mm merge.")
    if is_generator or not request.is_own:
        raise UsageError("only the package's own engine chooses adapters", key="--adapter", way_out="Use --lora.")
    if request.lora is not None:
        raise UsageError("there are adapters for all requests as well", key="--lora", way_out="Name them: --adapter.")
    if request.shown_name in request.adapters:
        what = f"the model itself is called '{request.shown_name}', and these adapters could not be asked for"
        way_out = "Call the adapters otherwise, or the model: --name NAME."
        raise UsageError(what, key="--adapter", way_out=way_out)
