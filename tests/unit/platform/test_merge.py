"""What `penstock merge` takes and refuses, and what it writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from penstock.platform.checks.load import compose_config
from penstock.platform.cli.main import app
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import byte_tokenizer, character_tokenizer
from penstock.weights.task_vectors import dare, linear, ties

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
SHARD = "6KB"


def write(
    folder: str,
    seed: int,
    *,
    near: str | None = None,
    dtype: torch.dtype = torch.float32,
    shard: str = "1GB",
    tokenizer: Any = None,
    kind: Any = Qwen3ForCausalLM,
    **fields: Any,
) -> None:
    """A model folder with random weights, or with those of `near` and a little more."""
    torch.manual_seed(seed)
    model = kind(kind.config_class(**(SHAPE | fields)))
    if near is not None:
        start = weights(near)
        for name, parameter in model.named_parameters():
            parameter.data = start[name].float() + 0.02 * torch.randn(parameter.shape)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (tokenizer or character_tokenizer()).save_pretrained(folder)


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def change(folder: str, name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace a tensor of a folder with one file."""
    file = Path(folder) / "model.safetensors"
    held = {key: one.clone() for key, one in load_file(file).items()}
    save_file(held | {name: changed(held.get(name, torch.zeros(1)))}, file, {"format": "pt"})


def write_run(name: str, policy: str, *overrides: str, version: int | None = 60) -> None:
    """A run directory with a saved policy."""
    run_dir = prepare_run_dir(compose_config(["experiment=arithmetic", f"name={name}", *overrides]))
    if version is not None:
        shutil.copytree(policy, run_dir / "policy")
        (run_dir / "summary.json").write_text(json.dumps({"policy_version": version}))


def add_checkpoint(name: str, version: int) -> None:
    saved = CheckpointFolder(Path("runs") / name)
    saved.prepare()
    manifest = {"version": version, "incarnation": 0, "trainer_files": [], "spooled": {}, "files": [], "run": {}}
    saved.commit(saved.unfinished(version), FlowSnapshot({}, (), ()), manifest)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three experts: `base`, `a`, `b` and `c`."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write("base", 0, shard=SHARD)
        for seed, name in enumerate("abc", start=1):
            write(name, seed, near="base")
    return folder


