"""The trainer's part of a checkpoint: one form for every backend, number of ranks, ZeRO stage and tensor-parallel size.

    fragments of live state → `TrainerSnapshot` (copied to host memory beside the next forwards and backwards)
    → `write_snapshot` (one file per rank, during training) → `CheckpointReader` → any backend's `restore`

Of each trained parameter the checkpoint has the float32 value and the states of its optimizer, which have its shape: of
AdamW exp_avg and exp_avg_sq, of Muon momentum_buffer. A rank writes them as stretches of the parameter in row-major
order, and each element is written by exactly one rank. So nothing is gathered when a checkpoint is saved, and a reader
puts whole parameters together, whichever ranks wrote the parts.

Files: `trainer_<rank>.safetensors` with the tensors `<prefix>/<parameter>/<start>/<kind>`, flat, in the dtype in which
the trainer keeps them (float32, moments also bfloat16), and the random state of the rank. The prefix is `model` or
`critic`. The metadata has the shapes, the counters and the format version. No Ray and no DeepSpeed here.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.dataflow.errors import CheckpointError, boundary
from penstock.dataflow.ports import WrittenFile
from penstock.weights.layout.algebra import Box, Shape, extents, intersect, volume, whole

VALUE = "value"
"""Kind of the tensor with the values; the other kinds are the names of states of the optimizer."""
FORMAT = 2
"""Version of the file format. A reader refuses newer ones. In 1 all tensors are float32 and of AdamW."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_PATTERN = "trainer_*.safetensors"
_METADATA_KEY = "penstock"
_RANDOM_STATE = "random_state"
# Large enough that crc32 and write release the GIL for most of the time, small enough to be in cache for both.
_PIECE_BYTES = 4 << 20


