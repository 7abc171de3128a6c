"""Where the job's store may be reached by others."""

import runpy
import socket
from pathlib import Path

import pytest

from spmd_rl.distributed.world import port_warnings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("address", "warned"),
    [
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.7", False),
        ("fd00::1", False),
        ("169.254.1.1", False),
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
    ],
)
def test_a_store_at_a_public_address_is_warned_of(address, warned, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    monkeypatch.setattr("socket.getaddrinfo", lambda name, port: [(family, 1, 6, "", (address, 0))])
    lines = port_warnings()
    assert len(lines) == warned and all(f"at node-0 ({address}), a public address" in line for line in lines)
    said = runpy.run_path(str(ROOT / "launch/interface.py"))["warning"](address, "eth0")
    assert bool(said) == warned and (not warned or f"listen at {address} (eth0), a public address" in said)


def test_without_a_known_name_nothing_is_said(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    assert port_warnings() == []
    monkeypatch.delenv("MASTER_ADDR")
    assert port_warnings() == []
