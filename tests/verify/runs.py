"""Small runs for the prover, and a way to prove them on a pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from pool import Pool
from torch import Tensor

from shoal.config import Run, check_run
from shoal.verify import Verdict
from shoal.verify.trace import Trace, trace

Tracer = Callable[[Run, int, dict[str, Tensor] | None, bool], Trace]

with_adamw = pytest.mark.parametrize("adamw", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sgd", "adamw"])
"""Gives a test the argument `adamw`: its proof with AdamW, which takes nearly twice as long, is in the slow tier.

Proofs without this mark train with AdamW in the default tier: there is one for each kind of layout.
"""

_references: dict[tuple[str, int, bool], Trace] = {}


def reference(run: Run, steps: int, adamw: bool) -> Trace:
    """Traces the run on one device, once for all tests that have the same run: it is the same training then."""
    key = json.dumps(run.tree(), sort_keys=True, default=str), steps, adamw
    if key not in _references:
        _references[key] = trace(run, steps, None, adamw)
    return _references[key]


def on(pool: Pool, tracer: Tracer = trace, adamw: bool = True) -> Any:
    """Returns a runner for `prove` that traces layouts of several ranks on the pool, by `tracer`.

    What runs on one device is traced in this process, and never by `tracer`, which may have a bug that a test planted.
    """

    def run_layout(run: Run, procs: int, steps: int, shared: dict[str, Tensor] | None) -> list[Trace]:
        if shared is None:
            return [reference(run, steps, adamw)]
        if procs == 1:
            return [trace(run, steps, shared, adamw)]
        return pool.run(tracer, run, steps, shared, adamw, init=False)

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
    """Returns a run of a Llama with two key/value heads for four, and a vocabulary that no number of ranks divides."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 259}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"config": {"model_type": "llama", **sizes, **heads}}
    return on_text(tmp_path, "causal_lm", model, distributed, **training)


def on_text(
    tmp_path: Path, recipe: str, model: dict[str, Any], distributed: dict[str, Any] | None = None, **training: Any
) -> Run:
    """Returns a run that trains on a text of squares, which lies beside the test's folder."""
    folder = tmp_path.parent / "squares"  # one for the session: runs that differ in nothing have the same reference
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
    """Returns what the failed checks found, by the name of the check."""
    return {check.name: check.detail for check in verdict.checks if not check.passed}
