"""A policy that is not trained: its logprobs of tokens that another policy sampled. No Ray here.

Shape legend: n sampled tokens of one group, its members one after another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import RowLayout, plan_rows, row_layout
from penstock.trainer.batches.samples import sampled_tokens
from penstock.trainer.flops import attention_share
from penstock.trainer.models.model_form import settings_for
from penstock.trainer.models.policy_model import PolicyModel, load_policy
from penstock.trainer.validation import check_vocabulary
from penstock.weights.model_config import ModelConfig


class OffloadedParameters:
    """Parameters of a frozen model: on its device while it is used, in host memory between uses.

    Invariant: the copies in host memory never change, so nothing is copied back.
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        """Take over a model that is in host memory; only its buffers are moved to the device."""
        self._device = device
        is_pinned = device.type == "cuda"
        self._host = [(one, one.data.pin_memory() if is_pinned else one.data) for one in model.parameters()]
        self.is_loaded = False
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        self.rest()

    def load(self) -> None:
        """Copy them to the device, unless they are there."""
        if not self.is_loaded:
            for parameter, values in self._host:
                # Pinned, they are copied on the stream of the computation, which therefore waits for them.
                parameter.data = values.to(self._device, non_blocking=True, copy=True)
            self.is_loaded = True

    def rest(self) -> None:
        """Give the memory of the device back."""
        for parameter, values in self._host:
            parameter.data = values
        self.is_loaded = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class FrozenPolicy:
    """Scores groups."""

    model: PolicyModel
    device: torch.device
    layout: RowLayout
    max_tokens: int
    """Padded tokens of one forward."""
    temperature: float
    """The sampling temperature; the same as the trainer's, so that logprobs can be compared."""
    attention_share: float
    """Of the cost model of packing, by the shape of the policy that is trained."""
    replays_routes: bool = True
    """Tokens go to the experts that the engines recorded for the policy."""
    offloaded: OffloadedParameters | None = None
    """Its parameters, if they leave the device between uses."""

    @classmethod
    def load(
        cls,
        path: str,
        model: ModelConfig,
        device: str,
        max_tokens: int,
        temperature: float,
        *,
        replays_routes: bool = True,
        offloads: bool = False,
    ) -> FrozenPolicy:
        """Load it in `model.dtype`, as the trained policy: rounded alike, equal weights diverge by nothing.

        Raises:
            ConfigError: If there is no such model, it cannot be loaded, or it has another vocabulary than the policy.
        """
        own = settings_for(path, model, device)
        policy = load_policy(path, own, gradient_checkpointing=False).eval()
        check_vocabulary("frozen policy", path, policy.hf_model.config.vocab_size, model.shape.vocab_size)
        policy.requires_grad_(requires_grad=False)
        offloaded = OffloadedParameters(policy, torch.device(device)) if offloads else None
        if offloaded is None:
            policy.to(device)
        share, layout = attention_share(model.shape), row_layout(own)
        return cls(policy, torch.device(device), layout, max_tokens, temperature, share, replays_routes, offloaded)

    @torch.no_grad()
    def logprobs(self, payload: GroupPayload) -> NDArray[np.float32]:
        """`[n] float32`, natural log, of every sampled token. The prompt of the group is computed once."""
        if self.offloaded is not None:
            self.offloaded.load()
        sequences = sampled_tokens([payload])
        if not self.replays_routes:
            sequences = [replace(one, routes=None) for one in sequences]
        needs_mask = self.layout != "single_row"
        plan = plan_rows(sequences, 1, self.max_tokens, self.attention_share, self.layout, share_prompts=True)
        starts = np.cumsum([0, *(len(sequence.targets) for sequence in sequences)])
        found = np.zeros(int(starts[-1]), np.float32)
        for micro_batch in plan.ranks[0]:
            batch = collate(micro_batch, sequences, device=self.device, needs_mask=needs_mask)
            logprobs, _ = batch.inputs.call(self.model, self.temperature)
            positions = starts[batch.sequence_index] + batch.token_index
            found[positions] = logprobs[: batch.num_tokens].float().cpu().numpy()
        return found
