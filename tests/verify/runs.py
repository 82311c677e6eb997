"""Small runs for the prover, and a way to prove them on a pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool import Pool
from torch import Tensor

from shoal.config import Run, check_run
from shoal.verify import Verdict
from shoal.verify.trace import Trace, trace

Tracer = Callable[[Run, int, dict[str, Tensor] | None], Trace]


def on(pool: Pool, tracer: Tracer = trace) -> Any:
    """A runner over the pool: the reference is always honest."""

    def run_layout(run: Run, procs: int, steps: int, shared: dict[str, Tensor] | None) -> list[Trace]:
        if procs == 1:
            return [trace(run, steps, shared)]
        return pool.run(tracer, run, steps, shared, init=False, timeout=180)

    return run_layout


def ragged(
    recipe: str = "Ragged",
    distributed: dict[str, Any] | None = None,
    launch: dict[str, Any] | None = None,
    **training: Any,
) -> Run:
    keys = {"max_steps": 3, "device": "cpu", "learning_rate": 1e-3, **training}
    sections = {"training": keys, "distributed": distributed or {}, "launch": launch or {}}
    return check_run({"recipe": f"verify.planted:{recipe}", **sections})


def bdh(tmp_path: Path, distributed: dict[str, Any] | None = None, **training: Any) -> Run:
    model = {"n_layer": 2, "n_embd": 32, "n_head": 4, "mlp_internal_dim_multiplier": 8}
    return on_text(tmp_path, "bdh", model, distributed, **training)


def llama(tmp_path: Path, distributed: dict[str, Any] | None = None, **training: Any) -> Run:
    """Two key/value heads for four, and a vocabulary that no number of ranks divides."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 259}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = {"config": {"model_type": "llama", **sizes, **heads}}
    return on_text(tmp_path, "causal_lm", model, distributed, **training)


def on_text(
    tmp_path: Path, recipe: str, model: dict[str, Any], distributed: dict[str, Any] | None = None, **training: Any
) -> Run:
    text, cache = tmp_path / "text.txt", str(tmp_path)
    text.write_text("".join(f"{i} squared is {i * i}\n" for i in range(400)))
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
    return {check.name: check.detail for check in verdict.checks if not check.passed}
