"""Train a small language model whose layers several processes share, in a loop you can read.

    python examples/tensor_parallel/train.py                                # one process
    torchrun --nproc_per_node=2 examples/tensor_parallel/train.py           # two, each with half of every layer
    torchrun --nproc_per_node=4 examples/tensor_parallel/train.py           # two such pairs, each with half of a batch

Tensor parallelism: the ranks of a pair see the same samples, and each computes some heads of the attention and some
neurons of the MLP. A layer split by its outputs (column parallel) needs nothing from the other rank. The layer after it
is split by its inputs (row parallel), and its outputs are summed over the ranks. So a block has two all-reduces in the
forward and two in the backward, and a rank holds half of the large matrices, of their gradients and of the optimizer's
state.

Run it again and it continues from its checkpoint, on any number of processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.distributed import get_world_size, seed_everything
from shoal.errors import UserError
from shoal.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, TensorParallelAttention
from shoal.strategies import Loop, MeshStrategy

TEXT = (
    "A shoal is many fish that swim as one. No fish leads and none has the plan; each sees those beside it and turns "
    "when they turn. So they go round a rock, close up again behind it, and are one shoal all the time. "
) * 20
LETTERS = sorted(set(TEXT))
TIME, BATCH, MICRO_BATCHES = 32, 16, 2


class Block(nn.Module):
    """Attention and MLP, split over the ranks of a pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)  # small: every rank has them whole
        self.attention = TensorParallelAttention(width, num_heads=4, num_kv_heads=2)
        self.up, self.down = ColumnParallelLinear(width, 4 * width), RowParallelLinear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Plain PyTorch, except for three layers from shoal; on one process they compute like ordinary ones."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(TIME, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample(step: int) -> Tensor:
    """Returns the batch of an update, (BATCH, TIME + 1). It depends on the step alone, so that a run can resume."""
    numbers = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    starts = torch.randint(len(TEXT) - TIME, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return numbers[starts + torch.arange(TIME + 1)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small language model of which processes share every layer.")
    parser.add_argument("--steps", type=int, default=100, help="updates in all, including those before a resume")
    parser.add_argument("--output_dir", default="runs/tensor_parallel", help="folder for the checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args(argv)
    path = Path(args.output_dir) / "last"

    # dp_shard = -1 takes the other processes: pairs that take different samples, and shard their halves once more.
    mesh = {"tp": 2 if get_world_size() > 1 else 1, "dp_shard": -1}
    with MeshStrategy(mesh=mesh, device=args.device) as strategy:
        loop = Loop(strategy)
        seed_everything(0)
        model, _ = loop.wrap(Model(), lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))
        step = loop.load(path)["step"] if path.exists() else 0
        strategy.barrier()  # no rank saves before all ranks have looked for the checkpoint
        while step < args.steps:
            # By data_rank, not by rank: the two ranks of a pair work on the same samples.
            samples = sample(step).tensor_split(strategy.data_size)[strategy.data_rank]
            mean_loss = torch.zeros((), device=strategy.device)
            for index, letters in enumerate(loop.to_device(samples.tensor_split(MICRO_BATCHES))):
                with loop.accumulate(last=index == MICRO_BATCHES - 1):
                    with loop.autocast():
                        logits = model(letters[:, :-1])
                        loss = F.cross_entropy(logits.flatten(0, 1), letters[:, 1:].flatten()) / MICRO_BATCHES
                    loop.backward(loss)
                mean_loss += loss.detach()
            loop.step(max_norm=1.0)  # the norm is that of the whole gradient, over all ranks
            step += 1
            if step % 10 == 0 or step == args.steps:
                mean_over_ranks = loop.reduce(mean_loss).item()  # every rank calls it, or the others would wait
                if strategy.is_main_process:
                    print(f"step {step}  loss {mean_over_ranks:.6f}", flush=True)
        loop.save(path, step=step)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # a mistake that you can correct: one line, no traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
