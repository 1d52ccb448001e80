"""Whether torch allocates GPU memory that other processes can open. Imports no torch: also checked before the start."""

from __future__ import annotations

from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expandable_segments(environment: Mapping[str, str]) -> str:
    """Why device memory cannot be shared under these variables; empty if it can."""
    for name in _VARIABLES:
        fields = (field.partition(":") for field in environment.get(name, "").split(","))
        if {key.strip(): value.strip().lower() for key, _, value in fields}.get("expandable_segments") == "true":
            return (
                f"weights: {name}={environment[name]}, but versions are written into memory of the engines' devices: "
                "torch shares expandable segments through file descriptors of the other process (pidfd_getfd), which "
                "containers forbid. Remove expandable_segments:True from it, or set weights.transport=shared_memory."
            )
    return ""
