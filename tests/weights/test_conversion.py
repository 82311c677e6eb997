"""Sources give the same values as torch's functions, and read only the part that is needed."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.weights.conversion import Compute, Concatenate, FileTensor, Narrow, Source, Stack, Transpose, open_files

A, B, C, D = (FileTensor(name) for name in "abcd")
STORED = {name: torch.randn(4, 6) for name in "abcd"}
a, b, c, d = STORED.values()
EXPERTS = Concatenate((Stack((A, B)), Stack((C, D))), dim=1)

CASES: dict[str, tuple[Source, Tensor]] = {
    "as it is": (A, a),
    "concatenated": (Concatenate((A, B, C)), torch.cat((a, b, c))),
    "concatenated along the last": (Concatenate((A, B), dim=-1), torch.cat((a, b), -1)),
    "stacked": (Stack((A, B, C)), torch.stack((a, b, c))),
    "stacked along the last": (Stack((A, B), dim=-1), torch.stack((a, b), -1)),
    "experts": (EXPERTS, torch.cat((torch.stack((a, b)), torch.stack((c, d))), 1)),
    "narrowed": (Narrow((A,), 1, 2, 3), a[:, 2:5]),
    "narrowed in a join": (Narrow((Concatenate((A, B)),), 0, 3, 3), torch.cat((a, b))[3:6]),
    "transposed": (Transpose((A,), 0, 1), a.T),
    "experts transposed": (Transpose((Stack((A, B)),), 1, 2), torch.stack((a, b)).mT),
    "computed": (Compute((A,), lambda x: x.view(2, 2, 6).mT.reshape(4, 6)), a.view(2, 2, 6).mT.reshape(4, 6)),
    "computed in a join": (Concatenate((Compute((A, B), torch.maximum), C)), torch.cat((a.maximum(b), c))),
}


def boxes(shape: torch.Size) -> list[list[slice]]:
    """Returns the whole tensor as a box, an empty box, and random ones."""
    rng = random.Random(0)
    cut = [[sorted(rng.choices(range(length + 1), k=2)) for length in shape] for _ in range(30)]
    return [[slice(0, length) for length in shape], [slice(0, 0) for _ in shape]] + [
        [slice(start, stop) for start, stop in box] for box in cut
    ]


@pytest.mark.parametrize("case", CASES)
def test_every_box_equals_what_torch_computes(tmp_path: Path, case: str) -> None:
    save_file(STORED, tmp_path / "weights.safetensors")
    files = open_files([tmp_path / "weights.safetensors"])
    source, expected = CASES[case]
    assert source.meta(files).shape == expected.shape
    for box in boxes(expected.shape):
        part = expected[tuple(box)]
        out = torch.full(part.shape, torch.nan, dtype=torch.float64)  # another type, as when a file holds bf16
        source.fill(out, box, files)
        assert torch.equal(out, part.double()), box


class CountedTensor:
    """A file tensor that counts the elements that are read."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.num_read = tensor, 0

    def get_shape(self) -> list[int]:
        return [*self.tensor.shape]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        self.num_read += self.tensor[box].numel()
        return self.tensor[box]


@pytest.mark.parametrize("case", [case for case in CASES if "computed" not in case])
def test_only_the_elements_in_the_box_are_read(case: str) -> None:
    source, expected = CASES[case]
    for box in boxes(expected.shape):
        files = {name: CountedTensor(tensor) for name, tensor in STORED.items()}
        part = expected[tuple(box)]
        source.fill(torch.empty_like(part), box, files)
        assert sum(file.num_read for file in files.values()) == prod(part.shape), box


def test_an_expert_of_another_rank_is_not_read() -> None:
    files = {name: CountedTensor(tensor) for name, tensor in STORED.items()}
    EXPERTS.fill(torch.empty(1, 8, 6), [slice(1, 2), slice(0, 8), slice(0, 6)], files)
    assert {name: file.num_read for name, file in files.items()} == {"a": 0, "b": 24, "c": 0, "d": 24}
    assert [*EXPERTS.names()] == ["a", "b", "c", "d"]
