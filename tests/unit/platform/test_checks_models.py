"""Checks of the models that a run starts from: by `model.path` alone, and what is refused before anything starts."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks import model_files
from penstock.platform.checks.load import load_config
from penstock.platform.checks.model_probe import Answer
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.weights.model_config import ModelForm
from tests.chat_tokenizers import chat_tokenizer
from tests.model_folder import CONFIG, write_model

PLUGIN = """
from penstock.dataflow.task import Task

def reward(trajectory, **fields):
    return 1.0

class Source:
    def __init__(self, seed):
        pass

    def train(self):
        return (Task(f"t{index}", f"{index}=", {"answer": "1"}) for index in range(4096))

    def held_out(self, num_tasks):
        return [Task(f"h{index}", f"{index}+", {"answer": "1"}) for index in range(num_tasks)]
"""


class CharacterCodec:
    turn_end, named_ends = None, ()

    def encode_prompt(self, prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, prompt))

    def spelled_token(self, _prompt: str) -> None:
        """It has no special tokens."""


@pytest.fixture
def overrides(tmp_path, monkeypatch):
    """The demo with tasks of the user's, on a machine whose vLLM and transformers support every model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_tasks.py").write_text(PLUGIN)
    policy = write_model(tmp_path / "policy")
    monkeypatch.setattr(model_files, "ask", lambda _question: Answer([]))
    monkeypatch.setattr("penstock.platform.checks.tasks.NUM_MEASURED_TASKS", 4)
    monkeypatch.setattr(
        "penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _env=None: CharacterCodec()
    )
    return [
        "experiment=arithmetic",
        f"model.path={policy}",
        "env.factory=my_tasks:Source",
        "env.args={}",
        "reward.fn=my_tasks:reward",
    ]


def problem(overrides: list[str], *, dry_run: bool = True) -> str:
    """The only problem; a dry run exits with it, as a run does."""
    with pytest.raises(ConfigError) as raised:
        load_config("train", overrides, dry_run=dry_run)
    (violation,) = raised.value.violations
    return violation


def absent(overrides: list[str]) -> str:
    """The problem of a run that is only a warning in a dry run."""
    found = problem(overrides, dry_run=False)
    assert load_config("train", overrides, dry_run=True).warnings == [found]
    return found


def test_a_missing_warm_start_says_how_to_create_it(overrides):
    found = absent([overrides[0], *overrides[2:], "seed=7"])
    assert "runs/arithmetic_sft-seed7/policy does not exist" in found
    assert "penstock sft experiment=arithmetic_sft seed=7" in found


def test_the_warm_start_of_another_experiment_is_named_too_and_none_that_does_not_exist(overrides):
    found = problem([*overrides, "model.path=runs/text_sft-seed3/policy"])
    assert "Create it with `penstock sft experiment=text_sft seed=3`" in found
    assert "Give a model directory" in problem([*overrides, "model.path=runs/no_such_sft-seed0/policy"])


def test_a_missing_model_is_refused_in_a_dry_run_too(overrides):
    assert "model.path=/no/such/model does not exist" in problem([*overrides, "model.path=/no/such/model"])


def test_a_hub_name_must_be_in_the_cache(overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "hf download Org/Model" in problem([*overrides, "model.path=Org/Model"])
    write_model(tmp_path / "hub" / "models--Org--Model" / "snapshots" / "old", num_hidden_layers=2)
    write_model(tmp_path / "hub" / "models--Org--Model" / "snapshots" / "abc", num_hidden_layers=3)
    (tmp_path / "hub" / "models--Org--Model" / "refs").mkdir()
    (tmp_path / "hub" / "models--Org--Model" / "refs" / "main").write_text("abc")
    assert load_config("train", [*overrides, "model.path=Org/Model"]).config.model.shape.num_layers == 3


def test_a_folder_that_is_no_model_is_refused(overrides, tmp_path):
    assert "has no config.json" in problem([*overrides, f"model.path={tmp_path}"])


def test_a_file_is_no_model_directory(overrides, tmp_path):
    (tmp_path / "model.bin").touch()
    assert "model.bin is a file" in problem([*overrides, f"model.path={tmp_path / 'model.bin'}"])


def auxiliary_model(tmp_path: Path, vocab_size: int, vocabulary: dict[str, int]) -> Path:
    """A model that is not the policy; both have a tokenizer."""
    other = write_model(tmp_path / "other", vocab_size=vocab_size, hidden_size=96)
    ours = {"0": 2, "1": 3, "+": 4}
    for folder, ids in ((tmp_path / "policy", ours), (other, vocabulary)):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}, "added_tokens": []}))
    return other


