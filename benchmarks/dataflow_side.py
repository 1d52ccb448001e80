"""How one side of `dataflow.py` is measured, in a process of its own: `python SIDE.py SPEC.json OUT.json`."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dataflow_memory import PeakMemory, tree_bytes, tree_cpu_s
from dataflow_work import Work

MEMORY_INTERVAL_S = 0.1

Run = Callable[[Work, int], Awaitable[int]]
"""Takes that many groups through all stages; returns the checksum over what the trainer ranks read."""


async def measured(spec: dict[str, Any], run: Run) -> list[dict[str, Any]]:
    """All processes are up: for each work a warm-up, a round on the clock, one in which memory is sampled."""
    results = []
    rest_bytes = tree_bytes()
    for work in (Work(**work) for work in spec["works"]):
        await run(work, work.window)
        load_before, cpu_before_s, started = os.getloadavg()[0], tree_cpu_s(), time.perf_counter()
        total = await run(work, work.num_groups)
        wall_s = time.perf_counter() - started
        cpu_s = tree_cpu_s() - cpu_before_s
        result = {
            "call_groups": work.call_groups,
            "wall_s": wall_s,
            "groups_per_s": work.num_groups / wall_s,
            "cpu_ms_per_group": 1e3 * cpu_s / work.num_groups,
            "checksum": total,
            "load": max(load_before, os.getloadavg()[0]),
        }
        if spec["memory"]:
            with PeakMemory(MEMORY_INTERVAL_S) as memory:
                again = await run(work, work.num_groups)
            assert again == total, f"the same groups gave the checksums {total} and {again}"
            result |= {"rest_bytes": rest_bytes, "peak_bytes": memory.peak_bytes}
        results.append(result)
    return results


def run_side(main: Callable[[dict[str, Any]], Awaitable[list[dict[str, Any]]]], packages: Sequence[str]) -> None:
    """Read the spec, measure, write the results."""
    spec, out = (Path(argument) for argument in sys.argv[1:3])
    results = asyncio.run(_awaited(main(json.loads(spec.read_text()))))
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    out.write_text(json.dumps({"results": results, "versions": versions}))


async def _awaited(results: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return await results
