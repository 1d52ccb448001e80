"""A network between namespaces of this machine, with delay, loss and cuts, made by forwarding packets in a thread.

Every node has a TUN device in its own network namespace. One thread reads the packets of all devices and writes each
to the device of its destination: after `delay_s`, with probability 1 − `loss`, never from or to a node that is cut off.
Linux' own netem is not in every kernel; this needs /dev/net/tun and the right to make network namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence

MTU = 65_000
"""Large packets, so that a thread in Python keeps up: TCP splits a message into few of them."""
QUEUED_PACKETS = 20_000
"""Packets on the way; more than TCP windows of all nodes together, beyond it the newest is lost."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_POLL_S = 0.5


class Network:
    """Forwards packets between the nodes 0 … n − 1, whose addresses are `address(node)`.

    Attributes:
        delay_s: One-way delay of every packet, seconds.
        loss: Share of packets that are lost.
        lost: Number of packets lost by chance, by cuts, and by a full queue.
        num_delivered: Packets written to their destination.
    """

    def __init__(self, namespaces: Sequence[int], *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Open a device `tun0` in the network namespace of each process of `namespaces`; without an address as yet."""
        self.delay_s, self.loss = delay_s, loss
        self.lost = Counter[str]()
        self.num_delivered = 0
        self._cut: set[int] = set()
        self._random = random.Random(seed)
        self._devices = [_open_device(pid) for pid in namespaces]
        self._node_of = {socket.inet_aton(address(node)): node for node in range(len(namespaces))}
        self._wakes, self._wakened = os.pipe()
        self._thread = threading.Thread(target=self._forward, name="network", daemon=True)
        self._thread.start()

    def cut(self, node: int) -> None:
        """From now on, nothing leaves or reaches this node."""
        self._cut.add(node)

    def heal(self, node: int) -> None:
        self._cut.discard(node)

    def close(self) -> None:
        os.close(self._wakened)
        self._thread.join(10)
        for device in (*self._devices, self._wakes):
            os.close(device)

    def _forward(self) -> None:
        """Consumes: packets of all devices. Waits for: the next packet, or the next one on the way to be due."""
        node_of_device = {device: node for node, device in enumerate(self._devices)}
        on_the_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            until = on_the_way[0][0] - time.monotonic() if on_the_way else _POLL_S
            ready, _, _ = select.select([*self._devices, self._wakes], [], [], min(max(until, 0.0), _POLL_S))
            if self._wakes in ready:
                return
            for device in ready:
                packet = os.read(device, MTU + 100)
                source, target = node_of_device[device], self._node_of.get(packet[16:20])
                if packet[0] >> 4 != 4 or target is None:
                    continue  # IPv6 neighbour discovery, multicast
                reason = self._reason_to_lose(source, target, len(on_the_way))
                if reason is not None:
                    self.lost[reason] += 1
                    continue
                number += 1
                heapq.heappush(on_the_way, (time.monotonic() + self.delay_s, number, target, packet))
            now = time.monotonic()
            while on_the_way and on_the_way[0][0] <= now:
                _, _, target, packet = heapq.heappop(on_the_way)
                if target in self._cut:
                    self.lost["cut"] += 1
                    continue
                try:
                    os.write(self._devices[target], packet)
                    self.num_delivered += 1
                except OSError:  # the device is down, or its queue is full: as on a real link, the packet is lost
                    self.lost["device"] += 1

    def _reason_to_lose(self, source: int, target: int, num_queued: int) -> str | None:
        if source in self._cut or target in self._cut:
            return "cut"
        if num_queued >= QUEUED_PACKETS:
            return "queue"
        return "chance" if self._random.random() < self.loss else None


def address(node: int) -> str:
    """Address of a node in the network."""
    return f"10.77.0.{node + 1}"


def _open_device(pid: int) -> int:
    """File descriptor of a new device `tun0` in the network namespace of a process."""
    opened: list[int] = []

    def in_namespace() -> None:  # a namespace is a property of a thread
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if libc.setns(namespace, _CLONE_NEWNET) != 0:
                return
        finally:
            os.close(namespace)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _IFF_TUN | _IFF_NO_PI))
        opened.append(device)

    thread = threading.Thread(target=in_namespace)
    thread.start()
    thread.join()
    if not opened:
        raise PermissionError("network: no TUN device could be made in a network namespace. Run as root on Linux.")
    return opened[0]
