"""How a language model is computed: asked of a tiny instance of its class, never of a list of names.

Three choices, each of them exact, and whether recorded experts can be replayed:

    rows        packed: several sequences in a row, which attention separates by a mask or by boundaries
                padded: one sequence per row, padded on the right, which nothing on its left can see
    head        fused: logprobs from hidden states and the head's weight
                model: from the model's own logits (soft caps, scales), chunk by chunk
    attention   the configured one, else varlen (sinks), else the model's own (eager: soft caps)

The instance runs in float32 on the trainer's device, with its kernels, and through the trainer's own code. What it
computes of each sequence alone, by its own attention and head, is the truth that every choice is compared with. A class
of which no tiny instance can be built gets padded rows and its own head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.errors import ConfigError, boundary
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence
from penstock.trainer.models.policy_model import PolicyModel, check_exists
from penstock.trainer.models.tiny_instance import VOCABULARY, tiny_config, tiny_model
from penstock.trainer.models.varlen_attention import register_varlen
from penstock.weights.kept_answers import digest_of, keep, kept
from penstock.weights.model_config import Attention, Head, ModelConfig, ModelForm, Routing, Rows

TOLERANCE = 3e-4
"""Nats, in float32. Rounding is below a tenth of it; what a wrong choice changes, far above."""
_ACCIDENTS = (ImportError, OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing about a class: they may pass without a change of the code."""
_PROMPT = 5
"""Tokens that all sequences begin with."""
_TREE = ((0, 23), (12, 4), (14, 7), (_PROMPT, 9))
"""Of each sequence the tokens that it shares with the one before it, and those behind them: a fork, a fork of that one,
and another answer to the prompt; more and fewer than a window."""


def model_form(hf_config: Any, attention: Attention, device: str = "cpu") -> ModelForm:
    """Choose rows, head and attention for the class that transformers builds of a config; the answer is kept.

    Args:
        hf_config: Of the checkpoint.
        attention: `model.attention`.
        device: Where the trainer computes.

    Raises:
        ConfigError: If a later token changes an earlier logit.
    """
    text = hf_config.get_text_config(decoder=True)
    settings = {name: value for name, value in text.to_dict().items() if name not in ("_name_or_path", "dtype")}
    return _kept(json.dumps(settings, sort_keys=True, default=str), attention, device, _Asked(text))


def settings_for(path: str, model: ModelConfig, device: str) -> ModelConfig:
    """The settings of the policy for another checkpoint, whose class may be another.

    Raises:
        ConfigError: If there is none, or it is not causal.
    """
    from transformers import AutoConfig

    check_exists(path)
    with boundary(ConfigError, f"{path}: its config.json cannot be read"):
        hf_config = AutoConfig.from_pretrained(path)
    form = model_form(hf_config, model.attention, device)
    return model.model_copy(update={"rows": form.rows, "head": form.head, "attention": form.attention})


class _Asked:
    """A config beside its text, which is what answers are kept by."""

    def __init__(self, hf_config: Any) -> None:
        self.hf_config = hf_config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked)

    def __hash__(self) -> int:
        return 0


@cache
def _kept(settings: str, attention: Attention, device: str, asked: _Asked) -> ModelForm:
    kind = torch.cuda.get_device_name() if device == "cuda" else device
    digest = digest_of([settings, attention, kind])
    if (stored := kept("model_forms", digest)) is not None:
        rows, head, chosen, because, *others = stored
        return ModelForm(rows, head, chosen, tuple(because), *others)
    form = ask(asked.hf_config, attention, device)
    if not form.is_accident:
        keep("model_forms", digest, form)
    return form


def ask(hf_config: Any, attention: Attention, device: str) -> ModelForm:
    """`model_form` of a text config, without what is kept."""
    register_varlen()
    refusals, is_accident = [], False
    for is_narrow in (True, False):
        try:
            config = tiny_config(hf_config, is_narrow=is_narrow)
            model = tiny_model(config, "eager", device)
            alone = [_logprobs_alone(model, one.token_ids, device) for one in _sequences()]
        except Exception as error:  # noqa: BLE001 - every class refuses other sizes in its own way
            refusals.append(_line(error))
            is_accident |= isinstance(error, _ACCIDENTS)
            continue
        _check_causal(model, device)
        return _Comparison(config, np.concatenate(alone), device).form(attention)
    because = (f"no tiny instance of it can be built to ask ({refusals[-1]})",)
    return ModelForm("padded", "model", attention, because, is_accident=is_accident)


