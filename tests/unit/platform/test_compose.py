"""Composition and field errors: every mistake is named with its path, and all mistakes come in one message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import compose_config
from penstock.platform.config.checkpoint_shapes import not_here
from penstock.platform.config.compose import compose_all, to_yaml
from penstock.platform.config.field_errors import PEER_NAMES
from penstock.platform.config.findings import Command
from penstock.platform.config.overrides import CONF_DIR, find_groups, sort_overrides
from penstock.platform.config.schema import RunConfig
from tests.composed_once import compose_choices_once, compose_every_time
from tests.tiers import by_tier

COMMANDS: dict[str, Command] = {"arithmetic_sft": "sft", "arithmetic_rlhf_sft": "sft", "text_sft": "sft"}
EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))


def problems(*overrides: str, experiment: str = "arithmetic", config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        compose_config([f"experiment={experiment}", *overrides], config_dir=config_dir)
    assert all(violation in str(raised.value) for violation in raised.value.violations)
    return raised.value.violations


def only_problem(*overrides: str) -> str:
    (problem,) = problems(*overrides)
    return problem


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_validates(experiment):
    config = compose_config([f"experiment={experiment}"], command=COMMANDS.get(experiment, "train"))
    assert config.name.startswith(experiment)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout/engine=torch", "dataflow.max_staleness=0", "env.args={digits: 1}"],
        ["env=gymnasium", "~env.args", "+env.streams.game={weight: 1}", "trainer.optimizer.betas=[0.9,0.99]"],
        ["algorithm=ppo", "name=${algorithm.loss}-${seed}", "seed=3"],
    ],
)
def test_what_tests_compose_once_is_what_hydra_composes(overrides):
    sorted_overrides = sort_overrides(["experiment=arithmetic", *overrides], find_groups([CONF_DIR]))
    arguments = (sorted_overrides.choices, sorted_overrides.values, None)
    assert compose_choices_once(*arguments) == compose_every_time(*arguments)


def test_the_demo_is_what_the_readme_says():
    config = compose_config(["experiment=arithmetic", "seed=3"])
    assert (config.dataflow.batch_groups, config.dataflow.group_size, config.dataflow.max_staleness) == (32, 8, 1)
    assert config.model.path == "runs/arithmetic_sft-seed3/policy"
    assert config.run_dir == "runs/arithmetic"
    assert config.evaluation.num_tasks is None, "all, at most 1024"
    sft = compose_config(["experiment=arithmetic_sft", "seed=3"], command="sft")
    assert config.model.path == f"{sft.run_dir}/policy"
    assert sft.model.shape == config.model.shape


@pytest.mark.parametrize("algorithm", ["online_dpo", "ppo"])
def test_each_step_of_the_rlhf_chain_finds_the_one_before_by_its_seed(algorithm):
    steps: list[tuple[str, Command]] = [("sft", "sft"), ("pairs", "sample"), ("rm", "rm"), (algorithm, "train")]
    sft, pairs, rm, train = (
        compose_config([f"experiment=arithmetic_rlhf_{step}", "seed=5"], command=command) for step, command in steps
    )
    assert {config.model.path for config in (pairs, rm, train)} == {f"{sft.run_dir}/policy"}
    assert {config.model.shape for config in (pairs, rm, train)} == {sft.model.shape}
    assert rm.env.args["path"] == f"{pairs.run_dir}/pairs.jsonl"
    assert train.reward.parts["judge"].args["path"] == f"{rm.run_dir}/reward_model"
    assert train.reward.parts["true"].fn == pairs.reward.fn
    assert train.reward.parts["true"].weight == 0, "the policy never learns of it"
    if train.algorithm.needs_critic:
        assert train.critic.path == f"{rm.run_dir}/reward_model"


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout/engine=torch"],
        ["rollout.num_engines=2"],
        ["trainer.num_ranks=2", "trainer.zero_stage=3"],
        ["tracker=[jsonl,wandb,tensorboard]"],
        ["trainer=torch"],
        ["dataflow=synchronous"],
        ["algorithm=dr_grpo"],
        ["algorithm=rloo"],
        ["weights=gather"],
        ["+experiment=arithmetic"],
        ["+seed=1", "++total_steps=2"],
    ],
)
def test_variants_of_the_demo_compose(overrides):
    compose_config(["experiment=arithmetic", *overrides])


def test_several_trackers_can_be_chosen():
    tracker = compose_config(["experiment=arithmetic", "tracker=[jsonl,wandb,tensorboard]"]).tracker
    assert tracker.wandb is not None
    assert tracker.tensorboard is not None
    assert compose_config(["experiment=arithmetic"]).tracker.wandb is None


def test_a_tracker_of_the_user_has_a_name_of_its_own_on_the_command_line_and_in_a_file(tmp_path):
    typed = ["tracker.rivers.factory=river_tracker:Rivers", "tracker.rivers.args.project=p"]
    own = compose_config(["experiment=arithmetic", *typed]).tracker.own
    assert {name: (one.factory, one.args) for name, one in own.items()} == {
        "rivers": ("river_tracker:Rivers", {"project": "p"})
    }
    assert compose_config(["experiment=arithmetic"]).tracker.own == {}
    (tmp_path / "tracker").mkdir()
    file = tmp_path / "tracker" / "rivers.yaml"
    file.write_text("# @package tracker.rivers\nfactory: river_tracker:Rivers\nargs: {project: p}\n")
    chosen = compose_config(["experiment=arithmetic", "tracker=[jsonl,wandb,rivers]"], config_dir=tmp_path).tracker
    assert (chosen.own, chosen.wandb is None) == (own, False)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "tracker.wandbb.project=x",
            "wandbb is none of our trackers (jsonl, wandb, tensorboard, mlflow, trackio) and has ",
        ),
        ("tracker.wandbb.project=x", "Did you mean tracker.wandb? One of your own needs tracker.wandbb.factory="),
        ("tracker.rivers.args.project=x", "and has no factory. One of your own needs tracker.rivers.factory="),
        ("tracker.rivers=river_tracker:Rivers", "One of your own needs tracker.rivers.factory="),
        ("tracker.rivers={factory: a.b, arg: 1}", "unknown key. Did you mean tracker.rivers.args?"),
        ("tracker.rivers.factory=3", "tracker.rivers.factory=3 is not text."),
    ],
)
def test_what_is_neither_a_tracker_of_ours_nor_has_a_factory_is_refused(typed, said):
    assert said in only_problem(typed)


def test_the_resolved_yaml_is_the_config():
    own = ["tracker.rivers.factory=river_tracker:Rivers", "tracker=[jsonl,mlflow,trackio]"]
    config = compose_config(["experiment=math_qwen_8gpu", *own])
    assert RunConfig.model_validate(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_a_misspelt_key_is_named_with_the_nearest_match(prefix):
    problem = only_problem(f"{prefix}dataflow.max_stalness=1")
    assert problem.startswith("dataflow.max_stalness")
    assert problem.endswith("unknown key. Did you mean dataflow.max_staleness?"), "and not 20 other keys"
    if prefix:
        assert f"`{prefix}dataflow.max_stalness=1`" in problem


def test_a_key_in_the_wrong_section_is_found_where_it_lives():
    assert "Did you mean trainer.optimizer.lr?" in only_problem("trainer.lr=1e-3")
    assert "Did you mean dataflow.max_staleness?" in only_problem("max_staleness=1")
    assert "Did you mean dataflow?" in only_problem("datflow.max_staleness=1")


def test_a_key_without_a_match_lists_the_keys():
    assert "unknown key. Keys of evaluation: num_tasks, every_steps" in only_problem("evaluation.xyzzy=1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss.delta=0.1"], "the chosen one is ppo_clip. Choose it with algorithm=dppo, or leave"),
        (["algorithm.loss.max_weight=2"], "key of algorithm/loss=dppo; the chosen one is ppo_clip."),
        (
            ["algorithm=sapo", "algorithm.loss.clip_high=0.3"],
            "cispo, clip_cov, gmpo, gspo or gspo_token; the chosen one is sapo.",
        ),
        (["algorithm.advantage.lam=0.9"], "key of algorithm/advantage=gae; the chosen one is grpo."),
        (["rollout/engine=torch", "rollout.engine.kv_cache_gib=1"], "key of rollout/engine=vllm; the chosen one is"),
        (["algorithm.correction.decoupled.max_kl=1"], "key of algorithm/correction=f_tis; the chosen one is"),
        (["algorithm.correction.max_kl=1"], "Write algorithm.correction.NAME.max_kl; it is a key of f_tis."),
        (["tracker.jsonl.project=x"], "key of tracker=wandb or trackio; the chosen one is jsonl."),
        (["tracker.project=x"], "Write tracker.NAME.project; it is a key of wandb or trackio."),
    ],
)
def test_a_key_of_another_choice_of_the_group_names_the_choice(overrides, words):
    problem = only_problem(*overrides)
    assert words in problem
    assert "Did you mean" not in problem


AT_LEAST_ONE = (
    "max_completion_length max_response_length max_steps num_generations num_iterations rollout.n train_batch_size "
    "trainer.total_training_steps warmup_steps top_k"
)
TYPED = dict.fromkeys(AT_LEAST_ONE.split(), "2") | {
    "model_name_or_path": "x", "output_dir": "runs/x", "stop": "[x]", "stop_strings": "[x]", "stop_token_ids": "[2]"
}  # fmt: skip
"""Values of another library's keys, where our key does not take 0.5."""


