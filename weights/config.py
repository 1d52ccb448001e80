"""Configuration of weight publishing: how a version is transferred, and how engines apply it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.dataflow.settings import MAX_TIMEOUT_S, MIN_CALL_TIMEOUT_S, Settings

NUM_BUFFERS = 2
"""Versions kept in shared memory: one is written while another may still be read. With staging=bucket: 1."""
UpdateMode = Literal["keep_kv", "recompute_kv", "drain", "multi_version"]
CodecName = Literal["full", "delta", "int8_delta"]


class WeightsConfig(Settings):
    """How published weights are transferred from the trainer to the engines (docs/concepts/weights.md)."""

    transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group", "gather"] = "auto"
    """`auto` chooses by the run: adapters if the trainer trains adapters (LoRA); within a node CUDA IPC if trainer and
    engines have GPUs, else shared memory; across nodes a process group. The other values force one transport and
    send all weights: `shared_memory` (files that the engines of a node map), `cuda_ipc` (into memory of the engines'
    own devices, within a node), `process_group` (NCCL between GPUs, gloo between CPUs), `gather` (whole tensors
    through training rank 0 and the engine's own loader, for models whose layout is not known; to other nodes through
    Ray's object store). platform/cluster/weight_routes.py has the table."""
    codec: CodecName = "full"
    """What a process group sends: `full` all elements, `delta` the changed elements (bit-exact), `int8_delta` the
    difference in 8 bits (not exact; only for engines of one device, since replicated parameters would differ between
    devices)."""
    overlap: bool = False
    """Training continues once the training ranks have copied or sent a version, while the engines still receive it. No
    request starts until the first engine has it."""
    directory: str | None = None
    """Parent of the folders that versions are published in; None: shared memory if the machine has it, else the
    temporary folder."""
    staging: Literal["shard", "bucket"] = "shard"
    """How much of a new version an engine holds in addition to its live parameters. `shard`: all of its shard, so
    requests continue until the shard is complete. `bucket`: one bucket (64 MiB); requests are frozen while the
    version is applied in place, bucket by bucket (weights/transport/in_place.py), from one buffer in shared memory
    instead of two, or from a process group. Adapters are then merged in main memory."""
    update_mode: UpdateMode = "keep_kv"
    """`keep_kv` freezes running requests for the swap and continues with their old KV cache; `recompute_kv` recomputes
    it; `drain` lets them finish first; `multi_version` drains one engine at a time."""
    probe_every: int = Field(default=20, ge=0)
    """Compare the engines' logprobs with the trainer's at version 0 and every `probe_every` versions
    (platform/run/logprob_parity.py); 0: never."""
    timeout_s: float = Field(default=120.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    """Longest wait for one publish, seconds, before the slow engines are fenced."""
    drain_timeout_s: float = Field(default=300.0, ge=MIN_CALL_TIMEOUT_S, le=MAX_TIMEOUT_S)
    """Longest wait for the running requests of an engine to finish, seconds, in `drain` and `multi_version`; after it
    they are frozen for the swap as with `keep_kv`."""

    @property
    def num_buffers(self) -> int:
        """Version buffers in shared memory for each engine rank."""
        return 1 if self.staging == "bucket" else NUM_BUFFERS

    @property
    def kv_mode(self) -> Literal["keep_kv", "recompute_kv"]:
        """What an engine does with the KV cache of its running requests during a swap."""
        return "recompute_kv" if self.update_mode == "recompute_kv" else "keep_kv"