AUXILIARY = {
    "critic.path": "algorithm=ppo",
    "teacher.path": "algorithm=distill",
    "reference.path": "algorithm=online_dpo",
}


@pytest.mark.parametrize("key", AUXILIARY)
def test_an_auxiliary_model_with_the_policys_tokenizer_is_accepted(overrides, tmp_path, key):
    other = auxiliary_model(tmp_path, 32, {"0": 2, "1": 3, "+": 4})
    load_config("train", [*overrides, AUXILIARY[key], f"{key}={other}"])


@pytest.mark.some(1)
@pytest.mark.parametrize("key", AUXILIARY)
def test_an_auxiliary_model_with_another_vocabulary_or_tokenizer_is_refused(overrides, tmp_path, key):
    other = auxiliary_model(tmp_path, 33, {"0": 2, "1": 3, "+": 4})
    found = problem([*overrides, AUXILIARY[key], f"{key}={other}"])
    assert found.startswith(f"{key}={other}: its vocab_size=33")
    assert "differs from the policy's, 32" in found
    write_model(other)
    swapped = {"model": {"vocab": {"0": 3, "1": 2, "+": 4}}}
    (other / "tokenizer.json").write_text(json.dumps(swapped))
    found = problem([*overrides, AUXILIARY[key], f"{key}={other}"])
    assert "2 of 3 tokens have a different id" in found
    assert "'0' 3 instead of 2" in found


def test_the_shape_is_that_of_the_checkpoint_and_not_of_the_preset(overrides, tmp_path):
    write_model(tmp_path / "policy", num_hidden_layers=7, num_key_value_heads=1, tie_word_embeddings=False)
    shape = load_config("train", overrides).config.model.shape
    assert (shape.num_layers, shape.num_kv_heads, shape.tie_word_embeddings, shape.vocab_size) == (7, 1, False, 32)


def test_a_typed_shape_that_is_not_the_checkpoints_is_refused_with_both_numbers(overrides, tmp_path):
    found = problem([*overrides, "model.shape.num_layers=5"])
    assert f"model.shape.num_layers=5 differs from the checkpoint's 4 (model.path, {tmp_path / 'policy'}" in found
    assert "model.from_scratch=true" in found
    load_config("train", [*overrides, "model.shape.num_layers=4"])


def partner(overrides: list[str], folder: Path, letters: str, num_layers: int = 3, **fields: int) -> list[str]:
    """The overrides of a run of two policies, each with its tokenizer."""
    ours = Path(overrides[1].partition("=")[2])
    theirs = write_model(folder / "partner", hidden_size=96, num_hidden_layers=num_layers, **fields)
    for path, vocabulary in ((ours, "abc"), (theirs, letters)):
        words = {letter: number for number, letter in enumerate(vocabulary)}
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))
    return ["experiment=arithmetic_two_policies", *overrides[1:], f"partner.model.path={theirs}"]


def test_a_partner_of_the_same_tokenizer_is_taken(overrides, tmp_path):
    assert load_config("train", partner(overrides, tmp_path, "abc")).warnings == []


def test_a_partner_whose_tokens_mean_something_else_is_refused(overrides, tmp_path):
    assert "2 of 3 tokens have a different id than in the policy's" in problem(partner(overrides, tmp_path, "acb"))


