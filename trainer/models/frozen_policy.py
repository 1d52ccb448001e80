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


@dataclass(frozen=True, slots=True)
class FrozenPolicy:
    """Scores groups.

    Attributes:
        max_tokens: Padded tokens of one forward.
        temperature: The sampling temperature; the same as the trainer's, so that logprobs can be compared.
        attention_share: Of the cost model of packing, by the shape of the policy that is trained.
        replays_routes: Tokens go to the experts that the engines recorded for the policy.
    """

    model: PolicyModel
    device: torch.device
    layout: RowLayout
    max_tokens: int
    temperature: float
    attention_share: float
    replays_routes: bool = True

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
    ) -> FrozenPolicy:
        """Load it in `model.dtype`, as the trained policy: rounded alike, equal weights diverge by nothing.

        Raises:
            ConfigError: If there is no such model, it cannot be loaded, or it has another vocabulary than the policy.
        """
        own = settings_for(path, model, device)
        policy = load_policy(path, own, gradient_checkpointing=False).to(device).eval()
        check_vocabulary("frozen policy", path, policy.hf_model.config.vocab_size, model.shape.vocab_size)
        policy.requires_grad_(requires_grad=False)
        share = attention_share(model.shape)
        return cls(policy, torch.device(device), row_layout(own), max_tokens, temperature, share, replays_routes)

    @torch.no_grad()
    def logprobs(self, payload: GroupPayload) -> NDArray[np.float32]:
        """`[n] float32`, natural log, of every sampled token. The prompt of the group is computed once."""
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
