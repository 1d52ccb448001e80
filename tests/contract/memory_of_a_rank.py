"""Bytes that one rank's tensors take while a backend trains.

    sys.argv[1:]: CASES ANSWERS

Real DeepSpeed or FSDP2 on the CPU, as rank 0 of several over torch's fake process group, which sends nothing. Under
`as_on_a_gpu`, what a GPU does differently is done as there, as far as memory goes: AdamW's `foreach`, tiles of logits.
CASES is a pickled list of `Case`, ANSWERS a pickled list of `Measured`; each case has a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch

from penstock.kernels import linear_logprob
from penstock.kernels.portable import logprob
from penstock.trainer.batches.collate import ModelInputs
from penstock.trainer.config import LoraConfig, MuonConfig, OptimizerConfig, TrainerConfig
from penstock.weights.model_config import DType, ModelConfig, ModelShape
from tests.live_bytes import LiveBytes
from tests.tiny_policy import SPECIAL_TOKENS

SHAPE = ModelShape(
    vocab_size=4096,
    hidden_size=192,
    intermediate_size=576,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
)
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-3),
    "muon": OptimizerConfig(lr=1e-3, muon=MuonConfig()),
    "bfloat16 moments": OptimizerConfig(lr=1e-3, moments_dtype="bfloat16"),
}
BUCKET_ELEMENTS = 300_000
"""Smaller than the largest tensor, as with all models from 0.5B on."""


class Case(NamedTuple):
    """A trainer.

    Attributes:
        tokens: Of a micro-batch.
        lora: Rank of the adapters; 0: all weights are trained.
        optimizer: One of `OPTIMIZERS`.
    """

    dtype: DType
    zero_stage: int
    num_ranks: int = 4
    tokens: int = 512
    gradient_checkpointing: bool = False
    lora: int = 0
    has_critic: bool = False
    on_gpu: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False
    optimizer: str = "adamw"
    backend: Literal["deepspeed", "fsdp2"] = "deepspeed"

    @property
    def model(self) -> ModelConfig:
        # Not varlen, which needs to know where sequences begin: these rows are one sequence each.
        return ModelConfig(dtype=self.dtype, max_context_tokens=self.tokens, shape=SHAPE, attention="sdpa")

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            backend=self.backend,
            num_ranks=self.num_ranks,
            zero_stage=self.zero_stage,
            gradient_checkpointing=self.gradient_checkpointing,
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            max_tokens_per_micro_batch=self.tokens,
            lora=LoraConfig(rank=self.lora, alpha=16) if self.lora else None,
            optimizer=OPTIMIZERS[self.optimizer],
        )


class Measured(NamedTuple):
    """Bytes of live tensors.

    Attributes:
        loading: Most while the models were loaded and given to the backend.
        resting: Between two steps.
        backward: Most during forward and backward of two micro-batches.
        step: Most during the optimizer step.
    """

    loading: int
    resting: int
    backward: int
    step: int

    @property
    def peak(self) -> int:
        return max(self.backward, self.step)


@contextmanager
def counting_what_is_gathered(live: LiveBytes) -> Iterator[None]:
    """Count gathered parameters of FSDP2: their tensors are made once, and get and lose their memory in place."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def counted(change: Any) -> Any:
        def changed(tensor: torch.Tensor) -> None:
            change(tensor)
            live.resized(tensor)

        return changed

    with ExitStack() as patches:
        for module in (_fsdp_param, _fsdp_param_group):
            for name in {"alloc_storage", "free_storage"} & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, counted(getattr(module, name))))
        yield


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Take memory as on a GPU. Gradients of the head are zeros: they are not what is measured."""
    from torch.optim import adam

    from penstock.kernels.gpu import logprob_backward

    def product(rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros((len(rows), len(words)), dtype=torch.float32)  # as cuBLAS returns it

    def gradient(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.zeros_like(logits, dtype=rest[-1])

    with ExitStack() as patches:
        for where, name, value in (
            (adam, "_default_to_fused_or_foreach", lambda *args, **kwargs: (False, True)),
            (logprob, "CPU_TILE", logprob.GPU_TILE),
            (linear_logprob, "runs_on_triton", lambda _: True),
            (linear_logprob, "_statistics", _statistics),
            (linear_logprob, "product", product),
            (logprob, "_add_product", lambda *args: None),
            (logprob_backward, "logits_gradient", gradient),
        ):
            patches.enter_context(mock.patch.object(where, name, value))
        yield


def _statistics(hidden: torch.Tensor, *_: object) -> logprob.Statistics:
    """What the forward kernel returns: it keeps no logits."""
    zeros = hidden.new_zeros(len(hidden), dtype=torch.float32)
    return logprob.Statistics(zeros, zeros + 1, zeros.clone(), zeros.clone())


def activation_bytes(config_file: Path, tokens: int, *, gradient_checkpointing: bool) -> int:
    """Bytes that forward and backward of a micro-batch take beside weights and gradients, in bfloat16 on a GPU.

    Of a model of any size: its tensors are fake, and have no memory.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    from penstock.trainer.models.policy_model import PolicyModel
    from penstock.weights.hf_folder import transformers_config

    with FakeTensorMode(allow_non_fake_inputs=True), as_on_a_gpu():
        hf_config = transformers_config(config_file)
        causal_lm = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16, attn_implementation="sdpa")
        if gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = PolicyModel(causal_lm).train()
        with LiveBytes() as live:
            for parameter in model.parameters():
                live.count(parameter.data)
            for _ in range(2):  # gradients exist from the first one on
                live.reset_peak()
                before = live.now
                logprobs, entropies = inputs_of(tokens).call(model, 1.0)
                (logprobs.sum() + entropies.sum()).backward()  # type: ignore[no-untyped-call]
                del logprobs, entropies
            return int(live.peak - before)


