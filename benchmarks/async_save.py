"""Measures how long a save in the background keeps the next step waiting, beside other saves of the same state.

    python benchmarks/async_save.py [--gib 1.2] [--rounds 4] [--folder .] [--write docs/benchmarks.md]

All of them save the weights and AdamW moments of one model, several times in turn: torch.save, shoal's save without
`checkpoint.async_save`, and with it. Unlike torch.save, shoal's saves also compute digests and flush the files to the
disk. "blocked" is the time until training could continue; the time until the background has written everything is shown
as well.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from cases import machine, write_section

from shoal.checkpoint import open_checkpoint
from shoal.checkpoint.async_save import Saver
from shoal.types import TrainState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the result into this Markdown file")
    options = parser.parse_args()
    layers, rows = 24, int(options.gib * 2**30 / 24 / 3 / 4 / 1024)
    model = {f"layer.{i}.weight": torch.randn(rows, 1024) for i in range(layers)}
    moments = {n: {"exp_avg": torch.randn_like(t), "exp_avg_sq": torch.randn_like(t)} for n, t in model.items()}
    state = TrainState(model, moments)
    total = 3 * sum(t.nbytes for t in model.values())
    print(f"{total / 2**30:.2f} GiB of state")
    lines = []
    at_once, saver = Saver(background=False), Saver(background=True)
    saver.reserve(state)  # as a run does after its first step
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for number in range(options.rounds):
            began = time.perf_counter()
            torch.save({"model": model, "moments": moments}, folder / "plain.pt")
            plain = time.perf_counter() - began
            began = time.perf_counter()
            at_once.save(folder / "step", state, {"step": number}, {})
            synchronous = time.perf_counter() - began
            began = time.perf_counter()
            saver.save(folder / "step", state, {"step": number}, {})
            blocked = time.perf_counter() - began
            saver.wait()
            whole = time.perf_counter() - began
            lines.append(
                f"save {number + 1}  blocked {blocked:.3f} s = {blocked / plain:.1%} of torch.save ({plain:.2f} s), "
                f"{blocked / synchronous:.1%} of a save at once ({synchronous:.2f} s); written after {whole:.2f} s"
            )
            print(lines[-1], flush=True)
        open_checkpoint(folder / "step").read()
    if options.write:
        head = (
            f"Measured by `python benchmarks/async_save.py` on {machine()}, with {torch.get_num_threads()} thread(s): "
            f"{total / 2**30:.2f} GiB of weights and AdamW moments. A step waits while it is *blocked*. Unlike "
            "`torch.save`, shoal's saves also compute digests and flush the files to the disk."
        )
        write_section(options.write, "Saving in the background", "\n".join([head, "", "```text", *lines, "```"]))


if __name__ == "__main__":
    main()
