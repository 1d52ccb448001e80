"""The ranks of a trainer meet before they load anything, so that one that cannot be reached is named within a minute.

torch's own rendezvous has the time limit of a step and names no rank.
"""

from __future__ import annotations

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.dataflow.errors import TrainingError, WeightSyncError
from penstock.weights.transport.process_group.group import connect_store, store_barrier

MEETING_S = 60.0
"""Longest wait for all ranks, which have their processes already, seconds."""
_OPEN_PORTS = "Open all TCP ports between the nodes (firewall, security group, network policy)."


def meet(
    store_at: tuple[str, int], server: TCPStore | None, rank: int, num_ranks: int, own_address: str, limit_s: float
) -> list[str]:
    """Wait until all ranks have reached rank 0.

    Args:
        store_at: Host and port of the store that rank 0 serves.
        server: The store itself, on rank 0.
        rank: This process.
        num_ranks: Of the trainer.
        own_address: That Ray knows this node by.
        limit_s: Longest wait, seconds.

    Returns:
        The address of each rank.

    Raises:
        TrainingError: If this rank cannot reach rank 0, or others have not.
    """
    host, port = store_at
    try:
        store = server or connect_store(host, port, limit_s)
        missing, addresses = store_barrier(store, "ranks", rank, num_ranks, own_address, limit_s)
    except (WeightSyncError, RuntimeError) as error:
        raise TrainingError(
            f"trainer: rank {rank} on {own_address} cannot reach rank 0 at {host}:{port} within {limit_s:g} s. "
            f"{_OPEN_PORTS}"
        ) from error
    if missing:
        names = ", ".join(map(str, missing))
        raise TrainingError(
            f"trainer: {len(missing)} of {num_ranks} ranks ({names}) have not reached rank 0 at {host}:{port} within "
            f"{limit_s:g} s. {_OPEN_PORTS}"
        )
    return addresses


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None