@pytest.fixture(autouse=True)
def folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the models, as the working directory."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def merge(*words: str, base: str = "base", coefficients: str = "0.5,0.5", to: str = "out") -> str:
    """Exit code and output of the command."""
    typed = ["merge", *words, "--base", base, "--coefficients", coefficients, "--to", to]
    result = CliRunner().invoke(app, typed, env={"COLUMNS": "400"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return f"{result.exit_code} {result.stdout}{result.stderr if result.exit_code else ''}"


def refusal(*words: str, **options: str) -> list[str]:
    """The lines of a refusal, which leaves nothing."""
    before = sorted(Path().iterdir())
    said = merge(*words, **options)
    assert said.startswith("2 "), said
    assert sorted(Path().iterdir()) == before
    return [line.removeprefix("  - ") for line in said.splitlines() if line.startswith("  - ")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_with_coefficient_1_is_that_expert_to_the_bit(dtype: torch.dtype) -> None:
    write("narrow", 0, dtype=dtype, shard=SHARD)
    write("expert", 5, near="narrow", dtype=dtype)
    assert merge("expert", base="narrow", coefficients="1").endswith("merge of expert (linear) written to out\n")
    expert, merged = weights("expert"), weights("out")
    assert merged.keys() == expert.keys()
    for name, tensor in merged.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor.view(torch.uint8), expert[name].view(torch.uint8))


METHODS: dict[str, tuple[list[str], Callable[[str, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]]] = {
    "linear": ([], lambda name, base, experts: linear(base, experts, [0.5, 0.7])),
    "ties": (["--density", "0.3"], lambda name, base, experts: ties(base, experts, [0.5, 0.7], 0.3)),
    "dare": (
        ["--density", "0.4", "--seed", "2"],
        lambda name, base, experts: dare(base, experts, [0.5, 0.7], 0.4, name=name, seed=2),
    ),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_tensor_is_merged_in_float32_and_written_in_the_form_of_the_base(method: str, dtype: torch.dtype) -> None:
    write("narrow", 0, dtype=dtype, shard=SHARD)
    write("first", 1, near="narrow", dtype=dtype)
    write("second", 2, near="narrow", dtype=dtype, shard="4KB")
    options, by_hand = METHODS[method]
    said = merge("first", "second", "--method", method, *options, base="narrow", coefficients="0.5,0.7")
    assert said.startswith("0 "), said
    files = sorted(path.name for path in Path("narrow").glob("model*"))
    assert len(files) >= 3, "the base is in several files"
    assert sorted(path.name for path in Path("out").glob("model*")) == files
    index = "model.safetensors.index.json"
    assert (Path("out") / index).read_bytes() == (Path("narrow") / index).read_bytes()
    start, first, second = (weights(one) for one in ("narrow", "first", "second"))
    for name, tensor in weights("out").items():
        expected = by_hand(name, start[name].float(), [first[name].float(), second[name].float()]).to(dtype)
        assert torch.equal(tensor, expected), name
    loaded = AutoModelForCausalLM.from_pretrained("out")
    assert loaded.dtype == dtype
    assert torch.equal(loaded.state_dict()["model.norm.weight"], weights("out")["model.norm.weight"])
    assert AutoTokenizer.from_pretrained("out").encode("1+2=") == character_tokenizer().encode("1+2=")


@pytest.mark.some(1)
@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_the_policies_and_their_files_change_no_bit(method: str) -> None:
    shutil.copytree("a", "whole")
    AutoModelForCausalLM.from_pretrained("a").save_pretrained("split", max_shard_size="4KB")
    for file in Path("a").glob("tokenizer*"):
        shutil.copy(file, "split")
    shutil.rmtree("a")
    options, _ = METHODS[method]
    written = []
    for source in ("whole", "split"):
        Path(source).rename("a")
        for order in permutations({"a": "0.5", "b": "0.3", "c": "0.1"}.items()):
            names, coefficients = zip(*order, strict=True)
            to = f"out{len(written)}"
            assert merge(*names, "--method", method, *options, coefficients=",".join(coefficients), to=to)[0] == "0"
            written.append([path.read_bytes() for path in sorted(Path(to).glob("*.safetensors"))])
        shutil.rmtree("a")
    assert len(written) == 12
    assert all(one == written[0] for one in written)


def test_runs_are_merged_by_their_policies_and_the_card_names_them() -> None:
    write_run("first", "a", "model.path=base")
    write_run("second", "b", "model.path=base", version=40)
    said = merge("runs/first", "runs/second/policy", "--method", "ties", "--density", "0.2", coefficients="0.5,1")
    assert said == "0 merge of runs/first, runs/second/policy (ties, density 0.2) written to out\n"
    card = (Path("out") / "README.md").read_text()
    rows = ["base model | base", "method | ties, density 0.2", "first, step 60 | coefficient 0.5"]
    assert [row for row in [*rows, "second, step 40 | coefficient 1"] if f"| {row} |\n" not in card] == []
    assert str(Path.cwd()) not in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["tags"] == ["penstock", "merge"]
    assert "base_model" not in front
    names = {path.name for path in Path("out").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"}
    assert GenerationConfig.from_pretrained("out").eos_token_id == 1


def test_a_base_on_the_hub_is_named_in_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    repository = Path("cache/models--some--base")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree("base", repository / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(Path("cache").absolute()))
    write_run("first", "a", "model.path=some/base")
    assert merge("runs/first", base="some/base", coefficients="1")[0] == "0"
    assert "\nbase_model: some/base\n" in (Path("out") / "README.md").read_text()
    assert merge("runs/first", base="base", coefficients="1", to="again")[0] == "0", "it has the same weights"
    assert refusal("a", base="some/other", coefficients="1", to="third") == [
        "some/other: there is no such run directory or Hugging Face folder, or not in the cache of huggingface_hub."
    ]


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ("0.5", "1 for 2 policies (a, b)"),
        ("0.5,0.5,0.5", "3 for 2 policies (a, b)"),
        ("0.5,x", "'x' is not a number"),
        ("0.5,", "'' is not a number"),
        ("0.5,nan", "'nan' is not a number"),
        ("inf,0.5", "'inf' is not a number"),
    ],
)
def test_coefficients_that_are_no_numbers_or_not_as_many_as_policies_are_refused(
    coefficients: str, message: str
) -> None:
    (line,) = refusal("a", "b", coefficients=coefficients)
    assert line.startswith(f"--coefficients {coefficients}: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method ties", "--method ties: give --density"),
        ("--method dare", "--method dare: give --density"),
        ("--density 0.5", "--density 0.5: it has no effect with --method linear"),
        ("--method ties --density 0", "--density 0: it is outside (0, 1]"),
        ("--method dare --density 1.1", "--density 1.1: it is outside (0, 1]"),
        ("--method dare --density nan", "--density nan: it is outside (0, 1]"),
        ("--method ties --density 0.5 --seed 1", "--seed 1: it has no effect with --method ties"),
    ],
)
def test_options_out_of_range_or_without_effect_are_refused(options: str, message: str) -> None:
    (line,) = refusal("a", "b", *options.split())
    assert line.startswith(message)


def test_several_mistakes_are_told_at_once() -> None:
    Path("out").mkdir()
    told = refusal("a", "nothing", "--method", "ties", coefficients="0.5")
    assert [line.partition(":")[0] for line in told] == ["--coefficients 0.5", "--method ties", "--to out", "nothing"]
    assert list(Path("out").iterdir()) == []


def test_what_is_no_model_is_refused() -> None:
    Path("empty").mkdir()
    (Path("adapter")).mkdir()
    (Path("adapter") / "adapter_config.json").write_text("{}")
    write("lost", 1, near="base", shard="4KB")
    next(Path("lost").glob("model-00002*")).unlink()
    assert refusal("a", "empty") == ["empty: it holds no config.json. Give a run directory or a Hugging Face folder."]
    assert refusal("adapter", "a")[0].startswith("adapter: it holds adapters alone; merge them into their base first.")
    assert "model-00002-of-" in refusal("a", "lost")[0]


def test_of_a_run_that_has_only_checkpoints_the_command_that_writes_its_policy_is_told() -> None:
    write_run("fresh", "a", version=None)
    assert refusal("runs/fresh", "b")[0].startswith("runs/fresh: the run has no policy yet. ")
    write_run("killed", "a", version=None)
    add_checkpoint("killed", 40)
    (line,) = refusal("runs/killed", "b")
    assert "its newest policy, of step 40, is in a checkpoint alone" in line
    assert line.endswith("penstock export runs/killed --to DIR")
    write_run("resumed", "a", "model.path=base", version=20)
    add_checkpoint("resumed", 40)
    assert "its newest policy, of step 40, is in a checkpoint alone" in refusal("runs/resumed", "b")[0]
    write_run("ended", "a", "model.path=base", version=40)
    add_checkpoint("ended", 40)
    assert merge("runs/ended", "b")[0] == "0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 1}, "other: 11 tensors are missing, e.g. model.layers.1."),
        ({"num_hidden_layers": 3}, "other: 11 tensors are not in the base base, e.g. model.layers.2."),
        ({"tie_word_embeddings": False}, "other: tie_word_embeddings=False, and True in the base base"),
        (
            {"intermediate_size": 32},
            "other: model.layers.0.mlp.down_proj.weight is [16, 32], and in the base base [16, 24]",
        ),
        ({"vocab_size": 40}, "other: model.embed_tokens.weight is [40, 16], and in the base base [32, 16]"),
    ],
)
def test_other_names_and_shapes_of_tensors_are_refused(fields: dict[str, Any], message: str) -> None:
    write("other", 1, **fields)
    (line,) = refusal("a", "other")
    assert line.startswith(message), line


