"""The interface that leads to a host: its own for an address of this host, never the loopback."""

from __future__ import annotations

import socket
import sys

import pytest

from mindspeed_mm.fsdp.distributed.job import launch
from mindspeed_mm.fsdp.distributed.job.launch import Interface, LaunchInfo, interface_to
from tests.helpers.two_hosts import two_hosts

ASK = "from mindspeed_mm.fsdp.distributed.job.launch import interface_to as ask; print(ask({!r}))"


def test_the_loopback_leads_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "ELSEWHERE", "127.0.0.2")
    assert interface_to("127.0.0.1") is None
    assert interface_to("no.such.host.invalid") is None


def test_bearers_of_addresses():
    names = {name for _, name in socket.if_nameindex()}
    assert launch._bearer("127.0.0.1") in names
    assert launch._bearer("203.0.113.7") is None
    assert launch._bearer("2001:db8::7") is None


def test_between_two_hosts():
    with two_hosts() as hosts:
        hosts.second.do("ip", "route", "add", "default", "via", hosts.first.address)
        # The other host; this one by its address; by a name that means the loopback, as in Debian's /etc/hosts.
        asked = [(hosts.second, "10.77.0.1"), (hosts.first, "10.77.0.1"), (hosts.second, "localhost")]
        running = [host.start(sys.executable, "-c", ASK.format(target)) for host, target in asked]
        said = [process.communicate(timeout=600) for process in running]
    wires = [Interface(host.device, host.address) for host, _ in asked]
    assert [out.strip() for out, _ in said] == [str(wire) for wire in wires], said


def settle(info: LaunchInfo, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str | None:
    """What GLOO_SOCKET_IFNAME is after joining, where `wire7` leads anywhere."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    store = dict(environment)
    monkeypatch.setattr(launch.os, "environ", store)
    monkeypatch.setattr(launch, "interface_to", lambda host: Interface("wire7", "10.0.0.7"))
    launch._settle_environment(info)
    assert set(store) <= {*names, "GLOO_SOCKET_IFNAME"}
    return store.get("GLOO_SOCKET_IFNAME")


def test_the_interface_is_chosen_between_hosts(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    assert settle(LaunchInfo(2, 0, 4, "10.0.0.1", 29500, ranks_here=2), monkeypatch) == "wire7"
    assert "gloo uses wire7 (10.0.0.7), the interface that reaches 10.0.0.1" in capfd.readouterr().err
    assert settle(LaunchInfo(3, 1, 4, "10.0.0.1", 29500, ranks_here=2), monkeypatch) == "wire7"
    assert capfd.readouterr().err == ""  # a host says it once


def test_a_choice_of_the_user_stands(monkeypatch: pytest.MonkeyPatch):
    info = LaunchInfo(2, 0, 4, "10.0.0.1", 29500, ranks_here=2)
    assert settle(info, monkeypatch, GLOO_SOCKET_IFNAME="ib0") == "ib0"


def test_on_one_host_gloo_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    assert settle(LaunchInfo(2, 2, 4, "10.0.0.1", 29500, ranks_here=4), monkeypatch) is None
    assert settle(LaunchInfo(2, 2, 4, "10.0.0.1", 29500), monkeypatch) is None