class Fragment(NamedTuple):
    """A stretch of one parameter, with its optimizer state."""

    name: str
    """Name of the parameter in the wrapped model, equal in all backends."""
    shape: Shape
    """Shape of the full parameter."""
    box: Box
    """The tensor-parallel part of it, as (start, stop) per dimension; all of it without tensor parallelism."""
    start: int
    """First element, row-major within the box."""
    values: Mapping[str, Tensor]
    """`[n]` by kind, the value float32; aliases of the live tensors, or of their copies in a snapshot."""
    num_updates: int
    """AdamW's step counter, which its bias correction needs; 0 of an optimizer without one."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: Shape,
        value: Tensor,
        state: Mapping[str, Tensor],
        *,
        box: Box | None = None,
        start: int = 0,
    ) -> Fragment:
        """Describe a stretch by its live tensors.

        Args:
            name: As the attribute.
            shape: As the attribute.
            value: `[n] float32`.
            state: Of the optimizer, for exactly these elements, by name; AdamW has a `step`, too.
            box: As the attribute; None: all of the parameter.
            start: As the attribute.
        """
        values = {VALUE: value.detach()} | {kind: one.detach() for kind, one in state.items() if kind != "step"}
        num_updates = int(state["step"]) if "step" in state else 0
        return cls(name, shape, whole(shape) if box is None else box, start, values, num_updates)

    def narrow(self, start: int, stop: int) -> Fragment:
        """The elements [start, stop) of this fragment, as aliases."""
        values = {kind: tensor[start:stop] for kind, tensor in self.values.items()}
        return self._replace(start=self.start + start, values=values)

    @property
    def num_elements(self) -> int:
        return self.values[VALUE].numel()


def deal(fragments: Sequence[Fragment], replica: int, num_replicas: int) -> list[Fragment]:
    """The share of one of several ranks that hold equal fragments: a stretch of ceil(n / num_replicas) of each."""
    shares = []
    for fragment in fragments:
        per_replica = -(-fragment.num_elements // num_replicas)
        share = fragment.narrow(replica * per_replica, (replica + 1) * per_replica)
        if share.num_elements:
            shares.append(share)
    return shares


class Counters(NamedTuple):
    """What a trainer counts."""

    version: int
    """The policy version."""
    num_steps: Mapping[str, int]
    """Optimizer steps by prefix; they decide the learning rate."""
    num_ranks: int
    """Ranks of the trainer, each with a file."""
    coefficients: Mapping[str, float] = {}
    """State of the controllers of coefficients."""
    critic_pace: Mapping[str, float] = {}
    """Updates of the critic and of the policy (`trainer.models.critic.Pace`)."""


class TrainerSnapshot:
    """The state of one rank between two steps, on its way to host memory.

    A thread copies while the loop goes on: rollouts, forwards and backwards only read the state. Invariant: the live
    tensors are those of the cut until `wait` has returned, because whoever changes them calls it first. Only an
    optimizer step does (`PolicyTrainer`).

    Attributes:
        random_state: `[n] uint8`, of torch's generator on the CPU.
    """

    def __init__(self, live: Mapping[str, Sequence[Fragment]], counters: Counters) -> None:
        """Begin to copy live fragments.

        Args:
            live: By prefix, `model` or `critic`.
            counters: Of the trainer.
        """
        self.counters = counters
        self.random_state = torch.get_rng_state()
        device = next((one.values[VALUE].device for of_prefix in live.values() for one in of_prefix), None)
        stream = None
        if device is not None and device.type == "cuda":
            # Not on the stream of the next forward, which would wait for the copy. After the step before, though.
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        thread = ThreadPoolExecutor(1, "checkpoint copy")
        self._copied: Future[Mapping[str, Sequence[Fragment]]] = thread.submit(_copied, live, stream)
        thread.shutdown(wait=False)

    def wait(self) -> float:
        """Wait until the live tensors may change; returns the seconds that this took."""
        started = time.perf_counter()
        futures.wait([self._copied])
        return time.perf_counter() - started

    @property
    def fragments(self) -> Mapping[str, Sequence[Fragment]]:
        """The copies, by prefix. Waits for them, and raises what the copy has failed with."""
        return self._copied.result()


def _copied(
    live: Mapping[str, Sequence[Fragment]], stream: torch.cuda.Stream | None
) -> Mapping[str, Sequence[Fragment]]:
    """Live fragments with copies of their tensors."""
    tensors = [tensor for fragments in live.values() for one in fragments for tensor in one.values.values()]
    with torch.cuda.stream(stream):  # without a stream it does nothing
        copies = iter(_host_copies(tensors))
    return {
        prefix: [one._replace(values={kind: next(copies) for kind in one.values}) for one in of_prefix]
        for prefix, of_prefix in live.items()
    }


def _host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in host memory of flat tensors, in their order.

    ZeRO's fragments are stretches of few flat buffers. What the tensors use of one buffer is copied in one piece, and
    the results are stretches of the copy: hundreds of small copies, each with a call of the device, take longer.
    """
    by_storage = defaultdict(list)
    for index, tensor in enumerate(tensors):
        assert tensor.dtype in _DTYPES, tensor.dtype
        assert tensor.is_contiguous(), tensor.shape
        by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append(index)
    copies: dict[int, Tensor] = {}
    for indices in by_storage.values():
        first = min(tensors[index].storage_offset() for index in indices)
        last = max(tensors[index].storage_offset() + tensors[index].numel() for index in indices)
        copy = torch.as_strided(tensors[indices[0]], (last - first,), (1,), first).to("cpu", copy=True)
        for index in indices:
            start = tensors[index].storage_offset() - first
            copies[index] = copy[start : start + tensors[index].numel()]
    return [copies[index] for index in range(len(tensors))]


