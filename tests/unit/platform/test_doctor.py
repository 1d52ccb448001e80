"""The doctor names what is broken and what to do."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.platform.cli import doctor
from penstock.platform.cli.doctor import Diagnosis
from penstock.platform.cluster import hardware


def test_every_core_requirement_is_read_from_our_own(monkeypatch):
    monkeypatch.setattr(hardware, "installed_version", lambda name: None)
    missing = {one.subject: one.found for one in doctor.check_packages()}
    assert {"torch", "ray", "deepspeed", "hydra-core", "transformers"} <= set(missing)
    assert all(
        found.startswith(("not installed, >=", "not installed, <", "not installed, ==")) for found in missing.values()
    )


def test_a_missing_and_a_wrong_package_are_named(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["no-such-package==1.0", "pytest==0.1"])
    missing, wrong = doctor.check_packages()
    assert (missing.subject, missing.status) == ("no-such-package", "bad")
    assert "1.0 is needed" in missing.found
    assert wrong.status == "warn"
    assert wrong.advice == "pip install 'pytest==0.1'"


def test_a_local_build_label_is_no_difference(monkeypatch):
    version = hardware.installed_version("torch")
    assert version is not None
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: [f"torch=={version.partition('+')[0]}"])
    (found,) = doctor.check_packages()
    assert (found.subject, found.status) == ("packages", "ok")


def test_an_import_that_fails_is_one_line_with_advice():
    diagnosis = doctor._import_in_child("nothing", "import no_such_module", "install it")
    assert diagnosis == Diagnosis(
        "nothing", "bad", "ModuleNotFoundError: No module named 'no_such_module'", "install it"
    )
    assert doctor._import_in_child("json", "import json; print('fine')", "").found == "fine"


def test_an_import_that_hangs_is_bad(monkeypatch):
    monkeypatch.setattr(doctor, "IMPORT_TIMEOUT_S", 0.2)
    diagnosis = doctor._import_in_child("slow", "import time; time.sleep(60)", "wait")
    assert diagnosis.status == "bad"
    assert "does not import within" in diagnosis.found


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("bad", 1)])
def test_the_exit_code_is_1_if_something_is_broken(monkeypatch, status, code):
    for look in ("python", "packages", "devices", "engines", "free_space"):
        monkeypatch.setattr(doctor, f"check_{look}", lambda: iter([Diagnosis("x", status, "found", "do this")]))
    stream = io.StringIO()
    assert doctor.run_doctor(Console(file=stream, width=100)) == code
    assert stream.getvalue().count("do this") == 5


def test_too_little_space_is_bad(monkeypatch):
    monkeypatch.setattr(hardware, "available_memory_bytes", lambda: 1 << 30)
    memory = next(iter(doctor.check_free_space()))
    assert memory.status == "bad"
    assert "1.0 GiB" in memory.found


def test_a_host_without_namespaces_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_no_namespaces", lambda: "unshare: Operation not permitted")
    (diagnosis,) = doctor.check_sandbox_support()
    assert diagnosis.status == "warn"
    assert "unshare: Operation not permitted" in diagnosis.found
    monkeypatch.setattr(doctor, "why_no_namespaces", lambda: "")
    assert [diagnosis.status for diagnosis in doctor.check_sandbox_support()] == ["ok"]


@pytest.mark.parametrize(
    ("version", "is_cpu_build", "status"),
    [
        ("580.65.06", False, "ok"),
        ("610.57.04", False, "ok"),
        ("580.65.05", False, "bad"),
        ("575.57.08", False, "bad"),
        ("575.57.08", True, "warn"),
    ],
)
def test_a_driver_that_is_too_old_for_the_cuda_wheel_is_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, version: str, is_cpu_build: bool, status: str
) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: is_cpu_build)
    monkeypatch.setattr(hardware, "nvidia_driver_version", lambda: version)
    driver = next(one for one in doctor.check_devices() if one.subject == "nvidia driver")
    assert driver.status == status
    if status != "ok":
        assert driver.found.startswith(f"{version}, but the CUDA 13.0 build of torch needs 580.65.06 or newer")
        assert "Install a newer NVIDIA driver" in driver.advice


def test_a_driver_whose_version_cannot_be_read_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = doctor._diagnose_driver(None)
    assert diagnosis.status == "warn"
    assert "needs 580.65.06 or newer" in diagnosis.advice


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("capability", "is_cpu_build", "status"), [("7.5", False, "bad"), ("7.5", True, "warn"), ("8.0", False, None)]
)
def test_a_gpu_that_is_too_old_is_named_with_both_capabilities(
    monkeypatch: pytest.MonkeyPatch, capability: str, is_cpu_build: bool, status: str | None
) -> None:
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: is_cpu_build)
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(hardware, "num_nvidia_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "gpu_capabilities", lambda: {"Tesla T4": capability})
    found = [one for one in doctor.check_devices() if "compute capability" in one.found]
    assert [one.status for one in found] == ([] if status is None else [status])
    assert all("compute capability 7.5, and 8.0 is needed" in one.found for one in found)
