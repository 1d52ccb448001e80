"""What the documents tell a user to type exists, and their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from penstock.platform.cli import main
from penstock.platform.config.compose import compose_all
from penstock.trainer.algorithms.advantages import OverlongConfig

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    ROOT / "AGENTS.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BASH_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(text: str) -> Iterator[list[str]]:
    """Every command of every ```bash block as words, without prompts, comments and leading assignments."""
    for block in BASH_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;]", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words:
                    yield words


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def penstock() -> Any:
    """The command line, with its commands."""
    return typer.main.get_command(main.app)


def problems(words: list[str]) -> list[str]:
    """What is wrong with one command; commands of other programs are not ours to judge."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = [word for word in arguments if "=" not in word and not word.startswith("-")]
        return [f"make {target}: no such target" for target in targets if target not in make_targets()]
    if program != "penstock":
        return []
    exists = arguments and arguments[0] in (*penstock().commands, "--help")
    found = [] if exists else [f"{' '.join(words)}: no such command"]
    experiments = [word.partition("=")[2] for word in arguments if word.startswith("experiment=")]
    missing = [name for name in experiments if not (ROOT / "conf" / "experiment" / f"{name}.yaml").exists()]
    return [*found, *(f"experiment={name}: no such file in conf/experiment" for name in missing)]


def test_the_readme_exists_shows_the_two_commands_and_is_at_most_120_lines() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    shown = [words for words in commands(text) if words[0] == "make"]
    assert {"demo", "test"} <= {word for words in shown for word in words}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_command_in_a_document_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [problem for words in commands(text) for problem in problems(words)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_in_a_document_leads_to_a_file(path: Path) -> None:
    targets = [target for target in LINK.findall(path.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


FOLDERS = (
    "actors", "benchmarks", "conf", "dataflow", "envs", "examples", "kernels", "platform", "rollout", "tests",
    "tools", "trainer", "weights",
)  # fmt: skip
"""Folders that a document names by their path. Other projects have a docs/ and a src/ as well."""
GONE = {
    "platform/__init__.py",  # would hide the standard library's module
    "types.py", "queue.py", "select.py",  # would be mistaken for modules of the standard library
}  # fmt: skip
"""What decision records (docs/adr/) name because it does not exist any more, or must not."""
OF_OTHERS = {
    "async_grpo_trainer.py", "fully_async_trainer.py", "integration_utils.py", "main_eval.py", "ppo_trainer.py",
    "run_generation_gsm8k.sh", "ssd_eval.py", "swe.toml", "train_source.py", "training_args.py",
}  # fmt: skip
"""Files of other projects, named without their folder."""


@cache
def repository() -> tuple[frozenset[str], frozenset[str]]:
    """All files and folders by their path, and the names of all tests."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    folders = {f"{parent.as_posix()}/" for name in files for parent in Path(name).parents if parent.name}
    sources = [(ROOT / name).read_text(encoding="utf-8") for name in files if re.fullmatch(r"tests/.*\.py", name)]
    tests = {name for source in sources for name in re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE)}
    return frozenset([*files, *folders]), frozenset(tests)


def missing_names(text: str, *, is_decision: bool = False) -> list[str]:
    """Files, folders and tests in backticks that do not exist; what a reader is told to write (`my_`, a block) may.

    A path may be given from any folder on, so `batches/packing.py` and `packing.py` are in trainer/batches; `*` and
    words in capitals stand for anything.
    """
    paths, tests = repository()
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for word in (word for span in re.findall(r"`([^`]+)`", prose) for word in re.split(r"::|[\s,;()]+", span)):
        folder, _, name = word.rstrip("/").rpartition("/")
        is_ours = word.startswith(tuple(f"{one}/" for one in FOLDERS))
        if re.fullmatch(r"test_\w+", word):
            is_missing = word not in tests
        elif re.fullmatch(r"[\w./*-]+\.(py|yaml|yml|md|sh|cpp|json|toml)|[\w./-]+/", word) and (
            is_ours or (word.endswith(".py") and not folder)
        ):
            pattern = re.sub(r"[A-Z]{3,}", "*", word) if is_ours else word
            is_missing = not any(fnmatch(path, pattern) or path.endswith(f"/{word}") for path in paths)
        else:
            continue
        is_readers = name.startswith("my_") or name in blocks or name in OF_OTHERS
        if is_missing and not is_readers and not (is_decision and word in GONE):
            found.append(word)
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_and_test_that_a_document_names_exists(path: Path) -> None:
    assert missing_names(path.read_text(encoding="utf-8"), is_decision=path.parent.name == "adr") == []


def test_planted_names_of_files_and_tests_that_do_not_exist_are_found() -> None:
    text = (
        "`platform/config/checks_trainer.py`, `platform/config/checks*.py`, `trainer/optimisers/`, "
        "`test_that_is_gone`, `gone.py`, `tests/unit/test_gone.py::test_neither`, `conf/algorithm/NAME/gone.yaml`, "
        "`types.py`\n"
        "`platform/checks/`, `trainer/step_s`, `conf/algorithm/NAME.yaml`, `my_reward.py`, `packing.py`, "
        "`test_planted_names_of_files_and_tests_that_do_not_exist_are_found`, `verl/trainer/main.py`, `env.py`, "
        "`own.py`\n"
        "```bash\ncat own.py other/gone2.py\n```\n"
    )
    assert missing_names(text) == [
        "platform/config/checks_trainer.py", "platform/config/checks*.py", "trainer/optimisers/", "test_that_is_gone",
        "gone.py", "tests/unit/test_gone.py", "test_neither", "conf/algorithm/NAME/gone.yaml", "types.py",
    ]  # fmt: skip
    assert missing_names("`types.py`", is_decision=True) == []


def test_every_page_that_code_names_exists() -> None:
    """In messages, comments and configurations: `docs/concepts/weights.md`."""
    paths, _ = repository()
    named = {
        (path, page)
        for path in paths
        if path.endswith((".py", ".yaml", ".toml")) and not path.startswith("tests/arch/")
        for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", (ROOT / path).read_text(encoding="utf-8"))
    }
    assert len(named) > 30
    assert sorted(one for one in named if one[1] not in paths) == []


OF_LIBRARIES = {
    "EarlyStoppingCallback", "KillMode", "KillWait", "LoRARequest", "PreemptParameters", "TimeoutStopSec",
    "apparmor_restrict_unprivileged_userns", "ds_to_universal", "env_key", "include_stop_str_in_output", "memfd_secret",
    "min_new_tokens", "model_provider", "model_providers", "return_sampling_mask", "root_package", "send_user_signal",
    "trainer_state", "wire_api",
}  # fmt: skip
"""Names of vLLM, TRL, DeepSpeed, codex, import-linter, SLURM, systemd and the kernel that documents explain."""
ABOUT_PEERS = {"coming-from.md", "peers.md"}
"""Pages whose names are mostly those of other systems; keys of ours in them are checked above and below."""


@cache
def names_in_code() -> frozenset[str]:
    """Every word of every file of text but the documents, and every file's name without its ending."""
    paths, _ = repository()
    names = {Path(path).stem for path in paths}
    for path in (ROOT / path for path in paths if not path.endswith((".md", "/")) and not path.startswith("docs/")):
        names |= set(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="ignore")))
    return frozenset(names)


