"""In-place updates in vLLM's worker: live parameters are received over nothing that still reads them.

On the fake GPU and over the fake NCCL; the rest of a publish is in tests/unit/weights/test_stream_order.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.transport.in_place import IN_PLACE
from penstock.weights.transport.process_group.endpoints import BucketChecksums, WeightSender
from penstock.weights.transport.process_group.group import serve_store
from tests.fake_gpu import GPU, a_machine_with_nccl, in_main_memory, on_a_gpu
from tests.fake_streams import Order, recorded_streams
from tests.unit.weights.test_stream_order import TIMEOUT_S, group_spec_at, nothing, weights

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,  # imports vLLM
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    for name, value in vllm_environment("cpu", threads=1).items():
        monkeypatch.setenv(name, value)
    from penstock.rollout.engines.vllm import worker

    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    with a_machine_with_nccl(), recorded_streams() as recorded, on_a_gpu():
        yield recorded


class Model:
    """What a worker uses of vLLM's model."""

    def __init__(self) -> None:
        self._held = {
            name: torch.zeros(values.shape, dtype=torch.bfloat16, device=GPU) for name, values in weights(0).items()
        }

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._held.items())


def receive_in_place(order: Order) -> str:
    """Receive a version while the last step of decoding may still read the parameters; returns the worker's error."""
    from penstock.rollout.engines.vllm.worker import PendingUpdate, WorkerExtension

    store, model = serve_store("127.0.0.1"), Model()
    group_spec = group_spec_at(store.port, is_in_place=True)
    worker = WorkerExtension()
    worker.model_runner, worker.device = SimpleNamespace(get_model=lambda: model), GPU
    sender = WeightSender(0, GPU)

    def prepare() -> BucketChecksums:
        with on_a_gpu(), order.within("trainer"):
            sender.join(group_spec)
            sender.snapshot(weights(1), copies=True)
            return sender.bucket_checksums()

    def send() -> None:
        with on_a_gpu(), order.within("trainer"):
            try:
                sender.send(1)
            finally:
                sender.close()

    def called(method: Callable[..., None], *arguments: object) -> str:
        """Call it in a thread, as the engine does; returns its error."""

        def call() -> None:
            with on_a_gpu():
                method(*arguments)

        error = calls.submit(call).exception(TIMEOUT_S)
        return "" if error is None else str(error)

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as calls:
        prepared = thread.submit(prepare)
        assert called(worker.penstock_join, group_spec, 0) == ""
        sums = prepared.result(TIMEOUT_S).sums
        for _, parameter in model.named_parameters():
            parameter.sum()  # decoding
        manifest = SimpleNamespace(version=1, bucket_sums=sums, location=IN_PLACE)
        worker.penstock_state.update = PendingUpdate(manifest)  # type: ignore[arg-type]
        sent = thread.submit(send)
        if error := called(worker.penstock_receive_in_place):
            sent.exception(2 * TIMEOUT_S)
            return error
        sent.result(TIMEOUT_S)
    for name, parameter in model.named_parameters():
        parameter.sum()  # decoding goes on
        assert torch.equal(in_main_memory(parameter), in_main_memory(weights(1)[name]).bfloat16())
    return ""


def test_parameters_are_received_after_the_step_that_reads_them(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    assert receive_in_place(order) == ""
    # The sender keeps its wait.
    plain = torch.cuda.synchronize
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda *args: nothing() if order.process == "engine" else plain(*args)
    )
    assert "overwrites memory that 'engine: default stream' may still use: nothing waits for it" in receive_in_place(
        order
    )
