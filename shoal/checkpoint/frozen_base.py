"""The frozen base: weights that a checkpoint refers to, by file, name and digest, instead of storing them.

A run that trains an adapter reads frozen weights from safetensors files and never changes them. Storing them in every
checkpoint would copy them again and again, so the manifest says in which file each of them is, with its sha256:

    "base": {
      "files": {"/models/base.safetensors": {"bytes": 13476839424}},
      "tensors": {"embed.weight": {"dtype": "float32", "shape": [32000, 4096], "file": "/models/base.safetensors",
                                   "key": "embed.weight", "file_dtype": "bfloat16", "sha256": "…"}}
    }

The digest is one of the tensor and not of the file: the frozen base may be moved, or split into other files, and is
still the same.

A quantised weight, or a table with rows for new tokens ("added_rows"), is made again from what is in the files. Its
entry says how, and from which tensors:

    "q_proj.weight": {"dtype": "uint8", "shape": [8388608, 1],
                      "quantised": {"scheme": {"bits": 4, …}, "part": "weight", "matrix": [4096, 4096], …},
                      "from": [{"file": "/models/base.safetensors", "key": "q_proj.weight", "shape": [4096, 4096],
                                "file_dtype": "bfloat16", "sha256": "…"}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint.manifest import dtype_name, parse_dtype, parse_lengths
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.pieces import MappedFiles, Piece, StoredTensor, tensor_digest
from shoal.checkpoint.regions import Region, whole_region
from shoal.errors import UserError, one_line
from shoal.quantised.sources import Quantisation, QuantisedSource
from shoal.tensors import fingerprint, local_part, tensors_with_names
from shoal.types import TrainState, Weights
from shoal.weights.added_rows import AddedRows, AddedRowsSource
from shoal.weights.conversion import FileTensor, Source, open_safetensors
from shoal.weights.from_files import sources_of

if TYPE_CHECKING:
    from shoal.checkpoint.store import Checkpoint

HASHING_THREADS = 4
Derivation = Quantisation | AddedRows
"""How a tensor is made from whole tensors in files."""


class FrozenBaseError(UserError):
    """A tensor of the frozen base cannot be read."""


class FrozenBaseMissing(FrozenBaseError):
    """A file of the frozen base is missing. The checkpoint is not damaged, and its stored tensors can be used."""


class FrozenBaseAltered(FrozenBaseError):
    """A file of the frozen base has other content than when the checkpoint was saved."""


class BaseFiles(MappedFiles):
    """Files of a frozen base; `sizes` maps them to their sizes in bytes, as far as known.

    `are_others` says that these are not the files that the run read, but others that a user has named.
    """

    def __init__(self, sizes: Mapping[Path, int] | None = None, are_others: bool = False):
        super().__init__({})
        self.sizes, self._are_others = sizes or {}, are_others

    def check(self, path: Path) -> None:
        """Raises FrozenBaseError if a file is missing or has another size. Does not read it."""
        try:
            if not path.is_file():  # opening a folder fails, and opening a named pipe waits forever
                raise FrozenBaseMissing(f"{path} does not exist")
            size = path.stat().st_size
        except (OSError, ValueError) as error:
            raise FrozenBaseMissing(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if size != self.sizes.get(path, size):
            raise FrozenBaseAltered(f"{path} was altered: it has {size} bytes, but had {self.sizes[path]}")

    def damage(self, path: Path, error: Exception) -> Exception:
        problem = "has other weights" if self._are_others else "was altered"
        return FrozenBaseAltered(f"{path} {problem}: {one_line(error)}")


@dataclass(frozen=True)
class BaseTensor(StoredTensor):
    """A tensor of a frozen base, stored as one piece. Its dtype in the file may differ from the model's.

    One with a derivation is made from its pieces, each a whole tensor in a file.
    """

    files: BaseFiles = field(repr=False, compare=False)
    derivation: Derivation | None = None
    """How a tensor is made that is not in a file as it is: quantised, or with rows for new tokens."""

    @property
    def source(self) -> Piece:
        """Returns the piece that is the whole tensor, or the first one that it is made from."""
        return self.pieces[0]

    def same_as(self, other: BaseTensor) -> bool:
        """Returns whether both are made in the same way from the same bytes in their files, by their digests."""
        return self.has_same_files(other) and self.derivation == other.derivation

    def has_same_files(self, other: BaseTensor) -> bool:
        """Returns whether both are made from the same bytes in their files, by their digests; one of them may be
        quantised."""
        mine, theirs = ([(p.sha256, p.dtype, p.region) for p in one.pieces] for one in (self, other))
        return mine == theirs

    def read(self, region: Region | None = None) -> Tensor:
        if self.derivation is None:
            return super().read(region)
        region = region or whole_region(self.shape)
        whole = self.derivation(*(self.files.read(piece) for piece in self.pieces)).to(self.dtype)
        return whole[region.slices_in(whole_region(self.shape))]

    def check(self, region: Region | None = None) -> None:
        for piece in self.pieces:
            self.files.read(piece)


def parse_base(about: dict[str, Any]) -> dict[str, BaseTensor]:
    """Returns the tensors in a manifest's `base` by name in the model. Raises ValueError for impossible claims.

    No file is opened.
    """
    files = BaseFiles({Path(file): int(facts["bytes"]) for file, facts in about["files"].items()})
    tensors: dict[str, BaseTensor] = {}
    for name, facts in about["tensors"].items():
        pieces = tuple(_parse_piece(name, part) for part in facts.get("from", [facts]))
        if outside := [piece.path for piece in pieces if piece.path not in files.sizes]:
            raise ValueError(f"{name} is in {outside[0]}, which is not one of the base's files")
        dtype, shape = parse_dtype(name, facts["dtype"]), parse_lengths(name, facts["shape"])
        tensors[name] = BaseTensor(name, dtype, shape, pieces, files, _parse_derivation(name, facts, pieces, shape))
    return tensors


def _parse_derivation(
    name: str, facts: dict[str, Any], pieces: tuple[Piece, ...], shape: tuple[int, ...]
) -> Derivation | None:
    """Returns how an entry of a manifest's `base` says that a tensor is made, or None if it is in a file as it is."""
    derivation: Derivation | None = None
    result = shape
    if "quantised" in facts:
        derivation = Quantisation.from_json(facts["quantised"])
        result = derivation.result_shape
    elif "added_rows" in facts:
        stored = pieces[0].region.shape if len(pieces) == 1 else ()
        derivation = AddedRows.from_json(facts["added_rows"], stored[0] if stored else 0)
        result = (derivation.rows, *stored[1:])
    if shape != result or not pieces or (derivation is None and "from" in facts):
        raise ValueError(f"{name} has another shape than what it is made from gives")
    return derivation


