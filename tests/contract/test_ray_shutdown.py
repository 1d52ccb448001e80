"""A process outlives the end of its Ray session, whatever its threads do meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.full]

PROGRAM = """
import asyncio, gc, threading
import ray
from penstock.actors.cluster import ray_session

class InACycle:
    def __init__(self, reference):
        self.itself, self.reference = self, reference

# Another thread collects garbage at the worst moment: Ray's worker has ended, and its Python object is there.
class CollectsInAThread:
    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        return getattr(self._worker, name)

    def shutdown_driver(self):
        self._worker.shutdown_driver()
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()

async def main():
    async with ray_session("local"):
        worker = ray._private.worker.global_worker
        worker.core_worker = CollectsInAThread(worker.core_worker)
        gc.disable()  # until then
        for number in range(100):
            InACycle(ray.put(number))

asyncio.run(main())
print("ended in order")
"""


def test_garbage_that_holds_object_references_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "ended in order\n"), done.stderr