def follow(advice: str) -> None:
    """The advice is accepted word for word; remarks are in brackets."""
    for line in re.sub(r" \([^)]*\)", "", advice).split(", or "):
        overrides = line.replace("TOKENS", "2048").split()
        assert all("=" in override for override in overrides), line
        compose_config(["experiment=arithmetic", *overrides])


@pytest.mark.parametrize("key", PEER_NAMES)
def test_what_a_key_of_another_library_is_answered_with_is_accepted(key):
    advice = re.search(r"Use (.*)\.$", only_problem(f"{key}={TYPED.get(key, '0.5')}"))
    assert advice
    follow(advice[1])


@pytest.mark.some(1)
@pytest.mark.parametrize("part", ["loss", "advantage", "correction"])
def test_the_advice_to_choose_a_part_of_an_algorithm_is_accepted(part, tmp_path):
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    choices = [choice for choice in find_groups([CONF_DIR])[f"algorithm/{part}"] if choice != "custom"]
    for choice in choices[:: by_tier(4, full=1)]:
        advice = re.search(r"Write (.*)\.$", only_problem(f"algorithm.{part}={choice}"))
        assert advice
        follow(advice[1])
        values = f"name: mine\nalgorithm: {{{part}: {choice}}}\n"
        own.write_text(f"# @package _global_\ndefaults:\n  - arithmetic\n\n{values}")
        (problem,) = problems(experiment="mine", config_dir=tmp_path)
        assert f"Use {advice[1]}; in a file `override /algorithm" in problem


