"""Processes of a test, as ranks of one program: started together, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]

# Libraries take seconds to import, so that is done once, before the ranks part.
LAUNCHER = """
import penstock  # before transformers, which else stumbles over a torchvision for CUDA
import importlib, json, os, sys
program, outputs, arguments, imports = json.loads(sys.argv[1])
for name in imports:
    importlib.import_module(name)
main = importlib.import_module(program).main
pids = []
for rank, own in enumerate(arguments):
    pids.append(os.fork())
    if not pids[-1]:
        output = os.open(f"{outputs}/{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv[1:] = own
        main()
        sys.exit()
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(json.dumps(codes))
"""


def run_ranks(
    program: str,
    arguments: Sequence[Sequence[object]],
    *,
    timeout_s: float,
    may_die: frozenset[int] = frozenset(),
    imports: Sequence[str] = (),
) -> None:
    """Run `main` of a program once for each rank, in a process of its own, to the end.

    Args:
        arguments: Of each rank, in `sys.argv`.
        timeout_s: For all of them, seconds.
        may_die: Ranks that have to end with an error; no other may.
        imports: What the program imports later, in each rank.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    with TemporaryDirectory() as outputs:
        words = json.dumps([program, outputs, [list(map(str, own)) for own in arguments], list(imports)])
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = launcher.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        told = "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(Path(outputs).iterdir()))
    assert launcher.returncode == 0, f"{said}\n{told}"
    died = {rank for rank, code in enumerate(json.loads(said.splitlines()[-1])) if code}
    assert died == may_die, told
