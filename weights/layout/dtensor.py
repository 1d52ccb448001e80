"""The layout of live DTensors (FSDP2, HSDP), read from their own meshes and placements. Nothing is communicated.

A DTensor on a mesh of axes m_0, m_1, … is split by its placements from left to right: `Shard(d)` on m_i gives the k-th
of m_i ranks the k-th chunk of ceil(n / m_i) of what is left along dimension d; `Replicate()` leaves it as it is. So
what every rank holds follows from one rank's view; that this rank really holds it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as SplitAlong

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import Layout, Shard, TensorSpec, View, extents, row_major, volume, whole
from penstock.weights.layout.training import chunk_of


def dtensor_layout(tensors: Mapping[str, DTensor]) -> Layout:
    """Where the ranks of a process group hold a model.

    Args:
        tensors: HF name -> this rank's DTensor of it, tied ones once. Ranks of the layout are the meshes' global ranks;
            every rank's buffers are its local tensors, flat and contiguous.

    Raises:
        WeightSyncError: If a placement is neither `Replicate()` nor `Shard(d)`, or if this rank holds another shape
            than its placements say.
    """
    num_ranks = 1 + max(int(tensor.device_mesh.mesh.max()) for tensor in tensors.values())
    buffers: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    shards = {}
    for name, tensor in tensors.items():
        _check_placements(name, tensor)
        held = _shards_of(TensorSpec(name, tuple(tensor.shape)), tensor)
        _check_local(name, tensor, held)
        for shard in held:
            buffers[shard.rank][name] = volume(shard.box)
        shards[name] = tuple(shard for shard in held if volume(shard.box))
    return Layout(shards, tuple(buffers))


def _shards_of(spec: TensorSpec, tensor: DTensor) -> list[Shard]:
    """One of every rank of the mesh, empty ones too."""
    mesh = tensor.device_mesh.mesh
    held = []
    for place in product(*map(range, mesh.shape)):
        box = whole(spec.shape)
        for placement, index, size in zip(tensor.placements, place, mesh.shape, strict=True):
            if isinstance(placement, SplitAlong):
                box = chunk_of(spec, box, placement.dim, index, size)
        held.append(Shard(int(mesh[place]), box, View(spec.name, 0, row_major(extents(box)))))
    return held


def _check_placements(name: str, tensor: DTensor) -> None:
    """Subclasses of `Shard` have an order of their own (FSDP2 over tensor parallelism), so types are compared."""
    for placement in tensor.placements:
        if type(placement) not in {Replicate, SplitAlong}:
            raise WeightSyncError(
                f"weights: {name} is placed as {placement!r} on a mesh of {tuple(tensor.device_mesh.mesh.shape)}, and "
                "only Replicate() and Shard(d) are known: its elements would be sent to wrong places. Set "
                "weights.transport=gather."
            )


def _check_local(name: str, tensor: DTensor, held: list[Shard]) -> None:
    mine = next((shard for shard in held if shard.rank == tensor.device_mesh.get_rank()), None)
    local = tuple(tensor.to_local().shape)
    if mine is not None and extents(mine.box) != local:
        raise WeightSyncError(
            f"weights: rank {mine.rank} holds {name} as {local}, and its placements {tensor.placements} of "
            f"{tuple(tensor.shape)} say {extents(mine.box)}: what it sends would land in wrong places. Set "
            "weights.transport=gather."
        )
