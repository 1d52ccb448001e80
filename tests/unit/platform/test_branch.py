"""What a branch of a run may keep of a checkpoint, by the keys that were changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.fingerprint import fingerprints
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.branch import PARTS, Limit, Part, decide, limits
from penstock.platform.config.compose import to_yaml
from penstock.platform.metrics.run_files import CONFIG_FILE, DATA_FILE
from penstock.platform.run.saved_config import changed_config, read_saved_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `limits` reads of the directory of a run."""
    folder = tmp_path_factory.mktemp("run")
    config = compose_config(["experiment=arithmetic", f"run_dir={folder}"])
    (folder / CONFIG_FILE).write_text(to_yaml(config))
    (folder / DATA_FILE).write_text(json.dumps(fingerprints(config.env, config.seed)))
    return folder


def kept(run_dir: Path, *overrides: str, wanted: Part | None = None) -> tuple[Part, list[str]]:
    saved = read_saved_config(run_dir)
    before, now = (changed_config(saved, words, run_dir) for words in ((), overrides))
    return decide(list(limits(before, now, run_dir)), wanted)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.optimizer.lr=1e-6",
        "trainer.optimizer.moments_dtype=bfloat16",
        "algorithm.loss.clip_high=0.5",
        "total_steps=999",
        "dataflow.group_size=4",
        "evaluation.every_steps=7",
        "trainer.zero_stage=0",
        "rollout.num_engines=2",
    ],
)
def test_a_key_that_changes_no_part_of_a_checkpoint_lets_a_branch_keep_all(run_dir: Path, override: str) -> None:
    assert kept(run_dir, override) == ("groups", [])


@pytest.mark.parametrize(
    ("override", "part", "said"),
    [
        ("rollout.sampling.temperature=0.7", "data", "rollout.sampling.temperature was 1.0 and is 0.7"),
        ("reward.timeout_s=3", "data", "reward.timeout_s was"),
        ("dataflow.max_staleness=0", "data", "admitted under the other bounds"),
        ("dataflow.batch_groups=8", "data", "dataflow.batch_groups was 32 and is 8"),
        ("algorithm.kl.coefficient=0.1", "data", "no logprobs of a reference"),
        ("seed=3", "optimizer", "seed was 0 and is 3: the tasks are others"),
        ("env.args.digits=2", "optimizer", "a position in them says nothing"),
    ],
)
def test_what_a_change_takes_from_a_branch_is_said(run_dir: Path, override: str, part: Part, said: str) -> None:
    found, told = kept(run_dir, override)
    assert found == part
    assert len(told) == 1
    assert said in told[0]
    assert told[0].endswith(f"kept: {', '.join(PARTS[: PARTS.index(part) + 1])}")


@pytest.mark.parametrize("change", ["trainer.lora.rank=4", "trainer.optimizer.muon={}"])
def test_an_optimizer_is_given_up_only_if_that_was_typed(run_dir: Path, change: str) -> None:
    key = change.partition("=")[0].removesuffix(".rank")
    with pytest.raises(ConfigError, match=rf"{key}.* The optimizer, data, groups of the checkpoint .* weights"):
        kept(run_dir, change)
    assert kept(run_dir, change, wanted="weights")[0] == "weights"


def test_more_than_a_change_leaves_is_refused_by_the_part_that_would_have_to_go(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed was 0 and is 3.* The data, groups of .* --restore optimizer"):
        kept(run_dir, "seed=3", wanted="groups")
    assert kept(run_dir, "seed=3", wanted="weights") == ("weights", [])


def test_weights_of_another_model_are_no_branch(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path was .* for others start a run"):
        kept(run_dir, "model.path=elsewhere", wanted="weights")


def test_another_critic_or_partner_is_not_ignored() -> None:
    ppo = compose_config(["experiment=arithmetic", "algorithm=ppo"])
    critic = ppo.critic.model_copy(update={"path": "elsewhere"})
    (limit,) = limits(ppo, ppo.model_copy(update={"critic": critic}), Path("nowhere"))
    assert (limit.part, limit.why.partition(":")[0]) == ("weights", "critic.path was None and is elsewhere")
    two = compose_config(["experiment=arithmetic_two_policies"])
    assert two.partner is not None
    model = two.partner.model.model_copy(update={"path": "elsewhere"})
    partner = two.partner.model_copy(update={"model": model})
    (limit,) = limits(two, two.model_copy(update={"partner": partner}), Path("nowhere"))
    assert limit.part is None
    assert limit.why.startswith("partner.model.path was")


def test_the_strictest_of_several_limits_counts() -> None:
    assert decide([Limit("data", "a"), Limit("optimizer", "b")], None)[0] == "optimizer"


@pytest.mark.parametrize(
    ("word", "args"),
    [
        ("env.args.digits=010", {"digits": "010"}),
        ("env.args.language=no", {"language": "no"}),
        ("env.args.path=/home/josé (1)/rows", {"path": "/home/josé (1)/rows"}),
        ("env.args={high: 9}", {"high": 9}),
    ],
)
def test_words_for_a_saved_configuration_are_read_as_those_of_train(
    run_dir: Path, word: str, args: dict[str, object]
) -> None:
    saved = read_saved_config(run_dir)
    left = {} if word.startswith("env.args=") else saved["env"]["args"]
    for found in (changed_config(saved, [word], run_dir), compose_config(["experiment=arithmetic", word])):
        assert found.env.args == left | args
