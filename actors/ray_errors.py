"""Ray's exceptions become ours here, with the cause in the sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from penstock.dataflow.errors import PenstockError


@contextmanager
def ray_boundary(error: type[PenstockError], what: str) -> Iterator[None]:
    """Re-raise what Ray calls raise as `error`, naming `what` was tried. A local time-out passes through.

    A remote exception is told by its type and message, a dead process by Ray's first line.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as failed:
        raise error(f"{what} failed: {type(failed.cause).__name__}: {failed.cause}") from failed
    except ray.exceptions.RayError as lost:
        raise error(f"{what}: a process died: {str(lost).strip().splitlines()[0]}") from lost
