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

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shoal.checkpoint.manifest import dtype_name, parse_dtype, parse_lengths
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.pieces import MappedFiles, Piece, StoredTensor, tensor_digest
from shoal.checkpoint.regions import whole_region
from shoal.errors import UserError, one_line
from shoal.tensors import fingerprint, local_part, tensors_with_names
from shoal.types import TrainState, Weights
from shoal.weights.conversion import FileTensor
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


class BaseFiles(MappedFiles):
    """Files of weights outside of any checkpoint; `sizes` are their bytes, as far as known."""

    def __init__(self, sizes: Mapping[Path, int] | None = None):
        super().__init__({})
        self.sizes = sizes or {}

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

    def damage(self, path: Path, error: Exception) -> Exception:
        return BaseAltered(f"{path} is not what it was: {one_line(error)}")


class Referenced(StoredTensor):
    """A tensor that a checkpoint refers to, whole in one piece. The file's dtype may be another than the model's."""

    files: BaseFiles

    @property
    def source(self) -> Piece:
        return self.pieces[0]

    def same_as(self, other: Referenced) -> bool:
        mine, theirs = self.source, other.source
        return (mine.sha256, mine.dtype, mine.region) == (theirs.sha256, theirs.dtype, theirs.region)


def parse_base(about: dict[str, Any]) -> dict[str, Referenced]:
    """The manifest's `base`, by name in the model; ValueError if it cannot be what it says. Nothing is opened."""
    files = BaseFiles({Path(file): int(facts["bytes"]) for file, facts in about["files"].items()})
    references: dict[str, Referenced] = {}
    for name, facts in about["tensors"].items():
        path, shape = Path(facts["file"]), parse_lengths(name, facts["shape"])
        dtype, file_dtype = (parse_dtype(name, facts[key]) for key in ("dtype", "file_dtype"))
        if path not in files.sizes:
            raise ValueError(f"{name} is in {path}, which is none of the base's files")
        piece = Piece(path, str(facts["key"]), whole_region(shape), file_dtype, str(facts["sha256"]))
        references[name] = Referenced(name, dtype, shape, (piece,), files)
    return references


def about_base(references: Mapping[str, Referenced]) -> dict[str, Any]:
    """For the manifest; the inverse of `parse_base`."""
    sizes: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for name, reference in sorted(references.items()):
        source = reference.source
        sizes[str(source.path)] = reference.files.sizes[source.path]
        tensors[name] = {
            "dtype": dtype_name(reference.dtype),
            "shape": [*reference.shape],
            "file": str(source.path),
            "key": source.key,
            "file_dtype": dtype_name(source.dtype),
            "sha256": source.sha256,
        }
    return {"files": {file: {"bytes": size} for file, size in sorted(sizes.items())}, "tensors": tensors}


def files_of(references: Mapping[str, Referenced]) -> dict[str, str | None]:
    """Where they are: file → why it cannot be used, as far as can be told without reading it."""
    problems: dict[str, str | None] = {}
    for path, files in sorted({reference.source.path: reference.files for reference in references.values()}.items()):
        problems[str(path)] = None
        try:
            files.check(path)
        except BaseProblem as problem:
            problems[str(path)] = str(problem)
    return problems


def look_in(place: Path, references: Mapping[str, Referenced]) -> dict[str, Referenced]:
    """The same tensors in another place: a file of safetensors, or a folder with some. Raises UserError."""
    if not place.exists():
        raise UserError(f"--base {place}: there is no such file or folder")
    paths = where_tensors_are(sorted(place.glob("*.safetensors")) if place.is_dir() else [place])
    files, found = BaseFiles(), dict[str, Referenced]()
    for name, reference in references.items():
        if reference.source.key not in paths:
            raise UserError(f"--base {place} has no tensor {reference.source.key!r}, which the checkpoint refers to")
        piece = replace(reference.source, path=paths[reference.source.key])
        found[name] = replace(reference, pieces=(piece,), files=files)
    return found


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


