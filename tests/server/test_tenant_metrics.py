"""Figures by tenant stay few, however many tenants there are."""

from __future__ import annotations

from daemon import DaemonProcess

from kvd.client import Client
from kvd.telemetry.tenants import OTHER


def test_stat_tells_so_many_apart_and_the_list_all() -> None:
    tenants = "".join(f"[tenants.t{n:03}]\nuids = [{50_000 + n}]\n" for n in range(150))
    config = tenants + "[tenancy]\nmetrics = 5\n"
    with DaemonProcess(arena_size="16MiB", config=config) as daemon:
        with Client(daemon.socket, map_memory=False) as client:
            told = client.stat()["tenants"]
            assert sorted(told) == [OTHER, *(f"t{n:03}" for n in range(5))]
            names = [row["name"] for row in client.tenants()]
            assert len(names) >= 150 and names == sorted(names) and "t149" in names
