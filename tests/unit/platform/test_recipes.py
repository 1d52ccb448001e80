"""Experiments, and the parts `model=`, `task=` and `scale=`, whose combinations are planned from public shapes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.placement import plan_placement
from penstock.platform.config.checkpoint_shapes import packaged_config
from penstock.platform.config.overrides import CONF_DIR
from penstock.weights.hf_folder import shape_of, transformers_config
from tests.tiers import by_tier

PARAMETERS = {
    "qwen2_5_0_5b_instruct": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_7b_instruct": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "gemma3_1b": 999_885_952,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_5_4b": 4_205_751_296,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "gpt_oss_20b": 20_914_757_184,
}
"""Of each public model, a tied head counted once (some files on the Hub have it twice)."""
TASKS = sorted(path.stem for path in (CONF_DIR / "task").glob("*.yaml"))
SCALES = sorted(path.stem for path in (CONF_DIR / "scale").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))
RECIPES = [name for name in EXPERIMENTS if re.search(r"_(\d+gpu|\dnodes)$", name)]
TOO_LARGE = re.compile(
    r"memory: a GPU of the pool \w+ has (24|80) GiB, (but its fullest GPU needs about .* "
    r"(or trainer=lora|several for each engine \(its tensor_parallel_size\))\.|"
    r"of which the weights .* leave .* for its KV cache, and one trajectory .*)"
)
MIXTURES = ("qwen3_30b_a3b", "qwen3_5_35b_a3b", "gpt_oss_20b")
"""Too large for an engine or a trainer of some scales."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that `make demo` leaves in runs/ would be read."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.some(5)
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_packaged_shape_of_a_model_has_its_number_of_parameters(name: str) -> None:
    path = yaml.safe_load((CONF_DIR / "model" / f"{name}.yaml").read_text())["path"]
    file = packaged_config(path)
    assert file is not None, path
    counted = shape_of(transformers_config(file), file).num_parameters
    assert counted == pytest.approx(PARAMETERS[name], rel=2e-3)


def test_each_recipe_is_in_the_guide_and_says_that_it_was_not_run() -> None:
    assert len(RECIPES) >= 15
    guide = (CONF_DIR.parent / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
    assert [name for name in RECIPES if f"| `{name}` |" not in guide] == []
    for name in RECIPES:
        head = (CONF_DIR / "experiment" / f"{name}.yaml").read_text().partition("defaults:")[0]
        assert "Not run yet" in head, name


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("preference")])
def test_a_recipe_fits_its_devices(name: str) -> None:
    config = compose_config([f"experiment={name}"])
    assert plan_placement(config)
    assert config.name == name
    devices = sum(pool.count for pool in config.cluster.pools.values() if pool.device == "gpu")
    said = re.search(r"_(?:(\d+)gpu|(\d)nodes)$", name)
    assert said is not None
    assert devices == (int(said[1]) if said[1] else 8 * int(said[2]))
    is_thinking = config.env.reasoning is not None
    assert is_thinking == config.model.path.startswith("Qwen/Qwen3-")
    assert (config.evaluation.temperature > 0) == is_thinking, "Qwen3 may repeat itself without end if it is greedy"
    assert config.rollout.engine.kv_cache_gib is None, "a stated cache leaves memory unused, and answers wait for it"
    assert check_config(config, "train") == [], "a recipe that its own dry run warns of"


def test_the_recipe_for_preferences_reads_the_pairs_of_a_user() -> None:
    Path("pairs.jsonl").write_text('{"prompt": "Say yes.", "chosen": "Yes.", "rejected": "No."}\n' * 40)
    config = compose_config(["experiment=preference_llama3_2_1b_1gpu"], command="dpo")
    assert plan_placement(config, "dpo")


@pytest.mark.full
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", by_tier(TASKS[:1], TASKS))
def test_each_model_is_planned_for_each_task_on_each_scale_or_is_too_large_for_it(task: str, scale: str) -> None:
    fitting = []
    for model in PARAMETERS:
        try:
            config = compose_config([f"model={model}", f"task={task}", f"scale={scale}", f"name={model}"])
        except ConfigError as refused:
            problems = refused.violations
            assert all(map(TOO_LARGE.fullmatch, problems)), problems
            assert scale.startswith("one_gpu") or model in MIXTURES
        else:
            assert plan_placement(config)
            fitting.append(model)
    least = {"one_gpu": 4, "one_gpu_80gib": 8}.get(scale, len(PARAMETERS) - len(MIXTURES))
    assert len(fitting) >= least, fitting


def test_a_scale_and_rows_of_ones_own_need_no_experiment_either() -> None:
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40)
    parts = ["model=qwen3_0_6b", "scale=one_gpu", "env=dataset", "env.args.path=rows.jsonl", "reward=exact_match"]
    assert compose_config(parts).cluster.colocated


def test_a_task_needs_no_experiment_and_nothing_at_all_says_what_there_is() -> None:
    with pytest.raises(ConfigError) as refused:
        compose_config(["model=qwen3_0_6b"])
    (problem,) = refused.value.violations
    assert problem.startswith("experiment: none chosen. Add experiment=CHOICE, one of:")
    assert problem.endswith("or task=, model= and scale= (docs/guides/recipes.md).")