def test_another_architecture_and_quantised_models_are_refused() -> None:
    for name, fields in (
        ("llama", {"model_type": "llama"}),
        ("codes", {"quantization_config": {"quant_method": "fp8"}}),
    ):
        shutil.copytree("a", name)
        config = json.loads((Path(name) / "config.json").read_text())
        (Path(name) / "config.json").write_text(json.dumps(config | fields))
    assert refusal("llama", "b")[0].startswith("llama: it is a llama, and the base base a qwen3.")
    assert refusal("codes", "b")[0].startswith("codes: it is quantised (config.json)")
    assert refusal("a", "b", base="codes")[0].startswith("codes: it is quantised (config.json)")


def test_a_configuration_that_computes_something_else_is_told() -> None:
    config = json.loads((Path("a") / "config.json").read_text())
    (Path("a") / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1, "use_cache": False}))
    said = merge("a", "b")
    assert "warning: a: its config.json differs from the base's, which is written: rms_norm_eps=0.1 (1e-06)\n" in said
    assert json.loads((Path("out") / "config.json").read_text())["rms_norm_eps"] == 1e-6


def with_steps(folder: str, dtype: torch.dtype, *values: float) -> None:
    change(folder, "steps", lambda _: torch.tensor(values).to(dtype))


def test_tensors_that_are_no_floats_are_kept_if_they_are_the_same_and_refused_if_not() -> None:
    write("base1", 0)
    for name in ("base1", "a", "b"):
        with_steps(name, torch.int64, 1, 2, 3)
    assert merge("a", "b", base="base1")[0] == "0"
    assert weights("out")["steps"].tolist() == [1, 2, 3]
    shutil.rmtree("out")
    with_steps("b", torch.int64, 1, 2, 4)
    assert refusal("a", "b", base="base1")[0].startswith("b: steps (I64) is not that of the base")
    with_steps("b", torch.float32, 1, 2, 3)
    assert refusal("a", "b", base="base1")[0].startswith("b: steps is stored as F32, and in the base as I64")


