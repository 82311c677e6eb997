"""Frozen weights stay where they were read from: a checkpoint refers to them by file, name and digest.

A run that trains an adapter reads its base from safetensors and leaves it as it is; every save would copy it again.
Instead the manifest says in which file each frozen tensor is, and what its bytes there hash to:

    "base": {
      "files": {"/models/base.safetensors": {"bytes": 13476839424}},
      "tensors": {"embed.weight": {"dtype": "float32", "shape": [32000, 4096], "file": "/models/base.safetensors",
                                   "key": "embed.weight", "file_dtype": "bfloat16", "sha256": "…"}}
    }

The digest is of the tensor, not of the file: a base may move, or be cut into other files, and is still the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.checkpoint.peers import Peers
from shoal.checkpoint.regions import Box, whole_box
from shoal.checkpoint.stored_tensor import parse_dtype, parse_lengths, tensor_digest
from shoal.errors import UserError
from shoal.tensors import fingerprint, local_part
from shoal.types import TrainState, Weights
from shoal.weights.conversion import FileTensor, Source
from shoal.weights.from_files import sources_of

if TYPE_CHECKING:
    from shoal.checkpoint.store import Checkpoint

HASHING_THREADS = 4


class BaseProblem(UserError):
    """Something that a checkpoint refers to cannot be read."""


class BaseMissing(BaseProblem):
    """It is not there. The checkpoint is whole all the same, and what it holds itself can be used."""


class BaseAltered(BaseProblem):
    """What is there is not what it was."""


class BaseFiles:
    """Files of weights outside of any checkpoint, opened when first needed; each tensor in them is hashed once."""

    def __init__(self, sizes: Mapping[Path, int] | None = None):
        """`sizes` are those that are known, in bytes."""
        self.sizes = dict(sizes or {})
        self._open: dict[Path, Any] = {}
        self._digests: dict[tuple[Path, str], str] = {}

    def check(self, path: Path) -> None:
        """What can be told of a file without reading it."""
        try:
            if not path.is_file():  # nor is a folder, or a pipe that never ends
                raise BaseMissing(f"{path} is not there")
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise BaseMissing(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if size != self.sizes.get(path, size):
            raise BaseAltered(f"{path} is {size} bytes long, but had {self.sizes[path]}")

    def tensor(self, path: Path, key: str) -> Tensor:
        """Mapped into memory, not checked."""
        if path not in self._open:
            self.check(path)
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            tensor: Tensor = self._open[path].get_tensor(key)
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise BaseAltered(f"{path} is not what it was: {' '.join(str(error).split())[:200]}") from None
        return tensor

    def digest(self, path: Path, key: str) -> str:
        if (path, key) not in self._digests:
            self._digests[path, key] = tensor_digest(self.tensor(path, key))
        return self._digests[path, key]

    def digest_all(self, places: Sequence[tuple[Path, str]]) -> None:
        """Hashes these several at a time; `digest` then knows them. Python's lock is free meanwhile."""
        tensors = [self.tensor(*place) for place in places]
        with ThreadPoolExecutor(HASHING_THREADS) as threads:
            self._digests |= zip(places, threads.map(tensor_digest, tensors), strict=True)

    def close(self) -> None:
        """Forgets what was read. Pages of a mapped file would count as memory of this process."""
        self._open.clear()
        self._digests.clear()


