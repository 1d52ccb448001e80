"""What `vllm_layout` says of a rank is what vLLM's own model class and weight loaders make there.

Each rank's model is built without an engine: vLLM asks `parallel_state` for its place among the ranks, and is told.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from penstock.rollout.vllm_environment import vllm_environment
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.decoder import decoder_tensors
from penstock.weights.layout.training import training_layout
from penstock.weights.layout.vllm import vllm_layout
from penstock.weights.model_config import ModelShape
from penstock.weights.planner.plan import make_plan
from tests.unit.weights.models import PADDING, numbered, small
from tests.unit.weights.test_reshard_plans import carried_out

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
CONF = Path(__file__).parents[2] / "conf" / "model"
Build = Callable[["Case", int, int, str], Any]


class Case(NamedTuple):
    """A model on both sides.

    Attributes:
        config: What vLLM's configuration needs beyond `shape`.
    """

    model_type: str
    architecture: str
    shape: ModelShape
    tensors: list[TensorSpec]
    config: Mapping[str, object] = {}


def dense(model_type: str, architecture: str, **changes: object) -> Case:
    shape = small(**{"hidden_size": 32, "head_dim": 4} | changes)
    return Case(model_type, architecture, shape, decoder_tensors(shape))


def gemma() -> Case:
    case = dense("gemma3_text", "Gemma3ForCausalLM", qk_norm=True, tie_word_embeddings=True, num_kv_heads=1)
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    more = [TensorSpec(f"model.layers.{i}.{norm}.weight", (case.shape.hidden_size,)) for i in (0, 1) for norm in norms]
    return case._replace(tensors=case.tensors + more)


def mixture(model_type: str, architecture: str, shared_rows: int = 0, **changes: object) -> Case:
    """A mixture of experts, stacked as transformers 5 stacks them, with a shared expert if `shared_rows`."""
    rows, experts = 16, 5
    sizes = {"num_experts": experts, "expert_size": rows, "shared_expert_size": shared_rows}
    case = dense(model_type, architecture, hidden_size=64, **sizes, **changes)
    config = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": rows}
    return case._replace(config=config | {"shared_expert_intermediate_size": shared_rows})


CASES = {
    "qwen2": dense("qwen2", "Qwen2ForCausalLM", attention_bias=True, vocab_size=131),
    "qwen2_tied": dense("qwen2", "Qwen2ForCausalLM", attention_bias=True, tie_word_embeddings=True),
    "qwen3": dense("qwen3", "Qwen3ForCausalLM", qk_norm=True, num_kv_heads=8, head_dim=6, hidden_size=28),
    "llama": dense(
        "llama", "LlamaForCausalLM", num_heads=12, hidden_size=36, num_kv_heads=4, head_dim=10, vocab_size=1001
    ),
    "gemma3": gemma(),
    "qwen3_moe": mixture("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, num_kv_heads=4, head_dim=6),
    "qwen2_moe": mixture("qwen2_moe", "Qwen2MoeForCausalLM", 24, attention_bias=True, head_dim=8),
}


def config_of(case: Case) -> dict[str, object]:
    """The model's config.json."""
    shape = case.shape
    same = shape.model_dump(exclude={"num_layers", "num_heads", "num_kv_heads", "attention_bias", "qk_norm"})
    heads = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    return {
        **same,
        **heads,
        "num_hidden_layers": shape.num_layers,
        "model_type": case.model_type,
        "architectures": [case.architecture],
        "bos_token_id": 1,
        **case.config,
    }


def group(rank: int, size: int) -> Any:
    """Stands for a process group of vLLM's: while it builds a model and loads weights it asks only who it is."""
    ranks = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    ends = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1}
    return SimpleNamespace(world_size=size, rank_in_group=rank, device_group=ranks, **ends)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    """The environment of an engine actor, set before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", threads=1).items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture
def build(patch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """vLLM's model of one rank, before anything is loaded. Private: the groups of `parallel_state`."""
    from transformers import AutoConfig
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    def built(case: Case, tp: int, rank: int, device: str) -> Any:
        config = config_of(case)
        AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(tmp_path)
        whole = {name: group(0, 1) for name in ("_PP", "_DP", "_PCP", "_DCP")}
        for name, standing in (whole | {"_TP": group(rank, tp), "_EP": group(rank, tp)}).items():
            patch.setattr(parallel_state, name, standing)
        vllm_config = VllmConfig(
            model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32", max_model_len=32),
            parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp"),
        )
        with set_current_vllm_config(vllm_config), torch.device(device):
            return initialize_model(vllm_config)

    return built


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_what_vllm_loads_is_where_the_layout_says(name: str, tp: int, build: Build) -> None:
    case = CASES[name]
    full = numbered(case.tensors)
    source, destination = training_layout(case.tensors), vllm_layout(case.tensors, case.shape, tp)
    ours = carried_out(make_plan(source, destination, 4), source, destination, full)
    for rank in range(tp):
        model = build(case, tp, rank, "cpu")
        for parameter in model.parameters():
            parameter.data.fill_(PADDING)
        model.load_weights((tensor, torch.from_numpy(values).float()) for tensor, values in full.items())
        theirs = {buffer: parameter.detach() for buffer, parameter in model.named_parameters()}
        assert theirs.keys() == ours[rank].keys()
        for buffer, values in ours[rank].items():
            is_padding = values == PADDING
            assert theirs[buffer].is_contiguous()
            assert theirs[buffer].numel() == values.size, buffer
            held = theirs[buffer].numpy().ravel()
            np.testing.assert_array_equal(held[~is_padding], values[~is_padding], err_msg=f"rank {rank}: {buffer}")
            assert (held[is_padding] <= 0).all(), f"rank {rank}: {buffer} holds more than the layout says"
            assert not is_padding.any() or buffer.endswith(("embed_tokens.weight", "lm_head.weight"))


@pytest.mark.parametrize(
    ("name", "tp"), [("qwen2_5_0_5b_instruct", 1), ("qwen2_5_0_5b_instruct", 2), ("qwen2_5_7b", 1), ("qwen2_5_7b", 4)]
)
def test_the_models_that_we_ship_configurations_of_have_these_sizes_in_vllm(name: str, tp: int, build: Build) -> None:
    shape = ModelShape.model_validate(yaml.safe_load((CONF / f"{name}.yaml").read_text())["shape"])
    case = Case("qwen2", "Qwen2ForCausalLM", shape, decoder_tensors(shape))
    ours = vllm_layout(case.tensors, shape, tp)
    for rank in {0, tp - 1}:
        parameters = build(case, tp, rank, "meta").named_parameters()
        assert {buffer: parameter.numel() for buffer, parameter in parameters} == ours.buffers[rank]