@pytest.mark.parametrize("where", ["a", "base1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_and_nothing_is_left(where: str, value: float) -> None:
    write("base1", 0)
    change(where, "model.norm.weight", lambda tensor: tensor.index_fill(0, torch.tensor([3, 5]), value))
    (line,) = refusal("a", "b", base="base1")
    assert line.startswith(f"{where}: 2 of the 16 values of model.norm.weight are not finite")


def test_a_merge_that_overflows_the_dtype_of_the_base_is_refused() -> None:
    assert "the merge, in torch.float32: " in refusal("a", "b", coefficients="1e38,3e38")[0]


def test_what_the_class_drops_from_the_base_stays_as_it_is_and_is_told() -> None:
    """As a run's policy is without the layer of a base that predicts further tokens."""
    mixture: dict[str, Any] = {
        "kind": Qwen3MoeForCausalLM,
        "num_experts": 2,
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 1,
    }
    for seed, name in enumerate(("base1", "first", "second")):
        write(name, seed, **mixture)
    assert any(".experts.1." in name for name in weights("base1")), "one by one, and stacked in the class"
    assert merge("first", "second", base="base1", to="plain")[0] == "0"
    extra = {"mtp.layers.0.weight": torch.arange(3.0), "model.rotary_emb.inv_freq": torch.ones(2)}
    for name, tensor in extra.items():
        change("base1", name, lambda _, tensor=tensor: tensor)
    said = merge("first", "second", base="base1")
    assert "warning: base1: 2 tensors that no qwen3_moe of transformers has stay as they are, e.g. model.rotary" in said
    expected, merged = weights("plain") | extra, weights("out")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())
    file = Path("second") / "model.safetensors"
    held = load_file(file)
    del held["model.layers.0.mlp.experts.1.up_proj.weight"]
    save_file(held, file, {"format": "pt"})
    (line,) = refusal("first", "second", base="base1", to="again")
    assert line.startswith("second: 1 tensors are missing, e.g. model.layers.0.mlp.experts.1.up_proj.weight.")


@pytest.mark.parametrize("method", ["linear", "dare"])
@pytest.mark.parametrize("where", [("base1",), ("a",), ("a", "b")])
def test_a_head_that_is_the_embedding_may_be_in_the_files_once_or_twice(where: tuple[str, ...], method: str) -> None:
    options = ("--method", method, *METHODS[method][0])
    write("base1", 0)
    assert merge("a", "b", *options, base="base1", to="plain")[0] == "0"
    for name in where:
        change(name, "lm_head.weight", lambda _, name=name: weights(name)["model.embed_tokens.weight"].clone())
    assert merge("a", "b", *options, base="base1")[0] == "0"
    merged, plain = weights("out"), weights("plain")
    if "base1" in where:
        assert torch.equal(merged.pop("lm_head.weight"), plain["model.embed_tokens.weight"])
    assert merged.keys() == plain.keys()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in merged.items())


