from __future__ import annotations

import threading
import time

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.transport.background import BackgroundJob

WAIT_S = 10.0


def ended(beside: BackgroundJob) -> str:
    deadline = time.monotonic() + WAIT_S
    while not beside.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return beside.error()


def test_a_job_begins_after_the_one_before_and_whoever_begins_it_waits_for_neither():
    beside, may_end, done = BackgroundJob(), threading.Event(), []
    assert beside.is_done

    def fail() -> None:
        may_end.wait(WAIT_S)
        done.append("first")
        raise WeightSyncError("a peer is lost")

    beside.begin("first", fail)
    beside.begin("second", lambda: done.append("second"))
    assert not beside.is_done
    assert not done
    may_end.set()
    assert ended(beside) == "", "the error of a job that was given up is not that of the next"
    assert done == ["first", "second"]


def test_why_a_job_failed_is_said():
    def fail_with(error: Exception) -> str:
        def fail() -> None:
            raise error

        beside.begin("fails", fail)
        return ended(beside)

    beside = BackgroundJob()
    assert fail_with(WeightSyncError("a peer is lost")) == "a peer is lost"
    assert fail_with(IndexError("list index out of range")) == "IndexError: list index out of range"
