"""The store: a checkpoint is published completely or not at all, verified while it is read, and holds no code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shoal.checkpoint import (
    CheckpointManager,
    DamagedCheckpoint,
    WrongLayout,
    find_latest_checkpoint,
    open_checkpoint,
    step_folder,
    write_checkpoint,
)
from shoal.checkpoint import store as store_module
from shoal.checkpoint.manifest import manifest_digest
from shoal.checkpoint.pieces import (
    MappedFiles,
    Piece,
    dtype_in_files,
    header_digest,
    is_storable,
    tensor_digest,
    why_not_storable,
)
from shoal.checkpoint.regions import Region, coverage_problem, held_of, local_region, whole_region
from shoal.errors import UserError
from shoal.types import TrainState

ABOUT: dict[str, Any] = {"layout": {"strategy": "single", "world_size": 1}, "batches": [[0, 4]], "config": {"a": 1}}


def state(value: float = 1.0) -> TrainState:
    weights = {
        "weight": torch.full((3, 4), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "steps": torch.tensor(7),
    }
    moments = {"weight": {"exp_avg": torch.full((3, 4), 2 * value), "step": torch.tensor(3.0)}}
    return TrainState(weights, moments, {"loss_scale": torch.tensor(1024.0)})


def save(folder: Path, step: int = 3, value: float = 1.0, keep_last: int = 9) -> Path:
    CheckpointManager(folder, keep_last).save_state(state(value), {"step": step, "samples": 5}, ABOUT)
    return step_folder(folder, step)


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    assert checkpoint.trainer == {"step": 3, "samples": 5}
    assert checkpoint.manifest["config"] == {"a": 1}
    assert checkpoint.manifest["versions"]["torch"] == torch.__version__
    read = checkpoint.read()
    for name, tensor in state().model.items():
        assert read.model[name].dtype == tensor.dtype
        assert torch.equal(read.model[name], tensor)
    assert torch.equal(read.optimizer["weight"]["exp_avg"], torch.full((3, 4), 2.0))
    assert read.optimizer["weight"]["step"].item() == 3
    assert sorted(p.name for p in checkpoint.folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "strategy.safetensors",
        "trainer.json",
    ]


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "strategy.safetensors", "trainer.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "pickle"])
def test_any_damage_is_detected_and_the_previous_checkpoint_is_found(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path, step=1)
    path = save(tmp_path, step=2) / file
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran"))))
    places = range(0, len(data), max(1, len(data) // 40)) if damage == "flip" else [0]
    for place in places:
        if damage == "flip":
            path.write_bytes(flip(data, 8 * place + place % 8))
        with pytest.raises((DamagedCheckpoint, UserError)):
            open_checkpoint(path.parent).read()
    assert not (tmp_path / "ran").exists()
    if damage != "flip" and file in ("manifest.json", "trainer.json"):
        assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000001"


def flip(data: bytes, bit: int) -> bytes:
    place = bit // 8
    return data[:place] + bytes([data[place] ^ 1 << bit % 8]) + data[place + 1 :]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_bit_of_a_manifest_counts(tmp_path: Path, stride: int) -> None:
    """This includes its format, and bits that change the text and not its meaning, as in 1e-5 and 1E-5."""
    about = {"config": {"rate": 1e-5, "name": "ü"}}
    CheckpointManager(tmp_path).save_state(TrainState({"w": torch.ones(1)}, {}), {"step": 1}, about)
    folder = step_folder(tmp_path, 1)
    open_checkpoint(folder).read()
    path = folder / "manifest.json"
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), stride):
        path.write_bytes(flip(data, bit))
        with pytest.raises(DamagedCheckpoint):
            open_checkpoint(folder)


class _Hostile:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes a manifest and computes its digest again, as an attacker can."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("digest")
    change(manifest)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize("file", FILES[1:])
def test_a_pickle_with_a_matching_digest_is_refused(tmp_path: Path, file: str) -> None:
    folder = save(tmp_path)
    path = folder / file
    path.write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran"))))

    def vouch(manifest: dict[str, Any]) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        about = {"bytes": path.stat().st_size, "header": header_digest(path), "sha256": digest}
        manifest["files"][file] |= about

    forge_manifest(folder, vouch)
    before = files_in(tmp_path)
    with pytest.raises(DamagedCheckpoint):
        open_checkpoint(folder).read()
    assert files_in(tmp_path) == before


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns all files under a folder with their sizes and modification times."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_manifest_that_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())

    def point_outside(manifest: dict[str, Any]) -> None:
        manifest["files"]["../../secret.safetensors"] = manifest["files"].pop("model.safetensors")

    forge_manifest(folder, point_outside)
    before = files_in(tmp_path)
    with pytest.raises(DamagedCheckpoint, match="outside"):
        open_checkpoint(folder)
    assert files_in(tmp_path) == before


def put_in_place(path: Path, kind: str) -> None:
    """Replaces a file by something that is no regular file."""
    copy = path.parents[2] / "elsewhere"
    shutil.copyfile(path, copy)
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    else:
        path.symlink_to({"device": Path("/dev/zero"), "link": copy, "loop": path}[kind])


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "link", "loop"])
def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path, file: str, kind: str) -> None:
    """A pipe would wait for a writer, /dev/zero has no end, and a link could lead to any file of the reader."""
    folder = save(tmp_path)
    put_in_place(folder / file, kind)
    with pytest.raises(DamagedCheckpoint, match=f"{file} is not a regular file but a ") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert find_latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("text", ["[1, 2]", "7", "null", '"step"'])
def test_a_trainer_json_that_is_no_object_is_damage(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path)
    (folder / "trainer.json").write_text(text)
    digest = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    forge_manifest(folder, lambda manifest: manifest["files"].update({"trainer.json": digest}))
    with pytest.raises(DamagedCheckpoint, match=r"trainer\.json is not an object"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "\0", "x" * 300])
def test_a_manifest_with_an_odd_file_name_is_damaged(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path)
    forge_manifest(folder, lambda manifest: manifest["files"].update({name: {"bytes": 4096}}))
    with pytest.raises(DamagedCheckpoint) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


WEIGHT = "model/weight"


def cut(*pieces: tuple[list[int], list[int]]) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        about = manifest["tensors"][WEIGHT]
        piece = about["pieces"][0]
        files = ["model.safetensors", "optimizer.safetensors"]
        about["pieces"] = [
            piece | {"offset": offset, "shape": shape, "file": file}
            for (offset, shape), file in zip(pieces, files, strict=False)
        ]

    return change


def claim(**about: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][WEIGHT] |= about

    return change


def grow(shape: list[int]) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][WEIGHT]["shape"] = manifest["tensors"][WEIGHT]["pieces"][0]["shape"] = shape

    return change


def name_it(name: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["tensors"][name] = manifest["tensors"].pop(WEIGHT)

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut(([0, 0], [2, 4]), ([1, 0], [2, 4])), "overlap"),
        (cut(([0, 0], [1, 4]), ([2, 0], [1, 4])), "gap"),
        (cut(([0, 0], [2, 4])), "reach 2 of 3"),
        (cut(([1, 0], [3, 4])), "gap"),
        (cut(([0, 0], [3, 4]), ([0, 0], [3, 4])), "twice"),
        (cut(([0, 0], [1, 2]), ([1, 2], [2, 2])), "2 of 4 pieces"),
        (cut(([0], [3])), "dimensions"),
        (cut(([0, 0], [-3, -4])), "impossible"),
        (cut(), "reach 0 of 3"),
        (claim(pieces=None), "NoneType"),
        (claim(dtype="load"), "unknown dtype"),
        (claim(dtype="qint8"), "unknown dtype"),
        (claim(dtype="complex128"), "in the manifest"),
        (claim(dtype="float64"), "in the manifest"),
        (claim(dtype="int32"), "in the manifest"),
        (grow([3_000_000_000, 4_000_000]), "too small"),
        (grow([2**40, 2**40]), "impossible"),
        (grow([0, 2**40, 2**40]), "impossible"),
        (grow([4, 3]), "another shape"),
        (grow([True, 12]), "impossible"),
        (name_it("secrets/weight"), "unknown section"),
        (name_it("model/other"), "other"),
    ],
)
def test_false_claims_in_a_manifest_are_refused(tmp_path: Path, change: Callable[..., None], words: str) -> None:
    folder = save(tmp_path)
    forge_manifest(folder, change)
    before = files_in(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=words):
        open_checkpoint(folder).read()
    assert files_in(tmp_path) == before


def test_a_region_outside_of_a_tensor_is_refused(tmp_path: Path) -> None:
    weight = open_checkpoint(save(tmp_path)).tensors[WEIGHT]
    assert torch.equal(weight.read(Region((1, 2), (2, 2))), torch.ones(2, 2))
    assert weight.read(Region((3, 0), (0, 4))).shape == (0, 4)
    for offset, shape in [((2, 0), (2, 4)), ((0,), (3,)), ((0, 0), (3, 5))]:
        with pytest.raises(ValueError, match="has no region"):
            weight.read(Region(offset, shape))


def test_a_checkpoint_of_format_1_still_opens() -> None:
    """The fixture was written by two ranks of the first version that had format 1."""
    checkpoint = open_checkpoint(Path(__file__).parent / "fixtures" / "format_1")
    assert checkpoint.trainer == {"step": 3, "samples": 12, "skipped_steps": 0}
    weight = torch.arange(12.0).reshape(3, 4)
    read = checkpoint.read()
    torch.testing.assert_close(
        read.model, {"half": torch.arange(5).bfloat16(), "steps": torch.tensor(7), "weight": weight}
    )
    torch.testing.assert_close(read.optimizer["weight"], {"exp_avg": weight / 2, "step": torch.tensor(3.0)})
    assert read.strategy["loss_scale"] == 65536
    assert torch.equal(checkpoint.tensors[WEIGHT].read(Region((1, 1), (2, 2))), weight[1:, 1:3])


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path)
    forge_manifest(folder, lambda manifest: manifest.update(format=99))
    with pytest.raises(UserError, match="format 99"):
        open_checkpoint(folder)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, step=1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "flush", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, step=2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_full_disk_raises_oserror_with_the_file(tmp_path: Path) -> None:
    """The error names the file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large: .*model\.safetensors"):
            write_checkpoint(tmp_path / "new", TrainState({"w": torch.zeros(5000)}, {}), {}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


def test_all_files_have_the_same_mode(tmp_path: Path) -> None:
    modes = {path.stat().st_mode for path in save(tmp_path).iterdir()}
    assert len(modes) == 1


def test_a_step_is_replaced_completely(tmp_path: Path) -> None:
    save(tmp_path, value=1.0)
    folder = save(tmp_path, value=5.0)
    assert open_checkpoint(folder).read().model["weight"].unique().item() == 5.0
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("killed", ["between the renames", "after the renames"])
def test_a_kill_during_a_replacement_loses_nothing(tmp_path: Path, killed: str) -> None:
    """The last step is replaced if it was saved before it was evaluated."""
    folder = save(tmp_path)
    beside, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    shutil.copytree(folder, beside)
    folder.rename(old)
    if killed == "after the renames":
        beside.rename(folder)
    CheckpointManager(tmp_path).clean()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    open_checkpoint(folder).read()


def test_latest_is_the_highest_step_not_the_newest_file(tmp_path: Path) -> None:
    save(tmp_path, step=100)
    save(tmp_path, step=20)
    (tmp_path / "checkpoints" / "step_00000300").mkdir()
    assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000100"
    assert find_latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("about", [ABOUT, {}], ids=["of a run", "of a hand-written loop"])
def test_a_copy_under_the_name_of_another_step_is_damaged(tmp_path: Path, about: dict[str, Any]) -> None:
    trainer = {"step": 2 if about else "the second"}
    write_checkpoint(step_folder(tmp_path, 2), state(), trainer, about)
    shutil.copytree(step_folder(tmp_path, 2), step_folder(tmp_path, 99))
    shutil.copytree(step_folder(tmp_path, 2), tmp_path / "kept")
    with pytest.raises(DamagedCheckpoint, match="it is the checkpoint of step 2"):
        open_checkpoint(step_folder(tmp_path, 99))
    assert find_latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert open_checkpoint(tmp_path / "kept").trainer == trainer  # a name that says no step


ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    """Returns a tensor with different bytes in all elements, though torch may not know how to compute with them."""
    numbers = torch.arange(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    return (numbers % 2 if dtype == torch.bool else numbers).view(dtype).view(shape)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and tensor_digest(a) == tensor_digest(b)


def test_every_dtype_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Those that safetensors cannot hold are stored as bytes, and move between layouts like others."""
    dtypes = [dtype for dtype in ALL_DTYPES if is_storable(dtype)]
    known = [dtype for dtype in dtypes if dtype_in_files(dtype)]
    assert {torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint16} <= {*known}
    assert {torch.complex64, torch.complex128, torch.float8_e8m0fnu, torch.uint64} <= {*dtypes}
    tensors = {f"{dtype}": filled(dtype, 4, 3) for dtype in dtypes}
    tensors |= {f"{dtype} number": filled(dtype, 1)[0] for dtype in dtypes}
    tensors |= {f"{dtype} empty": torch.empty(0, 2, dtype=dtype) for dtype in dtypes}
    write_checkpoint(tmp_path / "whole", TrainState(tensors, {}), {}, {})
    checkpoint = open_checkpoint(tmp_path / "whole")
    for name, tensor in checkpoint.read().model.items():
        assert same_bytes(tensor, tensors[name]), name
    for dtype in dtypes:
        part = checkpoint.tensors[f"model/{dtype}"].read(Region((1, 1), (2, 2)))
        assert same_bytes(part, filled(dtype, 4, 3)[1:3, 1:3].contiguous()), dtype
    assert "complex128" in checkpoint.manifest["tensors"]["model/torch.complex128"]["dtype"]
    conjugate = torch.tensor([1 + 2j]).conj()
    write_checkpoint(tmp_path / "conjugate", TrainState({"w": conjugate}, {}), {}, {})
    assert torch.equal(open_checkpoint(tmp_path / "conjugate").read().model["w"], torch.tensor([1 - 2j]))


def test_tensors_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model/w is stored in the layout sparse_coo"):
        write_checkpoint(tmp_path / "new", TrainState({"w": torch.eye(2).to_sparse()}, {}), {}, {})
    assert not [*tmp_path.iterdir()]
    assert why_not_storable(torch.ones(2)) is None
    assert "sparse_coo" in str(why_not_storable(torch.eye(2).to_sparse()))
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    assert "qint8" in str(why_not_storable(quantized))


BYTES_DTYPES = (torch.complex128, torch.complex64, torch.uint16, torch.float8_e8m0fnu)


def write_rows(folder: Path) -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    rows = {str(dtype): filled(dtype, 4, 3)[2 * rank :][:2] for dtype in BYTES_DTYPES}
    shards = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in rows.items()}
    write_checkpoint(folder, TrainState(shards, {}), {}, {})


def test_dtypes_that_are_stored_as_bytes_move_between_layouts(tmp_path: Path, pool2: Pool) -> None:
    pool2.run(write_rows, tmp_path / "rows")
    checkpoint = open_checkpoint(tmp_path / "rows")
    for dtype in BYTES_DTYPES:
        stored = checkpoint.tensors[f"model/{dtype}"]
        assert len(stored.pieces) == 2
        assert same_bytes(stored.read(), filled(dtype, 4, 3))
        assert same_bytes(stored.read(Region((1, 0), (2, 2))), filled(dtype, 4, 3)[1:3, :2].contiguous())


# Sharded layouts

SHAPES = {"even": (8, 4), "uneven": (7, 6), "few": (2, 5), "none": (0, 3)}
DTYPES = {"few": torch.bfloat16}
LAYOUTS: dict[str, tuple[tuple[int, ...], str]] = {
    "2 rows": ((2,), "0"),
    "2 columns": ((2,), "1"),
    "4 rows": ((4,), "0"),
    "2 replicas of 2 rows": ((2, 2), "R0"),
    "2 rows × 2 columns": ((2, 2), "01"),
    "rows cut twice": ((2, 2), "00"),
}
ON = {2: [name for name, (mesh, _) in LAYOUTS.items() if prod(mesh) == 2]}
ON[4] = [name for name in LAYOUTS if name not in ON[2]]


def whole_state() -> TrainState:
    """Returns the state with whole tensors."""
    weights = {
        name: torch.arange(prod(shape), dtype=DTYPES.get(name, torch.float32)).reshape(shape)
        for name, shape in SHAPES.items()
    }
    moments = {name: {"exp_avg": tensor + 0.5, "step": torch.tensor(3.0)} for name, tensor in weights.items()}
    return TrainState(weights | {"steps": torch.tensor(7)}, moments)


def sharded(layout: str) -> TrainState:
    """Returns the same state, sharded over the ranks of this world."""
    sides, letters = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", sides)
    placements = [Replicate() if letter == "R" else Shard(int(letter)) for letter in letters]

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, placements) if tensor.ndim else tensor

    whole = whole_state()
    return TrainState(
        {name: place(tensor) for name, tensor in whole.model.items()},
        {name: {slot: place(tensor) for slot, tensor in slots.items()} for name, slots in whole.optimizer.items()},
    )


def named(state: TrainState) -> dict[str, Any]:
    moments = {f"{slot}/{name}": t for name, slots in state.optimizer.items() for slot, t in slots.items()}
    return {**state.model, **moments}


def write_spread(folder: Path, layouts: list[str]) -> None:
    for layout in layouts:
        write_checkpoint(folder / layout, sharded(layout), {"step": 1}, {})


def read_spread(folders: list[Path], layouts: list[str]) -> list[str]:
    """Returns the shards that differ when each folder is read into each layout."""
    wrong = []
    for folder in folders:
        for layout in layouts:
            local_state = sharded(layout)
            stored = named(open_checkpoint(folder).checked_state(held_of(local_state.model)))
            for name, tensor in named(local_state).items():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                shard = stored[name].read(local_region(tensor))
                if shard.dtype != local.dtype or not torch.equal(shard, local):
                    wrong.append(f"{name} from {folder.name} in {layout}")
    return wrong


def test_every_layout_reads_what_every_layout_wrote(tmp_path: Path, pool2: Pool, pool4: Pool) -> None:
    write_checkpoint(tmp_path / "alone", whole_state(), {"step": 1}, {})
    pool2.run(write_spread, tmp_path, ON[2])
    pool4.run(write_spread, tmp_path, ON[4])
    folders = [tmp_path / "alone", *(tmp_path / layout for layout in LAYOUTS)]
    expected = named(whole_state())
    for folder in folders:
        read = named(open_checkpoint(folder).read())
        assert read.keys() == expected.keys()
        for name, tensor in expected.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor), (folder.name, name)
        data = [path.read_bytes() for path in folder.glob("*.safetensors")]
        stored = sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in data)
        assert stored == sum(tensor.nbytes for tensor in expected.values()), folder.name  # replicas are written once
    assert pool2.run(read_spread, folders, ON[2]) == [[]] * 2
    assert pool4.run(read_spread, folders, ON[4]) == [[]] * 4


def written_bytes(folder: Path) -> Counter[Path]:
    tensors = open_checkpoint(folder).tensors.values()
    return Counter(
        {
            path: sum(p.region.numel * t.dtype.itemsize for t in tensors for p in t.pieces if p.path == path)
            for path in {piece.path for tensor in tensors for piece in tensor.pieces}
        }
    )


def write_many(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    # Assigned in this order, one replica would write 30 columns and the other 90.
    columns = {"a": 10, "b": 10, "c": 10, "d": 10, "e": 10, "f": 10, "large": 60}
    model = {name: distribute_tensor(torch.zeros(4, n), mesh, [Replicate(), Shard(0)]) for name, n in columns.items()}
    write_checkpoint(folder, TrainState(model, {}), {}, {})


def test_replicas_write_equal_amounts(tmp_path: Path, pool4: Pool) -> None:
    pool4.run(write_many, tmp_path / "many")
    written = written_bytes(tmp_path / "many")
    assert [*written.values()] == [2 * 60 * 4] * 4


def count_reads(folder: Path, layout: str) -> tuple[int, int]:
    """Returns the bytes of the pieces that this rank opens to restore its state, and the bytes that it holds."""
    opened: dict[Piece, int] = {}
    read = MappedFiles.read

    def spy(self: MappedFiles, piece: Piece) -> Tensor:
        tensor = read(self, piece)
        opened[piece] = tensor.nbytes
        return tensor

    MappedFiles.read = spy  # type: ignore[method-assign]
    try:
        local_state = sharded(layout)
        stored = named(open_checkpoint(folder).checked_state(held_of(local_state.model)))
        for name, tensor in named(local_state).items():
            stored[name].read(local_region(tensor))
    finally:
        MappedFiles.read = read  # type: ignore[method-assign]
    tensors = named(local_state).values()
    return sum(opened.values()), sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def test_a_rank_reads_only_the_pieces_that_it_needs(tmp_path: Path, pool2: Pool, pool4: Pool) -> None:
    pool4.run(write_spread, tmp_path, ["4 rows"])
    for pool, layout in ((pool2, "2 rows"), (pool4, "4 rows"), (pool4, "2 replicas of 2 rows")):
        for opened, held in pool.run(count_reads, tmp_path / "4 rows", layout):
            assert opened == held


def write_with_mistake(folder: Path, mistake: str) -> str:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    tensor: Tensor = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    if mistake == "shape":
        tensor = torch.ones(6 + rank, 2)
    elif mistake == "partial":
        tensor = DTensor.from_local(torch.ones(6, 2), mesh, [Partial()])
    elif mistake == "length":
        local = torch.ones(3 - rank, 2)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=(2, 1))
    try:
        if mistake == "offset":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store_module, "local_region", lambda tensor: Region((2 * rank, 0), (3, 2)))
                write_checkpoint(folder, TrainState({"w": tensor}, {}), {}, {})
        else:
            write_checkpoint(folder, TrainState({"w": tensor}, {}), {}, {})
    except WrongLayout as error:
        return str(error)
    return "published"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("shape", "model/w is float32 [6, 2] on one rank and float32 [7, 2] on another"),
        ("partial", "only Shard and Replicate"),
        ("length", "should be (3, 2), but is (2, 2)"),
        ("offset", "model/w: its pieces overlap along dimension 0"),
        ("none", "published"),
    ],
)
def test_shards_that_do_not_cover_a_tensor_are_not_published(
    tmp_path: Path, pool2: Pool, mistake: str, words: str
) -> None:
    for message in pool2.run(write_with_mistake, tmp_path / "new", mistake):
        assert words in message
    assert [path.name for path in tmp_path.iterdir()] == (["new"] if mistake == "none" else [])


def test_regions_cover_a_tensor_or_not() -> None:
    quarters = [Region((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
    assert coverage_problem((4, 6), quarters) is None
    assert coverage_problem((), [Region((), ())]) is None
    assert coverage_problem((0, 3), [whole_region((0, 3))]) is None
    assert coverage_problem((4, 6), quarters[:3])
    assert coverage_problem((4, 6), [*quarters[:3], quarters[0]])
    assert coverage_problem((5, 6), quarters)
    assert coverage_problem((), [])