def inputs_of(tokens: int) -> ModelInputs:
    """Two rows or more, of which every token carries loss.

    Rows are short, since transformers makes a causal mask for fake tensors, `[row, row]` in every layer.
    """
    rows = max(2, tokens // 1024)
    return ModelInputs(
        torch.zeros(rows, tokens // rows, dtype=torch.int64),
        torch.arange(tokens // rows).repeat(rows, 1),
        None,
        torch.arange(tokens),
        torch.zeros(tokens, dtype=torch.int64),
    )


def measure(case: Case) -> Measured:
    """Load, then take two steps of two micro-batches. The second is measured: moments exist then."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from penstock.trainer.backends import deepspeed_settings
    from penstock.trainer.backends.deepspeed import build_deepspeed_backend
    from penstock.trainer.backends.fsdp2 import build_fsdp2_backend, rows_of
    from penstock.trainer.models.lora import load_adapted_policy
    from penstock.trainer.models.policy_model import load_policy
    from penstock.trainer.models.tiny_policy import create_policy
    from penstock.trainer.models.value_model import load_value_model

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    folder = tempfile.mkdtemp()
    create_policy(case.model, SPECIAL_TOKENS, folder, seed=0)
    vars(deepspeed_settings)["ZERO_BUCKET_ELEMENTS"] = BUCKET_ELEMENTS
    lora = case.trainer.lora
    loaders: list[Any] = [load_policy]
    if lora is not None:
        loaders = [lambda *args, **kwargs: load_adapted_policy(lora, 0, *args, **kwargs)]
    if case.has_critic:
        loaders.append(load_value_model)
    inputs = inputs_of(case.tokens)
    with ExitStack() as stack:
        if case.on_gpu:
            stack.enter_context(as_on_a_gpu())
        live = stack.enter_context(LiveBytes())
        built: list[Any] = []
        for load in loaders:
            if case.backend == "fsdp2":
                stack.enter_context(counting_what_is_gathered(live))
                built.append(build_fsdp2_backend(load, folder, case.model, case.trainer, "cpu"))
                held = [rows_of(one) for one in built[-1]._model.parameters()]
            else:
                built.append(build_deepspeed_backend(load, folder, case.model, case.trainer, "cpu"))
                held = [getattr(one, "ds_tensor", one).data for one in built[-1]._engine.module.parameters()]
            for one in held:
                live.count(one)
            del held
        loading, backward, step = live.peak, 0, 0
        for _ in range(2):
            backward = step = 0
            for backend in built:
                live.reset_peak()
                for micro_batch in range(2):
                    first, second = backend.forward(inputs, 1.0)
                    backend.backward((first.sum() + second.sum()) * 1e-3, is_last=micro_batch == 1)
                    del first, second
                backward = max(backward, live.peak)
                live.reset_peak()
                result = backend.optimizer_step()
                assert not result.is_skipped
                step = max(step, live.peak)
        return Measured(loading, live.now, backward, step)


def _answer(case: Case, connection: Any) -> None:
    connection.send(measure(case))


def main() -> None:
    cases, answers = map(Path, sys.argv[1:])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    import deepspeed  # noqa: F401 - before the fork, once for all cases
    import transformers  # noqa: F401

    given: list[Case] = pickle.loads(cases.read_bytes())
    forked, found = multiprocessing.get_context("fork"), []
    for case in given:
        mine, its = forked.Pipe()
        process = forked.Process(target=_answer, args=(case, its))
        process.start()
        its.close()
        found.append(mine.recv())
        process.join()
    answers.write_bytes(pickle.dumps(found))
