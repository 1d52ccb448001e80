"""The Triton kernels without a GPU: interpreted on CPU tensors, and compiled to machine code.

Triton decides at import whether a process interprets or compiles: each happens in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import IS_FULL

HERE = Path(__file__).parent


def run_tests(name: str, **environment: str) -> str:
    """Run a file of tests of this folder in another process; its output if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-m", ""] if IS_FULL else [])]
    command.append(str(HERE / name))
    everything = {**os.environ, **environment}
    result = subprocess.run(
        command, cwd=HERE.parents[2], env=everything, check=False, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.full
def test_interpreted_kernels_give_what_the_references_give() -> None:
    run_tests("interpreted_logprob.py", TRITON_INTERPRET="1")


@pytest.mark.full
def test_every_kernel_and_configuration_compiles_for_ampere_and_hopper(tmp_path: Path) -> None:
    run_tests("compiled_kernels.py", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
