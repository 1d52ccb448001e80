"""The pins of both extras, and of the GPU and driver that the cuda extra needs.

The pins of the cuda extra are compared with what the CUDA wheel of torch requires, which no machine without a GPU
installs.
"""

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

from penstock.platform.cluster.hardware import MIN_COMPUTE_CAPABILITY, MIN_NVIDIA_DRIVER

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "data" / "torch_cuda_requires.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
LINUX = {"platform_system": "Linux", "python_version": "3.11", "extra": ""}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins(extra: str) -> list[Requirement]:
    """What the project pins with an extra, its core included."""
    texts = [*project()["dependencies"], *project()["optional-dependencies"][extra]]
    return [requirement for text in texts if (requirement := Requirement(text)).specifier]


def recorded() -> list[Requirement]:
    lines = [line for line in RECORDED.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate(LINUX)]


def contradictions(pinned: list[Requirement], required: list[Requirement]) -> list[str]:
    """Pins that are outside of what is required of the same package."""
    exact = {one.name: next(iter(one.specifier)).version for one in pinned}
    return [
        f"{one.name}=={exact[one.name]}, required is {one.specifier}"
        for one in required
        if one.name in exact and not one.specifier.contains(exact[one.name])
    ]


def test_no_pin_of_the_cuda_extra_contradicts_the_cuda_wheel_of_torch() -> None:
    required = recorded()
    assert {"triton", "cuda-toolkit"} <= {one.name for one in required}
    assert contradictions(pins("cuda"), required) == []
    planted = [*pins("cuda"), Requirement("triton==3.9.0")]
    assert contradictions(planted, required) == ["triton==3.9.0, required is ==3.7.1"]


def test_the_record_is_of_the_torch_that_is_pinned_and_of_the_cuda_that_the_driver_is_for() -> None:
    (torch_pin,) = [one for one in pins("cuda") if one.name == "torch"]
    assert f"torch {next(iter(torch_pin.specifier)).version}'s Linux wheel" in RECORDED.read_text(encoding="utf-8")
    (toolkit,) = [one for one in recorded() if one.name == "cuda-toolkit"]
    assert toolkit.specifier.contains("13.0.3"), "another CUDA: MIN_NVIDIA_DRIVER and the README change with it"
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
    wanted = [str(one) for one in {*pins("cuda"), *pins("envs"), *pins("dev")}]
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
    assert {"torch-2.13.0", "triton-3.7.1", "vllm-0.32.0"} <= set(would_install)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_pip_resolves_what_make_setup_installs_without_a_gpu() -> None:
    """What is installed is not fetched again: its wheels are of gigabytes, and its metadata is here."""
    if version("torch").partition("+")[2] != "cpu":
        pytest.skip("this environment has the CUDA build of torch")
    resolved = subprocess.run(
        [*PIP, "install", "--dry-run", *map(str, {*pins("cpu"), *pins("envs"), *pins("dev")})],
        check=False,
        capture_output=True,
        text=True,
        timeout=780,
    )
    assert resolved.returncode == 0, resolved.stderr[-3000:]
    assert "Would install" not in resolved.stdout, "all of it is installed"
