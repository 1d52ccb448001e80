"""Layouts read from vLLM's own loaders: those that are frozen, and of twelve architectures what the loaders write.

Each rank's model is built without an engine: vLLM asks `parallel_state` for its place among the ranks, and is told.
"""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.checksum import tensor_checksum
from penstock.weights.hf_folder import shape_of, transformers_config
from penstock.weights.layout.algebra import TensorSpec, volume, whole
from penstock.weights.layout.checkpoint_names import (
    checkpoint_tensors,
    model_without_memory,
    module_tensors,
)
from penstock.weights.planner.plan import make_plan
from tests import layouts
from tests.layouts import training_layout
from tests.unit.weights.models import PADDING, buffers_of, numbered
from tests.unit.weights.test_reshard_plans import carried_out

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
CONF = Path(__file__).parents[2] / "conf" / "model"
DAILY = {"qwen3", "qwen3_moe", "gpt_oss"}
"""What is tried every day; everything else in `make test-full`."""


class Case(NamedTuple):
    """A model in the trainer and in the engine.

    Attributes:
        config: Of transformers.
        tensors: What a trainer of it has.
    """

    config: Any
    tensors: list[TensorSpec]


def case(model_type: str, **fields: object) -> Case:
    from transformers import AutoConfig

    sizes = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    known = {name: value for name, value in (sizes | fields).items() if value is not None}
    config = AutoConfig.for_model(model_type, **known)
    config.architectures = [type(model_without_memory(config)).__name__]
    return Case(config, module_tensors(config))


EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MODELS: dict[str, Mapping[str, object]] = {
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 8},
    "llama": {"vocab_size": 1001},
    "gemma2": {},
    "gemma3_text": {"num_key_value_heads": 1},
    "phi3": {"num_key_value_heads": 8},
    "mistral": {},
    "glm4": {"num_key_value_heads": 2},
    "qwen3_moe": EXPERTS | {"num_experts": 9},
    "qwen2_moe": EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 64},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "num_key_value_heads": 8, "intermediate_size": 256},  # in blocks of 32
    "falcon": {"multi_query": True, "head_dim": None},
    "gpt2": {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64},
}


