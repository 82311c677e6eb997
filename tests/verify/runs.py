"""Small runs for the tests of `shoal verify`, and a function that runs them on a pool of processes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from pool import Pool, WorkerFailure

from shoal.config import Run, check_run
from shoal.errors import UserError
from shoal.verify import Verdict
from shoal.verify.trace import Shared, Trace, trace

Tracer = Callable[[Run, int, Shared | None, bool, bool], Trace]

with_adamw = pytest.mark.parametrize("adamw", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sgd", "adamw"])
"""Runs a test twice: with SGD only, and in the slow tier also with AdamW, which takes nearly twice as long.

Tests without this mark train with AdamW in the default tier, too; each kind of layout has one.
"""

_references: dict[tuple[str, int, bool, bool], Trace] = {}


def reference(run: Run, steps: int, adamw: bool, in_float64: bool) -> Trace:
    """Returns the trace of the run on one device. Tests with the same run share one trace."""
    key = json.dumps(run.tree(), sort_keys=True, default=str), steps, adamw, in_float64
    if key not in _references:
        _references[key] = trace(run, steps, None, adamw, in_float64)
    return _references[key]


def runner_on(pool: Pool, tracer: Tracer = trace, adamw: bool = True) -> Any:
    """Returns a runner for `prove` that calls `tracer` in the processes of the pool for layouts of several ranks.

    Runs on one device are traced in this process, without `tracer`: a test may give a tracer with a bug in it.
    """

    def run_layout(run: Run, procs: int, steps: int, shared: Shared | None, in_float64: bool) -> list[Trace]:
        if shared is None:
            return [reference(run, steps, adamw, in_float64)]
        if procs == 1:
            return [trace(run, steps, shared, adamw, in_float64)]
        try:
            return pool.run(tracer, run, steps, shared, adamw, in_float64, init=False)
        except WorkerFailure as failure:  # `shoal verify` gets a UserError from its processes as it was raised
            if refusal := re.match(r"rank \d+ raised UserError: (.*)\n", str(failure)):
                raise UserError(refusal[1]) from failure
            raise

    return run_layout


def ragged(
    recipe: str = "Ragged",
    distributed: dict[str, Any] | None = None,
    launch: dict[str, Any] | None = None,
    **training: Any,
) -> Run:
    """Returns a run of a recipe from verify/planted.py."""
    keys = {"max_steps": 3, "device": "cpu", "learning_rate": 1e-3, **training}
    sections = {"training": keys, "distributed": distributed or {}, "launch": launch or {}}
    return check_run({"recipe": f"verify.planted:{recipe}", **sections})


def bdh(tmp_path: Path, distributed: dict[str, Any] | None = None, **training: Any) -> Run:
    """Returns a run of a small BDH."""
    model = {"n_layer": 2, "n_embd": 32, "n_head": 4, "mlp_internal_dim_multiplier": 8}
    return on_text(tmp_path, "bdh", model, distributed, **training)


def llama(tmp_path: Path, distributed: dict[str, Any] | None = None, **training: Any) -> Run:
    """Returns a run of a small Llama with four query heads, two key/value heads, and a vocabulary of 259 tokens, which
    2, 3 and 4 ranks cannot divide evenly."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 259}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"config": {"model_type": "llama", **sizes, **heads}}
    return on_text(tmp_path, "causal_lm", model, distributed, **training)


def on_text(
    tmp_path: Path, recipe: str, model: dict[str, Any], distributed: dict[str, Any] | None = None, **training: Any
) -> Run:
    """Returns a run that trains on a text of square numbers, in a folder beside `tmp_path`."""
    folder = tmp_path.parent / "squares"  # the same for all tests, so that equal runs share one reference
    text, cache = folder / "text.txt", str(folder)
    folder.mkdir(exist_ok=True)
    if not text.exists():  # several ranks may come here at once
        with NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write("".join(f"{i} squared is {i * i}\n" for i in range(400)))
        Path(file.name).replace(text)
    return check_run(
        {
            "recipe": recipe,
            "model": model,
            "dataset": {"name": "text", "files": str(text), "seq_length": 24, "cache_dir": cache},
            "training": {"max_steps": 3, "device": "cpu", "learning_rate": 1e-3, **training},
            "distributed": distributed or {},
        }
    )


def failed(verdict: Verdict) -> dict[str, str]:
    """Returns the details of the failed checks by the name of the check."""
    return {check.name: check.detail for check in verdict.checks if not check.passed}