def test_a_partner_is_asked_what_the_trainer_cannot_do_with_it(overrides, tmp_path):
    typed = [*partner(overrides, tmp_path, "abc", num_key_value_heads=1), "trainer.num_ranks=2"]
    found = problem([*typed, "trainer.tensor_parallel_size=2"])
    assert "does not divide partner.model.shape.num_kv_heads=1" in found


def test_a_partner_has_the_shape_of_its_own_checkpoint(overrides, tmp_path):
    typed = partner(overrides, tmp_path, "abc", num_layers=5)
    config = load_config("train", typed).config
    assert (config.model.shape.num_layers, config.partner.model.shape.num_layers) == (4, 5)
    found = problem([*typed, "partner.model.shape.num_layers=3"])
    assert "partner.model.shape.num_layers=3 differs from the checkpoint's 5" in found


@pytest.mark.full
def test_targets_of_adapters_that_the_model_has_not_are_refused_with_the_nearest(overrides):
    lora = [*overrides, "trainer=lora", "trainer.lora.targets=[q_proj,k_porj]"]
    assert "trainer.lora.targets: k_porj names no linear layer" in problem(lora)
    assert "Nearest: k_proj" in problem(lora)
    assert "norm names no" in problem([*overrides, "trainer=lora", "trainer.lora.targets=[v_proj,norm]"])
    load_config("train", [*overrides, "trainer=lora", "trainer.lora.targets=[self_attn.q_proj]"])


def test_stacked_experts_are_no_targets_of_adapters_although_the_checkpoint_has_them_one_by_one(overrides, tmp_path):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    write_model(tmp_path / "policy", model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], **experts)
    config = load_config("train", [*overrides, "trainer=lora"]).config
    assert config.trainer.lora is not None
    assert config.trainer.lora.targets == ("k_proj", "o_proj", "q_proj", "v_proj")


BROKEN_CONFIGS = {
    "empty": (b"", "is empty (0 bytes)"),
    "list": (b"[1, 2]", "holds a list where a JSON object is expected"),
    "text": (b"{model_type: qwen3}", "is not JSON: Expecting property name"),
    "not_utf8": (b'{"model_type": "\xff"}', "is not UTF-8: byte 0xff at position 16"),
    "bom": (b"\xef\xbb\xbf{}", "begins with a byte order mark (EF BB BF)"),
    "no_type": (b"{}", "has no model_type"),
    "unknown_type": (b'{"model_type": "qwen99"}', "model_type='qwen99' is not among the"),
    "code": (b'{"model_type": "own", "auto_map": {}}', "Code from a model's repository (trust_remote_code) is not run"),
    "text_size": (json.dumps(CONFIG | {"hidden_size": "wide"}).encode(), "transformers' qwen3 refuses it"),
    "zero": (json.dumps(CONFIG | {"vocab_size": 0}).encode(), "vocab_size=0: Input should be greater than 0"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", BROKEN_CONFIGS)
@pytest.mark.parametrize("key", ["model.path", "critic.path"])
def test_a_config_json_that_cannot_be_read_is_named_with_what_it_holds(overrides, tmp_path, kind, key):
    data, words = BROKEN_CONFIGS[kind]
    broken = write_model(tmp_path / "broken")
    (broken / "config.json").write_bytes(data)
    found = problem([*overrides, "algorithm=ppo", f"{key}={broken}"])
    assert found.startswith(f"{key}={broken}: {broken / 'config.json'}")
    assert words in found


def test_a_config_json_that_is_a_directory_is_refused(overrides, tmp_path):
    (tmp_path / "policy" / "config.json").unlink()
    (tmp_path / "policy" / "config.json").mkdir()
    assert "config.json is a directory" in problem(overrides)


@pytest.mark.full
@pytest.mark.parametrize("lora", [[], pytest.param(["trainer=lora"], marks=pytest.mark.full)])
def test_weights_that_are_not_complete_are_refused_with_both_sizes(overrides, tmp_path, lora):
    file = tmp_path / "policy" / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-3])
    assert f"has {len(data) - 3} bytes, but its header describes {len(data)}: it is truncated" in problem(
        [*overrides, *lora]
    )
    file.write_bytes(data[:20])
    assert f"has 20 bytes, but needs {len(data) - 8} for its header alone" in problem([*overrides, *lora])
    file.write_bytes(b"")
    assert "has 0 bytes, but needs 8" in problem([*overrides, *lora])
    file.write_bytes((4).to_bytes(8, "little") + b"oops")
    assert "has no safetensors header" in problem([*overrides, *lora])
    file.unlink()
    assert "has no *.safetensors" in problem([*overrides, *lora])
    (tmp_path / "policy" / "pytorch_model.bin").touch()
    assert "pytorch_model.bin, a pickle: convert it" in problem([*overrides, *lora])


