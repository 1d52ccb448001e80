"""Ranks of a trainer meet at rank 0 before they load anything; those that do not come are named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from penstock.actors.trainer.meeting import interface_of, meet
from penstock.dataflow.errors import TrainingError
from penstock.trainer.spec import free_port
from penstock.weights.transport.process_group.group import gloo_devices, serve_store

HOST = "127.0.0.1"
LIMIT_S = 30.0


def test_all_ranks_learn_the_addresses_of_all() -> None:
    server = serve_store(HOST)
    at = (HOST, server.port)
    with ThreadPoolExecutor(3) as ranks:
        met = ranks.map(lambda rank: meet(at, None if rank else server, rank, 3, f"10.0.0.{rank}", LIMIT_S), range(3))
        assert list(met) == [["10.0.0.0", "10.0.0.1", "10.0.0.2"]] * 3


def test_ranks_that_do_not_come_are_named() -> None:
    server = serve_store(HOST)
    with pytest.raises(
        TrainingError, match=r"2 of 3 ranks \(1, 2\) have not reached rank 0 at 127\.0\.0\.1:\d+ within"
    ):
        meet((HOST, server.port), server, 0, 3, HOST, 0.2)


def test_a_rank_that_cannot_reach_rank_0_says_where_it_is() -> None:
    with pytest.raises(
        TrainingError, match=r"rank 1 on 10\.0\.0\.9 cannot reach rank 0 at 127\.0\.0\.1:\d+.*TCP ports"
    ):
        meet((HOST, free_port()), None, 1, 2, "10.0.0.9", 0.2)


def test_the_interface_of_an_address_is_found() -> None:
    own = {one.address: name for name, addresses in psutil.net_if_addrs().items() for one in addresses}
    assert interface_of(HOST) == own[HOST]
    assert interface_of("203.0.113.7") is None


def test_interfaces_that_the_user_names_are_used_for_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, str]] = []

    class Gloo:
        @staticmethod
        def create_device(**arguments: str) -> str:
            made.append(arguments)
            return "device"

    monkeypatch.setattr("torch.distributed.distributed_c10d.ProcessGroupGloo", Gloo)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_devices("10.0.0.1") == ["device"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1, eth2")
    assert gloo_devices("10.0.0.1") == ["device", "device"]
    assert made == [{"hostname": "10.0.0.1"}, {"interface": "eth1"}, {"interface": "eth2"}]