def write_snapshot(snapshot: TrainerSnapshot, folder: str | Path, rank: int) -> WrittenFile:
    """Write a rank's file and flush it to the disk. Takes no lock, and releases the GIL for most of the time.

    Args:
        snapshot: What to write.
        folder: Created if it is missing.
        rank: Of the trainer, 0 ≤ rank < `snapshot.counters.num_ranks`.

    Raises:
        CheckpointError: If the state cannot be copied, or if the disk is full or cannot be written.
    """
    path = Path(folder) / f"trainer_{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, Any] = {}
    with boundary(CheckpointError, f"checkpoint {path}: copying the state to host memory"):
        copies = snapshot.fragments
    for prefix, fragments in copies.items():
        for one in fragments:
            key = f"{prefix}/{one.name}/{one.start}"
            parameters[key] = {"shape": one.shape, "box": one.box, "num_updates": one.num_updates}
            tensors |= {f"{key}/{kind}": tensor for kind, tensor in one.values.items()}
    tensors[_RANDOM_STATE] = snapshot.random_state
    # The offset of a tensor has to be a multiple of the size of its elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    metadata = {"format": FORMAT, "rank": rank, **snapshot.counters._asdict(), "parameters": parameters}
    header = _header_bytes(tensors, metadata)
    num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    num_written = checksum = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for view in (memoryview(header), *(one.view(torch.uint8).numpy().data for one in tensors.values())):
                for start in range(0, len(view), _PIECE_BYTES):
                    piece = view[start : start + _PIECE_BYTES]
                    checksum = zlib.crc32(piece, checksum)
                    num_written += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        # The name too, which is durable once its folder is: the driver may not see the folder of a partner.
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path}: {num_written} of {num_bytes} bytes were written: {error}. This checkpoint is "
            "incomplete; earlier ones are not affected. Make space on that disk, or give the run another folder."
        ) from error
    return WrittenFile(path.name, num_bytes, checksum)


