"""Routing replay: the trainer sends every token to the experts to which an engine sent it.

Engines here choose experts by scores with noise, which gate weights do not have. So most choices differ from those of
the trainer's routers, and the logprobs of an answer tell whether its choices were replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.dataflow.ids import GroupId, RequestId, TaskId, TrajectoryId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.saved_groups import MemberProgress, OpenGroup, decode, encode
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import GroupPayload, Routes, Thread, Trajectory, signed_routes, unknown_routes
from penstock.envs.reasoning import TurnText
from penstock.kernels.expert_choice import ExpertChoice, routers_of
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.torch import decoding
from penstock.rollout.engines.torch.decoding import DecodeBatch, RunningRequest
from penstock.rollout.engines.torch.engine import load_batch
from penstock.rollout.trajectory.conversation import Conversation, PartialTurn, build_trajectory
from penstock.trainer.build import build_trainer
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.models.policy_model import load_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec

from .engine_harness import make_spec
from .test_model_families import make_model, model_config

PROMPT = tuple(range(5, 17))
NUM_NEW = 24
FAMILIES = ("qwen3_moe", "mixtral", "granitemoe", "olmoe")
TASK = Task(TaskId("t"), "")


class NoisyChoice(ExpertChoice):
    """Chooses by scores with noise."""

    noise = torch.Generator()

    def _choose(self, layer: int, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        disturbed = scores + scores.std() * torch.randn(scores.shape, generator=self.noise)
        return super()._choose(layer, scores, disturbed.topk(chosen.shape[-1]).indices)


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model(request.param, tmp_path / "model", 3, initializer_range=0.2)


def engine_of(folder: Path, *, deterministic: bool = False, interval: int = 5) -> DecodeBatch:
    config = TorchEngineConfig(
        type="torch", max_num_seqs=4, deterministic=deterministic, journal_interval_tokens=interval
    )
    batch = load_batch(replace(make_spec(model_config(folder), config, "keep_kv"), records_routes=True), config)
    batch.version = 0
    return batch


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "ExpertChoice", NoisyChoice)
    NoisyChoice.noise.manual_seed(1)


def sample(engine: DecodeBatch, turns: Sequence[PartialTurn], *, steps: int | None = None) -> None:
    """Sample some turns together to their end, or for some steps, after which they are aborted."""
    requests = [turn.request(RequestId(str(index))) for index, turn in enumerate(turns)]
    for request in requests:
        engine.submit(RunningRequest.of(request, engine.limits))
    taken = 0
    while engine.has_requests:
        deltas = engine.step()
        taken += 1
        if taken == steps:
            deltas += [delta for request in requests for delta in engine.abort(request.request_id)]
        for name, delta in deltas:
            turns[int(name)].extend(delta)


def conversation(max_new_tokens: int = NUM_NEW, seed: int = 0) -> Conversation:
    return Conversation(PROMPT, "", SamplingParams(max_new_tokens, 1.0, seed=seed))


def answered(engine: DecodeBatch, count: int = 4) -> list[Trajectory]:
    """Answers to one prompt, scored 0 and 1 by turns."""
    talks = [conversation(NUM_NEW - 3 * index, index) for index in range(count)]
    turns = [one.next_turn(200) for one in talks]
    sample(engine, turns)
    return [trajectory(one, turn, index) for index, (one, turn) in enumerate(zip(talks, turns, strict=True))]


def trajectory(talk: Conversation, turn: PartialTurn, index: int = 0) -> Trajectory:
    talk.add_turn(turn, TurnText("", ""))
    built = build_trajectory([talk], TASK, TrajectoryId(str(index)))
    built.score(float(index % 2), {})
    return built


def trainer_of(folder: Path, **settings: object) -> PolicyTrainer:
    algorithm = AlgorithmConfig(**({"correction": {}} | settings.pop("algorithm", {})))  # type: ignore[operator, arg-type]
    trainer = TrainerConfig(
        backend="torch",
        optimizer=OptimizerConfig(lr=1e-3),
        max_tokens_per_micro_batch=256,
        **settings,  # type: ignore[arg-type]
    )
    spec = TrainerSpec(
        model_path=str(folder), model=model_config(folder), trainer=trainer, algorithm=algorithm, device="cpu",
        threads=1, seed=0, temperature=1.0, max_new_tokens=NUM_NEW,
    )  # fmt: skip
    return build_trainer(spec)


def without_routes(payload: GroupPayload) -> GroupPayload:
    return replace(payload, trajectories=tuple(replace(one, routes=None) for one in payload.trajectories))


@pytest.mark.some(1)
@pytest.mark.parametrize("share_prompts", [True, False])
def test_a_disturbed_choice_is_replayed_in_the_target_pass(folder: Path, noisy: None, share_prompts: bool) -> None:
    payload = GroupPayload(GroupId(0), tuple(answered(engine_of(folder))))
    found = [
        dict(trainer_of(folder, share_prompts=share_prompts).step([group], 0).metrics)
        for group in (payload, without_routes(payload))
    ]
    assert abs(found[0]["ratio/behavior_max"] - 1) <= 1e-5
    assert abs(found[0]["ratio/behavior_mean"] - 1) <= 1e-5
    assert found[1]["mismatch/abs_logprob_mean"] > 0.03, "without replay"
    assert found[0]["routing/unknown_share"] == 0.0
    assert found[1]["routing/unknown_share"] == 1.0
    assert 0.2 < found[0]["routing/differing_share"] < 1.0
    assert found[0]["routing/staleness_differing_share/0"] == found[0]["routing/differing_share"]
    assert found[0]["routing/max_load"] >= 1.0


@pytest.mark.some(1)
def test_it_is_replayed_in_proximal_and_reference_passes(folder: Path, noisy: None) -> None:
    payload = GroupPayload(GroupId(0), tuple(answered(engine_of(folder))))
    behavior = np.concatenate([one.behavior_logprobs[one.loss_mask] for one in payload.trajectories])
    frozen = FrozenPolicy.load(str(folder), model_config(folder), "cpu", 256, 1.0)
    np.testing.assert_allclose(frozen.logprobs(payload), behavior, atol=1e-5)
    teacher = replace(frozen, replays_routes=False)
    assert np.abs(teacher.logprobs(payload) - behavior).mean() > 0.03, "a teacher is another model"
    trainer = trainer_of(folder, algorithm={"proximal": "recompute", "mini_batches": 1, "epochs": 2})
    metrics = trainer.step([payload], 0).metrics
    assert metrics["mismatch/abs_logprob_max"] <= 1e-5


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_gradients_are_those_of_experts_written_by_hand(
    tmp_path: Path, norm_topk_prob: bool, gradient_checkpointing: bool
) -> None:
    """Qwen3-MoE in float64, against a sum over all experts with the gate weights at the recorded ones."""
    folder = make_model("qwen3_moe", tmp_path / "model", 3, initializer_range=0.2, norm_topk_prob=norm_topk_prob)
    in_a_loop = {"experts_implementation": "eager"}  # the other ways have no float64
    model = model_config(folder).model_copy(update={"load": in_a_loop})
    policies = [
        load_policy(str(folder), model, gradient_checkpointing=checkpointed).double()
        for checkpointed in (gradient_checkpointing, False)
    ]
    ids = torch.randint(5, 200, (1, 30), generator=torch.Generator().manual_seed(0))
    num_layers, index = len(policies[0].experts.routers), torch.arange(29)
    routes = torch.rand(30, num_layers, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices
    routes[3] = -1
    gradients = []
    for policy, given in zip(policies, (routes, None), strict=True):
        if given is None:
            for layer, block in enumerate(policy.causal_lm.model.layers):
                block.mlp.forward = partial(mixture_by_hand, block.mlp, routes[:, layer])
        positions = torch.arange(30)[None]
        logprobs, _ = policy(ids, positions, None, index, ids[0, 1:], 1.0, routes=given)
        (logprobs * torch.linspace(-1, 1, 29)).sum().backward()
        gradients.append({name: one.grad for name, one in policy.named_parameters() if one.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("gate.weight" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5)


def mixture_by_hand(block: nn.Module, routes: Tensor, hidden: Tensor) -> Tensor:
    """Σ_e g_e · down_e(silu(gate_e x) · up_e x), g the softmax at the recorded experts, over its sum if the model does
    that, and 0 elsewhere.
    """
    x = hidden[0]
    scores = (x @ block.gate.weight.T).softmax(-1)
    chosen = torch.where(routes >= 0, routes, scores.topk(2).indices)
    is_chosen = F.one_hot(chosen, scores.shape[-1]).sum(1)
    gates = scores * is_chosen
    if block.gate.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,efh->tef", x, block.experts.gate_up_proj).chunk(2, dim=-1)
    answers = torch.einsum("tef,ehf->teh", F.silu(gate) * up, block.experts.down_proj)
    return (gates[..., None] * answers).sum(1)[None]


@pytest.mark.parametrize("deterministic", [False, True])
def test_routes_of_all_tokens_are_kept_over_interruptions_turns_and_cuts(tmp_path: Path, deterministic: bool) -> None:
    """Equal to what the model chooses in one pass over all tokens, since no weights change."""
    folder = make_model("qwen3_moe", tmp_path / "model", 3, initializer_range=0.2)
    engine = engine_of(folder, deterministic=deterministic)
    talk = conversation()
    first = talk.next_turn(100)
    sample(engine, [first], steps=9 + deterministic * len(PROMPT))
    assert 0 < first.num_tokens < NUM_NEW
    first.finish_reason = None
    (saved,) = decode(encode(OpenGroup(GroupId(0), (MemberProgress(deltas=first.deltas),)).packed()), "here").members
    resumed = talk.next_turn(100)
    resumed.extend(saved.partial.delta())
    assert resumed.request(RequestId("r")).routes_from == len(PROMPT) - 1 + first.num_tokens
    sample(engine_of(folder), [resumed])
    resumed.cut(NUM_NEW - 2)
    talk.add_turn(resumed, TurnText("", ""))
    talk.add_observation((7, 8, 9), "")
    last = talk.next_turn(100)
    assert last.request(RequestId("r")).routes_from == talk.num_tokens - 4, "of the last sampled token none are known"
    sample(engine, [last])
    whole = trajectory(talk, last)
    assert whole.routes is not None
    np.testing.assert_array_equal(whole.routes[:-1], chosen_in_one_pass(folder, whole.token_ids)[:-1])
    np.testing.assert_array_equal(whole.routes[-1:], unknown_routes(1, whole.routes))
    assert signed_routes(whole.routes)[-1].max() == -1
    threads = (Thread("a", 20), Thread("b", len(whole.token_ids) - 20))
    parts = replace(whole, threads=threads).split_threads()
    np.testing.assert_array_equal(np.concatenate([one.routes for one in parts]), whole.routes)


def test_an_update_in_flight_leaves_earlier_routes(tmp_path: Path) -> None:
    """Whether the cache is recomputed or not, a token has the routes of the pass that predicted the next one."""
    old, new = (make_model("qwen3_moe", tmp_path / str(seed), seed, initializer_range=0.2) for seed in (3, 4))
    weights = load_policy(str(new), model_config(new), gradient_checkpointing=False).causal_lm.state_dict()
    for recomputes in (False, True):
        engine, turn = engine_of(old, interval=1), conversation().next_turn(100)
        request = turn.request(RequestId("0"))
        engine.submit(RunningRequest.of(request, engine.limits))
        while engine.has_requests:
            for _, delta in engine.step():
                turn.extend(delta)
            if turn.num_tokens == 10 and engine.version == 0:
                engine.model.load_state_dict(weights)
                engine.version = 1
                if recomputes:
                    engine.recompute()
        talk = conversation()
        whole = trajectory(talk, turn)
        assert whole.routes is not None
        num_old = len(PROMPT) - 1 + 10
        expected = chosen_in_one_pass(old, whole.token_ids)
        np.testing.assert_array_equal(whole.routes[:num_old], expected[:num_old])
        if recomputes:
            later = chosen_in_one_pass(new, whole.token_ids)
            np.testing.assert_array_equal(whole.routes[num_old:-1], later[num_old:-1])


def chosen_in_one_pass(folder: Path, token_ids: np.ndarray) -> Routes:
    policy = load_policy(str(folder), model_config(folder), gradient_checkpointing=False).eval()
    with torch.no_grad(), policy.experts.recording() as chosen:
        policy.causal_lm(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False)
    return torch.stack([chosen[layer] for layer in range(len(chosen))], dim=1).numpy().astype(np.uint8)


def test_routes_of_another_model_are_refused(tmp_path: Path) -> None:
    policy = load_policy(
        str(folder := make_model("qwen3_moe", tmp_path, 3)), model_config(folder), gradient_checkpointing=False
    )
    ids = torch.arange(5, 15)[None]
    call = partial(policy, ids, torch.arange(10)[None], None, torch.arange(9), ids[0, 1:], 1.0)
    with pytest.raises(ValueError, match="2 layers with experts, but 5 are recorded"):
        call(routes=torch.zeros(10, 5, 2, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"chooses \(10, 2\) experts, but \(10, 3\) are recorded"):
        call(routes=torch.zeros(10, 2, 3, dtype=torch.int16))
    assert routers_of(nn.Linear(2, 2)) == []


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_balance_loss_is_that_of_transformers_over_the_loss_tokens(
    tmp_path: Path, gradient_checkpointing: bool
) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    folder = make_model("qwen3_moe", tmp_path, 3, initializer_range=0.2, num_hidden_layers=1)
    policy = load_policy(str(folder), model_config(folder), gradient_checkpointing=gradient_checkpointing)
    policy.experts.is_balanced = True
    ids, index = torch.randint(5, 200, (1, 30), generator=torch.Generator().manual_seed(0)), torch.arange(4, 20)
    policy(ids, torch.arange(30)[None], None, index, ids[0, index + 1], 1.0)
    loss = policy.experts.balance_loss(index)
    loss.backward()
    (gate,) = [one for name, one in policy.named_parameters() if name.endswith("gate.weight")]
    found, gate.grad = gate.grad, None
    logits = policy.causal_lm.model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    expected = load_balancing_loss_func(tuple(one[index] for one in logits), 4, 2)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    torch.testing.assert_close(found, gate.grad)


def test_the_balance_loss_evens_the_load(tmp_path: Path) -> None:
    folder = make_model("qwen3_moe", tmp_path / "model", 3, initializer_range=0.2)
    payload = GroupPayload(GroupId(0), tuple(answered(engine_of(folder))))
    found = {}
    for coefficient in (0.0, 1.0):
        trainer = trainer_of(folder, algorithm={"balance_coefficient": coefficient, "routing": "current"})
        reports = [trainer.step([without_routes(payload)], step).metrics for step in range(8)]
        found[coefficient] = [one.get("routing/balance_loss") for one in reports]
    assert found[0.0] == [None] * 8
    assert 2.0 <= found[1.0][-1] < found[1.0][0] - 0.02
