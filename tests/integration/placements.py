"""What test_weight_group.py asks two processes about live DTensors: the layout that is read is what they hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import Layout, TensorSpec, extents, volume
from penstock.weights.layout.dtensor import dtensor_layout
from penstock.weights.layout.training import fsdp_layout
from penstock.weights.strided import strided_box


class Small(nn.Module):
    """Odd sizes: the last rank has less, of one tensor nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 5)
        self.up_proj = nn.Linear(6, 3)
        self.one = nn.Parameter(torch.randn(1, 4))


def read_placements(rank: int) -> dict[str, Any]:
    """Layouts read from what FSDP2, HSDP and DTensors of every placement really hold: buffers that are not as told."""
    told: dict[str, Any] = {}
    for kind, mesh in (("fsdp", (2,)), ("hsdp", (2, 1)), ("hsdp_sharded", (1, 2))):
        torch.manual_seed(0)
        model = Small()
        full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        axes = {"up_proj.weight": 1}
        by_id = {id(parameter): axes.get(name, 0) for name, parameter in model.named_parameters()}
        names = ("replicas", "parts")[-len(mesh) :]
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names),
            shard_placement_fn=lambda parameter, by_id=by_id: Shard(by_id[id(parameter)]),
        )
        live = dict(model.named_parameters())
        layout = dtensor_layout(live)
        told[kind] = [name for name in live if not holds_what_is_told(layout, rank, name, live[name], full[name])]
        if kind == "fsdp":
            specs = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in full.items()]
            told["as planned"] = layout == fsdp_layout(specs, 2, axes)
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    told["partial"] = refusal_of({"model.norm.weight": partial})
    uneven = DTensor.from_local(torch.ones(1 + 2 * rank), mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
    told["uneven"] = refusal_of({"model.norm.weight": uneven})
    torch.manual_seed(1)
    full = {"rows": torch.randn(3, 4), "columns": torch.randn(2, 5), "whole": torch.randn(3)}
    places = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    live = {name: distribute_tensor(full[name], mesh, [place]) for name, place in places.items()}
    layout = dtensor_layout(live)
    told["by hand"] = [name for name in live if not holds_what_is_told(layout, rank, name, live[name], full[name])]
    return told


def refusal_of(tensors: dict[str, DTensor]) -> str:
    try:
        dtensor_layout(tensors)
    except WeightSyncError as error:
        return str(error)
    return "no error"


def holds_what_is_told(layout: Layout, rank: int, name: str, live: DTensor, full: torch.Tensor) -> bool:
    local = live.to_local().detach().reshape(-1)
    shards = [shard for shard in layout.shards[name] if shard.rank == rank]
    boxes = [
        torch.equal(
            strided_box(local, extents(shard.box), shard.view), full[tuple(slice(*range_) for range_ in shard.box)]
        )
        for shard in shards
    ]
    return all(boxes) and layout.buffers[rank][name] == local.numel() == sum(volume(shard.box) for shard in shards)
