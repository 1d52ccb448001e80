"""Work of a transfer beside that of a model on the same GPU: on a CUDA stream of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a new CUDA stream and synchronize it at the end; on the CPU, run it unchanged."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
