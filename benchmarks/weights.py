"""The cost of a weight update: Penstock's plan compared with vLLM's own methods.

    python benchmarks/weights.py bytes     (15 s, no GPU; writes benchmarks/results/weights_bytes.md and .json)
    python benchmarks/weights.py time      (1 min, 7 GiB of memory; writes benchmarks/results/weights_time.md and .json)
    python benchmarks/weights.py stall     (1 min, 7 GiB of memory; writes weights_stall.md and .json there)
    python benchmarks/weights.py delta     (1 min, needs the demo's warm start; writes weights_delta.md and .json there)

`bytes`: Qwen2.5-7B in bfloat16 from 4 ZeRO-3 ranks to 2 engines of 4 tensor-parallel ranks each, all on devices of
their own. Nothing is sent: the bytes that each rank receives are counted from each library's own plan.

- Penstock: `make_plan` from the ranks to the first engine, which relays its shards to the second (`relay_tree`).
- vLLM's M-to-N (backend `nccl_m2n`): vLLM's model class is built on the meta device for each of the 4 ranks, and its
  `resolve_parameter_destinations`, `resolve_layout` and `shard_count` give the number of parts that each tensor is
  split into on the mesh of 2 × 4 engine ranks. A rank receives one part: its shard if the planner sends it directly,
  the whole tensor if it falls back to `load_weights`.
- Gather and broadcast: the trainer gathers each tensor on rank 0, every engine rank receives it whole.

How replicas share a tensor depends on NCCL and nccl_m2n, so bytes that leave the trainer are given as lower bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from alone import ROOT
from provenance import provenance
from rich.console import Console
from rich.table import Table
from vs_trl_report import RESULTS
from weights_plan import bytes_per_link, config_of_shape, egress, plain_layout, wire_bytes

from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.layout.algebra import TensorSpec, volume
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import DTYPE_BYTES, ModelConfig
from penstock.weights.planner.plan import make_plan
from penstock.weights.planner.relay import relay_tree

GIB, MIB = float(1 << 30), float(1 << 20)
PLANNING_ROUNDS = 5
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Setting:
    """The transfer that is measured."""

    model: str = "qwen2_5_7b"
    num_training_ranks: int = 4
    tp_size: int = 4
    num_replicas: int = 2


def count_bytes() -> None:
    """The section `bytes`."""
    os.environ.update(vllm_environment("cuda" if torch.cuda.is_available() else "cpu", threads=1))
    setting = Setting()
    model = ModelConfig.model_validate(yaml.safe_load((ROOT / f"conf/model/{setting.model}.yaml").read_text()))
    tensors, item_bytes = module_tensors(config_of_shape(model.shape)), DTYPE_BYTES[model.dtype]
    model_bytes = sum(sizes := [prod(tensor.shape) * item_bytes for tensor in tensors])
    m2n = many_to_many(setting, model, tensors, item_bytes)
    broadcast = dict.fromkeys(("leaving_trainer_bytes", "max_egress_bytes"), model_bytes) | {
        "received_per_rank_bytes": [model_bytes] * setting.tp_size * setting.num_replicas,
        "gathered_bytes": model_bytes * (setting.num_training_ranks - 1) // setting.num_training_ranks,
        "largest_receive_bytes": max(sizes),
    }
    results = {
        "setting": asdict(setting) | {"dtype": model.dtype, "num_tensors": len(tensors), "model_bytes": model_bytes},
        "penstock": penstock(setting, model, tensors, item_bytes),
        "m2n": m2n,
        "broadcast": broadcast,
        "provenance": provenance(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "vllm": m2n.pop("version")},
        "command": ["benchmarks/weights.py", *sys.argv[1:]],
    }
    write("weights_bytes", "Bytes of a weight update", *bytes_table(results), results)


def penstock(setting: Setting, model: ModelConfig, tensors: list[TensorSpec], item_bytes: int) -> dict[str, Any]:
    """The plan for the first engine, and the relay from there."""
    planning_s = []
    destination = plain_layout(config_of_shape(model.shape), tensors, model.dtype, setting.tp_size)
    for _ in range(PLANNING_ROUNDS):
        started = time.perf_counter()
        source = TrainingSharding(tuple(tensors), setting.num_training_ranks, is_partitioned=True).layout()
        plan = make_plan(source, destination, item_bytes)
        planning_s.append(time.perf_counter() - started)
    needed = sum(volume(shard.box) for shards in destination.shards.values() for shard in shards)
    links = bytes_per_link(plan)
    received = [sum(size for (_, dst), size in links.items() if dst == rank) for rank in range(setting.tp_size)]
    hops = relay_tree([f"node{replica}" for replica in range(setting.num_replicas)])
    return {
        "received_per_rank_bytes": received * (1 + len(hops)),
        "leaving_trainer_bytes": wire_bytes(plan),
        "max_egress_bytes": max(egress(plan).values()),
        "relayed_bytes": len(hops) * wire_bytes(plan),
        "lower_bound_bytes": setting.num_replicas * needed * item_bytes,  # the engines own nothing before
        "largest_receive_bytes": plan.bucket_bytes,
        "num_copies": sum(1 for _ in plan.copies),
        "num_buckets": len(plan.buckets),
        "planning_s": planning_s,
    }


def many_to_many(setting: Setting, model: ModelConfig, tensors: list[TensorSpec], item_bytes: int) -> dict[str, Any]:
    """Bytes that each engine rank receives by vLLM's plan."""
    import vllm
    from vllm.distributed.weight_transfer.m2n_common import M2NMesh, resolve_layout, shard_count
    from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations

    mesh = M2NMesh((setting.num_replicas, setting.tp_size), start_rank=setting.num_training_ranks)
    names, shapes = [tensor.name for tensor in tensors], [tensor.shape for tensor in tensors]
    sizes = [prod(shape) * item_bytes for shape in shapes]
    received = []
    for rank in range(setting.tp_size):
        destinations = resolve_parameter_destinations(
            vllm_model(model, setting.tp_size, rank),
            names,
            [getattr(torch, model.dtype)] * len(names),
            shapes,
            num_workers=mesh.size,
            shard_axis_size=setting.tp_size,
            allow_direct=True,  # as M2NWeightTransferEngine sets it without quantization and pipeline stages
        )
        parts = [shard_count(*resolve_layout(mesh, destination.placements)) for destination in destinations]
        received.append(sum(size // count for size, count in zip(sizes, parts, strict=True)))
    whole = [size for size, destination in zip(sizes, destinations, strict=True) if not destination.direct]
    direct = [destination.name for destination in destinations if destination.direct]
    return {
        "received_per_rank_bytes": received * setting.num_replicas,
        "leaving_trainer_bytes": sum(sizes),
        "max_egress_bytes": sum(sizes) // setting.num_training_ranks,
        "largest_receive_bytes": max(whole),
        "whole_bytes": sum(whole),
        "num_direct": len(direct),
        "direct": sorted({name.rpartition("layers.")[2].partition(".")[2] for name in direct}),
        "version": vllm.__version__,
    }


def vllm_model(model: ModelConfig, tp_size: int, rank: int) -> Any:
    """vLLM's model class of one rank, on the meta device.

    Private API: there are no process groups, so those of `parallel_state` are replaced by stubs with a rank.
    """
    import torch
    from transformers import Qwen2Config
    from vllm import config as vllm
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    alone = SimpleNamespace(rank_in_group=0, world_size=1, is_first_rank=True, is_last_rank=True)
    own = SimpleNamespace(rank_in_group=rank, world_size=tp_size)
    vars(parallel_state).update(_TP=own, _PP=alone, _DP=alone, _PCP=alone)
    config = Qwen2Config(
        num_hidden_layers=model.shape.num_layers,
        num_attention_heads=model.shape.num_heads,
        num_key_value_heads=model.shape.num_kv_heads,
        architectures=["Qwen2ForCausalLM"],
        **model.shape.model_dump(include={"vocab_size", "hidden_size", "intermediate_size", "tie_word_embeddings"}),
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        model_config = vllm.ModelConfig(folder, skip_tokenizer_init=True, dtype=model.dtype, max_model_len=1024)
        parallel = vllm.ParallelConfig(tensor_parallel_size=tp_size, distributed_executor_backend="mp")
        torch.set_default_dtype(model_config.dtype)
        built = vllm.VllmConfig(model_config=model_config, parallel_config=parallel)
        with vllm.set_current_vllm_config(built), torch.device("meta"):
            return initialize_model(built)


def bytes_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes."""
    ours, m2n, broadcast, setting = (results[key] for key in ("penstock", "m2n", "broadcast", "setting"))
    methods, bound = (ours, m2n, broadcast), ours["lower_bound_bytes"]
    totals = [sum(method["received_per_rank_bytes"]) for method in methods]

    def gib(key: str, least: str = "") -> list[str]:
        return [f"{'' if method is ours else least}{method.get(key, 0) / GIB:.2f}" for method in methods]

    rows = [
        ["received by all engine ranks, GiB", *(f"{total / GIB:.2f}" for total in totals)],
        ["÷ what they need and do not own", *(f"{total / bound:.3f}" for total in totals)],
        ["received by one engine rank, GiB", *(f"{max(m['received_per_rank_bytes']) / GIB:.2f}" for m in methods)],
        ["leaving the trainer, GiB", *gib("leaving_trainer_bytes", "≥ ")],
        ["sent by the busiest training rank, GiB", *gib("max_egress_bytes", "≥ ")],
        ["gathered within the trainer before, GiB", *gib("gathered_bytes")],
        ["relayed from engine to engine, GiB", f"{ours['relayed_bytes'] / GIB:.2f}", "up to the library", "up to NCCL"],
        [
            "largest receive (bucket, else tensor), MiB",
            *(f"{method['largest_receive_bytes'] / MIB:,.0f}" for method in methods),
        ],
    ]
    count, planning_s = setting["num_tensors"], ours["planning_s"]
    notes = [
        f"{setting['model']}, {setting['dtype']}, {setting['model_bytes'] / GIB:.2f} GiB in {count} tensors; "
        f"{setting['num_training_ranks']} ZeRO-3 ranks to {setting['num_replicas']} engines × {setting['tp_size']} "
        "tensor-parallel ranks, which own nothing before; counted from the plans, nothing was sent",
        f"Penstock: {ours['num_copies']:,} copies in {ours['num_buckets']} buckets, planned once per run in "
        f"{median(planning_s):.2f} s (median of {', '.join(f'{seconds:.2f}' for seconds in planning_s)})",
        f"vLLM M-to-N: of {count} tensors {m2n['num_direct']} go direct ({', '.join(m2n['direct'])}), a shard to each "
        f"rank; the others, {m2n['whole_bytes'] / GIB:.2f} GiB, reach every rank whole and go through load_weights. "
        "From vLLM's resolve_parameter_destinations on its own model class of each rank (meta device), resolve_layout "
        "and shard_count over its 2-axis mesh (replicas × tensor-parallel ranks)",
        "≥: every element leaves the trainer once; whether replicas share it is up to nccl_m2n, and to NCCL",
        *results["provenance"],
        ", ".join(f"{name} {number}" for name, number in results["versions"].items()),
        f"by: python {' '.join(results['command'])}",
    ]
    return ["", "Penstock", "vLLM M-to-N", "gather and broadcast"], rows, notes


def write(stem: str, title: str, header: list[str], rows: list[list[str]], notes: list[str], results: Any) -> None:
    """The table on the console and in `stem`.md; everything in `stem`.json."""
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table, *notes, sep="\n")
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    text = [f"# {title}", "", *lines, "", *(f"- {note}" for note in notes)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{stem}.md").write_text("\n".join(text) + "\n")
    (RESULTS / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(f"written to {RESULTS.relative_to(ROOT)}/{stem}.md and {stem}.json")


def measure_time() -> None:
    """The section `time`: benchmarks/weights_time.py."""
    from weights_time import time_publish, time_table

    results = time_publish() | {"provenance": provenance(), "torch": version("torch")}
    header, rows, notes = time_table(results)
    notes += [*results["provenance"], f"torch {results['torch']}", "by: python benchmarks/weights.py time"]
    write("weights_time", "Time of a weight update through shared memory", header, rows, notes, results)


def measure_stall() -> None:
    """The section `stall`: benchmarks/weights_stall.py."""
    from weights_stall import stall_table, time_stalls

    results = time_stalls() | {"provenance": provenance(), "torch": version("torch")}
    header, rows, notes = stall_table(results)
    notes += [*results["provenance"], f"torch {results['torch']}", "by: python benchmarks/weights.py stall"]
    write("weights_stall", "Stall of generation by a weight update", header, rows, notes, results)


def measure_delta(policy: Path) -> None:
    """The section `delta`: benchmarks/weights_delta.py."""
    from weights_delta import delta_table, measure_codecs

    results = measure_codecs(policy) | {"provenance": provenance(), "torch": version("torch")}
    header, rows, notes = delta_table(results)
    notes += [*results["provenance"], f"torch {results['torch']}", "by: python benchmarks/weights.py delta"]
    write("weights_delta", "Bytes of real training steps, by codec", header, rows, notes, results)


SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "bytes": lambda _: count_bytes(),
    "time": lambda _: measure_time(),
    "stall": lambda _: measure_stall(),
    "delta": lambda arguments: measure_delta(arguments.policy),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument(
        "--policy", type=Path, default=Path("runs/arithmetic_sft-seed0/policy"), help="of `delta`: the warm start"
    )
    arguments = parser.parse_args()
    SECTIONS[arguments.section](arguments)


if __name__ == "__main__":
    main()
