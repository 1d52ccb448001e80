"""How programs that nobody trusts are run: where, at most how, with which limits."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict, Field

from penstock.envs.retrying import RetryConfig
from penstock.envs.sandbox.contract import Limits

_MIB, _KIB = 1 << 20, 1 << 10


class LimitsConfig(BaseModel):
    """What one program may use, all its processes together.

    Attributes:
        wall_s: Wall-clock time, seconds.
        cpu_s: Processor time, seconds.
        memory_mib: Resident memory, MiB.
        max_processes: Processes and threads at a time.
        max_file_mib: Largest single file, MiB.
        max_disk_mib: Size of the working directory, MiB; it is main memory.
        max_output_kib: Standard output and standard error, KiB; what goes beyond ends the program.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    wall_s: float = Field(default=10.0, gt=0)
    cpu_s: float = Field(default=10.0, gt=0)
    memory_mib: int = Field(default=512, ge=16)
    max_processes: int = Field(default=32, ge=1)
    max_file_mib: int = Field(default=16, ge=1)
    max_disk_mib: int = Field(default=64, ge=1)
    max_output_kib: int = Field(default=64, ge=1)

    def limits(self) -> Limits:
        """The same in the units of the port."""
        return Limits(
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            memory_bytes=self.memory_mib * _MIB,
            max_processes=self.max_processes,
            max_file_bytes=self.max_file_mib * _MIB,
            max_disk_bytes=self.max_disk_mib * _MIB,
            max_output_bytes=self.max_output_kib * _KIB,
        )


class RemoteConfig(RetryConfig):
    """A sandbox service that speaks the protocol of envs/sandbox/service.py.

    Attributes:
        url: Its address, e.g. `http://sandbox:8080`.
        token_variable: Environment variable of the reward workers that holds the service's token; None sends none.
        grace_s: How much longer than the program's own wall-clock limit an answer may take, seconds.
    """

    url: str = Field(pattern=r"^https?://")
    token_variable: str | None = None
    grace_s: float = Field(default=10.0, gt=0)


class SandboxConfig(BaseModel):
    """The sandbox.

    Attributes:
        allow_unisolated: Run programs without isolation where the host does not allow any: limits hold, but a program
            can read, write and send what this user can. False refuses.
        max_concurrency: Programs at a time in each reward worker; None is the number of cores.
        read_only_paths: Host paths that programs may read, besides the system's programs and this Python.
        limits: What one program may use.
        remote: A sandbox service to use instead of this machine; None is local.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    allow_unisolated: bool = False
    max_concurrency: int | None = Field(default=None, ge=1)
    read_only_paths: tuple[str, ...] = ()
    limits: LimitsConfig = LimitsConfig()
    remote: RemoteConfig | None = None

    @property
    def num_slots(self) -> int:
        """Programs at a time."""
        return self.max_concurrency or os.cpu_count() or 1