@dataclass(frozen=True)
class Referenced:
    """A tensor that a checkpoint refers to. What it is is known; what it holds is read, and checked, when asked for."""

    name: str
    """In the model."""
    dtype: torch.dtype
    """Of the model's; the file's is converted."""
    shape: tuple[int, ...]
    path: Path
    key: str
    """Its name in the file: another one than the model's first where a tensor has several."""
    file_dtype: torch.dtype
    sha256: str
    """Of its bytes in the file."""
    files: BaseFiles = field(repr=False, compare=False)

    def read(self, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """The part that begins at `offset` and is `shape` large, or all of it, on the CPU. Raises BaseProblem."""
        self.check()
        tensor = self.files.tensor(self.path, self.key)
        if offset is not None and shape is not None:
            tensor = tensor[Box(tuple(offset), tuple(shape)).within(whole_box(self.shape))]
        return tensor.to(self.dtype)

    def check(self) -> None:
        """Compares it with its digest, the first time. Raises BaseProblem."""
        tensor = self.files.tensor(self.path, self.key)
        what = (tuple(tensor.shape), tensor.dtype)
        if what != (self.shape, self.file_dtype) or self.files.digest(self.path, self.key) != self.sha256:
            raise BaseAltered(f"{self.path} is not what it was: {self.key} does not match its digest")

    def same_as(self, other: Referenced) -> bool:
        return (self.sha256, self.file_dtype, self.shape) == (other.sha256, other.file_dtype, other.shape)


def parse_base(about: dict[str, Any]) -> dict[str, Referenced]:
    """The manifest's `base`, by name in the model; ValueError if it cannot be what it says. Nothing is opened."""
    sizes = {Path(file): int(facts["bytes"]) for file, facts in about["files"].items()}
    files = BaseFiles(sizes)
    references: dict[str, Referenced] = {}
    for name, facts in about["tensors"].items():
        dtype, file_dtype = (parse_dtype(name, facts[key]) for key in ("dtype", "file_dtype"))
        shape = parse_lengths(name, facts["shape"])
        path, key, sha256 = Path(facts["file"]), str(facts["key"]), str(facts["sha256"])
        if path not in sizes:
            raise ValueError(f"{name} is in {path}, which is none of the base's files")
        references[name] = Referenced(name, dtype, shape, path, key, file_dtype, sha256, files)
    return references


def about_base(references: Mapping[str, Referenced]) -> dict[str, Any]:
    """For the manifest; the inverse of `parse_base`."""
    tensors = {
        name: {
            "dtype": _say(reference.dtype),
            "shape": [*reference.shape],
            "file": str(reference.path),
            "key": reference.key,
            "file_dtype": _say(reference.file_dtype),
            "sha256": reference.sha256,
        }
        for name, reference in sorted(references.items())
    }
    sizes = {path: reference.files.sizes[path] for reference in references.values() for path in [reference.path]}
    return {"files": {str(path): {"bytes": sizes[path]} for path in sorted(sizes)}, "tensors": tensors}


def files_of(references: Mapping[str, Referenced]) -> dict[Path, str | None]:
    """Where they are: file → why it cannot be used, as far as can be told without reading it."""
    problems: dict[Path, str | None] = {}
    for path in sorted({reference.path for reference in references.values()}):
        files = next(reference.files for reference in references.values() if reference.path == path)
        try:
            files.check(path)
            problems[path] = None
        except BaseProblem as problem:
            problems[path] = str(problem)
    return problems


def look_in(place: Path, references: Mapping[str, Referenced]) -> dict[str, Referenced]:
    """The same tensors in another place: a file of safetensors, or a folder with some. Raises UserError."""
    if not place.exists():
        raise UserError(f"--base {place}: there is no such file or folder")
    paths = where_tensors_are(sorted(place.glob("*.safetensors")) if place.is_dir() else [place])
    for reference in references.values():
        if reference.key not in paths:
            raise UserError(f"--base {place} has no tensor {reference.key!r}, which the checkpoint refers to")
    files = BaseFiles()
    return {name: replace(r, path=paths[r.key], files=files) for name, r in references.items()}


def where_tensors_are(files: Iterable[Path]) -> dict[str, Path]:
    """Name in the files → the file. Of two with the same name the later counts, as when weights are read."""
    paths: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                paths |= dict.fromkeys(opened.keys(), file.absolute())
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read as safetensors: {error}") from None
    return paths


class _Wanted(NamedTuple):
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Base:
    """The files that a run's weights were read from, and which of its frozen parameters are still what those hold.

    A parameter that is frozen may be changed all the same: an average of others, other weights that are loaded over
    it. A hash of its bits tells; it is stored then as any other. Buffers are always stored. All ranks make a base, and
    ask it, together.
    """

    def __init__(self, model: nn.Module, weights: Weights, here: Mapping[str, Tensor]):
        """`here` is the model's state right after its weights were read from files, where they were."""
        self._paths = where_tensors_are(weights.files if weights.kind == "files" else ())
        self._peers = Peers()
        self._files = BaseFiles({path: path.stat().st_size for path in self._paths.values()})
        self.references: dict[str, Referenced] = {}
        """Of all ranks: what is frozen and came from the files."""
        if self._paths:
            keys = _frozen(model, sources_of(weights, self._paths))
            frozen = {name: key for name, key in keys.items() if _has_bits(here[name])}
            self._own = sorted(frozen)
            self._bits = self._hash_bits(here)
            self.references = self._look_up(
                {name: _Wanted(key, here[name].dtype, tuple(here[name].shape)) for name, key in frozen.items()}
            )

    def leave_out(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state without what can be read from the files again, and what the manifest says of that."""
        there = self.unchanged(state.model)
        if not there:
            return state, {}
        model = {name: tensor for name, tensor in state.model.items() if name not in there}
        return replace(state, model=model), {"base": about_base(there)}

    def unchanged(self, here: Mapping[str, Tensor]) -> dict[str, Referenced]:
        """What of the files the model holds as they do, over all ranks; `here` is its state."""
        if not self.references:
            return {}
        now = self._hash_bits(here)
        changed = {self._own[place] for place in (now != self._bits).nonzero().flatten().tolist()}
        everywhere = set().union(*self._peers.tell_all(changed))
        return {name: reference for name, reference in self.references.items() if name not in everywhere}

    def check(self, checkpoint: Checkpoint, here: Mapping[str, Tensor]) -> dict[str, Any]:
        """Refuses a checkpoint that refers to another base than the run has; the model's state is `here`.

        Returns what has to be read to have what the checkpoint refers to: nothing, where the model still has it.
        """
        own = self._find(checkpoint.base)
        for name, reference in checkpoint.base.items():
            if name not in own:
                checkpoint.check_base(reference)
            elif not own[name].same_as(reference):
                raise BaseAltered(
                    f"{own[name].path} is not the base that {checkpoint.folder} was trained on: {own[name].key} "
                    "differs; put the file back, or take the adapter alone by checkpoint.init_from in a run of its own"
                )
        held = self.unchanged(here) if checkpoint.base else {}
        return {name: own.get(name, reference) for name, reference in checkpoint.base.items() if name not in held}

    def has(self, referenced: Mapping[str, Referenced]) -> bool:
        """Whether all of these are in the files of this run, the same."""
        own = self._find(referenced)
        return all(name in own and own[name].same_as(reference) for name, reference in referenced.items())

    def _find(self, referenced: Mapping[str, Referenced]) -> dict[str, Referenced]:
        """The same tensors in the files of this run; what is not frozen here is hashed only now."""
        unknown = {
            name: _Wanted(reference.key, reference.dtype, reference.shape)
            for name, reference in referenced.items()
            if name not in self.references and reference.key in self._paths
        }
        return {**self.references, **(self._look_up(unknown) if unknown else {})}

    def _look_up(self, wanted: dict[str, _Wanted]) -> dict[str, Referenced]:
        """Hashes these in the files, each on one rank, the largest dealt out first; all ranks get all."""
        everything: dict[str, _Wanted] = {}
        for told in self._peers.tell_all(wanted):
            everything |= told
        names = sorted(everything, key=lambda name: (-prod(everything[name].shape), name))
        own = {name: everything[name].key for name in names[self._peers.rank :: self._peers.size]}
        found: dict[str, tuple[torch.dtype, str]] = {}
        problem: BaseProblem | None = None
        try:
            self._files.digest_all([(self._paths[key], key) for key in own.values()])
            for name, key in own.items():
                path = self._paths[key]
                found[name] = self._files.tensor(path, key).dtype, self._files.digest(path, key)
        except BaseProblem as error:
            problem = error
        self._files.close()
        told_by_all = self._peers.tell_all((found, problem))
        for _, problem in told_by_all:
            if problem:
                raise problem
        hashed = {name: about for told, _ in told_by_all for name, about in told.items()}
        return {
            name: Referenced(name, dtype, shape, self._paths[key], key, *hashed[name], self._files)
            for name, (key, dtype, shape) in everything.items()
        }

    def _hash_bits(self, here: Mapping[str, Tensor]) -> Tensor:
        """One number for each of this rank's own, on the device."""
        return torch.stack([fingerprint(local_part(here[name])) for name in self._own] or [torch.zeros(())])


def _frozen(model: nn.Module, sources: Mapping[str, Source]) -> dict[str, str]:
    """Returns the frozen parameters that the files hold as they are: name in the model → name in the files.

    What is made from several file tensors, or from another form of one, is stored in every checkpoint.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    frozen: dict[str, str] = {}
    for parameter in model.parameters():
        first, *others = names.get(id(parameter), [""])
        source = next((sources[name] for name in (first, *others) if name in sources), None)
        if isinstance(source, FileTensor) and not parameter.requires_grad:
            frozen[first] = source.name
    return frozen


def _has_bits(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor, not a kind of its own that keeps several."""
    part = local_part(tensor)
    return type(part) is Tensor and part.element_size() <= 8


def _say(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
