"""How published weights travel, and how engines take them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

NUM_SLOTS = 2
"""Versions kept in shared memory: one is written while another may still be read. With staging=bucket: 1."""
UpdateMode = Literal["keep_kv", "recompute_kv", "drain", "multi_version"]
CodecName = Literal["full", "delta", "int8_delta"]


class WeightsConfig(BaseModel):
    """How published weights travel from trainer to engines (docs/concepts/weight-updates.md).

    Attributes:
        transport: `auto` takes the one way that fits: adapters where the trainer trains adapters (LoRA); within a node
            CUDA IPC where trainer and engines have GPUs, else shared memory; across nodes a process group. The others
            force one, and send all weights: `shared_memory` (files that the engines of a node map), `cuda_ipc` (into
            memory of the engines' own devices, within a node), `process_group` (NCCL between GPUs, gloo between CPUs),
            `gather` (whole tensors through training rank 0 and the engine's own loader, for models whose layout is not
            known; to other nodes they go through Ray's object store). platform/cluster/weight_routes.py has the table.
        codec: What crosses nodes by a process group: everything, what has changed (bit-exact), or the difference in 8
            bits (not exact; engines of one device only, since replicated parameters would differ between devices).
        overlap: Training goes on once a version has left the training ranks, while engines take it. Until the first of
            them has, no request starts.
        directory: Parent of the folders that versions are published in; None: shared memory where there is some, else
            the temporary folder.
        staging: What of an arriving version an engine holds beside its live parameters: `shard` is all of it, so that
            requests go on until it is there; `bucket` is one bucket (64 MiB), and requests stand still while the
            version streams through it (weights/transport/streaming.py): out of one slot in shared memory instead of
            two, or by a process group straight into the parameters. Adapters are then added up in main memory.
        update_mode: `keep_kv` freezes running requests for the swap and goes on with their old KV cache;
            `recompute_kv` recomputes it; `drain` lets them end first; `multi_version` does so engine by engine.
        probe_every: Compare the engines' logprobs with the trainer's at version 0 and every so many versions
            (platform/run/logprob_parity.py); 0 never does.
        timeout_s: Longest wait for one publish, seconds, before the slow engines are fenced.
        drain_timeout_s: Longest wait for the running requests of an engine to end, seconds, in `drain` and
            `multi_version`; then they are frozen for the swap as with `keep_kv`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    transport: Literal["auto", "shared_memory", "cuda_ipc", "process_group", "gather"] = "auto"
    codec: CodecName = "full"
    overlap: bool = False
    directory: str | None = None
    staging: Literal["shard", "bucket"] = "shard"
    update_mode: UpdateMode = "keep_kv"
    probe_every: int = Field(default=20, ge=0)
    timeout_s: float = Field(default=120.0, gt=0)
    drain_timeout_s: float = Field(default=300.0, gt=0)

    @property
    def num_slots(self) -> int:
        """Versions kept in shared memory."""
        return 1 if self.staging == "bucket" else NUM_SLOTS

    @property
    def kv_mode(self) -> Literal["keep_kv", "recompute_kv"]:
        """What an engine does with the KV cache of requests that are inside it during a swap."""
        return "recompute_kv" if self.update_mode == "recompute_kv" else "keep_kv"
