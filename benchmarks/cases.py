"""What the benchmarks of models share: cases in processes of their own, timed steps, sections of a Markdown page."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, float]]
WARM_UP = 3
"""Steps that compile and allocate, before those that are timed."""
WARM_UP_RECORDED = 17
"""The same with recordings in CUDA graphs, which are compared with plain steps after 1, 2, 4, 8 and 16 uses."""
WARM = "warm"
"""What a process says when it is ready to be timed."""


def parser_of(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all of these benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--small", action="store_true", help="use a model that is small enough for a CPU")
    parser.add_argument("--cases", help="run cases whose name contains one of these; semicolons between")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the results into this Markdown file")
    parser.add_argument("--at-once", type=int, default=3, metavar="N", help="so many cases start and warm up together")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the options; a small model is only to see that a benchmark runs, so it is not written down."""
    options = parser.parse_args()
    if options.small and options.write:
        parser.error("--write: the page is about the real sizes; leave --small out")
    return options


def run_cases(names: Collection[str], options: argparse.Namespace) -> Results:
    """Runs this program once for each case, with `--case NAME` added, and shows and returns what each printed last.

    Several start and compile together, because that takes most of the time, and are then timed one after another while
    the others wait. Speeds are compared with that of the first case.
    """
    results: Results = {}
    width = max(map(len, names))
    wanted = options.cases.split(";") if options.cases else [""]
    chosen = [name for name in names if any(part in name for part in wanted)]
    for group in (chosen[i : i + options.at_once] for i in range(0, len(chosen), options.at_once)):
        cases = {name: _Case(name) for name in group}
        for case in cases.values():
            case.wait_until_warm()
        for name, case in cases.items():
            result = case.measured()
            if isinstance(result, str):
                print(f"{name:{width}}  failed: {result}", flush=True)
                continue
            results[name] = result
            against = _against(results, next(iter(names)), name)
            shown = f"{result['tokens_per_second']:9,.0f} tokens/s  {against:>5}  {result['peak_gib']:6.2f} GiB"
            print(f"{name:{width}}  {shown}  loss {result['loss']:.3f}", flush=True)
    return results


class _Case:
    """A process that measures a case. It says when it is warm, and waits for a word until it goes on."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, *sys.argv, "--case", name]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, it is read when the process has ended
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def wait_until_warm(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and line.strip() != WARM:
            pass

    def measured(self) -> dict[str, float] | str:
        """Lets the process go on; returns what it measured, or the end of its errors."""
        try:
            output, _ = self._process.communicate("go\n")
        except BrokenPipeError:
            output = ""
        if self._process.wait():
            self._errors.seek(0)
            return self._errors.read().strip()[-300:]
        measured: dict[str, float] = json.loads(output.splitlines()[-1])
        return measured


def time_steps(step: Callable[[], Any], steps: int, tokens: int, recorded: bool = False) -> dict[str, float]:
    """Returns the speed of steps of so many tokens, the peak memory of a GPU, and the last loss.

    `recorded` says that the steps are computed by recordings in CUDA graphs.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    synchronise = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(WARM_UP_RECORDED if recorded else WARM_UP):
        step()
    synchronise()
    if on_gpu:
        torch.cuda.empty_cache()  # others are warming up
    print(WARM, flush=True)
    sys.stdin.readline()
    step()
    synchronise()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronise()
    seconds = time.perf_counter() - began
    peak = (torch.cuda.max_memory_allocated() + _kept_by_recordings()) / 2**30 if on_gpu else 0.0
    return {"tokens_per_second": steps * tokens / seconds, "peak_gib": peak, "loss": loss.item()}


def _kept_by_recordings() -> int:
    """Returns the bytes that only recordings in CUDA graphs use, and that count as free between their uses."""
    import torch

    segments = torch.cuda.memory_snapshot()
    own = [segment for segment in segments if segment["segment_pool_id"] != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def step_of(
    tree: Mapping[str, Any],
    tokens: Any,
    *,
    world: Any = None,
    weights: Any = None,
    parts: int = 1,
    drawn_on_device: bool = False,
) -> Any:
    """Returns a function that takes a step of the run that a config describes, on rows of tokens in so many parts.

    `drawn_on_device` draws the matrices again where they are: products with random numbers take longer than with equal
    ones, and drawing billions of them on the host takes minutes.
    """
    from shoal.config import check_run
    from shoal.strategies import from_config
    from shoal.training.session import assemble
    from shoal.types import MicroBatch

    run = check_run({**tree, "training": {"max_steps": 1, "batch_size": len(tokens), **tree["training"]}})
    strategy = from_config(run.config, world)
    strategy.setup()
    session = assemble(run.recipe_type(run.recipe_config), strategy, run.config.training, seed=0, weights=weights)
    if drawn_on_device:
        for parameter in session.model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.data.normal_(0, 0.02)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    if strategy.device.type == "cuda":  # as the loader of a run does: a copy from other memory waits for the device
        batch = {key: value.pin_memory() for key, value in batch.items()}
    rows = range(len(tokens))
    micro_batches = [
        MicroBatch({key: value[i::parts] for key, value in batch.items()}, rows[i::parts], rows[i::parts])
        for i in range(parts)
    ]

    def step() -> Any:
        output = strategy.forward_backward(session.model, micro_batches, session.recipe, 0)
        strategy.step(session.optimizer, 1.0)
        return output.loss

    return step


def machine() -> str:
    """Returns when and where this runs."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return f"{date.today().isoformat()}, {device}, torch {torch.__version__}"


def table_of(results: Results, first: str) -> str:
    """Returns the results as a Markdown table; speeds are compared with that of the case `first`."""
    rows = [f"| | tokens/s | of {first} | peak GiB |", "| --- | --- | --- | --- |"]
    for name, result in results.items():
        against = _against(results, first, name)
        rows.append(f"| {name} | {result['tokens_per_second']:,.0f} | {against} | {result['peak_gib']:.2f} |")
    return "\n".join(rows)


def write_section(file: Path, heading: str, text: str) -> None:
    """Puts a section into a Markdown page, in the place of one with the same heading, or at the end."""
    head, *sections = file.read_text().split("\n## ")
    titles = [section.split("\n", 1)[0] for section in sections]
    section = f"{heading}\n\n{text.strip()}\n"
    if heading in titles:
        sections[titles.index(heading)] = section
    else:
        sections.append(section)
    file.write_text("\n## ".join([head.rstrip() + "\n", *(section.rstrip() + "\n" for section in sections)]))


def _against(results: Results, first: str, name: str) -> str:
    if first not in results:
        return "-"
    return f"{results[name]['tokens_per_second'] / results[first]['tokens_per_second']:.2f}×"