def test_another_tokenizer_is_refused_and_the_same_in_other_bytes_is_not() -> None:
    file = Path("a") / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content, indent=7, sort_keys=True))
    (Path("b") / "tokenizer_config.json").unlink()
    shutil.copy(Path("a") / "tokenizer_config.json", Path("b") / "tokenizer_config.json")
    assert merge("a", "b")[0] == "0"
    ids = content["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    file.write_text(json.dumps(content))
    (line,) = refusal("a", "b", to="again")
    assert line.startswith("a: its tokenizer is not that of base: they differ in model.")


def test_policies_with_different_chat_templates_are_refused_and_the_base_may_have_none() -> None:
    size = {"vocab_size": 259}
    write("base1", 0, **size)
    for name in ("first", "second"):
        write(name, 1, tokenizer=byte_tokenizer(), **size)
    bare = byte_tokenizer()
    bare.chat_template = None
    bare.save_pretrained("base1")
    assert merge("first", "second", base="base1")[0] == "0"
    assert AutoTokenizer.from_pretrained("out").chat_template == byte_tokenizer().chat_template
    other = byte_tokenizer()
    other.chat_template = "{{ messages[0]['content'] }}"
    other.save_pretrained("second")
    assert refusal("first", "second", base="base1", to="again")[0].startswith(
        "second: its tokenizer has another chat_template than first"
    )


def test_a_model_without_a_tokenizer_gets_that_of_the_others() -> None:
    for name in ("a", "base"):
        for file in Path(name).glob("tokenizer*"):
            file.unlink()
    assert merge("a", "b")[0] == "0"
    assert AutoTokenizer.from_pretrained("out").encode("1+2=") == character_tokenizer().encode("1+2=")


def test_a_base_that_a_run_was_not_trained_from_is_refused() -> None:
    shutil.copytree("base", "same")
    write("elsewhere", 9)
    write_run("first", "a", "model.path=same")
    write_run("second", "b", "model.path=elsewhere")
    assert merge("runs/first", coefficients="1", to="right")[0] == "0", "another folder with the same weights"
    (line,) = refusal("runs/first", "runs/second")
    assert line.startswith("runs/second: it was trained from ")
    assert "/elsewhere, whose model.embed_tokens.weight is not that of base. " in line
    new = prepare_run_dir(compose_config(["experiment=arithmetic_sft", "name=new"], command="sft"))
    shutil.copytree("a", new / "policy")
    assert refusal("runs/new", "b")[0].startswith("runs/new: the run began with random weights")


def test_a_base_of_which_nothing_is_certain_is_told() -> None:
    write("elsewhere", 9)
    assert "warning: a: nothing in it says which model it was trained from. Is it base?\n" in merge("a", "b", to="out1")
    (Path("a") / "README.md").write_text("---\nbase_model: elsewhere\n---\n")
    said = merge("a", "b", to="out2")
    assert "warning: a: it was trained from elsewhere, whose model.embed_tokens.weight is not that of base." in said
    write_run("gone", "a", "model.path=base")
    shutil.move("base", "moved")
    said = merge("runs/gone", "runs/gone", base="moved", to="out3")
    assert said.count("warning: runs/gone: it was trained from base, which is not here. Is it moved?\n") == 2
    assert said.startswith("0 ")


def test_a_folder_that_cannot_be_written_is_told_in_one_line_and_leaves_nothing() -> None:
    Path("file").write_text("")
    said = merge("a", "b", to="file/out")
    assert said.startswith("1 "), said
    assert "error: --to file/out: NotADirectoryError: " in said