class _Comparison:
    """Runs the trainer's code on a tiny instance, and compares it with the truth.

    Attributes:
        truth: `[K]` logprobs of all targets, one sequence after another.
        had_accident: A choice could not be computed for a reason that may pass.
    """

    def __init__(self, config: Any, truth: NDArray[np.float64], device: str) -> None:
        self._config, self.truth, self._device = config, truth, device
        self.had_accident = False

    def form(self, attention: Attention) -> ModelForm:
        """The first choices that give the truth, the fast ones first."""
        head: Head = "fused" if not self.difference("padded", "fused", "eager") else "model"
        because = [] if head == "fused" else ["its logits are more than its head makes of hidden states"]
        choices: dict[Attention, list[tuple[Rows, Attention]]] = {
            "varlen": [("packed", "varlen"), ("packed", "sdpa"), ("padded", "sdpa")],
            "sdpa": [("packed", "sdpa"), ("padded", "sdpa"), ("packed", "varlen")],
            "eager": [],
        }
        for rows, chosen in (*choices[attention], ("padded", "eager")):
            said = self.difference(rows, head, chosen)
            if not said:
                routing = self._routing(rows, head, chosen)
                return ModelForm(rows, head, chosen, tuple(because), routing, self.had_accident)
            because.append(f"{rows} rows with {chosen} attention {said}")
        raise ConfigError([f"{self._config.model_type}: the trainer does not compute what it is: {'; '.join(because)}"])

    def difference(self, rows: Rows, head: Head, attention: Attention) -> str:
        """How the logprobs by these choices differ from the truth; empty if they do not."""
        try:
            model = PolicyModel(tiny_model(self._config, attention, self._device), rows, head).eval()
            found = [self._logprobs(model, plan, attention) for plan in _plans(rows)]
        except Exception as error:  # noqa: BLE001 - a class refuses an attention in its own way
            self.had_accident |= isinstance(error, _ACCIDENTS)
            return f"cannot be computed ({_line(error)})"
        most = max(float(np.abs(one - self.truth).max()) for one in found)
        return "" if most <= TOLERANCE else f"change a logprob by {most:.2g}"

    def _routing(self, rows: Rows, head: Head, attention: Attention) -> Routing:
        """Whether experts can be replayed: those that the routers choose give the truth, and others do not."""
        model = PolicyModel(tiny_model(self._config, attention, self._device), rows, head).eval()
        if not model.experts.routers:
            return "none"
        plan = next(_plans(rows))
        try:
            with model.experts.recording() as chosen:
                self._logprobs(model, plan, attention)
            routes = torch.stack([chosen[layer] for layer in range(len(model.experts.routers))], dim=1)
            others = (routes + 1) % model.experts.num_experts
            own, other = (self._logprobs(model, plan, attention, given) for given in (routes, others))
        except Exception as error:  # noqa: BLE001 - a router that chooses in another way
            self.had_accident |= isinstance(error, _ACCIDENTS)
            return "current"
        is_replayed, is_chosen = (float(np.abs(one - self.truth).max()) <= TOLERANCE for one in (own, other))
        return "replay" if is_replayed and not is_chosen else "current"

    def _logprobs(
        self, model: PolicyModel, plan: MicroBatchPlan, attention: Attention, routes: Tensor | None = None
    ) -> NDArray[np.float64]:
        needs_mask = attention != "varlen" or model.rows == "padded"
        batch = collate(plan, _sequences(), device=torch.device(self._device), needs_mask=needs_mask)
        with torch.no_grad():
            logprobs, _ = batch.inputs._replace(routes=routes).call(model, 1.0)
        return logprobs.double().cpu().numpy()


def _plans(rows: Rows) -> Iterator[MicroBatchPlan]:
    lengths = [one.num_inputs for one in _sequences()]
    if rows == "padded":
        yield MicroBatchPlan(tuple((index,) for index in range(len(lengths))), max(lengths))
        return
    together = tuple(range(len(lengths)))
    yield MicroBatchPlan((together,), sum(lengths))
    shared = tuple(common for common, _ in _TREE)
    yield MicroBatchPlan((together,), sum(lengths) - sum(shared), (shared,))


@cache
def _sequences() -> tuple[TrainingSequence, ...]:
    """Sequences that begin alike; every token behind the prompt is a target."""
    found = []
    random, ids = np.random.default_rng(0), np.zeros(0, np.int64)
    for shared, num_own in _TREE:
        ids = np.concatenate([ids[:shared], random.integers(4, VOCABULARY, num_own)])
        targets = np.arange(_PROMPT, len(ids))
        found.append(TrainingSequence(ids, targets, np.zeros(len(targets), np.float32)))
    return tuple(found)


@torch.no_grad()
def _logprobs_alone(model: Any, ids: NDArray[np.integer], device: str) -> NDArray[np.float64]:
    """`[n]` of the tokens behind the prompt, by the model's own forward pass over one sequence."""
    logits = _logits(model, torch.from_numpy(ids[:-1]).to(device))[_PROMPT - 1 :]
    targets = torch.from_numpy(ids[_PROMPT:]).to(device)
    found: NDArray[np.float64] = logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0].cpu().numpy()
    if not np.isfinite(found).all():
        raise ValueError("its logits are not finite")
    return found


@torch.no_grad()
def _check_causal(model: Any, device: str) -> None:
    """Change the last token of a sequence.

    Raises:
        ConfigError: If that changes what the model says of the tokens before.
    """
    ids = torch.from_numpy(_sequences()[0].token_ids).to(device)
    other = ids.clone()
    other[-1] = ids[-2]
    changed = float((_logits(model, ids)[:-1] - _logits(model, other)[:-1]).abs().max())
    if changed > TOLERANCE:
        raise ConfigError(
            [
                f"{type(model).__name__} is not causal: another last token changes a logit before it by {changed:.2g}. "
                "Answers cannot be sampled from it token by token. Use a model that generates text"
            ]
        )


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