def test_a_shard_that_the_index_names_must_be_there(overrides, tmp_path):
    index = tmp_path / "policy" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    found = problem(overrides)
    assert "model-2.safetensors does not exist: 1 of the 2 weight files" in found
    index.write_text("[]")
    assert "index.json holds a list" in problem(overrides)


def test_a_context_longer_than_the_models_positions_is_refused_with_both_numbers(overrides, tmp_path):
    write_model(tmp_path / "policy", max_position_embeddings=100)
    found = problem([*overrides, "model.max_context_tokens=128"])
    assert "model.max_context_tokens=128 is above max_position_embeddings=100" in found
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "rope_theta": 1e4}
    write_model(tmp_path / "policy", max_position_embeddings=100, rope_parameters=scaled)
    load_config("train", overrides)  # how far it reaches is for vLLM to say


def longrope(original: int, **fields: object) -> dict[str, object]:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "rope_theta": 1e4}
    return {"rope_type": "longrope", "original_max_position_embeddings": original} | factors | fields


PHI = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "max_position_embeddings": 1024}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rope_parameters": longrope(100)},
        {"original_max_position_embeddings": 100, "rope_scaling": longrope(100, type="longrope")},
        {"original_max_position_embeddings": 100,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}},
    ],
    ids=["new", "old", "as in Phi-3.5"],
)  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "torch"])
def test_longrope_beyond_its_original_context_is_refused_with_the_largest_that_works(
    overrides, tmp_path, fields, engine
):
    write_model(tmp_path / "policy", **(PHI | fields))
    typed = [*overrides, f"rollout/engine={engine}", "model.max_context_tokens=128"]
    found = problem(typed)
    assert "model.max_context_tokens=128 is above original_max_position_embeddings=100 of the checkpoint" in found
    assert "LongRoPE" in found
    assert found.endswith("Use model.max_context_tokens=100 or less.")
    load_config("train", [*typed, "model.max_context_tokens=100", "rollout.sampling.max_new_tokens=40"], dry_run=True)


def test_longrope_of_a_teacher_is_refused_too(overrides, tmp_path):
    other = auxiliary_model(tmp_path, 32, {"0": 2, "1": 3, "+": 4})
    write_model(other, **PHI, original_max_position_embeddings=64, rope_parameters=longrope(64))
    found = problem([*overrides, "algorithm=distill", f"teacher.path={other}", "model.max_context_tokens=128"])
    assert "model.max_context_tokens=128 is above original_max_position_embeddings=64" in found
    assert f"(teacher.path, {other}" in found


