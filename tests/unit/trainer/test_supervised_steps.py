"""Supervised steps and teacher-forced accuracy on the plain torch backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.trainer.build import save_policy

from .torch_trainer import logprobs_of, trainer_of, trajectory


def test_the_first_supervised_loss_is_the_mean_over_response_tokens(policy) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    rng = np.random.default_rng(0)
    examples = [([2, 3, 4], [5]), ([3, 3], [7, 1])]
    members = [trajectory("x", prompt, response, rng, None) for prompt, response in examples]
    expected = -np.concatenate([logprobs_of(model, one) for one in members]).mean()
    assert trainer_of(policy).supervised_step(examples)["sft/loss"] == pytest.approx(expected, rel=1e-5)


def test_sampled_accuracy_is_the_mean_probability_of_the_whole_answer(policy) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    examples = [([2, 3, 4], [5]), ([3, 3], [7, 1]), ([9], [8, 8, 1])]
    probabilities = []
    for prompt, response in examples:
        softmax = model(torch.tensor([[*prompt, *response]])).logits[0].detach().double().softmax(-1).numpy()
        probabilities.append(np.prod([softmax[len(prompt) + i - 1, token] for i, token in enumerate(response)]))
    assert trainer_of(policy).teacher_forced(examples).sampled_accuracy == pytest.approx(
        np.mean(probabilities), rel=1e-4
    )


def test_supervised_steps_reach_teacher_forced_accuracy_one_and_greedy_agrees(policy) -> None:
    from transformers import AutoModelForCausalLM

    trainer = trainer_of(policy, lr=1e-2)
    examples = [([2, 3, 4], [5, 6, 1]), ([3, 3], [7, 1]), ([9], [8, 8, 8, 1])]
    assert trainer.teacher_forced(examples).greedy_accuracy == 0.0
    first = trainer.supervised_step(examples)
    for _ in range(30):
        last = trainer.supervised_step(examples)
    assert last["sft/loss"] < 0.1 * first["sft/loss"]
    assert not [name for name in last if name.startswith(("ratio/", "mismatch/"))]
    assert trainer.teacher_forced(examples).greedy_accuracy == 1.0
    assert trainer.teacher_forced([*examples, ([2, 3, 4], [5, 6, 2])]).greedy_accuracy == pytest.approx(0.75)

    saved = str(Path(policy).parent / "sft")
    save_policy(trainer, saved, policy)
    model = AutoModelForCausalLM.from_pretrained(saved)
    for prompt, response in examples:
        output = model.generate(torch.tensor([prompt]), max_new_tokens=len(response), do_sample=False)
        assert output[0, len(prompt) :].tolist() == response
