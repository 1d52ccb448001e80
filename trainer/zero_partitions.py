"""Whether ZeRO-3 really partitioned as weights/layout/training.py has it. No deepspeed here.

Rank r of W holds the elements [r · p, (r + 1) · p) of a tensor of n in row-major order, p = ceil(n / W), the last ones
padding. A version of DeepSpeed that pads to something else, or partitions over other ranks, has another p: training
would go on, and versions be published from wrong places.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.dataflow.errors import WeightSyncError


def check_partitions(held: Mapping[str, int], num_elements: Mapping[str, int], num_replicas: int, rank: int) -> None:
    """Compare this rank's partitions with the plan's.

    Args:
        held: HF name -> elements that this rank has of a tensor, padding included.
        num_elements: Of what the ranks partition among themselves, the whole tensor or a tensor-parallel rank's part.
        num_replicas: W.
        rank: For the message.

    Raises:
        WeightSyncError: With the first tensor that is otherwise, and both sizes.
    """
    for name, found in held.items():
        part = -(-num_elements[name] // num_replicas)
        if found != part:
            raise WeightSyncError(
                f"trainer rank {rank}: ZeRO-3 holds {found} elements of {name}, and {part} were planned "
                f"({num_elements[name]} over {num_replicas} ranks, rounded up): this version of DeepSpeed partitions "
                "in another way than we publish. Set trainer.zero_stage=2, or install the version that is pinned."
            )
