"""The layout of a policy in vLLM, traced from vLLM's own loader: any model that it can load, at any number of ranks.

The engine's model is built a second time on the meta device, with the engine's own configuration, and loads meta
tensors under the names of a checkpoint (weights/layout/tracing.py). This takes milliseconds and no memory. Trainers
name tensors by the modules of transformers, which may stack tensors that a checkpoint keeps apart (experts);
transformers' own conversion to the checkpoint's tensors runs inside the same trace.

vLLM's processing after loading is traced too. If that needs a device (kernels that repack), the live model decides: its
parameters must have the names, shapes and strides of the traced model.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import Layout, Shard, TensorSpec
from penstock.weights.layout.checkpoint_names import checkpoint_tensors
from penstock.weights.layout.derived import source_name
from penstock.weights.layout.tracing import Trace
from penstock.weights.model_config import DType

logger = logging.getLogger(__name__)

Form = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Name of a parameter -> its shape and its strides."""


class RankLayout(NamedTuple):
    """The parameters of one rank of an engine."""

    shards: Mapping[str, list[Shard]]
    """Tensor of the trainer -> its shards on this rank; empty if it is on other ranks."""
    form: Form
    """Shape and strides of every parameter."""


def trace_rank(vllm_config: VllmConfig, tensors: Sequence[TensorSpec], dtype: DType, rank: int) -> RankLayout:
    """Trace the rank of this process, as vLLM's process groups define it.

    Args:
        vllm_config: Configuration of the engine. Not changed.
        tensors: Tensors that the trainer publishes, by the names of transformers' modules; tied ones once.
        dtype: Dtype of the published tensors.
        rank: Tensor-parallel rank, recorded in the shards.

    Raises:
        WeightSyncError: If the loader refuses a tensor, or does more than copy.
    """
    config, trace = _separate_config(vllm_config), Trace(tensors, TORCH_DTYPES[dtype])
    with set_current_vllm_config(config), _own_caches():
        try:
            with torch.device("meta"):
                model = initialize_model(config)
            with trace:
                given = checkpoint_tensors(config.model_config.hf_config, trace.sources)
                model.load_weights(iter(given.items()))
        except WeightSyncError:
            raise
        except Exception as error:
            raise WeightSyncError(
                f"weights: vLLM's loader of {config.model_config.architecture} cannot be traced as a layout: on the "
                f"meta device it fails with {type(error).__name__}: {error}. Set weights.transport=gather: it sends "
                "whole tensors through that loader, at the price of more bytes."
            ) from error
        loaded = _rank_layout(model, trace, rank)
        try:
            with trace:
                process_weights_after_loading(model, config.model_config, torch.device("meta"))
        except Exception as error:  # noqa: BLE001 - kernels that need their device fail in ways of their own
            logger.info("vLLM's processing of %s after loading needs its device: %s", type(model).__name__, error)
            return loaded
        return _rank_layout(model, trace, rank)


def _rank_layout(model: torch.nn.Module, trace: Trace, rank: int) -> RankLayout:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shards = trace.shards(rank, parameters)
    known = {parameter.untyped_storage()._cdata for parameter in parameters.values()}  # noqa: SLF001 - meta has no other
    for name, tensor in _other_tensors(model):
        if tensor.untyped_storage()._cdata not in known and trace.holds(tensor):  # noqa: SLF001
            raise WeightSyncError(
                f"weights: vLLM's {type(model).__name__} keeps {name}, derived from its weights, in addition to its "
                "parameters. New parameters would leave it stale. Set rollout/engine=torch."
            )
    return RankLayout(shards, form_of(parameters))


def form_of(parameters: Mapping[str, torch.Tensor]) -> Form:
    """Shapes and strides, which must be equal in the traced model and in the live one."""
    return {name: (tuple(one.shape), tuple(one.stride())) for name, one in parameters.items()}


def check_live(traced: Form, live: Form, rank: int) -> None:
    """Check that the engine's parameters have the form of the traced model.

    Raises:
        WeightSyncError: For the first parameter that differs.
    """
    for name in sorted(traced.keys() | live.keys()):
        if traced.get(name) != live.get(name):
            raise WeightSyncError(
                f"weights: {name} is {_words(live.get(name))} in rank {rank} of the engine, and vLLM's loader writes "
                f"{_words(traced.get(name))}: it is changed after loading, so its layout is not known. Set "
                "weights.transport=gather."
            )


