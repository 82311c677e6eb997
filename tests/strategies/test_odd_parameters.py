"""Parameters of unusual dtypes and shapes: each strategy trains them as one device does, or refuses them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import PLAN, SLOW_ZERO_1, ZERO_3, Net, Points, make, micro_batch, rows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.checkpoint import open_checkpoint, write_checkpoint
from shoal.errors import UserError
from shoal.strategies import Loop
from shoal.types import Weights

ODD: dict[str, Any] = {
    "float64": lambda: torch.ones(3, dtype=torch.float64),
    "all float64": lambda: torch.ones(3),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
    "complex128": lambda: torch.ones(3, dtype=torch.complex128),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(3, 0),
    "number": lambda: torch.ones(()),
    "frozen int16": lambda: torch.ones(3, dtype=torch.int16),
    "frozen bool": lambda: torch.ones(3, dtype=torch.bool),
    "frozen float64": lambda: torch.ones(3, dtype=torch.float64),
}
SPARSE = "scale.odd is stored in the layout sparse_coo; only dense tensors can be saved"
NUMBER = "parameter scale.odd is a single number, which sharding cannot split"
EMPTY = "has no elements, which strategy"
REAL = "and strategy fsdp sums gradients as real numbers"
ONE_DTYPE = "whose trained parameters need one dtype"
AS_FLOAT = "and strategy deepspeed trains everything as float32"
GATHER = "which strategy deepspeed with zero_stage 3 cannot gather"

REFUSED: dict[str, dict[str, str]] = {
    "single": {"sparse": SPARSE},
    "ddp": {"sparse": SPARSE},
    "pp": {"sparse": SPARSE, "number": NUMBER},
    "tp": {"sparse": SPARSE, "number": NUMBER},
    "fsdp": {
        "float64": ONE_DTYPE,
        "bfloat16": ONE_DTYPE,
        "complex64": REAL,
        "complex128": REAL,
        "sparse": SPARSE,
        "no rows": EMPTY,
        "no columns": EMPTY,
        "number": NUMBER,
    },
    "zero_1": {
        "float64": AS_FLOAT,
        "all float64": AS_FLOAT,
        "bfloat16": AS_FLOAT,
        "complex64": AS_FLOAT,
        "complex128": AS_FLOAT,
        "sparse": SPARSE,
        "number": NUMBER,
    },
    "zero_3": {
        "float64": AS_FLOAT,
        "all float64": AS_FLOAT,
        "bfloat16": AS_FLOAT,
        "complex64": AS_FLOAT,
        "complex128": AS_FLOAT,
        "sparse": SPARSE,
        "no rows": EMPTY,
        "no columns": EMPTY,
        "number": NUMBER,
        "frozen int16": GATHER,
    },
}
"""What each strategy says of the parameters that it refuses; it trains all others."""
if torch.__version__ < "2.13":
    REFUSED["fsdp"] |= dict.fromkeys(["frozen int16", "frozen bool"], "which strategy fsdp cannot shard with torch")


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.factor = kind, nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(ODD[kind](), requires_grad=not kind.startswith("frozen"))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("complex"):
            return x * self.factor + (self.odd * (1 + 2j)).real.to(x.dtype)
        return x * self.factor + (self.odd.sum() if self.kind.startswith("no ") else self.odd.to(x.dtype))


class OddNet(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.scale = Odd(kind)  # type: ignore[assignment]


def train(layout: str, kind: str, folder: Path) -> dict[str, Tensor] | str:
    """Trains, saves, changes all weights, loads, and returns the weights; or what the strategy said."""
    torch.manual_seed(3)
    model: nn.Module = OddNet(kind)
    dtype = torch.float64 if kind == "all float64" else torch.float32
    with make(layout) as strategy:
        try:
            model, optimizer = strategy.prepare(model.to(dtype) if kind == "all float64" else model, adam, PLAN, BUILT)
        except UserError as error:
            return str(error)
        for step in range(3):
            parts = [micro_batch(*(t.to(dtype) for t in rows(4, 10 * step + rank))) for rank in range(2)]
            mine = parts if strategy.data_size == 1 else [parts[strategy.data_rank]]
            strategy.forward_backward(model, mine, Points(), step)
            strategy.step(optimizer, 1.0)
        saved = folder / f"{layout} {kind}"
        write_checkpoint(saved, strategy.state(model, optimizer), {}, {})
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter.data).zero_()
        strategy.load_state(model, optimizer, open_checkpoint(saved).checked_state(strategy.held()))
        write_checkpoint(saved.with_name(f"{saved.name} again"), strategy.state(model, optimizer), {}, {})
    first, again = (open_checkpoint(path).read().model for path in (saved, saved.with_name(f"{saved.name} again")))
    assert all(torch.equal(first[name], again[name]) for name in first)
    return {name: tensor.clone() for name, tensor in first.items()}


BUILT = Weights("built")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, fused=False)


def train_all(layout: str, folder: Path) -> dict[str, dict[str, Tensor] | str]:
    return {kind: train(layout, kind, folder) for kind in ODD}


@pytest.mark.parametrize(
    "layout",
    [
        "single",
        "pp",
        "fsdp",
        ZERO_3,
        SLOW_ZERO_1,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "tp")),
    ],
)
def test_trained_right_or_refused_by_name(tmp_path: Path, pool2: Pool, layout: str) -> None:
    alone = train_all("single", tmp_path)
    ranks = [alone] if layout == "single" else pool2.run(train_all, layout, tmp_path, init=False)
    for trained in ranks:
        for kind in ODD:
            found, words = trained[kind], REFUSED[layout].get(kind)
            if words is None:
                assert isinstance(found, dict), f"{kind}: {found}"
                precise = {"rtol": 1e-13, "atol": 1e-13} if kind == "all float64" else {}
                torch.testing.assert_close(found, alone[kind], **precise)
            else:
                assert isinstance(found, str), f"{kind} was trained"
                assert words in found
                assert ("up.weight" if kind == "all float64" else "scale.odd") in found
                assert "\n" not in found


def test_a_unit_of_one_dtype_that_nobody_can_gather_is_refused(pool2: Pool) -> None:
    for message in pool2.run(unit_of_int16, init=False):
        assert message.startswith("parameter codes.0.weight is int16, which strategy fsdp cannot ")


def unit_of_int16() -> str:
    model = nn.ModuleDict({"codes": nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])})
    for layer in model["codes"]:  # type: ignore[attr-defined]
        layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int16), requires_grad=False)
    model["head"] = nn.Linear(2, 2)
    with make("fsdp") as strategy:
        try:
            Loop(strategy).wrap(model, adam)
        except UserError as error:
            return str(error)
    return "wrapped"