def _header_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> bytes:
    """The head of a safetensors file: 8 bytes with the length of the JSON, and the JSON, padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {_METADATA_KEY: json.dumps(metadata, separators=(",", ":"))}}
    offset = 0
    for key, tensor in tensors.items():
        place = [offset, offset + tensor.nbytes]
        header[key] = {"dtype": _DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def verify(folder: str | Path, files: Sequence[WrittenFile]) -> None:
    """Read the files of a checkpoint and compare them with what was written.

    Args:
        folder: Of the checkpoint; the names of the files are relative to it.
        files: As `write_snapshot` reported them.

    Raises:
        CheckpointError: If a file is missing, or has another size or checksum.
    """
    for written in files:
        path = Path(folder) / written.name
        if not path.is_file():
            raise CheckpointError(
                f"checkpoint {path}: the file is missing; {len(files)} files were written. What was in it is lost. "
                f"{_EARLIER}"
            )
        if (num_bytes := path.stat().st_size) != written.num_bytes:
            raise _torn(path, num_bytes, written.num_bytes)
        checksum = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
        if checksum != written.crc32:
            raise CheckpointError(
                f"checkpoint {path}: its checksum is {checksum:#010x}, and {written.crc32:#010x} was written. The file "
                f"has changed on the disk, so training would go on from wrong numbers. {_EARLIER}"
            )


_EARLIER = "Resume from an earlier checkpoint, or restore the file from a copy."


def _torn(path: Path, num_bytes: int, expected: int) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path}: it has {num_bytes} bytes of {expected}. The file was cut off, so a part of it is lost. "
        f"{_EARLIER}"
    )


class _Stretch(NamedTuple):
    """Where a stretch of a parameter is: elements [start, start + length) of the box, in the file of a rank."""

    box: Box
    start: int
    length: int
    rank: int
    key: str


class CheckpointReader:
    """The files of all ranks, as whole parameters. Tensors are read when they are asked for.

    Invariant: after `__init__` every element of every parameter is in exactly one file.

    Attributes:
        counters: Of the trainer that was saved.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a checkpoint.

        Raises:
            CheckpointError: If a file is missing, torn, of a newer format or of another checkpoint, or if a parameter
                is not covered exactly once.
        """
        self._folder = Path(folder)
        paths = sorted(self._folder.glob(_PATTERN))
        if not paths:
            raise CheckpointError(
                f"checkpoint {folder}: 0 files {_PATTERN} are there, and at least 1 is needed. There is no trainer to "
                "resume. Name the folder of a complete checkpoint."
            )
        metadata = [_metadata_of(path) for path in paths]
        self.counters = Counters(**{name: metadata[0][name] for name in Counters._fields if name in metadata[0]})
        ranks = [one["rank"] for one in metadata]
        if ranks != list(range(self.counters.num_ranks)):
            missing = sorted(set(range(self.counters.num_ranks)) - set(ranks))
            raise CheckpointError(
                f"checkpoint {folder}: the files of {len(paths)} ranks are there, and {self.counters.num_ranks} ranks "
                f"wrote (missing: {missing or 'none'}). The parameters of the others are lost. {_EARLIER}"
            )
        for path, one in zip(paths, metadata, strict=True):
            if (version := one["version"]) != self.counters.version or one["num_ranks"] != self.counters.num_ranks:
                raise CheckpointError(
                    f"checkpoint {path}: it has version {version} of {one['num_ranks']} ranks, and {paths[0].name} has "
                    f"version {self.counters.version} of {self.counters.num_ranks}. The files are of different "
                    "checkpoints, and would mix two policies. Resume from another checkpoint."
                )
        self._files = [_open(path) for path in paths]
        self._shapes: dict[str, Shape] = {}
        self._num_updates: dict[str, int] = {}
        self._kinds: dict[str, set[str]] = defaultdict(set)
        self._stretches: dict[str, list[_Stretch]] = defaultdict(list)
        for rank, one in enumerate(metadata):
            self._add(rank, one["parameters"])
        for name in self._shapes:
            self._check_covered(name)

    def _add(self, rank: int, parameters: Mapping[str, Any]) -> None:
        for key, described in parameters.items():
            name, _, start = key.rpartition("/")
            shape = tuple(described["shape"])
            if (known := self._shapes.setdefault(name, shape)) != shape:
                raise CheckpointError(
                    f"checkpoint {self._folder}: {name} is {shape} in the file of rank {rank}, and {known} in another "
                    "one. The files are of different models. Resume from another checkpoint."
                )
            (length,) = self._files[rank].get_slice(f"{key}/value").get_shape()
            box = tuple((start, stop) for start, stop in described["box"])
            self._stretches[name].append(_Stretch(box, int(start), length, rank, key))
            self._num_updates[name] = max(self._num_updates.get(name, 0), described["num_updates"])
        for key in self._files[rank].keys():  # noqa: SIM118 - a file of safetensors is no mapping
            of_stretch, _, kind = key.rpartition("/")
            if of_stretch in parameters:
                self._kinds[of_stretch.rpartition("/")[0]].add(kind)

    def _check_covered(self, name: str) -> None:
        by_box: dict[Box, list[_Stretch]] = defaultdict(list)
        for stretch in self._stretches[name]:
            by_box[stretch.box].append(stretch)
        num_covered, is_disjoint = 0, True
        for box, stretches in by_box.items():
            is_disjoint &= not any(intersect(box, other) for other in by_box if other != box)
            end = 0
            for stretch in sorted(stretches, key=lambda one: one.start):
                is_disjoint &= stretch.start >= end
                end = stretch.start + stretch.length
                num_covered += stretch.length
            is_disjoint &= end <= volume(box)
        if not is_disjoint or num_covered != prod(self._shapes[name]):
            wrong = "are not there, or twice" if is_disjoint else "overlap"
            raise CheckpointError(
                f"checkpoint {self._folder}: its files have {num_covered} elements of {name}, which has "
                f"{prod(self._shapes[name])}, and some {wrong}. The parameter cannot be put together. {_EARLIER}"
            )

    def check_model(self, prefix: str, shapes: Mapping[str, Shape], states: Mapping[str, Sequence[str]]) -> None:
        """Compare the parameters under a prefix, and the states of their optimizer, with those of a trainer.

        Args:
            prefix: `model` or `critic`.
            shapes: Name -> full shape of each trained parameter; empty if the trainer has no such model.
            states: Name -> names of the states that its optimizer keeps of it.

        Raises:
            CheckpointError: With the first difference.
        """
        keys = [key for key in self._shapes if key.startswith(f"{prefix}/")]
        mine = {key.removeprefix(f"{prefix}/"): self._shapes[key] for key in keys}
        if mine == shapes:
            self._check_optimizer(prefix, states)
            return
        different = next(name for name in [*shapes, *mine] if mine.get(name) != shapes.get(name))
        saved, trained = (
            f"of shape {found[different]}" if different in found else "not there" for found in (mine, shapes)
        )
        raise CheckpointError(
            f"checkpoint {self._folder}: it has {len(mine)} trained parameters of the {prefix}, and this trainer has "
            f"{len(shapes)}. First difference: {different} is {saved} in the checkpoint, and {trained} in the trainer. "
            "Another model cannot go on from it. Resume with the model, the adapters (trainer.lora) and the algorithm "
            "of the run that was saved."
        )

    def _check_optimizer(self, prefix: str, states: Mapping[str, Sequence[str]]) -> None:
        for name, expected in states.items():
            if (saved := self.kinds(f"{prefix}/{name}") - {VALUE}) != set(expected):
                key = "trainer.optimizer" if prefix == "model" else "critic.optimizer"
                raise CheckpointError(
                    f"checkpoint {self._folder}: it has {', '.join(sorted(saved))} of {name}, and the optimizer of "
                    f"this trainer keeps {', '.join(sorted(expected))}: another one has saved it, whose states mean "
                    f"nothing to this one. Resume with {key}.muon as it was ({{}} or null), or begin with the weights "
                    "alone: penstock resume RUN --as NEW --restore weights."
                )

    def kinds(self, name: str) -> set[str]:
        """What the checkpoint has of a parameter `<prefix>/<parameter>`: its value, and the states of its optimizer."""
        return self._kinds[name]

    def full(self, name: str, kind: str) -> Tensor:
        """`[shape] float32`: one whole parameter.

        Args:
            name: `<prefix>/<parameter>`.
            kind: `VALUE`, or the name of a state.
        """
        stretches = self._stretches[name]
        by_box: dict[Box, Tensor] = {}
        for box, start, length, rank, key in stretches:
            part = by_box.setdefault(box, torch.empty(volume(box)))
            part[start : start + length] = self._files[rank].get_tensor(f"{key}/{kind}")
        full = torch.empty(self._shapes[name])
        for box, part in by_box.items():
            full[tuple(slice(*range_) for range_ in box)] = part.view(extents(box))
        return full

    def fill(self, prefix: str, fragments: Sequence[Fragment]) -> None:
        """Copy the saved values and states into live fragments; a bfloat16 one rounds what was saved in float32."""
        for fragment in fragments:
            index = tuple(slice(*range_) for range_ in fragment.box)
            for kind, target in fragment.values.items():
                part = self.full(f"{prefix}/{fragment.name}", kind)[index].reshape(-1)
                target.copy_(part[fragment.start : fragment.start + target.numel()])

    def num_updates(self, prefix: str, names: Sequence[str]) -> int:
        """AdamW's step counter of parameters that share one; of all of them, if none is named; 0 of those of Muon.

        Parameters without any gradient are not updated, so counters can differ. The largest is of those with most
        history.
        """
        found = [self._num_updates[f"{prefix}/{name}"] for name in names]
        return max(found or [count for key, count in self._num_updates.items() if key.startswith(f"{prefix}/")])

    def random_state(self, rank: int) -> Tensor:
        """`[n] uint8` of a rank; of another number of ranks, that of one that was saved."""
        return self._files[rank % len(self._files)].get_tensor(_RANDOM_STATE)


def _metadata_of(path: Path) -> dict[str, Any]:
    """What a file says of itself, if it is whole."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 + length:
            raise _torn(path, num_bytes, 8 + length)
        with boundary(CheckpointError, f"checkpoint {path}: its first {length} bytes cannot be read. {_EARLIER}"):
            header = json.loads(file.read(length))
            metadata: dict[str, Any] = json.loads(header.pop("__metadata__")[_METADATA_KEY])
            expected = 8 + length + max(one["data_offsets"][1] for one in header.values())
    if num_bytes != expected:
        raise _torn(path, num_bytes, expected)
    if metadata["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: it has format {metadata['format']}, and this Penstock reads formats up to {FORMAT}. A "
            "newer Penstock has written it. Resume with that version."
        )
    return metadata


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")