def check_is_tied(model_config: ModelConfig, traced: Form, live: Form) -> None:
    """Check that vLLM tied a model again whose files hold a head in addition to the embedding.

    It does so if they are equal, as transformers does for the trainer.

    Raises:
        WeightSyncError: If they differ.
    """
    if not model_config.word_embeddings_untied_by_checkpoint:
        return
    if own := sorted(live.keys() - traced.keys()):
        raise WeightSyncError(
            f"weights: config.json of {model_config.model} has tie_word_embeddings=true, but its files hold a head "
            f"that is not equal to the embedding, so vLLM and transformers keep both ({own[0]} has shape "
            f"{live[own[0]][0]}). A tied model has one tensor to publish. Set tie_word_embeddings=false there if the "
            "head is right, or remove the head from the files if it is stale."
        )


def _words(form: tuple[tuple[int, ...], tuple[int, ...]] | None) -> str:
    return "absent" if form is None else f"{form[0]} with strides {form[1]}"


def joined(ranks: Sequence[RankLayout]) -> Layout:
    """The layout of an engine.

    Raises:
        WeightSyncError: If a tensor has no place in the engine, or a parameter would never be updated.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank.shards)
    layout = Layout(
        {name: tuple(shard for rank in ranks for shard in rank.shards.get(name, ())) for name in names},
        tuple({name: torch.Size(shape).numel() for name, (shape, _) in rank.form.items()} for rank in ranks),
    )
    written = {shard.view.buffer for shards in layout.shards.values() for shard in shards}
    placed = {source_name(name) for name, shards in layout.shards.items() if shards}
    lost = [name for name in layout.shards if source_name(name) not in placed]
    kept = [name for name in ranks[0].form if name not in written]
    if lost or kept:
        what = (
            f"{lost[0]} ({len(lost)} such tensors) is nowhere in the engine: vLLM's loader leaves it out."
            if lost
            else f"parameter {kept[0]} ({len(kept)} such) of the engine is in no tensor that is published and would "
            "keep old weights."
        )
        raise WeightSyncError(
            f"weights: {what} Are model.path and the engine's model the same? Otherwise use rollout/engine=torch."
        )
    return layout


def plain_config(
    hf_config: Any, dtype: DType, tp_size: int, max_model_len: int = 32, folder: Path | None = None
) -> VllmConfig:
    """vLLM's configuration of a model, of which there may be no more than a configuration of transformers.

    Args:
        hf_config: Of transformers.
        dtype: Of the engine.
        tp_size: Tensor-parallel ranks.
        max_model_len: Context.
        folder: Its Hugging Face directory, if there is one: of models that also take images vLLM reads more files.
    """
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            hf_config.save_pretrained(made)
        try:
            return VllmConfig(
                model_config=ModelConfig(
                    model=str(folder or made),
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    language_model_only=True,
                ),
                parallel_config=ParallelConfig(
                    tensor_parallel_size=tp_size, distributed_executor_backend="uni" if tp_size == 1 else "mp"
                ),
            )
        except ValueError as error:
            raise WeightSyncError(
                f"weights: vLLM refuses {hf_config.model_type} over {tp_size} tensor-parallel ranks: {error}"
            ) from error


@contextmanager
def stand_in_groups(rank: int, size: int) -> Iterator[None]:
    """Act as one tensor-parallel rank of `size`: to build and load a model, vLLM only needs ranks and sizes."""
    names = {"_PP": (0, 1), "_DP": (0, 1), "_PCP": (0, 1), "_DCP": (0, 1), "_TP": (rank, size), "_EP": (rank, size)}
    before = {name: getattr(parallel_state, name) for name in names}
    try:
        for name, place in names.items():
            setattr(parallel_state, name, _stand_in(*place))
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def _stand_in(rank: int, size: int) -> Any:
    ranks = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    ends = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1}
    return SimpleNamespace(
        world_size=size, rank_in_group=rank, device_group=ranks, cpu_group=ranks, unique_name="stand-in", **ends
    )


def _separate_config(vllm_config: VllmConfig) -> VllmConfig:
    """A copy, so that the second model does not register itself among the layers of the first.

    If vLLM found a head in the files of a tied model, it loads that model untied and ties it again after loading. The
    copy is tied, since the trainer publishes one tensor.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    if vllm_config.model_config.word_embeddings_untied_by_checkpoint:
        model_config = config.model_config = copy.deepcopy(vllm_config.model_config)
        for one in (model_config.hf_config, model_config.hf_config.get_text_config()):
            one.tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False
    return config


@contextmanager
def _own_caches() -> Iterator[None]:
    """Keep meta tensors out of the cache of rotary embeddings, which all models of a process share."""
    before = dict(rotary_embedding._ROPE_DICT)  # noqa: SLF001 - vLLM has no public access to it
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()  # noqa: SLF001
        rotary_embedding._ROPE_DICT.update(before)  # noqa: SLF001


def _other_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers and plain attributes of all modules."""
    yield from model.named_buffers()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{name}.{attribute}", value
