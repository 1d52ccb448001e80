"""What `penstock sft`, `rm` and `dpo` print about the model that they train, with a trainer of given figures."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dataflow.errors import ConfigError, TrainingError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import actor_factory
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.run import offline_training, sample
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.trainer.micro_batches import TeacherForced
from penstock.trainer.spec import TrainerSpec


class Figures:
    """A trainer and a hub whose figures are known."""

    num_skipped = 0.0

    async def supervised_step(self, _examples: list[Any]) -> dict[str, float]:
        return {"sft/loss": 1.25, "trainer/skipped_updates": self.num_skipped}

    async def teacher_forced(self, _held_out: list[Any]) -> TeacherForced:
        return TeacherForced(greedy_accuracy=0.5, sampled_accuracy=0.2)

    async def preference_step(self, *_: Any) -> dict[str, float]:
        return {"preference/loss": 0.5, "trainer/skipped_updates": self.num_skipped}

    async def preference_logprobs(self, _pairs: list[Any]) -> None:
        pass

    async def stop_step(self) -> bool:
        return True

    async def preference_margins(self, held_out: list[Any]) -> np.ndarray:
        return np.arange(len(held_out)) - 0.5

    async def save(self, _folder: str) -> None:
        pass

    def log(self, *_: Any) -> None:
        pass


def printed(experiment: str, command: Command, monkeypatch: pytest.MonkeyPatch, capsys, *overrides: str) -> str:
    @asynccontextmanager
    async def known(*_: Any) -> AsyncIterator[tuple[Figures, Figures]]:
        yield Figures(), Figures()

    monkeypatch.setattr(offline_training, "offline_training", known)
    config: RunConfig = compose_config([f"experiment={experiment}", *overrides], command=command)
    assert getattr(offline_training, f"run_{command}")(config) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("experiment", "command"),
    [("arithmetic_sft", "sft"), ("arithmetic_preference", "rm"), ("arithmetic_preference", "dpo")],
)
def test_skipped_steps_in_a_row_end_it(experiment: str, command: Command, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Figures, "num_skipped", 1.0)
    characters = offline_training.NEW_TOKENIZERS["characters"]()
    if command != "sft":
        monkeypatch.setattr(offline_training, "load_codec", lambda _path, _env: characters)
    monkeypatch.setattr(offline_training, "encode_pairs", lambda *_: [None] * 64)
    told = rf"{command}: 2 steps in a row up to step 2 had a non-finite loss or gradient, trainer.max_bad_steps is 2"
    with pytest.raises(TrainingError, match=told):
        printed(experiment, command, monkeypatch, capsys, "trainer.max_bad_steps=2")


def test_sft_says_that_its_accuracies_are_those_of_gold_answers(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shown = printed("arithmetic_sft", "sft", monkeypatch, capsys, "sft.max_steps=2")
    assert "stop      when one sample gives 0.15 of the gold answers that it is measured on" in shown
    assert "accuracy  share of gold answers given token by token (teacher forcing)" in shown
    assert "step    2  loss 1.2500  held-out gold answers 0.200 sampled, 0.500 greedy" in shown
    assert "(step 2: gold answers 0.200 sampled, 0.500 greedy)" in shown


def test_a_reward_model_says_that_its_accuracy_is_that_of_pairs(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["preference.num_steps=1", "preference.eval_pairs=4", "preference.batch_size=2"]
    characters = offline_training.NEW_TOKENIZERS["characters"]()
    monkeypatch.setattr(offline_training, "load_codec", lambda _path, _env: characters)
    monkeypatch.setattr(offline_training, "encode_pairs", lambda *_: [None] * 4)
    shown = printed("arithmetic_preference", "rm", monkeypatch, capsys, *typed)
    assert "step    1  loss 0.5000  held-out pairs ranked right 0.750" in shown


@pytest.mark.parametrize(
    ("experiment", "command", "module", "body"),
    [
        ("arithmetic_sft", "sft", offline_training, "_train_sft"),
        ("arithmetic_preference", "rm", offline_training, "_train_preferences"),
        ("arithmetic_preference", "dpo", offline_training, "_train_preferences"),
        ("arithmetic", "sample", sample, "_run"),
    ],
)
def test_a_run_is_not_deleted_while_it_goes_on(
    experiment: str, command: Command, module: Any, body: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_config([f"experiment={experiment}"], command=command)
    refusals = []

    async def run(*_: Any) -> int:
        with pytest.raises(ConfigError, match=r"is in use by process \d+") as refusal:
            prepare_run_dir(config.model_copy(update={"overwrite": True}))
        refusals.append(refusal)
        return 0

    monkeypatch.setattr(module, body, run)
    assert getattr(module, f"run_{command}")(config) == 0
    assert refusals


@pytest.mark.parametrize("command", ["train", "sft", "rm", "dpo"])
async def test_given_answers_are_trained_at_the_temperature_at_which_they_are_measured(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[TrainerSpec] = []

    async def start_trainer(spec: TrainerSpec, *_others: object) -> None:
        started.append(spec)

    monkeypatch.setattr(actor_factory, "start_trainer", start_trainer)
    config = compose_config(["experiment=arithmetic", "rollout.sampling.temperature=0.5"])
    await actor_factory.start_trainer_group(config, "x", command=command)
    assert [spec.temperature for spec in started] == [0.5 if command == "train" else 1.0]
