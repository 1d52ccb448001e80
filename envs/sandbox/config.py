"""Where untrusted programs run, with which isolation and which limits."""

from __future__ import annotations

import os

from pydantic import Field

from penstock.dataflow.settings import Settings
from penstock.envs.retrying import RetryConfig
from penstock.envs.sandbox.contract import Limits


class RemoteConfig(RetryConfig):
    """A sandbox service that speaks the protocol of envs/sandbox/service.py."""

    url: str = Field(pattern=r"^https?://")
    """Its address, e.g. `http://sandbox:8080`."""
    token_variable: str | None = None
    """Environment variable of the reward workers that holds the service's token; None sends none."""
    grace_s: float = Field(default=10.0, gt=0)
    """How much longer than the program's own wall-clock limit an answer may take, seconds."""


class SandboxConfig(Settings):
    """The sandbox."""

    allow_unisolated: bool = False
    """Run programs without isolation if the host does not allow any: limits still hold, but a program can read, write
    and send everything that this user can. False refuses."""
    max_concurrency: int | None = Field(default=None, ge=1)
    """Programs at a time in each reward worker; None is the number of cores."""
    read_only_paths: tuple[str, ...] = ()
    """Host paths that programs may read, in addition to the system's programs and this Python."""
    limits: Limits = Limits()
    """What one program may use."""
    remote: RemoteConfig | None = None
    """A sandbox service to use instead of this machine; None is local."""

    @property
    def num_slots(self) -> int:
        """Programs at a time."""
        return self.max_concurrency or os.cpu_count() or 1
