"""What a joined cluster's workers get from the driver: its variables and the user's modules."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from ray._private.runtime_env.packaging import create_package

from penstock.actors import job_environment
from penstock.actors.cluster import JobNeeds, ray_session
from penstock.actors.job_environment import passed_variables, shipped_folder, user_locations
from penstock.dataflow.errors import ConfigError, PlacementError


def test_variables_of_the_libraries_and_proxies_are_passed_and_those_of_one_machine_are_not() -> None:
    wanted = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/shared/hf",
        "HF_TOKEN": "secret",
        "WANDB_MODE": "offline",
        "VLLM_LOGGING_LEVEL": "INFO",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "10.0.0.0/8",
        "JUDGE_KEY": "k",
    }
    left = {
        "CUDA_VISIBLE_DEVICES": "0",
        "VLLM_HOST_IP": "10.0.0.1",
        "WANDB_API_KEY": "secret",
        "PATH": "/bin",
        "HOME": "/home/me",
        "OTHER_KEY": "k",
    }
    assert passed_variables(wanted | left, named=["JUDGE_KEY"]) == wanted


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a reward, and a second folder on the import path."""
    folder, library = tmp_path / "project", tmp_path / "library"
    for path, text in {
        folder / "my_reward.py": "import my_tools",
        folder / "prompts" / "judge.txt": "Judge.",
        folder / "data.jsonl": "{}",
        folder / "secret.pem": "key",
        folder / ".gitignore": "*.pem\n",
        folder / ".env": "KEY=1",
        folder / "env310" / "pyvenv.cfg": "",
        folder / "env310" / "lib.py": "",
        folder / "runs" / "old" / "metrics.jsonl": "{}",
        folder / "model" / "model.safetensors": "weights",
        library / "my_tools" / "__init__.py": "",
        library / "my_tools" / "sums.py": "",
        library / "my_other.py": "",
        library / "holiday.jpg": "",
        library / "photos" / "beach.jpg": "",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def packed(fields: dict[str, Any], target: Path) -> set[str]:
    """What Ray puts into the package."""
    create_package(fields["working_dir"], target, include_gitignore=True, excludes=fields["excludes"])
    with zipfile.ZipFile(target) as package:
        return {name for name in package.namelist() if not name.endswith("/")}


def test_modules_that_are_not_installed_are_sent_with_what_is_beside_them(project: Path, tmp_path: Path) -> None:
    locations = user_locations(["my_reward", "my_tools.sums", "json", "pytest", "penstock.envs.rewards"])
    assert locations == [project / "my_reward.py", project.parent / "library" / "my_tools"]
    with shipped_folder(locations, project) as fields:
        files = packed(fields, tmp_path / "package.zip")
        staging = Path(fields["working_dir"])
    code = {"my_reward.py", "my_tools/__init__.py", "my_tools/sums.py", "my_other.py"}
    assert files == code | {"prompts/judge.txt", "data.jsonl"}, "no secret, environment, run, model or photo"
    assert not staging.exists()
    assert (project / "my_reward.py").exists(), "only links were removed"


def test_without_modules_of_the_user_nothing_is_sent(project: Path) -> None:
    with shipped_folder(user_locations(["pytest", "penstock.envs.rewards.exact_match"]), project) as fields:
        assert fields == {}


def test_too_much_to_send_is_refused_with_the_largest_entries(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_environment, "MAX_SHIPPED_BYTES", 3 << 20)
    (project / "corpus.jsonl").write_bytes(b"x" * (4 << 20))
    refused = rf"are in {project}, which .* more than 3 MiB\. The largest so far: corpus\.jsonl 4 MiB.*\.gitignore"
    with (
        pytest.raises(ConfigError, match=refused),
        shipped_folder([project / "my_reward.py"], project),
    ):
        pass
    (project / ".gitignore").write_text("corpus.jsonl\n")
    with shipped_folder([project / "my_reward.py"], project) as fields:
        assert fields


async def test_an_address_without_a_cluster_is_named_at_once() -> None:
    with pytest.raises(PlacementError, match=r"cluster\.address=127\.0\.0\.1:1 cannot be joined: .*`ray start --head`"):
        async with ray_session("127.0.0.1:1", needs=JobNeeds()):
            pass