def unknown_names(text: str) -> list[str]:
    """Identifiers in backticks that no file has: words with an underscore, or with a capital inside.

    Names that a block of the page defines are the reader's; paths are checked above.
    """
    blocks = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    words = [word for span in re.findall(r"`([^`]+)`", prose) for word in re.split(r"[\s,;]+", span) if "/" not in word]
    names = [name for word in words for name in re.findall(r"\b(?:[A-Z]+[a-z]+[A-Z]\w*|[a-z]\w*_\w+)\b", word)]
    is_known = names_in_code() | OF_LIBRARIES | set(re.findall(r"\w+", blocks))
    return [name for name in names if name not in is_known and not name.startswith(("my_", "mine_"))]


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name not in ABOUT_PEERS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_identifier_that_a_document_names_is_in_the_code(path: Path) -> None:
    assert unknown_names(path.read_text(encoding="utf-8")) == []


def test_planted_identifiers_that_do_not_exist_are_found() -> None:
    text = (
        "`GoneClass.method_that_is_gone`, `dataflow.key_that_is_gone=3`, `Flow.snapshot`, `dataflow.max_staleness`, "
        "`my_own_name`, `OwnClass`\n```python\nclass OwnClass: ...\n```\n"
    )
    # The words stand in this file, so that they are not found by chance.
    planted = text.replace("gone", "g" + "one_x").replace("Gone", "G" + "oneX")
    assert unknown_names(planted) == ["G" + "oneXClass", "method_that_is_g" + "one_x", "key_that_is_g" + "one_x"]


