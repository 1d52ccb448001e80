"""Every family of causal language models, as a tiny instance chooses, gives what plain transformers gives: logprobs
and gradients of sequences in the trainer's rows, and of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import TrainingSequence, plan_rows, row_layout
from penstock.trainer.models import model_form
from penstock.trainer.models.policy_model import OwnLogits, PolicyModel
from penstock.trainer.models.tiny_instance import tiny_config
from penstock.weights.model_config import Head, ModelConfig, ModelForm, ModelShape, Rows

SIZES: Mapping[str, object] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}
LINEAR = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "initializer_range": 0.1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
PLAIN: tuple[Rows, Head, str] = ("packed", "fused", "sdpa")
FAMILIES: dict[str, tuple[tuple[Rows, Head, str], Mapping[str, object]]] = {
    "qwen2": (PLAIN, {}),
    "qwen3": (PLAIN, {}),
    "llama": (PLAIN, {}),
    "gemma3_text": (PLAIN, {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": (PLAIN, {}),
    "mistral": (PLAIN, {"sliding_window": 8}),
    "olmo2": (PLAIN, {}),
    "glm4": (PLAIN, {"partial_rotary_factor": 0.5}),
    "smollm3": (PLAIN, {"num_hidden_layers": 4}),
    "gpt2": (PLAIN, {"n_positions": 128}),
    "stablelm": (PLAIN, {}),
    "qwen3_moe": (PLAIN, EXPERTS),
    "olmoe": (PLAIN, EXPERTS),
    "mixtral": (PLAIN, EXPERTS),
    "gpt_oss": (("packed", "fused", "varlen"), EXPERTS | {"sliding_window": 8}),
    "granite": (("packed", "model", "sdpa"), {"logits_scaling": 6.0, "attention_multiplier": 0.1}),
    "granitemoe": (("packed", "model", "sdpa"), EXPERTS | {"logits_scaling": 6.0}),
    "cohere": (("packed", "model", "sdpa"), {"logit_scale": 0.3}),
    "gemma2": (("padded", "model", "eager"), {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "qwen3_5_text": (("padded", "fused", "sdpa"), LINEAR),
    "qwen3_5_moe_text": (("padded", "fused", "sdpa"), LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3_next": (("padded", "fused", "sdpa"), LINEAR | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "lfm2": (
        ("padded", "fused", "sdpa"),
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
         "conv_dim": 64, "conv_dim_out": 64, "block_dim": 64},
    ),
    "granitemoehybrid": (
        ("padded", "model", "sdpa"),
        MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "num_local_experts": 0,
                 "num_experts_per_tok": 0, "position_embedding_type": "nope", "logits_scaling": 6.0},
    ),
    "nemotron_h": (
        ("padded", "fused", "sdpa"),
        {"layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3, "mamba_num_heads": 8,
         "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16},
    ),
    "bloom": (("padded", "fused", "eager"), {}),
    "opt": (("packed", "fused", "sdpa"), {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}  # fmt: skip
TOLERANCE = 1e-5


def config_of(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family][1]))


def random_model(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def sequences() -> list[TrainingSequence]:
    """Of three prompts, with two answers each, most longer than a window, and a fork of the first one in its middle."""
    random = np.random.default_rng(1)
    found = []

    def add(context: np.ndarray, num_tokens: int) -> np.ndarray:
        ids = np.concatenate([context, random.integers(2, 96, num_tokens)])
        found.append(TrainingSequence(ids, np.arange(len(context), len(ids)), np.zeros(num_tokens, np.float32)))
        return ids

    for num_tokens, answers in ((7, (20, 4)), (1, (11, 30)), (12, (3, 9))):
        prompt = random.integers(2, 96, num_tokens)
        first, _ = (add(prompt, answer) for answer in answers)
        add(first[: (num_tokens + len(first)) // 2], 5)
    return found


def weights_of(sequence: TrainingSequence) -> torch.Tensor:
    """Upstream gradients of its logprobs, different for all."""
    return torch.cos(torch.arange(len(sequence.targets)) + float(sequence.token_ids.sum()))


def alone(config: Any) -> tuple[list[np.ndarray], dict[str, torch.Tensor]]:
    """Logprobs and gradient by plain transformers, with the model's own attention, one sequence after another."""
    model, found = random_model(config, "eager"), []
    for one in sequences():
        ids = torch.from_numpy(one.token_ids)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        logprobs = logits.gather(-1, ids[1:, None])[int(one.targets[0]) - 1 :, 0]
        (logprobs * weights_of(one)).sum().backward()
        found.append(logprobs.detach().numpy())
    return found, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def in_rows(config: Any, form: ModelForm, max_tokens: int) -> tuple[list[np.ndarray], dict[str, torch.Tensor], int]:
    """The same by the trainer's plan, rows and head; and the number of micro-batches."""
    causal_lm = random_model(config, form.attention)
    policy = PolicyModel(causal_lm, form.rows, form.head).train()
    causal_lm.eval()  # no dropout
    shape = ModelShape(vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
                       head_dim=16)  # fmt: skip
    model = ModelConfig(max_context_tokens=128, shape=shape, rows=form.rows, attention=form.attention)
    given = sequences()
    layout = row_layout(model)
    plan = plan_rows(given, 1, max_tokens, 1e-3, layout, share_prompts=True)
    found: list[np.ndarray] = [np.zeros(len(one.targets)) for one in given]
    for planned in plan.ranks[0]:
        batch = collate(planned, given, device=torch.device("cpu"), needs_mask=layout != "single_row")
        logprobs, _ = batch.inputs.call(policy, 1.0)
        pairs = list(zip(batch.sequence_index, batch.token_index, strict=True))
        upstream = torch.stack([weights_of(given[index])[token] for index, token in pairs])
        (logprobs * upstream).sum().backward()
        for (index, token), value in zip(pairs, logprobs.tolist(), strict=True):
            found[index][token] = value
    gradient = {name: one.grad for name, one in causal_lm.named_parameters() if one.grad is not None}
    return found, gradient, len(plan.ranks[0])


