"""Which experts vLLM sends each token to, on their way from a worker's routers to the deltas of an engine.

    worker       rows of a step, in the order of its tokens → rows of each request, by position     `StepRoutes`
    scheduler    rows of a request wait until it has a token to send; recomputed ones are dropped     `RequestRoutes`
    event loop   rows are taken by the delta whose tokens they predicted                              `ReceivedRoutes`

On a GPU vLLM does the first two itself (`enable_return_routed_experts`); its CPU build cannot, so they are done here in
the same form: an output carries the rows from the end of the output before it to the last token but one. A token of the
prefix cache has the rows of the request that computed it: they are kept by the slots of the KV cache, as its keys are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import RequestId
from penstock.dataflow.trajectory import Routes, dtype_for, unknown_routes


def layers_with_experts(model: torch.nn.Module) -> dict[int, Any]:
    """Index of a layer -> what runs its experts."""
    return {one.layer_id: one for one in model.modules() if isinstance(one, MoERunner)}


class StepRoutes:
    """Records the routes of each step of one worker, between its model runner and its scheduler."""

    def __init__(self, model_runner: Any) -> None:
        layers = layers_with_experts(model_runner.get_model())
        self._runner = model_runner
        self._num_layers = len(layers)
        self._dtype = dtype_for(max(layer.router.global_num_experts for layer in layers.values()))
        self._of_step: dict[int, torch.Tensor] = {}
        self._by_request: dict[str, AuxRequestOutput] = {}
        self._by_slot: Routes | None = None
        groups = enumerate(model_runner.kv_cache_config.kv_cache_groups)
        # Other groups give blocks back before a request has ended.
        kept = [(index, one.kv_cache_spec.block_size) for index, one in groups if _is_kept(one.kv_cache_spec)]
        self._group: int | None = kept[0][0] if kept else None
        self._block_size: int = kept[0][1] if kept else 0
        for place, layer in enumerate(layers.values()):
            layer.router.set_capture_fn(partial(self._capture, place))
        self._execute, self._sample = model_runner.execute_model, model_runner.sample_tokens
        model_runner.execute_model, model_runner.sample_tokens = self.execute_model, self.sample_tokens

    def _capture(self, place: int, chosen: torch.Tensor) -> None:
        self._of_step[place] = chosen

    def execute_model(self, scheduled: Any, *rest: Any) -> Any:
        """The runner's forward pass; keeps the rows of its requests."""
        self._of_step.clear()
        output = self._execute(scheduled, *rest)
        if len(self._of_step) == self._num_layers:
            of_step = torch.stack([self._of_step[place] for place in range(self._num_layers)], dim=1)
            rows = of_step[: scheduled.total_num_scheduled_tokens].to(torch.int32).numpy().astype(self._dtype)
            self._by_request = self._split(scheduled, rows)
        return output

    def sample_tokens(self, *args: Any) -> Any:
        """The runner's sampling; hands the rows on with its output."""
        output = self._sample(*args)
        if self._by_request:
            output.aux_output_connector_output, self._by_request = self._by_request, {}
        return output

    def _split(self, scheduled: Any, rows: Routes) -> dict[str, AuxRequestOutput]:
        # First, since a request may find in the prefix cache what another one computes in this step.
        self._write(rows)
        begun = {one.req_id for one in scheduled.scheduled_new_reqs} | set(
            scheduled.scheduled_cached_reqs.resumed_req_ids
        )
        found, offset = {}, 0
        for request_id in self._runner.input_batch.req_ids:
            state, count = self._runner.requests[request_id], scheduled.num_scheduled_tokens[request_id]
            start, own = state.num_computed_tokens, rows[offset : offset + count]
            offset += count
            if start and request_id in begun:  # what is cached of it was computed by others
                cached = self._read(state.block_ids, start, own)
                found[request_id] = AuxRequestOutput(0, np.concatenate([cached, own]))
            else:
                found[request_id] = AuxRequestOutput(start, own)
        return found

    def _read(self, block_ids: Sequence[Sequence[int]], stop: int, like: Routes) -> Routes:
        if self._by_slot is None:
            return unknown_routes(stop, like)
        return self._by_slot[self._slots(block_ids, stop)]

    def _write(self, rows: Routes) -> None:
        if self._group is None:
            return
        if self._by_slot is None:
            num_slots = self._runner.kv_cache_config.num_blocks * self._block_size
            self._by_slot = np.zeros((num_slots, *rows.shape[1:]), rows.dtype)  # memory is taken as it is written
        slots = self._runner.input_batch.block_table[self._group].slot_mapping.gpu[: len(rows)]
        self._by_slot[slots.numpy()] = rows

    def _slots(self, block_ids: Sequence[Sequence[int]], stop: int) -> NDArray[np.int64]:
        assert self._group is not None
        places = np.arange(stop)
        blocks = np.array(block_ids[self._group], np.int64)
        return blocks[places // self._block_size] * self._block_size + places % self._block_size


def _is_kept(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec) and spec.sliding_window is None


class RequestRoutes:
    """Rows of the requests of one scheduler that were computed and not sent. A position has the rows of its first pass:
    those of the token that it predicted.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Routes]] = {}
        self._ends: dict[str, int] = {}

    def add(self, recorded: Mapping[str, AuxRequestOutput], requests: Mapping[str, Any]) -> None:
        """Take the rows of a step; `requests` are vLLM's, which say from where on rows are wanted."""
        for request_id, of in recorded.items():
            if (request := requests.get(request_id)) is None:
                continue
            end = self._ends.get(request_id, request.sampling_params.routed_experts_prompt_start)
            self._ends[request_id] = max(end, of.token_start + len(of.rows))
            self._parts.setdefault(request_id, []).append(of.rows[max(end - of.token_start, 0) :])

    def attach(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Let outputs that have tokens carry their rows."""
        for output in outputs:
            if output.new_token_ids and (parts := self._parts.pop(output.request_id, None)):
                output.routed_experts = np.concatenate(parts)
            if output.finish_reason is not None:
                self.forget(output.request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._parts.pop(request_id, None)
        self._ends.pop(request_id, None)


class ReceivedRoutes:
    """Rows that an engine core has sent to the event loop. vLLM itself would hand them on with the last output only."""

    def __init__(self, output_processor: Any, layers: Sequence[int], num_experts: int) -> None:
        """Receive from now on.

        Args:
            output_processor: vLLM's, of the engine's client.
            layers: Indices of those that have experts.
            num_experts: Of each of them.
        """
        self._processor, self._process = output_processor, output_processor.process_outputs
        self._layers, self._dtype = list(layers), dtype_for(num_experts)
        self._rows: dict[str, list[Routes]] = {}
        output_processor.process_outputs = self.process_outputs

    def process_outputs(self, outputs: list[EngineCoreOutput], *args: Any, **settings: Any) -> Any:
        """vLLM's, without the rows, which are kept here."""
        for output in outputs:
            rows, output.routed_experts = output.routed_experts, None
            state = self._processor.request_states.get(output.request_id)
            kept = None if state is None else self._rows.get(state.external_req_id)
            if rows is not None and kept is not None:
                if rows.shape[1] != len(self._layers):  # vLLM has rows of all layers
                    rows = rows[:, self._layers]
                kept.append(rows.astype(self._dtype, copy=False))
        return self._process(outputs, *args, **settings)

    def open(self, request_id: RequestId) -> None:
        """Keep the rows of a request from now on."""
        self._rows[request_id] = []

    def take(self, request_id: RequestId, count: int) -> Routes:
        """The next `count` rows of a request.

        Raises:
            TrajectoryError: kind `engine`, if vLLM has not sent them.
        """
        parts = self._rows[request_id]
        rows = np.concatenate(parts) if parts else np.zeros((0, len(self._layers), 1), self._dtype)
        if len(rows) < count:
            raise TrajectoryError(
                "engine",
                f"{request_id}: vLLM sent the experts of {len(rows)} tokens with a delta, and {count} are needed. The "
                "trainer could not replay them. Set algorithm.routing=current.",
                is_final=True,
            )
        self._rows[request_id] = [rows[count:]] if len(rows) > count else []
        return rows[:count]

    def close(self, request_id: RequestId) -> None:
        """Drop what is left of a request, and what still comes."""
        self._rows.pop(request_id, None)