def _parse_piece(name: str, facts: dict[str, Any]) -> Piece:
    """Returns the piece that an entry of a manifest's `base` names."""
    region = whole_region(parse_lengths(name, facts["shape"]))
    return Piece(
        Path(facts["file"]), str(facts["key"]), region, parse_dtype(name, facts["file_dtype"]), str(facts["sha256"])
    )


def describe_base(tensors: Mapping[str, BaseTensor]) -> dict[str, Any]:
    """Returns the manifest's entry `base`; the inverse of `parse_base`."""
    sizes = {str(piece.path): tensor.files.sizes[piece.path] for tensor in tensors.values() for piece in tensor.pieces}
    return {
        "files": {file: {"bytes": size} for file, size in sorted(sizes.items())},
        "tensors": {name: _describe_tensor(tensor) for name, tensor in sorted(tensors.items())},
    }


def _describe_tensor(tensor: BaseTensor) -> dict[str, Any]:
    about = {"dtype": dtype_name(tensor.dtype), "shape": [*tensor.shape]}
    pieces = [
        {
            "file": str(piece.path),
            "key": piece.key,
            "file_dtype": dtype_name(piece.dtype),
            "sha256": piece.sha256,
        }
        for piece in tensor.pieces
    ]
    if tensor.derivation is None:
        return about | pieces[0]
    shapes = [{"shape": [*piece.region.shape]} for piece in tensor.pieces]
    made_from = [piece | shape for piece, shape in zip(pieces, shapes, strict=True)]
    kind = "quantised" if isinstance(tensor.derivation, Quantisation) else "added_rows"
    return about | {kind: tensor.derivation.as_json(), "from": made_from}