def test_a_misspelt_key_in_the_users_own_yaml_is_named(tmp_path):
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\ndefaults:\n  - arithmetic\n\nname: mine\ndataflow:\n  max_stalenes: 1\n")
    (problem,) = problems(experiment="mine", config_dir=tmp_path)
    assert problem.startswith("dataflow.max_stalenes: unknown key. Did you mean dataflow.max_staleness?")


def test_deleting_arguments_that_a_preset_does_not_set_is_no_mistake():
    assert compose_config(["experiment=text", "env=gsm8k", "~env.args"]).env.args == {}


def test_the_users_own_groups_are_found(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("factory: my.tasks\nargs: {depth: 3}\n")
    config = compose_config(["experiment=arithmetic", "env=mine"], config_dir=tmp_path)
    assert config.env.factory == "my.tasks"
    assert config.env.args == {"depth": 3}


@pytest.mark.parametrize("name", ["conf é", "conf (1)", "a,b", "it's", "[x] {y}", 'a=b: "c"', "a\\'b"])
def test_the_folder_of_the_users_own_groups_may_have_any_name(name, tmp_path):
    folder = tmp_path / name
    (folder / "env").mkdir(parents=True)
    (folder / "env" / "mine.yaml").write_text("factory: my.tasks\n")
    assert compose_config(["experiment=arithmetic", "env=mine"], config_dir=folder).env.factory == "my.tasks"


def test_a_file_of_the_user_that_would_be_ignored_is_refused(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "arithmetic.yaml").write_text("factory: my.tasks\n")
    assert "Give your file another name" in problems(config_dir=tmp_path)[0]


def test_a_missing_config_dir_is_named(tmp_path):
    assert "no such folder" in problems(config_dir=tmp_path / "nowhere")[0]


def test_broken_yaml_is_one_problem(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("factory: [\n")
    assert len(problems("env=mine", config_dir=tmp_path)) == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("total_steps=abc", ['total_steps="abc"', "wrong type", "an integer in [1, 100000000]"]),
        ("seed=true", ["seed=true", "an integer in [0, 4294967296)"]),
        ("dataflow.surplus=some", ['dataflow.surplus="some"', "wrong type", "an integer >= 0 or one of: auto"]),
        ("total_steps=1.5", ["total_steps=1.5", "an integer in [1, 100000000]"]),
        ("overwrite=1", ["overwrite=1", "true or false"]),
        ("name=3", ["name=3", "text"]),
        ("trainer.optimizer.betas=[0.9]", ["trainer.optimizer.betas=[0.9]", "a list of 2 numbers"]),
        ("trainer.optimizer=3", ["trainer.optimizer=3", "a section"]),
        ("sft.batch_size=3", ["sft.max_steps is required"]),
    ],
)
def test_a_wrong_type_says_what_is_expected(override, words):
    problem = only_problem(override)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dataflow.batch_groups=0", ["dataflow.batch_groups=0", "out of range", "in [1, 65536]"]),
        ("dataflow.surplus=-1", ["dataflow.surplus=-1", "out of range", "must be >= 0."]),
        ("rollout.sampling.temperature=0", ["rollout.sampling.temperature=0", "in (0, 10]"]),
        ("algorithm.loss.clip_low=1.5", ["algorithm.loss.clip_low=1.5", "in (0, 1)"]),
        ("rollout.engine.journal_interval_tokens=65", ["in [1, 64]"]),
        ("cluster.pools.cpu.count=0", ["cluster.pools.cpu.count=0", "in [1, 100000]"]),
    ],
)
def test_a_value_out_of_range_states_the_range(override, words):
    problem = only_problem(override)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("dataflow.on_expiry=tim", ["Choices: wait, trim, drop", "Did you mean trim?"]),
        ("trainer.backend=deepsped", ['"deepsped"', "Choices: deepspeed, fsdp2, torch", "Did you mean deepspeed?"]),
        ("trainer.zero_stage=4", ["trainer.zero_stage=4", "Choices: 0, 1, 2, 3"]),
        ("rollout.engine.type=vlm", ["Write rollout/engine=CHOICE", "torch, vllm", "Did you mean vllm?"]),
        ("trainer=torhc", ["trainer=torhc", "Choices: deepspeed, fsdp2, lora, torch", "Did you mean torch?"]),
        ("rollout/engine=sglang", ["rollout/engine=sglang", "torch, vllm"]),
        ("tracker=[jsonl,wandbb]", ["tracker=wandbb", "Did you mean wandb?"]),
        ("rollout/engin=torch", ["no config group", "Did you mean rollout/engine?"]),
        ("rollout.engine=torch", ["Write rollout/engine=torch."]),
    ],
)
def test_an_unknown_choice_lists_the_choices(override, words):
    problem = only_problem(override)
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("arithmetik", "arithmetic"),
        ("arithmetic_typo", "arithmetic"),
        ("arithmetic_sft2", "arithmetic_sft"),
        ("arithmetic_two_polices", "arithmetic_two_policies"),
    ],
)
def test_an_unknown_experiment_lists_them(typed, meant):
    assert f"Did you mean {meant}?" in problems(experiment=typed)[0]