@pytest.fixture(scope="module", autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    """The environment of an engine actor, set before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", threads=1).items():
            patch.setenv(name, value)
        yield patch


def build(case: Case, tp: int, device: str) -> Any:
    """vLLM's model of the rank that this process simulates, before anything is loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from penstock.rollout.engines.vllm.layout import plain_config

    vllm_config = plain_config(case.config, "float32", tp)
    with set_current_vllm_config(vllm_config), torch.device(device):
        return initialize_model(vllm_config)


def daily(names: Mapping[str, object] | tuple[str, ...], is_daily: Callable[[str], bool]) -> list[Any]:
    return [name if is_daily(name) else pytest.param(name, marks=pytest.mark.full) for name in names]


LOADED = tuple(name for name in layouts.NAMES if name.startswith("loaded_"))
SHAPES = {
    "loaded_qwen2": ("qwen2", {"vocab_size": 131}),
    "loaded_qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "loaded_qwen3": ("qwen3", {"num_key_value_heads": 8, "head_dim": 6, "hidden_size": 28}),
    "loaded_llama": (
        "llama",
        {"num_attention_heads": 12, "hidden_size": 36, "num_key_value_heads": 4, "head_dim": 10, "vocab_size": 1001},
    ),
    "loaded_gemma3": ("gemma3_text", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "loaded_qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"hidden_size": 64, "moe_intermediate_size": 16, "num_key_value_heads": 4, "head_dim": 6},
    ),
    "loaded_qwen2_moe": (
        "qwen2_moe",
        EXPERTS
        | {"hidden_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "head_dim": 8},
    ),
}
"""Of the frozen layouts that vLLM was compared with before they were frozen."""


def frozen_case(name: str) -> Case:
    model_type, fields = SHAPES[name]
    small = {"vocab_size": 515, "hidden_size": 32, "intermediate_size": 40, "num_key_value_heads": 2, "head_dim": 4}
    return case(model_type, **small | fields)._replace(tensors=layouts.read(name).tensors)


@pytest.mark.parametrize("name", daily(LOADED, lambda name: name in ("loaded_qwen2", "loaded_qwen3_moe")))
def test_what_is_read_from_the_loader_is_the_frozen_layout(name: str) -> None:
    from benchmarks.weights_plan import plain_layout

    config, tensors = frozen_case(name)
    full = numbered(tensors)
    for tp, frozen in layouts.read(name).layouts.items():
        if tp > getattr(config, "num_experts", tp):
            continue  # vLLM refuses it
        read = plain_layout(config, tensors, "float32", tp)
        assert list(map(dict, read.buffers)) == list(map(dict, frozen.buffers))
        for ours, before in zip(buffers_of(read, full), buffers_of(frozen, full), strict=True):
            for buffer, values in before.items():
                np.testing.assert_array_equal(ours[buffer], values, err_msg=f"{tp}: {buffer}")


@pytest.mark.parametrize("tp", [1, 2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", daily(MODELS, lambda name: name in DAILY))
def test_what_the_loader_writes_is_where_the_plan_puts_it(name: str, tp: int) -> None:
    """Bit for bit: numbers of which no two are equal, by our plan and by vLLM's own loader."""
    from benchmarks.weights_plan import plain_layout
    from penstock.rollout.engines.vllm.layout import stand_in_groups

    model = case(name, **MODELS[name])
    full = numbered(model.tensors)
    source, destination = training_layout(model.tensors), plain_layout(model.config, model.tensors, "float32", tp)
    ours = carried_out(make_plan(source, destination, 4), source, destination, full)
    given = {tensor: torch.from_numpy(values).float() for tensor, values in full.items()}
    for rank in range(tp):
        with stand_in_groups(rank, tp):
            theirs = loaded(model, tp, checkpoint_tensors(model.config, given))
        assert theirs.keys() == ours[rank].keys()
        for buffer, values in ours[rank].items():
            is_padding = values == PADDING
            np.testing.assert_array_equal(theirs[buffer][~is_padding], values[~is_padding], err_msg=f"{rank}: {buffer}")
            assert (theirs[buffer][is_padding] <= 0).all(), f"rank {rank}: {buffer} holds more than the layout says"


def loaded(model: Case, tp: int, given: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """What vLLM's loader makes of real tensors: flat parameters."""
    made = build(model, tp, "cpu")
    for parameter in made.parameters():
        parameter.data.fill_(PADDING)
    made.load_weights(iter(given.items()))
    assert all(parameter.is_contiguous() for parameter in made.parameters())
    return {name: parameter.detach().numpy().ravel() for name, parameter in made.named_parameters()}


def gathered(model: Case) -> tuple[dict[str, torch.Tensor], WeightManifest]:
    """A version of whole tensors, in none of which two elements are equal, and its manifest."""
    sent = {name: torch.from_numpy(values).float() + 1 for name, values in numbered(model.tensors).items()}
    entries = tuple(
        TensorEntry(name, "float32", tuple(tensor.shape), tensor_checksum(tensor)) for name, tensor in sent.items()
    )
    return sent, WeightManifest(1, "nowhere", entries, 0, 0)


def receive(model: Any, known: Case, sent: Mapping[str, torch.Tensor], manifest: WeightManifest) -> None:
    """Load whole tensors into a model, as a worker does."""
    from penstock.rollout.engines.vllm.worker import SharedMemoryTransfer, SharedMemoryUpdate, _states

    transfer = SharedMemoryTransfer.__new__(SharedMemoryTransfer)
    transfer.model = model
    transfer.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=known.config))
    update = SimpleNamespace(manifest=manifest, staged=SimpleNamespace(values=sent))
    _states[model] = SimpleNamespace(update=update)  # type: ignore[assignment]
    transfer.receive_weights(SharedMemoryUpdate(manifest.version))
    assert update.staged is None


GATHERED = (*SHAPES, "gpt2", "mixtral")


@pytest.mark.parametrize("name", daily(GATHERED, lambda name: name == "mixtral"))
def test_whole_tensors_are_proven_to_be_in_the_model_whatever_it_calls_them(name: str) -> None:
    from penstock.rollout.engines.vllm.layout import stand_in_groups
    from penstock.rollout.engines.vllm.live import LiveTensors

    known = case(name, **MODELS[name]) if name in MODELS else frozen_case(name)
    sent, manifest = gathered(known)
    with stand_in_groups(0, 1):
        model = build(known, 1, "cpu")
    live = LiveTensors(model, manifest)
    is_known = name not in ("gpt2", "mixtral", "loaded_qwen3_moe", "loaded_qwen2_moe")
    assert bool(live.unplaced) == bool(live.unaccounted) == (not is_known)
    assert live.refusal() == ""
    receive(model, known, sent, manifest)
    found, wrong = live.checksums(sent)
    assert wrong == ""
    assert found == {entry.name: entry.checksum for entry in manifest.entries}
    stale = dict(model.named_parameters())[next(iter(live.unaccounted), "model.norm.weight")]
    stale.data.view(-1)[1] += 1
    again, wrong = live.checksums(sent)
    if is_known:
        assert [tensor for tensor in again if again[tensor] != found[tensor]] == ["model.norm.weight"]
    else:
        assert f"vLLM's loader accepted {live.unplaced[0].name}" in wrong


@pytest.mark.full
def test_whole_tensors_that_the_model_does_not_have_are_refused_by_name() -> None:
    from penstock.rollout.engines.vllm.layout import stand_in_groups
    from penstock.rollout.engines.vllm.live import LiveTensors

    known = frozen_case("loaded_qwen3")
    with stand_in_groups(0, 1):
        model = build(known, 1, "meta")
    _, manifest = gathered(known)
    foreign = TensorEntry("model.layers.0.attn.Wqkv.weight", "float32", (8, 28), 0)
    more = LiveTensors(model, replace(manifest, entries=(*manifest.entries, foreign)))
    assert "model.layers.0.attn.Wqkv.weight has no place in this engine's model" in more.refusal()
    assert "1 such tensors have 224 elements, this engine has space for 0" in more.refusal()
    less = LiveTensors(model, replace(manifest, entries=manifest.entries[:-1]))
    assert f"parameter {manifest.entries[-1].name} of this engine is not in the version" in less.refusal()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 1),
        ("Qwen/Qwen2.5-0.5B-Instruct", 2),
        ("Qwen/Qwen2.5-7B", 1),
        ("Qwen/Qwen2.5-7B", 4),
        ("Qwen/Qwen3-30B-A3B-Base", 4),
    ],
)
def test_of_the_models_that_we_ship_configurations_of_every_element_is_on_an_engine_rank(name: str, tp: int) -> None:
    from benchmarks.weights_plan import plain_layout

    file = CONF / "public" / f"{name}.json"
    config = transformers_config(file)
    shape = shape_of(config, file)
    tensors = module_tensors(config)
    assert sum(volume(whole(tensor.shape)) for tensor in tensors) == pytest.approx(shape.num_parameters, rel=0.001)
    layout = plain_layout(config, tensors, "bfloat16", tp)
    for tensor in tensors:
        boxes = {shard.box for shard in layout.shards[tensor.name]}  # of replicas, one
        assert sum(map(volume, boxes)) == volume(whole(tensor.shape)), tensor.name