def base_files(tensors: Mapping[str, BaseTensor]) -> dict[str, str | None]:
    """Returns the files of these tensors, each with the reason why it cannot be used, or None. Reads no file."""
    problems: dict[str, str | None] = {}
    paths = {piece.path: tensor.files for tensor in tensors.values() for piece in tensor.pieces}
    for path, files in sorted(paths.items()):
        problems[str(path)] = None
        try:
            files.check(path)
        except FrozenBaseError as error:
            problems[str(path)] = str(error)
    return problems


def find_base_in(place: Path, tensors: Mapping[str, BaseTensor]) -> dict[str, BaseTensor]:
    """Returns the same tensors as they are in another safetensors file, or in a folder of them. Raises UserError."""
    if not place.exists():
        raise UserError(f"--base {place}: no such file or folder")
    paths = files_by_tensor(sorted(place.glob("*.safetensors")) if place.is_dir() else [place])
    files = BaseFiles(are_others=True)
    if missing := [piece.key for tensor in tensors.values() for piece in tensor.pieces if piece.key not in paths]:
        raise UserError(f"--base {place} has no tensor {missing[0]!r}, which the checkpoint refers to")
    pieces = {name: tuple(replace(piece, path=paths[piece.key]) for piece in t.pieces) for name, t in tensors.items()}
    return {name: replace(tensor, pieces=pieces[name], files=files) for name, tensor in tensors.items()}


def files_by_tensor(files: Iterable[Path]) -> dict[str, Path]:
    """Returns the file of each tensor by its name in the files. Of two with one name, the later file's counts."""
    return {name: file.absolute() for file in files for name in open_safetensors(file).keys()}  # noqa: SIM118  a file is no mapping


class _Frozen(NamedTuple):
    """A frozen tensor that came from files."""

    keys: tuple[str, ...]
    """The names in the files: one, or those that a quantised tensor is made from."""
    dtype: torch.dtype
    """The dtype in the model."""
    shape: tuple[int, ...]
    derivation: Derivation | None


