"""How published weights travel, and how engines take them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

NUM_SLOTS = 2
"""Versions kept in shared memory by `direct`: one is written while another may still be read. Of memory=device, and
with staging=bucket: 1."""
UpdateMode = Literal["keep_kv", "recompute_kv", "drain", "multi_version"]
CodecName = Literal["full", "delta", "int8_delta"]
"""Those of messages between nodes; `lora` is none, since it is not the weights that travel."""


class WeightsConfig(BaseModel):
    """How published weights travel from trainer to engines (docs/concepts/weight-updates.md).

    Attributes:
        mode: `direct` sends each engine rank exactly what it holds, from whichever trainer rank has it; `gather` sends
            whole tensors through rank 0 and the engine's own loader: for models whose layout is not known.
        transport: `auto` is shared memory where trainer and engines are on one node; across nodes it is a process group
            of its own for `direct` and Ray's object store for `gather`. The others force one of them.
        codec: What crosses nodes by a process group: everything, what has changed (bit-exact), or the difference in 8
            bits (not exact; engines of one device only, since replicated parameters would differ between devices).
            `lora`, also within a node: only adapters, which engines add to the weights that they were loaded with.
        overlap: Training goes on once a version has left the training ranks, while engines take it. Until the first of
            them has, no request starts.
        memory: Where a version is written: `host` is files in shared memory, which all engines of a node map; `device`
            is memory of each engine's own devices (CUDA IPC within a node, NCCL across nodes), its shard's size once,
            kept for the run.
            `auto` is `device` where all ranks and engines have GPUs of one machine (platform/slots.py), else `host`.
        directory: Parent of the folders that versions are published in; None: shared memory where there is some, else
            the temporary folder.
        stage_on: Where a GPU engine keeps an arrived version until the swap: `device` needs its shard's size of GPU
            memory once more, and freezes for a copy within the device; `host` needs none, and freezes for longer, and
            is for versions in shared memory.
        staging: What of an arriving version an engine holds beside its live parameters: `shard` is all of it, so that
            requests go on until it is there; `bucket` is one bucket (64 MiB), and requests stand still while the
            version streams through it (weights/streaming.py). Of shared memory it takes one slot instead of two; from
            device to device it needs transport=group, and no slot at all.
        update_mode: `keep_kv` freezes running requests for the swap and goes on with their old KV cache;
            `recompute_kv` recomputes it; `drain` lets them end first; `multi_version` does so engine by engine.
        probe_every: Compare the engines' logprobs with the trainer's at version 0 and every so many versions
            (platform/ratio_probe.py); 0 never does.
        timeout_s: Longest wait for one publish, seconds, before the slow engines are fenced off.
        drain_timeout_s: Longest wait for the running requests of an engine to end, seconds, in `drain` and
            `multi_version`; then they are frozen for the swap as with `keep_kv`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["direct", "gather"] = "direct"
    transport: Literal["auto", "shared_memory", "group", "object_store"] = "auto"
    codec: CodecName | Literal["lora"] = "full"
    overlap: bool = False
    memory: Literal["auto", "host", "device"] = "auto"
    directory: str | None = None
    stage_on: Literal["device", "host"] = "device"
    staging: Literal["shard", "bucket"] = "shard"
    update_mode: UpdateMode = "keep_kv"
    probe_every: int = Field(default=20, ge=0)
    timeout_s: float = Field(default=120.0, gt=0)
    drain_timeout_s: float = Field(default=300.0, gt=0)

    @property
    def num_slots(self) -> int:
        """Versions kept in shared memory by `direct`."""
        return 1 if self.staging == "bucket" else NUM_SLOTS

    @property
    def kv_mode(self) -> Literal["keep_kv", "recompute_kv"]:
        """What an engine does with the KV cache of requests that are inside it during a swap."""
        return "recompute_kv" if self.update_mode == "recompute_kv" else "keep_kv"