def test_dynamic_rotary_embeddings_beyond_their_positions_are_a_warning(overrides, tmp_path):
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    write_model(tmp_path / "policy", max_position_embeddings=100, rope_parameters=dynamic)
    (warned,) = load_config("train", overrides).warnings
    assert "model.max_context_tokens=128 is above 100, from which on the checkpoint's dynamic rotary" in warned
    assert warned.endswith("Use model.max_context_tokens=100 or less.")
    write_model(tmp_path / "policy", max_position_embeddings=128, rope_parameters=dynamic)
    assert load_config("train", overrides).warnings == []


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_refused_with_both_numbers(overrides, tmp_path):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 31}}, "added_tokens": [{"content": "<end>", "id": 32}]}
    (tmp_path / "policy" / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = problem(overrides)
    assert "token '<end>' has the id 32" in found
    assert "vocab_size=32" in found
    (tmp_path / "policy" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not JSON" in problem(overrides)


def test_the_torch_engine_refuses_a_window_below_the_context(overrides, tmp_path):
    write_model(tmp_path / "policy", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    load_config("train", overrides)
    found = problem([*overrides, "rollout/engine=torch", "model.max_context_tokens=128"])
    assert "max_context_tokens=128 and the checkpoint's sliding_window=64" in found


def test_what_trainer_and_engine_refuse_is_refused_before_anything_starts(overrides, monkeypatch):
    asked = []

    def ask(question: model_files.Question) -> Answer:
        asked.append(question)
        return Answer(["vLLM on cpu: head_dim=16"])

    monkeypatch.setattr(model_files, "ask", ask)
    found = problem(overrides)
    assert found.startswith("model.path=")
    assert "vLLM on cpu: head_dim=16" in found
    assert (asked[0].attention, asked[0].engine_dtype, asked[0].context) == ("sdpa", "float32", 128)


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_run_on_torch_engines_asks_whether_they_compute_the_model(command, overrides, monkeypatch):
    asked = []
    monkeypatch.setattr(model_files, "ask", lambda question: asked.append(question) or Answer(["it cannot decode."]))
    with pytest.raises(ConfigError, match=r"model.path=\S+: it cannot decode"):
        load_config(command, [*overrides, "rollout/engine=torch"], dry_run=True)
    assert {(one.has_torch_engine, one.engine_dtype) for one in asked} == {(True, None)}


def test_a_dtype_that_the_user_has_not_set_becomes_the_only_one_that_the_engine_has(overrides, monkeypatch):
    def ask(question: model_files.Question) -> Answer:
        is_right = question.engine_dtype in (None, "bfloat16")
        return Answer([] if is_right else ["vLLM on cpu: bfloat16 only."], dtype=None if is_right else "bfloat16")

    monkeypatch.setattr(model_files, "ask", ask)
    loaded = load_config("train", overrides)
    assert loaded.config.model.dtype == "bfloat16"
    assert any("model.dtype=bfloat16" in line and "in no other" in line for line in loaded.warnings)
    assert "vLLM on cpu: bfloat16 only." in problem([*overrides, "model.dtype=float32"])


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("typed", "roles"),
    [
        (["algorithm=ppo", "critic.path={other}"], ["policy", "value"]),
        (["algorithm=ppo"], ["policy", "value"]),
        (["algorithm=distill", "teacher.path={other}"], ["policy", "frozen"]),
        (["algorithm=online_dpo", "reference.path={other}"], ["policy", "frozen"]),
        (["reward=reward_model", "reward.args.path={other}"], ["policy", "reward"]),
    ],
)
def test_every_model_of_a_run_is_asked_about_in_its_role(overrides, tmp_path, monkeypatch, typed, roles):
    other = auxiliary_model(tmp_path, 32, {"0": 2, "1": 3, "+": 4})
    asked = []

    def ask(question: model_files.Question) -> Answer:
        asked.append(question)
        return Answer([] if question.role == "policy" else ["no such class."])

    monkeypatch.setattr(model_files, "ask", ask)
    kept = [one for one in overrides if not one.startswith("reward.")]
    found = problem([*kept, *(one.format(other=other) for one in typed)])
    assert [one.role for one in asked] == roles
    assert [one.engine_dtype for one in asked] == ["float32", None], "no engine serves it"
    key = "model.path" if typed == ["algorithm=ppo"] else typed[-1].partition("=")[0]
    assert asked[1].folder == str(tmp_path / "policy" if key == "model.path" else other)
    assert re.search(rf"{re.escape(key)}=\S+( as a critic .*)?: no such class\.$", found, re.MULTILINE)


def test_the_model_of_rm_is_asked_about_as_a_sequence_classifier(overrides, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(model_files, "ask", lambda question: asked.append(question) or Answer(["no such class"]))
    with pytest.raises(ConfigError, match="as a reward model: no such class"):
        load_config("rm", ["experiment=arithmetic_preference", f"model.path={tmp_path / 'policy'}"], dry_run=True)
    assert [(one.role, one.engine_dtype) for one in asked] == [("value", None)]


def no_answer(_question: model_files.Question) -> Answer:
    raise RuntimeError("no answer within 120 s")


@pytest.mark.parametrize("command", ["train", "sft", "dpo", "rm"])
def test_a_model_that_cannot_be_asked_is_trained_in_the_form_that_computes_every_model(
    command, overrides, tmp_path, monkeypatch
):
    monkeypatch.setattr(model_files, "ask", no_answer)
    if command in ("dpo", "rm"):
        overrides = ["experiment=arithmetic_preference", f"model.path={tmp_path / 'policy'}"]
    elif command == "sft":
        overrides = ["experiment=arithmetic_sft", f"model.path={tmp_path / 'policy'}", "model.from_scratch=false"]
    loaded = load_config(command, overrides, dry_run=True)
    found = loaded.config.model
    assert (found.rows, found.attention, found.head) == ("padded", "eager", "fused" if command == "rm" else "model")
    assert any("could not be checked: no answer within 120 s" in line for line in loaded.warnings)
    assert any(line.startswith("model.rows=padded, not the default packed: ") for line in loaded.warnings)


def test_a_chosen_form_stays_with_a_warning_where_no_model_can_be_asked(overrides, monkeypatch):
    monkeypatch.setattr(model_files, "ask", no_answer)
    loaded = load_config("train", [*overrides, "model.rows=packed", "model.attention=sdpa"])
    found = loaded.config.model
    assert (found.rows, found.attention, found.head) == ("packed", "sdpa", "model")
    assert any("model.rows=packed was chosen; model.rows=padded computes every model" in one for one in loaded.warnings)


def test_a_torch_engine_does_not_serve_what_cannot_be_asked(overrides, monkeypatch):
    monkeypatch.setattr(model_files, "ask", no_answer)
    found = problem([*overrides, "rollout/engine=torch"])
    assert "no answer within 120 s. rollout.engine.type=torch computes some models wrongly. Run it again" in found


def test_a_reward_model_is_trained_in_the_rows_that_compute_it(tmp_path, overrides, monkeypatch):
    form = ModelForm("padded", "model", "sdpa", ("packed rows change a logprob by 1",))
    monkeypatch.setattr(model_files, "ask", lambda _question: Answer([], form))
    loaded = load_config("rm", ["experiment=arithmetic_preference", f"model.path={tmp_path / 'policy'}"], dry_run=True)
    assert (loaded.config.model.rows, loaded.config.model.head) == ("padded", "fused")


@pytest.mark.parametrize("experiment", ["gsm8k_qwen_1gpu", "math_qwen_8gpu"])
def test_public_models_are_planned_from_the_package_before_they_are_downloaded(experiment, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    loaded = load_config("train", [f"experiment={experiment}"], dry_run=True)
    assert any("hf download Qwen/Qwen2.5-" in warned for warned in loaded.warnings)
    assert loaded.config.model.shape.num_layers in (24, 28)


@pytest.mark.parametrize("path", ['"~nobody-here/x"', "'a\\0b'", "Qwen/../x"])
def test_a_name_that_no_file_can_have_is_a_missing_model(overrides, path):
    assert "does not exist. Give a model directory or a hub name." in problem([*overrides, f"model.path={path}"])


@pytest.mark.parametrize("path", ["a" * 300, "a/" * 3000])
def test_a_name_that_is_too_long_for_a_file_system_says_so(overrides, path):
    assert f"has {len(path)} characters" in problem([*overrides, f"model.path={path}"])


def test_the_home_directory_is_expanded_for_the_processes_that_load_the_model(overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config("train", [*overrides, "model.path='~/policy'"]).config
    assert config.model.path == str(tmp_path / "policy")


def test_the_model_of_a_reward_is_checked_too(overrides, tmp_path):
    judge = write_model(tmp_path / "judge")
    (judge / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as raised:
        load_config("train", [*overrides[:-1], "reward=reward_model", f"reward.args.path={judge}"], dry_run=True)
    assert any(
        found.startswith(f"reward.args.path={judge}: {judge}/model.safetensors has 0 bytes")
        for found in raised.value.violations
    )


def test_a_stop_text_that_no_text_contains_and_a_stop_token_that_is_never_sampled_are_refused(overrides, monkeypatch):
    codec = TokenCodec(chat_tokenizer("chatml"))
    end = codec.stop_token_ids[0]
    monkeypatch.setattr("penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _env=None: codec)
    found = problem([*overrides, f"rollout.sampling.stop=['</answer>','{codec.tokenizer.decode([end])}']"])
    assert "is a special token" in found
    assert f"Use rollout.sampling.stop_token_ids=[{end}]" in found
    found = problem([*overrides, "rollout.sampling.stop_token_ids=[1,32]"])
    assert "stop_token_ids has 32; model.shape.vocab_size=32" in found


def test_a_stop_token_that_the_chat_template_adds_is_told(overrides, monkeypatch):
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.eos_token = "<|eot_id|>"
    codec = TokenCodec(tokenizer)
    monkeypatch.setattr("penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _env=None: codec)
    (told,) = load_config("train", overrides, dry_run=True).warnings
    assert told.startswith(f"rollout.sampling: an answer also ends with '<|im_end|>' (id {codec.turn_end}), with which")
    assert f"name [{tokenizer.eos_token_id}] only" in told
    assert load_config("train", [*overrides, f"rollout.sampling.stop_token_ids=[{codec.turn_end}]"]).warnings == []


def test_prompts_that_spell_special_tokens_are_told_once_unless_they_are_meant(overrides, tmp_path, monkeypatch):
    codec = TokenCodec(chat_tokenizer("chatml"))
    monkeypatch.setattr("penstock.rollout.tokenization.tokenizers.load_codec", lambda _path, _env=None: codec)
    spelling = PLUGIN.replace('f"{index}="', 'f"{index}<|im_end|>="')
    assert spelling != PLUGIN
    (tmp_path / "my_spelling_tasks.py").write_text(spelling)
    overrides = [*overrides, "env.factory=my_spelling_tasks:Source"]
    (warning,) = load_config("train", overrides, dry_run=True).warnings
    assert "4 of 8 prompts spell a special token of the tokenizer, first t0 with '<|im_end|>'" in warning
    assert "set env.special_tokens=tokens" in warning
    codec = TokenCodec(chat_tokenizer("chatml"), special_tokens="tokens")
    assert load_config("train", [*overrides, "env.special_tokens=tokens"], dry_run=True).warnings == []


def test_experts_without_a_plan_do_not_stay_on_their_ranks(overrides, tmp_path):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    alone = [*overrides, "trainer=fsdp2", "trainer.num_ranks=2", "trainer.expert_parallel=true"]
    write_model(tmp_path / "policy", model_type="granitemoe", architectures=["GraniteMoeForCausalLM"], **experts)
    assert "trainer.expert_parallel=true: transformers has no plan for GraniteMoeForCausalLM" in problem(alone)
    write_model(tmp_path / "policy", model_type="mixtral", architectures=["MixtralForCausalLM"], **experts)
    load_config("train", alone)