class FrozenBase:
    """The files that a run read its weights from, and the frozen parameters that still have the values in them.

    Frozen only means that no gradient is computed: a parameter may still change, for example as an average of others or
    by loading other weights. A fingerprint of its bits shows that, and it is then stored like any other. Buffers are
    always stored. All ranks construct it and call its methods together.
    """

    def __init__(self, model: nn.Module, weights: Weights, model_state: Mapping[str, Tensor]):
        """`model_state` has the model's tensors by name, right after they were read from the files of `weights`."""
        self._paths = files_by_tensor(weights.files if weights.kind == "files" else ())
        self._sizes = {path: path.stat().st_size for path in self._paths.values()}
        self._peers = Peers()
        frozen: dict[str, _Frozen] = {}
        sources = sources_of(weights, self._paths) if self._paths else {}
        for tensor, (name, *aliases) in tensors_with_names(model):
            source = next((sources[key] for key in (name, *aliases) if key in sources), None)
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            keys, derivation = _keys_of(source)
            if is_frozen and keys and _has_plain_bits(model_state[name]):
                frozen[name] = _Frozen(keys, model_state[name].dtype, tuple(model_state[name].shape), derivation)
        self._local_names = sorted(frozen)
        self._local_fingerprints = self._fingerprints(model_state)
        self.tensors = self._hash_files(frozen) if self._paths else {}
        """The frozen tensors of all ranks that came from the files, by name in the model."""

    def without_base(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Returns the state without what the files still hold, and the manifest's entry that refers to the files."""
        unchanged = self.unchanged(state.model)
        model = {name: tensor for name, tensor in state.model.items() if name not in unchanged}
        return replace(state, model=model), {"base": describe_base(unchanged)} if unchanged else {}

    def unchanged(self, model_state: Mapping[str, Tensor]) -> dict[str, BaseTensor]:
        """Returns the tensors that on all ranks still have the values in the files."""
        if not self.tensors:
            return {}
        changed = (self._fingerprints(model_state) != self._local_fingerprints).nonzero().flatten().tolist()
        changed_names = self._peers.union({self._local_names[index]: True for index in changed})
        return {name: tensor for name, tensor in self.tensors.items() if name not in changed_names}

    def check(self, checkpoint: Checkpoint, model_state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Raises FrozenBaseError if a checkpoint refers to other weights than this run has read.

        Returns the tensors of the checkpoint's frozen base that have to be read because the model has other values.
        """
        run_tensors = self._find_in_files(checkpoint.base)
        for name, tensor in checkpoint.base.items():
            if name not in run_tensors:
                checkpoint.check_base(tensor)
            elif not run_tensors[name].same_as(tensor):
                raise FrozenBaseAltered(
                    f"{run_tensors[name].source.path} is not the base that {checkpoint.folder} was trained on: "
                    f"{run_tensors[name].source.key} differs; put the file back, or start a new run from the adapter "
                    "alone with checkpoint.init_from, and model.name in checkpoint.allow_changed"
                )
        held = self.unchanged(model_state) if checkpoint.base else {}
        return {name: run_tensors.get(name, tensor) for name, tensor in checkpoint.base.items() if name not in held}

    def differing(self, tensors: Mapping[str, BaseTensor]) -> dict[str, BaseTensor | None]:
        """Returns those of another base's tensors that the files of this run hold with other values, each as it is in
        these files, or None if they do not hold it. Whether and how a base is quantised does not count."""
        found = self._find_in_files(tensors)
        return {
            name: found.get(name)
            for name, tensor in tensors.items()
            if name not in found or not found[name].has_same_files(tensor)
        }

    def _find_in_files(self, tensors: Mapping[str, BaseTensor]) -> dict[str, BaseTensor]:
        """Returns this run's tensors and those of `tensors` that its files hold; the latter are hashed only now."""
        unknown = {
            name: _Frozen(tuple(piece.key for piece in tensor.pieces), tensor.dtype, tensor.shape, tensor.derivation)
            for name, tensor in tensors.items()
            if name not in self.tensors and all(piece.key in self._paths for piece in tensor.pieces)
        }
        return {**self.tensors, **(self._hash_files(unknown) if unknown else {})}

    def _hash_files(self, tensors: dict[str, _Frozen]) -> dict[str, BaseTensor]:
        """Hashes the tensors of all ranks in the files, each on one rank, and returns all of them on every rank."""
        all_tensors = self._peers.union(tensors)
        sizes = {key: prod(tensor.shape) for tensor in all_tensors.values() for key in tensor.keys}
        largest_first = sorted(sizes, key=lambda key: (-sizes[key], key))
        keys = largest_first[self._peers.rank :: self._peers.size]

        def hash_tensors() -> dict[str, tuple[Region, torch.dtype, str]]:
            files = BaseFiles(self._sizes)  # forgotten after hashing: pages of mapped files count as memory
            mapped = [files.tensor(self._paths[key], key) for key in keys]
            with ThreadPoolExecutor(HASHING_THREADS) as threads:  # hashing does not hold Python's global lock
                digests = threads.map(tensor_digest, mapped)
                hashed = zip(keys, mapped, digests, strict=True)
                return {key: (whole_region(tuple(t.shape)), t.dtype, digest) for key, t, digest in hashed}

        hashed, files = self._peers.union(self._peers.run_together(hash_tensors)), BaseFiles(self._sizes)
        pieces = {key: Piece(self._paths[key], key, *facts) for key, facts in hashed.items()}
        return {
            name: BaseTensor(name, one.dtype, one.shape, tuple(pieces[key] for key in one.keys), files, one.derivation)
            for name, one in all_tensors.items()
        }

    def _fingerprints(self, model_state: Mapping[str, Tensor]) -> Tensor:
        """Returns one number for each frozen tensor of this rank, on the device."""
        return torch.stack(
            [fingerprint(local_part(model_state[name])) for name in self._local_names] or [torch.zeros(())]
        )


def _keys_of(source: Source | None) -> tuple[tuple[str, ...], Derivation | None]:
    """Returns the names of the file tensors that a manifest can refer to, and how a tensor is made of them.

    There are none for a tensor that is joined from several, or is another form of one. It is always stored.
    """
    if isinstance(source, FileTensor):
        return (source.name,), None
    if isinstance(source, QuantisedSource) and all(isinstance(part, FileTensor) for part in source.parts):
        return tuple(source.names()), source.quantisation
    if isinstance(source, AddedRowsSource) and isinstance(source.parts[0], FileTensor):
        return tuple(source.names()), source.added
    return (), None


def _has_plain_bits(tensor: Tensor) -> bool:
    """Returns False for tensor subclasses that keep several tensors, which have no bits of their own to hash."""
    local = local_part(tensor)
    return type(local) is Tensor and local.element_size() <= 8