class Base:
    """The files that a run's weights were read from, and which of its frozen parameters are still what those hold.

    A parameter that is frozen may be changed all the same: an average of others, other weights that are loaded over
    it. A hash of its bits tells; it is stored then as any other. Buffers are always stored. All ranks make a base, and
    ask it, together.
    """

    def __init__(self, model: nn.Module, weights: Weights, here: Mapping[str, Tensor]):
        """`here` is the model's state right after its weights were read from files, where they were."""
        self._paths = where_tensors_are(weights.files if weights.kind == "files" else ())
        self._sizes = {path: path.stat().st_size for path in self._paths.values()}
        self._peers = Peers()
        frozen: dict[str, tuple[str, torch.dtype, tuple[int, ...]]] = {}
        sources = sources_of(weights, self._paths) if self._paths else {}
        for tensor, (name, *aliases) in tensors_with_names(model):
            source = next((sources[key] for key in (name, *aliases) if key in sources), None)
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            # What is made from several file tensors, or from another form of one, is stored in every checkpoint.
            if is_frozen and isinstance(source, FileTensor) and _has_bits(here[name]):
                frozen[name] = (source.name, here[name].dtype, tuple(here[name].shape))
        self._own = sorted(frozen)
        self._bits = self._hash_bits(here)
        self.references = self._look_up(frozen) if self._paths else {}
        """Of all ranks: what is frozen and came from the files."""

    def leave_out(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state without what can be read from the files again, and what the manifest says of that."""
        there = self.unchanged(state.model)
        model = {name: tensor for name, tensor in state.model.items() if name not in there}
        return replace(state, model=model), {"base": about_base(there)} if there else {}

    def unchanged(self, here: Mapping[str, Tensor]) -> dict[str, Referenced]:
        """What of the files the model holds as they do, over all ranks; `here` is its state."""
        if not self.references:
            return {}
        changed = self._hash_bits(here) != self._bits
        changed_names = self._peers.union({self._own[place]: True for place in changed.nonzero().flatten().tolist()})
        return {name: reference for name, reference in self.references.items() if name not in changed_names}

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
                    f"{own[name].source.path} is not the base that {checkpoint.folder} was trained on: "
                    f"{own[name].source.key} differs; put the file back, or take the adapter alone by "
                    "checkpoint.init_from in a run of its own"
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
            name: (reference.source.key, reference.dtype, reference.shape)
            for name, reference in referenced.items()
            if name not in self.references and reference.source.key in self._paths
        }
        return {**self.references, **(self._look_up(unknown) if unknown else {})}

    def _look_up(self, wanted: dict[str, tuple[str, torch.dtype, tuple[int, ...]]]) -> dict[str, Referenced]:
        """Hashes these in the files, each on one rank, the largest dealt out first; all ranks get all.

        `wanted` is name in the model → name in the files, dtype and shape in the model.
        """
        everything = self._peers.union(wanted)
        names = sorted(everything, key=lambda name: (-prod(everything[name][2]), name))
        keys = {name: everything[name][0] for name in names[self._peers.rank :: self._peers.size]}

        def hash_tensors() -> dict[str, tuple[torch.dtype, str]]:
            files = BaseFiles(self._sizes)  # closed again after this: pages of a mapped file count as memory
            tensors = [files.tensor(self._paths[key], key) for key in keys.values()]
            with ThreadPoolExecutor(HASHING_THREADS) as threads:  # Python's lock is free while one hashes
                digests = threads.map(tensor_digest, tensors)
                return {name: (t.dtype, digest) for name, t, digest in zip(keys, tensors, digests, strict=True)}

        hashed, files = self._peers.union(self._peers.run_together(hash_tensors)), BaseFiles(self._sizes)
        return {
            name: Referenced(
                name, dtype, shape, (Piece(self._paths[key], key, whole_region(shape), *hashed[name]),), files
            )
            for name, (key, dtype, shape) in everything.items()
        }

    def _hash_bits(self, here: Mapping[str, Tensor]) -> Tensor:
        """One number for each of this rank's own, on the device."""
        return torch.stack([fingerprint(local_part(here[name])) for name in self._own] or [torch.zeros(())])


def _has_bits(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor, not a kind of its own that keeps several."""
    part = local_part(tensor)
    return type(part) is Tensor and part.element_size() <= 8
