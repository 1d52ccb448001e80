"""Processes of a test, as ranks of one program: started together, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


AS_MODULE = """
import penstock  # before transformers, which else stumbles over a torchvision for CUDA
import runpy, sys
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_ranks(
    program: str, arguments: Sequence[Sequence[object]], *, timeout_s: float, may_die: frozenset[int] = frozenset()
) -> None:
    """Run `python -m program` once for each rank, to the end.

    Args:
        arguments: Of each rank.
        timeout_s: For each of them, seconds.
        may_die: Ranks that have to end with an error; no other may.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", AS_MODULE, program, *map(str, own)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in arguments
    ]
    outputs = []
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    died = {number for number, rank in enumerate(ranks) if rank.returncode}
    assert died == may_die, "\n".join(output[-3000:] for output in outputs)