FOREIGN_OPTIONS = {
    "--address", "--backend-store-uri", "--ckpt", "--dataset_name", "--extra-index-url", "--follow", "--from-literal",
    "--gpus",
    "--auth-type", "--dangerously-bypass-approvals-and-sandbox", "--dangerously-skip-permissions", "--exit-immediately",
    "--head", "--host", "--import-mode", "--model", "--monitors", "--node-ip-address", "--push_to_hub", "--qos",
    "--requeue", "--resume", "--reward_funcs", "--run", "--security-opt", "--served-model-name", "--shm-size",
    "--signal", "--skip-git-repo-check", "--trainer", "--use_peft", "--vllm", "--yolo",
}  # fmt: skip
"""Of agents, docker, git, kubectl, mlflow, pip, pytest, ray, sbatch, vllm and other trainers."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@cache
def options_of(command: Any) -> frozenset[str]:
    """Options of a command and of all its subcommands."""
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    below = getattr(command, "commands", {}).values()
    return frozenset(own.union(*(options_of(one) for one in below)))


@cache
def options_of_programs() -> frozenset[str]:
    """Options of the scripts that documents tell a reader to run."""
    scripts = [
        *(ROOT / "benchmarks").glob("*.py"),
        *(ROOT / "tools").glob("**/*.py"),
        *(ROOT / "examples").glob("*.py"),
        *(ROOT / "tests").glob("*.py"),
    ]
    return frozenset(OPTION.findall("\n".join(path.read_text(encoding="utf-8") for path in scripts)))


def unknown_options(text: str) -> list[str]:
    """Options in a document that no program of it has, and those of `penstock` commands that the command has not."""
    known = options_of(penstock()) | options_of_programs() | FOREIGN_OPTIONS
    found = [option for option in OPTION.findall(text) if option not in known]
    for words in (words for words in commands(text) if Path(words[0]).name == "penstock"):
        command, rest = penstock(), words[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        typed = [word.partition("=")[0] for word in rest if OPTION.match(word)]
        found += [f"{' '.join(words[:2])} {option}" for option in typed if option not in options_of(command)]
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_option_in_a_document_exists(path: Path) -> None:
    assert unknown_options(path.read_text(encoding="utf-8")) == []


def test_planted_options_that_do_not_exist_are_found() -> None:
    text = "`--trial-timeout-s` or `--cell-timeout-s`\n```bash\npenstock sweep seeds=0:3 --dry-run --watch\n```\n"
    assert unknown_options(text) == ["--trial-timeout-s", "penstock sweep --watch"]


def test_what_the_guide_says_of_answers_that_were_cut_off_are_the_choices_of_the_key() -> None:
    guide = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (paragraph,) = re.findall(r"\(`overlong\.mode`\)\.(.*?)\n\n", guide, re.DOTALL)
    assert set(re.findall(r"`([a-z]+)`", paragraph)) == set(get_args(OverlongConfig.model_fields["mode"].annotation))


CONFIGURED = ("train", "sft", "rm", "dpo", "eval", "sample", "sweep", "launch", "plan")
"""Commands that take overrides of a configuration."""


def overrides(words: list[str]) -> list[str]:
    """The overrides of a command; of several values of a sweep the first."""
    typed = [word for word in words[2:] if "=" in word and not word.startswith(("-", "seeds=", "launch."))]
    if words[1] == "eval" and typed and "=" not in words[2]:  # of a run, whose configuration it takes
        return typed if any(word.startswith("experiment=") for word in typed) else ["experiment=arithmetic", *typed]
    if words[1] != "sweep":
        return typed
    return [re.sub(r"^([^=\[{]+=[^,\[{]+),.*", r"\1", word) for word in typed]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_configuration_in_a_document_is_valid(path: Path) -> None:
    """Keys and values only: files and modules that a page tells its reader to write are not here."""
    shown = [words for words in commands(path.read_text(encoding="utf-8")) if Path(words[0]).name == "penstock"]
    typed = [overrides(words) for words in shown if len(words) > 1 and words[1] in CONFIGURED]
    own_folder = [words for words in shown if "--config-dir" in words]
    wrong = [compose_all(one).problems for one in typed if one and not own_folder]
    assert [problems for problems in wrong if problems] == []


def unknown_keys(text: str) -> list[str]:
    """Keys and choices of ours in the tables of another tool's keys (second column, and third) that do not exist."""
    known = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    roots = set(re.findall(r"^\| `([a-z_]+)[.`]", known, re.MULTILINE)) | {"cluster", "algorithm"}
    found = []
    for row in re.findall(r"^\| [^|]+ \| (.+)\|$", text, re.MULTILINE):
        for word in re.findall(r"`([^`]+)`", row):
            key, _, choice = word.partition("=")
            group = ROOT / "conf" / key
            if key.partition(".")[0].partition("/")[0] not in roots:
                continue
            is_choice = group.is_dir() and (not choice or (group / f"{choice}.yaml").is_file())
            if not is_choice and ".args." not in key and f"| `{key}` |" not in known:
                found.append(word)
    return found


