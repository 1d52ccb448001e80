"""Families of models as transformers makes them: a tiny random one of each is served by vLLM and scored by the trainer.

The engine starts with other weights than it is sent, so equal logprobs prove the layout and the names of every tensor.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.saved_groups import PartialTokens
from penstock.dataflow.trajectory import Routes, padded_routes, signed_routes
from penstock.platform.run.logprob_parity import LogprobParityCheck
from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from penstock.trainer.models import model_form
from penstock.trainer.models.policy_model import PolicyModel, hf_parameters, load_policy
from penstock.trainer.models.value_model import load_value_model
from penstock.trainer.models.varlen_attention import SequenceBoundaries
from penstock.weights.hf_folder import shape_of, transformers_config
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import DType, ModelConfig, ModelForm
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from tests.command_line import read_summary, run_cli

VOCAB_SIZE, CONTEXT, NUM_PROMPT, NUM_NEW = 259, 128, 20, 60
SIZES: Mapping[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.15,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}
LINEAR = {
    "num_hidden_layers": 4, "hidden_size": 256, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "initializer_range": 0.03,
}  # fmt: skip
FAMILIES: dict[str, Mapping[str, object]] = {
    "qwen2": {"hidden_size": 128, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"hidden_size": 128},
    "mistral": {"sliding_window": 16},
    "olmo2": {"hidden_size": 128},
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {"hidden_size": 128, "num_hidden_layers": 4},
    "gpt2": {"hidden_size": 128, "n_positions": CONTEXT},
    "stablelm": {"hidden_size": 128},
    "opt": {"hidden_size": 128, "ffn_dim": 96, "word_embed_proj_dim": 128},
    "granite": {"hidden_size": 128, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "cohere": {"hidden_size": 128, "logit_scale": 0.5, "tie_word_embeddings": True},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS | {"hidden_size": 128, "num_key_value_heads": 4},
    "mixtral": EXPERTS,
    "granitemoe": EXPERTS | {"hidden_size": 128, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    "gpt_oss": EXPERTS | {"sliding_window": 16, "intermediate_size": 64},
    "lfm2": {
        "hidden_size": 128, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False, "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128,
    },
    "granitemoehybrid": {
        "hidden_size": 128, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 96, "mamba_n_heads": 4,
        "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_chunk_size": 64, "position_embedding_type": "nope",
    },
    "nemotron_h": {
        "hidden_size": 128, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3,
        "mamba_num_heads": 4, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1, "expand": 2, "chunk_size": 64,
        "time_step_min": 1e-8,  # below it transformers cuts time steps off, and vLLM does not
    },
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64},
    "qwen3_next": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 64},
    "gemma3": {
        "text_config": SIZES | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        "mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 252, "eoi_token_index": 253,
    },
    "qwen3_5": {
        "text_config": SIZES | LINEAR,
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 256,
            "num_position_embeddings": 16,
        },
        "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
    },
}  # fmt: skip
PLAIN = (
    "qwen2", "qwen3", "llama", "gemma3_text", "phi3", "mistral", "olmo2", "glm4", "smollm3", "qwen3_moe", "mixtral",
)  # fmt: skip
"""Packed rows, the fused head and varlen compute these, and Ulysses splits their rows."""
IN_BFLOAT16 = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_5")
"""vLLM's CPU build has gated delta layers in bfloat16 only, and only with heads of 64 and 128."""
IMAGES = {"image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def make_model(model_type: str, folder: Path, seed: int, **fields: object) -> Path:
    """A random model of a family in a Hugging Face directory, in float32 if vLLM serves it in that.

    Models that also take images are written as the hub has them, with their vision tower.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    given = FAMILIES[model_type] | fields
    has_tower = "vision_config" in given
    if has_tower:
        given = FAMILIES[model_type] | {"text_config": FAMILIES[model_type]["text_config"] | fields}  # type: ignore[operator]
        given |= {name: fields[name] for name in fields if name == "tie_word_embeddings"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **(given if has_tower else SIZES | given))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dtype = torch.bfloat16 if model_type in IN_BFLOAT16 else torch.float32
        kind.from_config(config).to(dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def add_head(folder: Path, difference: float = 0.0) -> None:
    """Write the head of a tied model in addition to its embedding, as many checkpoints on the hub have it."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    inside = "language_model." if embedding.startswith("language_model.") else ""
    save_file(tensors | {f"{inside}lm_head.weight": tensors[embedding] + difference}, file, {"format": "pt"})


def model_config(folder: Path) -> ModelConfig:
    """As it is composed from `model.path` alone."""
    file = folder / "config.json"
    hf_config = transformers_config(file)
    form = model_form.ask(hf_config, "sdpa", "cpu")
    return ModelConfig(
        path=str(folder),
        max_context_tokens=CONTEXT,
        shape=shape_of(hf_config, file),
        rows=form.rows,
        head=form.head,
        attention=form.attention,
        dtype="bfloat16" if hf_config.model_type in IN_BFLOAT16 else "float32",
    )


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """That of an engine actor, set before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", threads=1).items():
            patch.setenv(name, value)
        yield


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.parametrize("model_type", FAMILIES)
async def test_engine_and_trainer_agree_on_every_version_that_is_published(
    model_type: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The last three of four versions arrive while a request is answered."""
    gaps = []
    prompts = [tuple(range(2, 2 + length)) for length in (NUM_PROMPT, CONTEXT - NUM_NEW - 2)]
    async with published(model_type, tmp_path) as (engine, policy, publish):
        for version in (1, 2, 3, 4):
            if version > 1:
                in_flight = asyncio.ensure_future(answer(engine, f"in flight {version}", prompts[0], num_new=100))
                await asyncio.sleep(0.05)
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
                await publish(version)
                assert len((await in_flight).token_ids) == 100
            # The last ones are in the prefix cache, some by the step in which another one computes them.
            ahead = asyncio.ensure_future(answer(engine, f"ahead {version}", prompts[0], num_new=100))
            await asyncio.sleep(0.05)
            together = [prompts[-1][::-1]] * 3
            of_group = await asyncio.gather(
                *(answer(engine, f"{version}.{n}", one) for n, one in enumerate(together, 9))
            )
            await ahead
            alone = [await answer(engine, f"{version}.{n}", one) for n, one in enumerate((*prompts, prompts[-1]))]
            asked = [*prompts, prompts[-1], *together]
            for prompt, said in zip(asked, [*alone, *of_group], strict=True):
                assert len(said.token_ids) == NUM_NEW
                assert np.std(said.logprobs) > 0.05, "the model tells tokens apart"
                assert (said.routes is not None) == bool(policy.experts.routers)
                if said.routes is not None:
                    assert len(said.routes) == len(prompt) - 1 + NUM_NEW
                    assert said.routes.max() < 8, "known of every token"
                gap, gap_without = (
                    np.abs(np.array(said.logprobs) - logprobs_of(policy, prompt, said.token_ids, 1.0, routes))
                    for routes in (said.routes, None)
                )
                gaps.append(gap)
                if model_type not in IN_BFLOAT16:
                    assert gap_without.max() <= 1e-4
                    assert gap.max() <= 1e-4
                else:
                    assert gap.mean() <= 0.01
                    assert np.percentile(gap, 99) <= 0.05
    found = np.concatenate(gaps)
    is_rounded = model_type in IN_BFLOAT16
    said = f"{found.mean():.2g} on average, in bfloat16" if is_rounded else f"{found.max():.1g}, in float32"
    record_property("engine", said)  # tools/models_page.py


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
async def test_experts_over_two_ranks_of_an_engine_compute_what_is_published(model_type: str, tmp_path: Path) -> None:
    prompt = tuple(range(2, 2 + NUM_PROMPT))
    async with published(model_type, tmp_path, tensor_parallel_size=2) as (engine, policy, _):
        said = await answer(engine, "a", prompt)
        for routes in (said.routes, None):
            gap = np.abs(np.array(said.logprobs) - logprobs_of(policy, prompt, said.token_ids, 1.0, routes))
            assert gap.max() <= 1e-4


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
async def test_a_tied_model_whose_files_also_hold_a_head_computes_what_is_published(tmp_path: Path) -> None:
    prompt = tuple(range(2, 2 + NUM_PROMPT))
    async with published("qwen3", tmp_path, prepare=add_head) as (engine, policy, publish):
        assert not any("lm_head" in name for name, _ in hf_parameters(policy))
        for version in (1, 2):
            if version > 1:
                with torch.no_grad():
                    policy.causal_lm.get_input_embeddings().weight.mul_(1.5)
                await publish(version)
            said = await answer(engine, str(version), prompt)
            gap = np.abs(np.array(said.logprobs) - logprobs_of(policy, prompt, said.token_ids, 1.0))
            assert gap.max() <= 1e-4


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
async def test_a_head_in_the_files_that_is_not_the_embedding_of_a_tied_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"tie_word_embeddings=true, but its files hold a head that is not equal"):
        async with published("qwen3", tmp_path, prepare=lambda folder: add_head(folder, 0.5)):
            pass


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
async def test_replay_halves_the_gap_of_an_engine_in_bfloat16(tmp_path: Path) -> None:
    """To the same weights in float32, over the answers to eight prompts."""
    gaps: list[tuple[np.ndarray, ...]] = []
    experts = {"num_experts": 32, "num_experts_per_tok": 2, "num_hidden_layers": 4, "norm_topk_prob": True}
    async with published("qwen3_moe", tmp_path, experts, dtype="bfloat16") as (engine, policy, _):
        for shift in range(8):
            prompt = tuple(range(2 + shift, 2 + shift + NUM_PROMPT))
            said = await answer(engine, str(shift), prompt)
            routes = said.routes
            ours = [logprobs_of(policy, prompt, said.token_ids, 1.0, one) for one in (routes, None)]
            gaps.append(tuple(np.abs(np.array(said.logprobs) - one) for one in ours))
    with_replay, without = (np.concatenate(of) for of in zip(*gaps, strict=True))
    assert with_replay.mean() <= 0.5 * without.mean()
    assert np.percentile(with_replay, 99) <= 0.5 * np.percentile(without, 99)


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_of_512_positions_is_trained_by_its_path_alone(model_type: str, tmp_path: Path) -> None:
    folder = make_model(model_type, tmp_path / "model", 1, max_position_embeddings=512)
    done = run_cli("train", "experiment=text", f"model.path={folder}", "total_steps=3", cwd=tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "model.max_context_tokens=512, not the default 1024" in done.stderr
    summary = read_summary(tmp_path / "runs" / "text")
    assert (summary["status"], summary["steps"], summary["ledger"]["failed"]) == ("completed", 3, 0)


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.parametrize(
    ("args", "temperature"),
    [
        ({}, 0.7),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}}, 1.0),
        ({"hf_overrides": {"sliding_window": 64}}, 1.0),
        ({"logprobs_mode": "raw_logprobs"}, 0.7),
    ],
    ids=str,
)
async def test_the_parity_check_finds_arguments_that_change_logprobs(
    args: dict[str, Any], temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that do are reserved, so that is lifted here."""
    from penstock.rollout.engines.vllm import arguments

    class Trainer:
        async def token_logprobs(
            self, examples: Sequence[tuple[Sequence[int], Sequence[int]]], _routes: object
        ) -> np.ndarray:
            return np.concatenate([logprobs_of(policy, *one, temperature) for one in examples])

    monkeypatch.setattr(arguments, "RESERVED", {})
    async with published("mistral", tmp_path, **args) as (engine, policy, _):
        pool = EnginePool([engine], 8)
        prompts = [tuple(range(2 + shift, 2 + shift + NUM_PROMPT)) for shift in (0, 20, 40, 60)]
        sampling = SamplingParams(NUM_NEW, temperature)
        check = LogprobParityCheck(pool, Trainer(), prompts, sampling, "float32", timeout_s=60.0)  # type: ignore[arg-type]
        if args:
            with pytest.raises(WeightSyncError, match="logprob parity check at v1"):
                await check.check(1)
        else:
            assert (await check.check(1) or 1.0) < 1e-4


@asynccontextmanager
async def published(
    model_type: str,
    folder: Path,
    fields: Mapping[str, object] = MappingProxyType({}),
    dtype: DType | None = None,
    tensor_parallel_size: int = 1,
    prepare: Callable[[Path], None] = lambda _folder: None,
    **args: Any,
) -> AsyncIterator[tuple[Any, PolicyModel, Callable[[int], Awaitable[None]]]]:
    """An engine that was started with other weights than it was sent, the policy with the weights that it has, and what
    publishes the policy again.
    """
    from penstock.rollout.engines.vllm.engine import VllmEngine

    served, trained = (make_model(model_type, folder / str(seed), seed, **fields) for seed in (1, 2))
    prepare(served)
    prepare(trained)
    model = model_config(served)
    model = model.model_copy(update={"dtype": dtype or model.dtype})
    policy = load_policy(str(trained), model, gradient_checkpointing=False).eval()
    tensors = {name: parameter.detach() for name, parameter in hf_parameters(policy)}
    training = TrainingSharding(tuple(TensorSpec(name, tuple(one.shape)) for name, one in tensors.items()))
    config = VllmEngineConfig(
        type="vllm", max_num_seqs=8, kv_cache_gib=0.1, tensor_parallel_size=tensor_parallel_size, args=args
    )
    spec = EngineSpec(EngineId("e"), str(served), model, config, "cpu", "keep_kv", seed=0, threads=1)
    engine = VllmEngine(replace(spec, records_routes=True))
    await asyncio.wait_for(engine.start(), 240)
    try:
        receiving = EngineLayout("vllm", await engine.layout(training.tensors))
        transfer = ShardTransfer.between(training, receiving, model.dtype, str(folder))
        writer = ShardWriter(transfer, 0, ShardFiles(transfer))

        async def publish(version: int) -> None:
            flat = {name: tensor.flatten() for name, tensor in tensors.items()}
            writer.write(version, flat)
            await asyncio.wait_for(engine.update_weights(transfer.manifest(version, writer.sums(flat))), 60)

        await publish(1)
        yield engine, policy, publish
    finally:
        await engine.shutdown()


def logprobs_of(
    policy: PolicyModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float, routes: Routes | None = None
) -> np.ndarray:
    """`[len(tokens)]`: of each token, by the trainer's forward pass in float32."""
    policy = copy.deepcopy(policy).float()
    ids = torch.tensor([*prompt, *tokens])
    index = torch.arange(len(prompt) - 1, len(ids) - 1)
    is_varlen = policy.causal_lm.config._attn_implementation == "varlen"
    boundaries = SequenceBoundaries.of((len(ids),), ids.device) if is_varlen else None
    with torch.no_grad():
        # fmt: off
        ours, _ = policy(
            ids[None], torch.arange(len(ids))[None], None, index, ids[index + 1], temperature, boundaries,
            routes=None if routes is None else torch.from_numpy(signed_routes(padded_routes(routes, len(ids)))),
        )
        # fmt: on
    return ours.numpy()


async def answer(engine: Any, request_id: str, prompt: tuple[int, ...], num_new: int = NUM_NEW) -> PartialTokens:
    sampling = SamplingParams(max_new_tokens=num_new, temperature=1.0, stop_token_ids=(), seed=None)
    request = GenerateRequest(RequestId(request_id), prompt, sampling)
    return PartialTokens.of([delta async for delta in engine.generate(request)])


def save(model: Any, folder: Path) -> Path:
    """Write a model and a tokenizer."""
    model.float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_arguments_of_loading_are_those_of_transformers_and_not_values_of_the_model(tmp_path: Path) -> None:
    from penstock.trainer.model_support import unsupported

    folder = make_model("qwen3", tmp_path, 0)
    assert unsupported(folder, load={"use_safetensors": True}) == []
    model = model_config(folder)
    loaded = load_policy(
        str(folder), model.model_copy(update={"load": {"use_safetensors": True}}), gradient_checkpointing=False
    )
    assert loaded.training
    for argument, why in (
        ({"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ({"rope_parameters": {"rope_theta": 9.0}}, "model.load.rope_parameters is a value of its config.json"),
        ({"sliding_window": 4}, "which the engines read too"),
        ({"dtype": "float16"}, "model.load.dtype is reserved: set model.dtype"),
        ({"trust_remote_code": True}, "code from a model's repository is not run"),
        ({"device_map": "auto"}, "Penstock places the weights itself"),
    ):
        (said,) = unsupported(folder, load=argument)
        assert why in said


@pytest.mark.some(5)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_trainer_takes_every_family_and_masks_sequences_that_share_a_row(model_type: str, tmp_path: Path) -> None:
    from penstock.trainer.model_support import unsupported

    folder = make_model(model_type, tmp_path, 0)
    assert unsupported(folder) == []
    model = model_config(folder)
    if model.rows == "padded":
        return  # a row has one sequence
    policy = load_policy(str(folder), model, gradient_checkpointing=False).eval()
    is_varlen = model.attention == "varlen"
    before, ids = torch.arange(90, 120), torch.arange(2, 82)
    positions = torch.cat([torch.arange(len(before)), torch.arange(len(ids))])
    segments = torch.cat([torch.zeros(len(before)), torch.ones(len(ids))])
    mask = None if is_varlen else (segments[:, None] == segments[None]).tril()[None, None]
    of_one, of_both = (
        SequenceBoundaries.of(lengths, ids.device) if is_varlen else None
        for lengths in ((len(ids),), (len(before), len(ids)))
    )
    index = torch.arange(len(ids) - 1)
    with torch.no_grad():
        alone, _ = policy(ids[None], torch.arange(len(ids))[None], None, index, ids[1:], 1.0, of_one)
        row = torch.cat([before, ids])
        packed, _ = policy(row[None], positions[None], mask, index + len(before), ids[1:], 1.0, of_both)
    np.testing.assert_allclose(packed.numpy(), alone.numpy(), atol=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_dropout_is_off_in_training(model_type: str, tmp_path: Path) -> None:
    folder = make_model(model_type, tmp_path, 0)
    policy = load_policy(str(folder), model_config(folder), gradient_checkpointing=False)
    assert policy.causal_lm.training
    prompt, tokens = range(2, 22), list(range(40, 60))
    in_training, again = (logprobs_of(policy, prompt, tokens, 1.0) for _ in range(2))
    np.testing.assert_array_equal(in_training, again)
    np.testing.assert_allclose(in_training, logprobs_of(policy.eval(), prompt, tokens, 1.0), atol=1e-6)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_a_critic_of_a_model_with_a_tower_trains_its_text_alone(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model(model_type, tmp_path, 0)
    critic = load_value_model(str(folder), model_config(folder), gradient_checkpointing=False)
    torch.nn.init.ones_(critic.classifier.score.weight)
    token_ids = torch.arange(2, 14)[None]
    values, _ = critic(token_ids, torch.arange(12)[None], None, torch.tensor([3, 11]), None, 1.0)
    values.sum().backward()
    parameters = dict(critic.named_parameters())
    trained = {name for name, one in parameters.items() if one.requires_grad}
    assert trained == {name for name, one in parameters.items() if one.grad is not None}
    text = AutoModelForCausalLM.from_config(transformers_config(folder / "config.json").get_text_config(decoder=True))
    assert len(trained) == len(dict(text.model.named_parameters())) + 1, "all of the text, and the head"


def test_a_checkpoint_that_contradicts_itself_about_its_head_is_refused(tmp_path: Path) -> None:
    from penstock.trainer.model_support import unsupported

    folder = make_model("gemma3", tmp_path, 0)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = not config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    (said,) = unsupported(folder)
    assert "tie_word_embeddings=True, and False in its text_config" in said


def refused_by_the_trainer(kind: str, folder: Path) -> str:
    """Make a model of some kind; returns what the trainer says about it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from penstock.trainer.model_support import unsupported

    if kind == "classifier":
        config = AutoConfig.for_model("qwen3", **SIZES, num_labels=1)
        save(AutoModelForSequenceClassification.from_config(config), folder)
    elif kind == "other_layers":
        make_model("qwen3", folder, 0)
        config = AutoConfig.for_model("qwen3", **(SIZES | {"num_hidden_layers": 3}))
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
    else:
        make_model("qwen3", folder, 0)
        config = AutoConfig.for_model("qwen3", **(SIZES | {"intermediate_size": 64}))
        config.save_pretrained(folder)
    (said,) = unsupported(folder)
    return said


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("classifier", "tensors of Qwen3ForCausalLM are not in the checkpoint, e.g. "),
        ("other_layers", "12 tensors of Qwen3ForCausalLM are not in the checkpoint"),
        ("other_width", "transformers cannot load its weights"),
    ],
)
def test_what_the_trainer_would_get_wrong_is_refused_with_the_cause(kind: str, words: str, tmp_path: Path) -> None:
    assert words in refused_by_the_trainer(kind, tmp_path)


def test_a_model_is_judged_by_the_role_that_a_run_gives_it(tmp_path: Path) -> None:
    """A policy can begin a critic or a reward model; only a finished classifier of one label scores answers."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from penstock.trainer.model_support import unsupported

    def classifier(name: str, model_type: str = "qwen3", labels: int = 1) -> Path:
        config = AutoConfig.for_model(model_type, **SIZES, num_labels=labels)
        return save(AutoModelForSequenceClassification.from_config(config), tmp_path / name)

    policy, judge, pair = make_model("qwen3", tmp_path / "policy", 0), classifier("judge"), classifier("pair", labels=2)
    capped = classifier("capped", "gemma2")
    found = {
        (folder.name, role): " ".join(unsupported(folder, role))
        for folder in (policy, judge, pair, capped)
        for role in ("policy", "frozen", "value", "reward")
    }
    fine = {("policy", "policy"), ("policy", "frozen"), ("policy", "value"), ("judge", "value"), ("judge", "reward")}
    fine |= {("capped", role) for role in ("policy", "frozen", "value", "reward")}  # its head is its embedding
    assert {case for case, said in found.items() if not said} == fine
    assert (
        "1 tensors of Qwen3ForSequenceClassification are not in the checkpoint, e.g. score.weight"
        in found["policy", "reward"]
    )
    assert "tensors of Qwen3ForCausalLM are not in the checkpoint" in found["judge", "frozen"]
    assert "it has 2 labels (num_labels)" in found["pair", "reward"]
    assert "transformers cannot load its weights" in found["pair", "value"]


def test_a_model_without_a_sequence_classifier_cannot_begin_a_critic_or_a_reward_model(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from penstock.trainer.model_support import unsupported

    folder = save(AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5", **SIZES)), tmp_path)
    assert unsupported(folder) == []
    (said,) = unsupported(folder, "value")
    assert said.startswith("transformers cannot build a sequence classifier of it")


def refused_by_vllm(folder: Path, **changed: Any) -> list[str]:
    from penstock.rollout.engines.vllm.support import unsupported

    settings = {"tp_size": 1, "context": CONTEXT, "is_traced": True, "device_is_here": True}
    return unsupported(folder, "float32", **(settings | changed))


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.parametrize(
    "model_type", ["qwen3", *(pytest.param(one, marks=pytest.mark.full) for one in ("gemma3", "qwen3_5"))]
)
def test_a_tied_model_whose_files_also_hold_a_head_has_the_layout_of_one_tensor(
    model_type: str, tmp_path: Path
) -> None:
    from penstock.rollout.engines.vllm.layout import plain_config, stand_in_groups, trace_rank

    plain, folder = (make_model(model_type, tmp_path / of, 0, tie_word_embeddings=True) for of in ("plain", "headed"))
    add_head(folder)
    hf_config = transformers_config(folder / "config.json")
    tensors, traced = module_tensors(hf_config), []
    assert not any("lm_head" in tensor.name for tensor in tensors)
    for one in (plain, folder):
        with stand_in_groups(0, 1):
            config = plain_config(hf_config, "float32", 1, CONTEXT, one)
            traced.append(trace_rank(config, tensors, "float32", 0))
    assert config.model_config.word_embeddings_untied_by_checkpoint, "vLLM builds the live model untied"
    assert traced[0] == traced[1]
    assert refused_by_vllm(folder, device_is_here=False) == []


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
def test_what_vllm_cannot_serve_here_is_refused_with_its_own_words(tmp_path: Path) -> None:
    from penstock.rollout.engines.vllm.support import only_dtype

    good = make_model("llama", tmp_path / "good", 0)
    assert refused_by_vllm(good) == []
    assert refused_by_vllm(good, tp_size=2) == []
    (said,) = refused_by_vllm(good, tp_size=3)
    assert "not divisible by tensor parallel size (3)" in said or "must be divisible" in said
    (said,) = refused_by_vllm(good, context=CONTEXT + 1)
    assert f"({CONTEXT + 1})" in said
    narrow = make_model("qwen3", tmp_path / "narrow", 0, head_dim=16)
    (said,) = refused_by_vllm(narrow)
    assert "head_dim=16 of model.layers.0.self_attn.attn is not supported by its attention backend CPU_ATTN" in said
    assert refused_by_vllm(narrow, device_is_here=False) == []
    assert refused_by_vllm(make_model("mixtral", tmp_path / "experts", 0)) == []
    hybrid = make_model("qwen3_5_text", tmp_path / "hybrid", 0)
    (said,) = refused_by_vllm(hybrid)
    assert "gated delta layers (model.layers.0.linear_attn) in bfloat16 only, and model.dtype=float32" in said
    assert refused_by_vllm(hybrid, device_is_here=False) == []
    assert only_dtype(hybrid, "float32", 1, CONTEXT) == "bfloat16"
    assert only_dtype(good, "float32", 1, CONTEXT) is None
    narrow = make_model("qwen3_5_text", tmp_path / "narrow-hybrid", 0, linear_key_head_dim=32, linear_value_head_dim=32)
    (said,) = refused_by_vllm(narrow)
    assert "linear_attn has linear heads of 32 (keys) and 32 (values), which its kernel for CPUs refuses: Un" in said
    foreign = make_model("qwen3", tmp_path / "foreign", 0)
    config = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen99ForCausalLM"]}))
    (said,) = refused_by_vllm(foreign)
    assert "Qwen99ForCausalLM" in said


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
def test_the_question_is_asked_in_a_child_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.platform.checks import model_probe

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_model("qwen3", tmp_path / "narrow", 0, head_dim=32)
    question = model_probe.Question(str(folder), "sdpa", "float32", 1, CONTEXT, True, "cpu", True)
    first, again = model_probe.ask(question), model_probe.Answer(["asked again"])
    assert first.problems == []
    assert first.form == ModelForm("packed", "fused", "sdpa")
    model_probe._asked_once.cache_clear()
    monkeypatch.setattr(model_probe, "_ask_child", lambda _question: again)
    assert model_probe.ask(question) == first
    assert model_probe.ask(question._replace(context=64)) == again
    make_model("qwen3", folder, 0, head_dim=16)
    assert model_probe.ask(question) == again