def test_without_an_experiment_they_are_listed_and_unset_values_are_not_mentioned():
    with pytest.raises(ConfigError, match=r"none chosen.*gsm8k_qwen_1gpu") as raised:
        compose_config(["trainer.num_ranks=5", "seed=-1"])
    _, seed = raised.value.violations
    assert seed.startswith("seed=-1")


def test_a_choice_inside_the_users_own_yaml_lists_the_choices(tmp_path):
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\ndefaults:\n  - arithmetic\n  - override /rollout/engine: vlm\n")
    (problem,) = problems(experiment="mine", config_dir=tmp_path)
    assert problem.startswith("rollout/engine=vlm is not a valid choice. Choices: torch, vllm")
    assert problem.endswith("Did you mean vllm?")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("foo", ["'foo' is not an override", "key=value"]),
        ("seed=1,2", ["a run takes one value of seed"]),
        ("hydra.verbose=true", ["have no effect"]),
        ("~nothing", ["~nothing"]),
        ("~dataflow.max_stalness", ["~dataflow.max_stalness", "Did you mean ~dataflow.max_staleness?"]),
        ("model.path=${nme}", ["model.path=${nme}", "nme"]),
        ("seed.foo=1", ["seed"]),
        ("name='a b'", ["not allowed", "letters, digits"]),
    ],
)
def test_an_override_that_cannot_be_used_is_one_problem(override, words):
    problem = only_problem(override)
    assert all(word in problem for word in words), problem