def test_a_loader_that_computes_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from benchmarks.weights_plan import plain_layout

    model = frozen_case("loaded_qwen3")
    really = Qwen3ForCausalLM.load_weights

    def halved(self: Any, weights: Any) -> Any:
        return really(self, ((name, tensor / 2 if "o_proj" in name else tensor) for name, tensor in weights))

    monkeypatch.setattr(Qwen3ForCausalLM, "load_weights", halved)
    with pytest.raises(WeightSyncError, match=r"o_proj\.weight are computed by aten\.div.*weights\.transport=gather"):
        plain_layout(model.config, model.tensors, "float32", 1)

    def forgotten(self: Any, weights: Any) -> Any:
        return really(self, ((name, tensor) for name, tensor in weights if "layers.1.mlp.down_proj" not in name))

    monkeypatch.setattr(Qwen3ForCausalLM, "load_weights", forgotten)
    with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.down_proj\.weight .* is nowhere in the engine"):
        plain_layout(model.config, model.tensors, "float32", 1)
    monkeypatch.undo()
    with pytest.raises(WeightSyncError, match=r"parameter model\.norm\.weight .* would keep old weights"):
        plain_layout(model.config, [one for one in model.tensors if one.name != "model.norm.weight"], "float32", 1)


def test_a_worker_reports_where_its_layout_and_its_live_model_differ() -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.v1.engine import UtilityResult
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from penstock.rollout.engines.vllm.layout import joined, plain_config, stand_in_groups
    from penstock.rollout.engines.vllm.worker import WorkerExtension

    model, answers = frozen_case("loaded_qwen3"), []
    rows = [(name, list(shape)) for name, shape in model.tensors]
    for rank in range(2):
        vllm_config = plain_config(model.config, "float32", 2)
        with stand_in_groups(rank, 2):
            with set_current_vllm_config(vllm_config):
                live = initialize_model(vllm_config)
                process_weights_after_loading(live, vllm_config.model_config, torch.device("cpu"))
            worker = WorkerExtension()
            worker.model_runner = SimpleNamespace(vllm_config=vllm_config, get_model=lambda live=live: live)
            answers.append(worker.penstock_layout(rows, "float32"))
            before = dict(live.named_parameters())["model.norm.weight"].data
            live.model.norm.weight.data = before[:-1]
            _, refusal, _ = worker.penstock_layout(rows, "float32")
            assert f"model.norm.weight is (27,) with strides (1,) in rank {rank} of the engine" in refusal
    sent = MsgpackEncoder().encode(UtilityResult(answers))
    told = MsgpackDecoder(UtilityResult).decode(sent).result
    assert [refusal for _, refusal, _ in told] == ["", ""]
    layout, full = joined([pickle.loads(traced) for _, _, traced in told]), numbered(model.tensors)
    for ours, before in zip(
        buffers_of(layout, full), buffers_of(layouts.read("loaded_qwen3").layouts[2], full), strict=True
    ):
        assert all(np.array_equal(ours[buffer], values) for buffer, values in before.items())


def test_an_engine_that_holds_its_weights_in_another_form_than_it_loads_them_is_refused() -> None:
    from penstock.rollout.engines.vllm.layout import check_live, form_of

    loaded = form_of({"w": torch.empty(4, 6), "v": torch.empty(3)})
    check_live(loaded, form_of({"w": torch.empty(4, 6), "v": torch.empty(3)}), 0)
    with pytest.raises(
        WeightSyncError, match=r"w is \(4, 6\) with strides \(1, 4\) in rank 1 .*weights\.transport=gather"
    ):
        check_live(loaded, form_of({"w": torch.empty(6, 4).t(), "v": torch.empty(3)}), 1)
    with pytest.raises(WeightSyncError, match=r"v is absent in rank 0"):
        check_live(loaded, form_of({"w": torch.empty(4, 6)}), 0)
