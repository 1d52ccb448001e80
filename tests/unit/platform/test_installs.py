"""What `make setup` and the Dockerfile install. The recipe is run with a Python that writes down what it is asked."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock import __version__

ROOT = Path(__file__).parents[3]
FAKE_PYTHON = """#!/bin/sh
case "$*" in *"-m pip"*) echo "$*" >> {log} ;; esac
case "$*" in
  *--extra-index-url*) exit 0 ;;
  *"${{REFUSED:-nothing}}"*) exit 1 ;;
esac
"""
"""Answers yes. What holds $REFUSED is refused, unless another package index is named."""


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def installed(tmp_path: Path, *variables: str, refused: str = "nothing") -> list[str]:
    """Arguments of pip, in the order in which `make setup` calls it."""
    log, programs = tmp_path / "log", tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    python = programs / "python"
    python.write_text(FAKE_PYTHON.format(log=log))
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path / 'venv'}", "PYTHON=python3", *variables],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "REFUSED": refused},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    return [line.partition("--no-input ")[2] for line in lines]


def torch_pin(flavor: str) -> str:
    lock = (ROOT / "requirements" / f"{flavor}.lock").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^torch==.*", lock, re.MULTILINE)
    return pin


def test_a_gpu_gets_the_cuda_build_of_torch_first(tmp_path: Path) -> None:
    torch, rest = installed(tmp_path, "FLAVOR=cuda", "HAS_DRIVER=yes")
    assert torch == f"install {torch_pin('cuda')}"
    assert "+" not in torch
    assert rest == "install -c requirements/cuda.lock -e .[cuda,dev]"


@pytest.mark.parametrize("refused", ["nothing", "+cpu"], ids=["the index has it", "the index does not have it"])
def test_a_machine_without_a_gpu_gets_the_cpu_build_of_torch(tmp_path: Path, refused: str) -> None:
    *torch, rest = installed(tmp_path, "FLAVOR=cpu", "EXTRAS=envs", refused=refused)
    pin = torch_pin("cpu")
    assert pin.endswith("+cpu")
    elsewhere = f"install --extra-index-url https://download.pytorch.org/whl/cpu {pin}"
    assert torch == [f"install {pin}", *([elsewhere] if refused == "+cpu" else [])]
    assert rest == "install -c requirements/cpu.lock -e .[cpu,envs]"


def test_another_lock_may_be_named(tmp_path: Path) -> None:
    _, rest = installed(tmp_path, "FLAVOR=cpu", "LOCK=requirements/oldest.lock")
    assert rest == "install -c requirements/oldest.lock -e .[cpu,dev]"


def test_a_second_setup_does_nothing_and_other_extras_install_again(tmp_path: Path) -> None:
    assert len(installed(tmp_path / "a", "FLAVOR=cuda", "HAS_DRIVER=yes")) == 2
    again = ["make", "setup", f"VENV={tmp_path / 'a' / 'venv'}", "FLAVOR=cuda", "HAS_DRIVER=yes"]
    for extra, calls in ([], 2), (["EXTRAS=envs"], 4):
        # Nothing of a make above this one: it may have another LOCK.
        subprocess.run(
            [*again, *extra], cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, check=True, capture_output=True, timeout=60
        )
        assert len((tmp_path / "a" / "log").read_text().splitlines()) == calls


def instructions(text: str) -> list[tuple[str, str]]:
    """Instruction and argument of each line of a Dockerfile, with continued lines joined."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, argument = line.strip().partition(" ")
            found.append((word, " ".join(argument.split())))
    return found


KNOWN = {"FROM", "ARG", "RUN", "WORKDIR", "USER", "COPY", "ENV", "CMD"}


@pytest.fixture
def dockerfile() -> list[tuple[str, str]]:
    return instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))


def test_the_dockerfile_is_made_of_known_instructions_and_public_names(dockerfile: list[tuple[str, str]]) -> None:
    assert {word for word, _ in dockerfile} == KNOWN
    (base,) = [argument for word, argument in dockerfile if word == "FROM"]
    name, _, tag = base.partition(":")
    assert name == "python", "of Docker's own library"
    version = re.match(r"(\d+)\.(\d+)-slim", tag)
    assert version is not None
    assert f">={version[1]}.{version[2]}" == project()["requires-python"]
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"https?://\S+", text) == []


def test_the_image_does_not_run_as_root(dockerfile: list[tuple[str, str]]) -> None:
    users = [argument for word, argument in dockerfile if word == "USER"]
    (made,) = re.findall(r"useradd .*--uid (\d+) (\S+)", " ".join(argument for _, argument in dockerfile))
    assert users[-1] == made[1]
    assert made[0] == "1000", "the fsGroup of `penstock launch kuberay`"


@pytest.mark.parametrize("flavor", ["cpu", "cuda"])
def test_the_image_installs_what_make_setup_installs(
    dockerfile: list[tuple[str, str]], flavor: str, tmp_path: Path
) -> None:
    (line,) = [argument for word, argument in dockerfile if word == "RUN" and argument.startswith("make ")]
    defaults = dict(argument.split("=", 1) for word, argument in dockerfile if word == "ARG")
    assert defaults["FLAVOR"] in ("cpu", "cuda")
    filled = re.sub(r"\$\{(\w+)\}", lambda found: (defaults | {"FLAVOR": flavor})[found[1]], line)
    program, target, *variables = shlex.split(filled)
    assert (program, target) == ("make", "setup")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for variable in variables:
        assert re.search(
            rf"^{variable.partition('=')[0]} [:?]=|\$\({variable.partition('=')[0]}\)", makefile, re.MULTILINE
        )
    calls = installed(tmp_path, *variables)
    assert f"install --no-cache-dir -c requirements/{flavor}.lock -e .[{flavor},envs]" in calls
    extras = project()["optional-dependencies"]
    assert {flavor, "envs"} <= set(extras)  # type: ignore[call-overload]
    (path,) = [argument for word, argument in dockerfile if word == "ENV"]
    assert path == "PATH=/opt/penstock/.venv/bin:${PATH}"
    assert ("WORKDIR", "/opt/penstock") in dockerfile


def test_what_is_left_out_of_the_image_is_not_needed_by_the_installation() -> None:
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    needed = {
        "pyproject.toml",
        "requirements",
        "Makefile",
        "README.md",
        "src",
        *(path.name for path in (ROOT / "src" / "penstock").iterdir()),
    }
    assert not needed & set(left_out)
    assert {".git", ".venv", "runs"} <= set(left_out)


def test_the_workflow_calls_targets_that_there_are() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    jobs = {name: [step.get("run", "") for step in job["steps"]] for name, job in workflow["jobs"].items()}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {step.split()[1] for steps in jobs.values() for step in steps if step.startswith("make")} <= targets
    assert jobs["test"][-3:] == ["make lint", "make test", "make docs"]
    assert jobs["full"][-1] == "make test-full"


def test_the_readme_installs_this_version_with_the_index_that_make_setup_uses() -> None:
    readme, wheel = (ROOT / "README.md").read_text(encoding="utf-8"), f"dist/penstock-{__version__}-py3-none-any.whl"
    (index,) = re.findall(r"^TORCH_CPU_INDEX \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    (block,) = re.findall(r"^## Install\n\n```bash\n(.*?)```", readme, re.MULTILINE | re.DOTALL)
    assert [shlex.split(line, comments=True) for line in block.splitlines()] == [
        ["pip", "wheel", "--no-deps", "-w", "dist", "."],
        ["pip", "install", f"{wheel}[cpu]", "--extra-index-url", index],
    ]


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (__version__, project()["license"])
