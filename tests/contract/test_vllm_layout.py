"""What `vllm_layout` says of a rank is what vLLM's own model class and weight loaders make there.

Each rank's model is built without an engine: vLLM asks `parallel_state` for its place among the ranks, and is told.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.rollout.vllm_environment import vllm_environment
from penstock.weights.checksum import tensor_checksum
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
    pytest.mark.full,
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


def gpt2() -> Case:
    """Neither our layouts nor the names of a fused parameter know it; its linear weights lie the other way round."""
    shape = small(hidden_size=32, num_heads=4, num_kv_heads=4, head_dim=8, vocab_size=131)
    hidden = shape.hidden_size
    block = {"ln_1.weight": (hidden,), "ln_1.bias": (hidden,), "ln_2.weight": (hidden,), "ln_2.bias": (hidden,)}
    block |= {"attn.c_attn.weight": (hidden, 3 * hidden), "attn.c_attn.bias": (3 * hidden,)}
    block |= {"attn.c_proj.weight": (hidden, hidden), "attn.c_proj.bias": (hidden,)}
    block |= {"mlp.c_fc.weight": (hidden, 4 * hidden), "mlp.c_fc.bias": (4 * hidden,)}
    block |= {"mlp.c_proj.weight": (4 * hidden, hidden), "mlp.c_proj.bias": (hidden,)}
    tensors = [TensorSpec("transformer.wte.weight", (131, hidden)), TensorSpec("transformer.wpe.weight", (32, hidden))]
    tensors += [TensorSpec(f"transformer.h.{i}.{name}", size) for i in (0, 1) for name, size in block.items()]
    tensors += [TensorSpec(f"transformer.ln_f.{part}", (hidden,)) for part in ("weight", "bias")]
    config = {"n_embd": hidden, "n_head": 4, "n_layer": 2, "n_positions": 32, "tie_word_embeddings": True}
    return Case("gpt2", "GPT2LMHeadModel", shape, tensors, config)


GATHERED = CASES | {"gpt2": gpt2()}


def gathered(case: Case) -> tuple[dict[str, torch.Tensor], WeightManifest]:
    """A version of whole tensors, in none of which two elements are equal, and its manifest."""
    sent = {name: torch.from_numpy(values).float() + 1 for name, values in numbered(case.tensors).items()}
    entries = tuple(
        TensorEntry(name, "float32", tuple(tensor.shape), tensor_checksum(tensor)) for name, tensor in sent.items()
    )
    return sent, WeightManifest(1, "nowhere", entries, 0, 0)


@pytest.mark.parametrize("name", GATHERED)
def test_whole_tensors_are_proven_to_be_in_the_model_whatever_it_calls_them(name: str, build: Build) -> None:
    from penstock.rollout.vllm_live import LiveTensors

    case = GATHERED[name]
    sent, manifest = gathered(case)
    model = build(case, 1, 0, "cpu")
    live = LiveTensors(model, manifest)
    is_known = name in ("qwen2", "qwen2_tied", "qwen3", "llama", "gemma3")
    assert bool(live.unplaced) == bool(live.unaccounted) == (not is_known)
    assert live.refusal() == ""
    model.load_weights(iter(sent.items()))
    found, wrong = live.checksums(sent)
    assert wrong == ""
    assert found == {entry.name: entry.checksum for entry in manifest.entries}
    stale = dict(model.named_parameters())[next(iter(live.unaccounted), "model.norm.weight")]
    stale.data.view(-1)[1] += 1
    again, wrong = live.checksums(sent)
    if is_known:
        assert [tensor for tensor in again if again[tensor] != found[tensor]] == ["model.norm.weight"]
    else:
        assert f"vLLM's loader took {live.unplaced[0].name}" in wrong


def test_whole_tensors_that_the_model_has_no_place_for_are_refused_by_name(build: Build) -> None:
    from penstock.rollout.vllm_live import LiveTensors

    case = CASES["qwen3"]
    model = build(case, 1, 0, "meta")
    _, manifest = gathered(case)
    foreign = TensorEntry("model.layers.0.attn.Wqkv.weight", "float32", (8, 28), 0)
    more = LiveTensors(model, replace(manifest, entries=(*manifest.entries, foreign)))
    assert "model.layers.0.attn.Wqkv.weight has no place in this engine's model" in more.refusal()
    assert "1 such tensors have 224 elements, this engine has room for 0" in more.refusal()
    less = LiveTensors(model, replace(manifest, entries=manifest.entries[:-1]))
    assert f"parameter {manifest.entries[-1].name} of this engine is not in the version" in less.refusal()


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
