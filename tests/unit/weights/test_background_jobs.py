from __future__ import annotations

import threading
import time

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.transport.background import BackgroundJob

WAIT_S = 10.0


def error_at_end(job: BackgroundJob) -> str:
    deadline = time.monotonic() + WAIT_S
    while not job.is_done:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return job.error()


def test_a_job_starts_after_the_previous_one_and_begin_waits_for_neither():
    job, may_end, done = BackgroundJob(), threading.Event(), []
    assert job.is_done

    def fail() -> None:
        may_end.wait(WAIT_S)
        done.append("first")
        raise WeightSyncError("a peer is lost")

    job.begin("first", fail)
    job.begin("second", lambda: done.append("second"))
    assert not job.is_done
    assert not done
    may_end.set()
    assert error_at_end(job) == "", "the error of an abandoned job is not that of the next"
    assert done == ["first", "second"]


def test_the_error_of_a_job_is_reported():
    def fail_with(error: Exception) -> str:
        def fail() -> None:
            raise error

        job.begin("fails", fail)
        return error_at_end(job)

    job = BackgroundJob()
    assert fail_with(WeightSyncError("a peer is lost")) == "a peer is lost"
    assert fail_with(IndexError("list index out of range")) == "IndexError: list index out of range"