@pytest.mark.some(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_as_its_tiny_instance_chooses(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    config = config_of(family)
    form = model_form.ask(config, "sdpa", "cpu")
    for name, value in (("rows", form.rows), ("head", form.head), ("attention", form.attention)):
        record_property(name, value)  # tools/models_page.py
    record_property("experts", {"none": "none", "replay": "replayed", "current": "current"}[form.routing])
    assert form[:3] == FAMILIES[family][0], form.because
    has_experts = EXPERTS.items() <= FAMILIES[family][1].items()
    assert form.routing == ("replay" if has_experts else "none")
    logprobs, gradient = alone(config)
    for max_tokens in (1000, 60):
        found, found_gradient, count = in_rows(config, form, max_tokens)
        assert (count > 1) == (max_tokens == 60)
        for one, expected in zip(found, logprobs, strict=True):
            np.testing.assert_allclose(one, expected, atol=TOLERANCE)
        assert found_gradient.keys() == gradient.keys()
        largest = max(float(one.abs().max()) for one in gradient.values())
        for name, one in gradient.items():
            assert float((found_gradient[name] - one).abs().max()) <= TOLERANCE * largest, name


def test_what_generates_no_text_is_refused() -> None:
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="BertLMHeadModel is not causal: another last token changes a logit before"):
        model_form.ask(AutoConfig.for_model("bert"), "sdpa", "cpu")


def test_a_class_without_a_tiny_instance_gets_the_form_that_computes_every_causal_model() -> None:
    from transformers import AutoConfig

    form = model_form.ask(AutoConfig.for_model("reformer"), "sdpa", "cpu")
    assert form[:3] == ("padded", "model", "sdpa")
    assert "no tiny instance of it can be built" in form.because[0]


def test_packed_rows_would_be_wrong_where_a_state_runs_along_the_row() -> None:
    """What the choice guards against, with the same code."""
    config = config_of("qwen3_5_text")
    logprobs, _ = alone(config)
    found, _, _ = in_rows(config, ModelForm("packed", "fused", "sdpa"), 1000)
    assert max(float(np.abs(one - other).max()) for one, other in zip(found, logprobs, strict=True)) > 0.01


def test_varlen_is_kept_where_a_model_tells_its_attention_the_boundaries() -> None:
    assert model_form.ask(config_of("qwen3"), "varlen", "cpu")[:3] == ("packed", "fused", "varlen")
    form = model_form.ask(config_of("stablelm"), "varlen", "cpu")
    assert (form.rows, form.head) == ("packed", "fused")


def test_the_answer_is_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of("cohere")
    first = model_form.model_form(config, "sdpa")
    model_form._kept.cache_clear()
    monkeypatch.setattr(model_form, "ask", lambda *_: pytest.fail("asked again"))
    assert model_form.model_form(config, "sdpa") == first
    assert first.head == "model"


def test_a_tiny_instance_has_every_kind_of_layer_where_all_layers_differ() -> None:
    from transformers import AutoConfig

    sizes = FAMILIES["nemotron_h"][1] | {"layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 4}
    config = AutoConfig.for_model("nemotron_h", **(SIZES | EXPERTS | sizes))
    small = tiny_config(config, is_narrow=True)
    assert small.num_hidden_layers == 3
    assert model_form.ask(config, "sdpa", "cpu").routing != "none"
    numbers = AutoConfig.for_model("llama", **(SIZES | {"num_hidden_layers": 8, "of_layer": list(range(8))}))
    assert tiny_config(numbers, is_narrow=True).num_hidden_layers == 2


def test_a_class_without_an_attribute_for_its_body_is_computed() -> None:
    from transformers import AutoConfig

    fields = EXPERTS | {"intermediate_size_mlp": 96, "attention_chunk_size": 8}
    config = AutoConfig.for_model("llama4_text", **(SIZES | fields))
    model = random_model(config, "eager")
    assert model.base_model is model
    assert model_form.ask(config, "sdpa", "cpu")[:2] == ("padded", "fused")  # chunks are counted along a row
    ids = torch.arange(2, 40)[None]
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(OwnLogits(model)(hidden), model(input_ids=ids, use_cache=False).logits[0])


def test_a_form_that_a_lack_of_memory_chose_is_not_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, whole = config_of("llama"), model_form.tiny_model

    def tiny_model(config: Any, attention: str, device: str) -> Any:
        if attention == "sdpa":
            raise MemoryError("of the machine")
        return whole(config, attention, device)

    for broken, chosen in ((tiny_model, "varlen"), (whole, "sdpa")):
        monkeypatch.setattr(model_form, "tiny_model", broken)
        form = model_form.model_form(config, "sdpa")
        assert (form.attention, form.is_accident) == (chosen, broken is tiny_model)
        model_form._kept.cache_clear()


def test_own_logits_are_those_of_the_whole_forward_pass_and_leave_the_model_as_it_was() -> None:
    config = config_of("gemma2")
    model = random_model(config, "eager")
    ids = torch.arange(2, 40)[None]
    whole = model(input_ids=ids, use_cache=False).logits[0]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(OwnLogits(model)(hidden), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits[0], whole, atol=0, rtol=0)
