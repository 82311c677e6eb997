"""Processes that are started from a real Jupyter kernel, with what cells have defined."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import PATIENCE_SECONDS, USER_RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.clusters]
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; `make test-clusters` installs it")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="ipykernel is not installed; `make test-clusters` installs it")

FUNCTIONS = """
import os, torch
import torch.distributed as dist
import shoal
from shoal.distributed import get_rank, setup_distributed

class Answer:
    def __init__(self, value, pid):
        self.value, self.pid = value, pid

bonus = 10

def sums(factor):
    setup_distributed()
    total = torch.tensor([float(get_rank() + 1)])
    dist.all_reduce(total)
    return Answer(total.item() * factor + bonus, os.getpid())
"""
CALL = """
answers = shoal.launch_distributed(sums, 2, processes=2, start_method={method!r})
assert len({{answer.pid for answer in answers}} - {{os.getpid()}}) == 2
[answer.value for answer in answers]
"""
FAILURE = """
def fail():
    raise ValueError(f"no luck in {bonus}")
try:
    shoal.launch_distributed(fail, processes=2, start_method="spawn")
except ValueError as error:
    print(error, "raised in rank" in error.__notes__[0])
"""
PAGE = Path(__file__).parents[2] / "docs" / "notebooks.md"


def run_cells(folder: Path, *cells: str) -> list[str]:
    """Runs cells in a new kernel and returns what each shows."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources={"metadata": {"path": str(folder)}})
    client.execute()
    shown = []
    for cell in notebook.cells:
        texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        shown.append("".join(texts))
    return shown


def test_a_function_of_a_cell_runs_in_processes_however_they_are_started(tmp_path: Path) -> None:
    calls = [CALL.format(method=method) for method in ("auto", "fork", "spawn")]
    _, *shown = run_cells(tmp_path, FUNCTIONS, *calls, FAILURE)
    assert shown == ["[16.0, 16.0]"] * 3 + ["no luck in 10 True\n"]


def test_the_cells_in_the_docs_run(tmp_path: Path) -> None:
    train, launch = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    recipe = f"import shoal\n{USER_RECIPE}\nMyRecipe = Toy"
    _, trained, shown = run_cells(tmp_path, recipe, f"{train}[*outcome.model.state_dict()]", launch)
    assert trained.endswith("['0.weight', '0.bias', '3.weight', '3.bias']"), trained
    assert shown == "[10, 11]"
    assert (tmp_path / "runs" / "run" / "logs" / "rank_1.log").exists()
