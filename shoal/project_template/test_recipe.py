"""Run with `pytest`: two processes train this recipe exactly as one does."""

from pathlib import Path

from shoal.config import load_run
from shoal.verify import prove

CONFIG = Path(__file__).parent / "run.yaml"


def test_two_processes_compute_the_same_training():
    verdicts = prove(load_run(CONFIG, ["training.device=cpu"]), procs=2, layouts=["ddp", "fsdp"])
    problems = [f"{verdict.layout}: {check}" for verdict in verdicts for check in verdict.checks if not check.passed]
    assert {verdict.layout: verdict.outcome for verdict in verdicts} == {"ddp": "same", "fsdp": "same"}, problems
