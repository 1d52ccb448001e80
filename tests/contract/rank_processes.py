"""The ranks of a trainer as processes of their own, as a test starts and ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 900.0


def run_ranks(program: str, num_ranks: int, arguments: Callable[[int, int], list[object]]) -> None:
    """Run `python -m program` once for each rank, to the end.

    Args:
        arguments: Of a rank and the port on which rank 0 listens.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", program, *map(str, arguments(rank, port))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = []
    try:
        outputs = [rank.communicate(timeout=LONGEST_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(output[-3000:] for output in outputs)
