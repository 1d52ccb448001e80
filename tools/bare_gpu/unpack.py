"""Unpacks the parts that build.py made, on the GPU machine:  python3 unpack.py PARTS TO

Parts may come one after the other, also the pieces of one: what is not whole yet is left for the next call.
"""

import compileall
import re
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path

ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # FlashInfer and DeepGEMM are not sent.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}


def archives(parts: Path) -> dict[str, list[Path]]:
    """Name of each archive that is whole -> its pieces in order."""
    found: dict[str, list[Path]] = {path.name: [path] for path in parts.glob("*.tar.xz")}
    for path in parts.glob("*.tar.xz.*of*"):
        name, number, count = re.fullmatch(r"(.*)\.(\d+)of(\d+)", path.name).groups()
        pieces = [parts / f"{name}.{index}of{count}" for index in range(1, int(count) + 1)]
        if missing := [piece.name for piece in pieces if not piece.exists()]:
            if int(number) == 1:
                print(f"{name} is not whole yet: {', '.join(missing)} is missing")
            continue
        found[name] = pieces
    return found


def extract(pieces: list[Path], to: Path) -> None:
    """Unpack one archive and remove its pieces."""
    with tarfile.open(fileobj=BytesIO(b"".join(piece.read_bytes() for piece in pieces))) as tar:
        tar.extractall(to, filter="fully_trusted")
    for piece in pieces:
        piece.unlink()


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    parts, to = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    whole = archives(parts)
    with ProcessPoolExecutor() as pool:
        for name, _ in zip(whole, pool.map(extract, whole.values(), [to] * len(whole)), strict=True):
            print(f"unpacked {name}")
    for folder in ("site", "penstock"):
        compileall.compile_dir(to / folder, quiet=2, workers=0)  # imports take minutes without
    paths = f"{to}/site:{to}/penstock/src"
    lines = [f"export {name}={value}" for name, value in {"PYTHONPATH": paths, **ENVIRONMENT}.items()]
    (to / "env.sh").write_text("\n".join(lines) + "\n")
    print(f". {to}/env.sh && cd {to}/penstock && python3 benchmarks/gpu_check.py --piece 1")


if __name__ == "__main__":
    main()