def test_all_problems_come_in_one_message():
    found = problems(
        "foo",
        "trainer=torhc",
        "dataflow.max_stalness=1",
        "+dataflow.group_siz=3",
        "total_steps=abc",
        "rollout.sampling.temperature=0",
        "dataflow.batch_groups=32",
        "trainer.num_ranks=5",
        "rollout.sampling.top_p=1.5",
        "model.path=${nme}",
    )
    expected = [
        "'foo'", "trainer=torhc", "dataflow.max_stalness", "dataflow.group_siz", "total_steps",
        "rollout.sampling.temperature", "dataflow.batch_groups=32 is not a multiple of trainer.num_ranks=5",
        "rollout.sampling.top_p=1.5", "model.path=${nme}",
    ]  # fmt: skip
    assert len(found) == len(expected)
    assert all(any(problem.startswith(start) for problem in found) for start in expected), found


def test_cross_field_problems_of_a_wrong_key_are_left_out():
    assert [problem.split(" ")[0] for problem in problems("dataflow.batch_groups=abc", "trainer.num_ranks=5")] == [
        'dataflow.batch_groups="abc"'
    ]


def test_the_directory_of_a_run_names_its_policy(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "before"
    (run_dir / "policy").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("name: before\n")
    overrides = ["experiment=arithmetic", f"model.path={run_dir}"]
    problem = not_here("model.path", str(run_dir))
    assert f"model.path={run_dir} is the directory of a run that has not saved its policy" in problem
    assert f"penstock export {run_dir} --to DIR" in problem
    config = {"model_type": "qwen2", "vocab_size": 33, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
    (run_dir / "policy" / "config.json").write_text(json.dumps(config))
    composed = compose_all(overrides)
    assert composed.config is not None
    assert composed.config.model.path == f"{run_dir}/policy"
    assert composed.config.model.shape.vocab_size == 33
    assert f"model.path={run_dir} is the directory of a run; its policy is taken, {run_dir}/policy" in composed.remarks
