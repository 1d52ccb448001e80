"""What vLLM decides on a GPU that is not there: `python -m tests.contract.vllm_on_a_gpu DEVICE CASES ANSWERS`.

In a process of its own, because vLLM looks for its platform once. DEVICE `cuda` gets vLLM's CUDA platform with the
facts of an H100, `cpu` the platform of the installed build. CASES is a pickled list of `Case`, ANSWERS one of `Answer`.
Models are built on the meta device, and vLLM's compiled operators only have names: nothing is computed.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment

GIB = 1 << 30
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Modules of vLLM's CUDA build."""
NAMESPACES = ("_C", "_C_cache_ops", "_C_cuda_utils", "_C_custom_ar", "_moe_C")
"""Of its operators, which get a name when they are looked up."""


class Case(NamedTuple):
    """An engine, and what the trainer publishes to it; nothing if its layout is not wanted."""

    spec: EngineSpec
    tensors: list[tuple[str, tuple[int, ...]]]


class Answer(NamedTuple):
    """Attributes:
    decisions: What vLLM made of the engine's arguments, by name.
    layout: Where the engine's ranks hold each tensor.
    """

    decisions: dict[str, Any]
    layout: Any


def pretend_to_have_gpus() -> None:
    """Give this process vLLM's CUDA platform, with eight H100."""
    from triton.backends import backends

    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    for name in COMPILED:
        sys.modules[name] = ModuleType(name)
    from vllm import platforms

    platforms.vllm_version_matches_substr = lambda _part: False  # it is not the CPU build
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 * GIB

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms._current_platform = Hopper()
    define_operators_on_demand()


def define_operators_on_demand() -> None:
    """Layers look operators up when they are built. Those that ask what a kernel supports say no."""
    import torch

    libraries = {name: torch.library.Library(name, "FRAGMENT") for name in NAMESPACES}
    plain, asked = torch._ops._OpNamespace.__getattr__, set[str]()

    def lookup(namespace: Any, name: str) -> Any:
        try:
            return plain(namespace, name)
        except AttributeError:
            library = libraries.get(namespace.name)
            if library is None or name.startswith("__") or name in asked:  # `define` asks, too
                raise
        asked.add(name)
        if "supports" in name:
            library.define(f"{name}(int capability) -> bool")
            library.impl(name, lambda _capability: False, "CompositeExplicitAutograd")
        else:
            library.define(f"{name}(Tensor x) -> Tensor")
            library.define(f"{name}.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        return plain(namespace, name)

    torch._ops._OpNamespace.__getattr__ = lookup  # type: ignore[method-assign]


def answer(case: Case) -> Answer:
    """Validate the engine's arguments as `AsyncLLM.from_engine_args` does, and trace its ranks as its workers do."""
    from vllm.v1.executor.abstract import Executor

    from penstock.rollout.engines.vllm.arguments import USAGE, engine_args
    from penstock.rollout.engines.vllm.layout import joined, stand_in_groups, trace_rank
    from penstock.weights.layout.algebra import TensorSpec

    spec = case.spec
    arguments = engine_args(spec, spec.engine)  # type: ignore[arg-type]
    config = arguments.create_engine_config(USAGE)
    tensors = [TensorSpec(name, shape) for name, shape in case.tensors]
    ranks = []
    for rank in range(arguments.tensor_parallel_size if tensors else 0):
        with stand_in_groups(rank, arguments.tensor_parallel_size):
            ranks.append(trace_rank(config, tensors, spec.model.dtype, rank))
    decisions = {
        "v2_runner": config.use_v2_model_runner,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "scheduler": config.scheduler_config.get_scheduler_cls().__name__,
        "executor": Executor.get_class(config).__name__,
        "worker": config.parallel_config.worker_cls,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "compilation": config.compilation_config.mode.name,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "dtype": str(config.model_config.dtype),
        "head_dtype": str(config.model_config.head_dtype),
        "logprobs_mode": config.model_config.logprobs_mode,
        "max_model_len": config.model_config.max_model_len,
        "batch_tokens": config.scheduler_config.max_num_batched_tokens,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "cache_dtype": config.cache_config.cache_dtype,
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "weight_transfer": config.weight_transfer_config.backend,
    }
    return Answer(decisions, joined(ranks) if ranks else None)


def main(device: str, cases: str, answers: str) -> None:
    os.environ |= vllm_environment("cuda" if device == "cuda" else "cpu", threads=1)
    if device == "cuda":
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        pretend_to_have_gpus()
    given: list[Case] = pickle.loads(Path(cases).read_bytes())
    Path(answers).write_bytes(pickle.dumps([answer(case) for case in given]))


if __name__ == "__main__":
    from tests.contract import vllm_on_a_gpu  # not as __main__: its classes are pickled for the test

    vllm_on_a_gpu.main(*sys.argv[1:])
