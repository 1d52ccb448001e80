"""What pyproject.toml allows and requirements/*.lock pin, and the GPU and driver that the cuda extra needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from penstock.platform.cluster.hardware import MIN_COMPUTE_CAPABILITY, MIN_NVIDIA_DRIVER

ROOT = Path(__file__).parents[3]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
EXTRAS_OF_LOCKS = {"cpu": ("cpu", "envs", "models", "dev"), "cuda": ("cuda", "envs", "models", "dev")}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def allowed(*extras: str) -> list[Requirement]:
    """What the project depends on with these extras."""
    texts = [
        *project()["dependencies"],
        *(text for extra in extras for text in project()["optional-dependencies"][extra]),
    ]
    return [requirement for text in texts if (requirement := Requirement(text)).specifier]


def lock(name: str) -> dict[str, Version]:
    """Package -> version in requirements/NAME.lock."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): Version(text) for package, text in pairs}


@pytest.mark.parametrize("name", ["cpu", "cuda", "oldest"])
def test_a_lock_pins_what_the_project_allows(name: str) -> None:
    pinned = lock(name)
    ranges = allowed(*EXTRAS_OF_LOCKS["cuda" if name == "cuda" else "cpu"])
    assert [str(one) for one in ranges if pinned[canonicalize_name(one.name)] not in one.specifier] == []


def test_the_oldest_lock_is_the_lower_end_of_every_range() -> None:
    pinned, differ = lock("oldest"), []
    for one in allowed(*EXTRAS_OF_LOCKS["cpu"]):
        (lower,) = [part.version for part in one.specifier if part.operator in (">=", "==")]
        if Version(pinned[canonicalize_name(one.name)].base_version) != Version(lower):
            differ.append(f"{one}: {pinned[canonicalize_name(one.name)]}")
    assert differ == []


def test_the_driver_is_for_the_cuda_that_is_locked() -> None:
    runtime = lock("cuda")["nvidia-cuda-runtime"]
    assert runtime.release[:2] == (13, 0), "another CUDA: MIN_NVIDIA_DRIVER and the README change with it"
    assert f"driver {MIN_NVIDIA_DRIVER}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_gpu_that_is_needed_is_the_one_on_which_vllm_takes_bfloat16() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "platforms" / "cuda.py").read_text(encoding="utf-8")
    body = source.partition("def check_if_supports_dtype")[2].partition("    @classmethod")[0]
    (least,) = re.findall(r"has_device_capability\((\d+)\)", body)
    assert f"{least[:-1]}.{least[-1]}" == MIN_COMPUTE_CAPABILITY
    assert f"compute capability {MIN_COMPUTE_CAPABILITY}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_package_index_resolves_what_make_setup_installs_for_cuda(tmp_path: Path) -> None:
    """With the newest pip, which reads requirements out of wheels without fetching them whole."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environment["PIP_CONFIG_FILE"] = os.devnull  # a local folder of wheels may hold the CPU build of torch
    fetch = [*PIP, "download", "-q", "--no-deps", "--dest", str(tmp_path), "pip"]
    if subprocess.run(fetch, env=environment, check=False, capture_output=True, timeout=120).returncode:
        pytest.skip("no package index can be reached: whether it resolves the cuda extra cannot be asked")
    (newest,) = tmp_path.glob("pip-*.whl")
    options = ["--dry-run", "--ignore-installed", "--no-cache-dir", "--use-feature=fast-deps"]
    wanted = ["-c", str(ROOT / "requirements" / "cuda.lock"), *map(str, allowed(*EXTRAS_OF_LOCKS["cuda"]))]
    resolved = subprocess.run(
        [sys.executable, str(newest / "pip"), "install", *options, *wanted],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=780,
    )
    assert resolved.returncode == 0, resolved.stderr[-3000:]
    would_install = resolved.stdout.rpartition("Would install ")[2].split()
    assert {f"{name}-{lock('cuda')[name]}" for name in ("torch", "triton", "vllm")} <= set(would_install)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pip_resolves_what_make_setup_installs_without_a_gpu() -> None:
    """What is installed is not fetched again: its wheels are of gigabytes, and its metadata is here."""
    if version("torch").partition("+")[2] != "cpu":
        pytest.skip("this environment has the CUDA build of torch")
    here = "oldest" if version("transformers") == str(lock("oldest")["transformers"]) else "cpu"
    wanted = ["-c", str(ROOT / "requirements" / f"{here}.lock"), *map(str, allowed(*EXTRAS_OF_LOCKS["cpu"]))]
    resolved = subprocess.run(
        [*PIP, "install", "--dry-run", *wanted],
        check=False,
        capture_output=True,
        text=True,
        timeout=780,
    )
    assert resolved.returncode == 0, resolved.stderr[-3000:]
    assert "Would install" not in resolved.stdout, "all of it is installed"