def test_every_key_beside_one_of_another_tool_exists() -> None:
    text = (ROOT / "docs" / "guides" / "coming-from.md").read_text(encoding="utf-8")
    assert unknown_keys(text) == []
    planted = "| `a` | `trainer.lr`, `trainer.optimizer.lr` | |\n| `b` | `algorithm/loss` | `algorithm=grp` |\n"
    assert unknown_keys(planted) == ["trainer.lr", "algorithm=grp"]


def test_a_planted_configuration_that_is_wrong_is_found() -> None:
    (words,) = commands("```bash\npenstock train experiment=arithmetic algorithm.clip_hihg=0.3\n```\n")
    assert compose_all(overrides(words)).problems
    (words,) = commands("```bash\npenstock sweep experiment=arithmetic algorithm=grpo,rloo seeds=0:3\n```\n")
    assert overrides(words) == ["experiment=arithmetic", "algorithm=grpo"]


@pytest.mark.full
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "reference" / "configuration" / "index.html").exists()


def test_planted_commands_that_do_not_exist_are_found() -> None:
    text = (
        "```bash\n$ SEED=1 make dmo A=1  # comment\nmake demo && .venv/bin/penstock trian experiment=arithmetik\n"
        "git status\n```\n```yaml\nmake: nothing\n```\n"
    )
    assert [problem for words in commands(text) for problem in problems(words)] == [
        "make dmo: no such target",
        ".venv/bin/penstock trian experiment=arithmetik: no such command",
        "experiment=arithmetik: no such file in conf/experiment",
    ]
