"""The example loop and the scripts that start it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_SECONDS
from pool import Pool
from ports import free_port
from verify.runs import failed, runner_on

from shoal.checkpoint import open_checkpoint
from shoal.config import load_run
from shoal.errors import UserError
from shoal.tensors import local_part
from shoal.training import train
from shoal.verify import prove

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "bdh" / "train.py"
SHARED_LAYERS = ROOT / "examples" / "tensor_parallel" / "train.py"
SIZES = ["--n_layer", "2", "--n_embd", "16", "--mlp_internal_dim_multiplier", "8", "--block_size", "32"]
TINY = [*SIZES, "--device", "cpu", "--max_iters", "8", "--warmup_iters", "2", "--log_freq", "1", "--save_freq", "2"]
ITER = re.compile(r"^iter (\d+)  loss (\S+)", re.M)


def losses(output: str) -> dict[int, float]:
    found = ITER.findall(output)
    assert len(dict(found)) == len(found), "an iteration was logged twice"
    return {int(step): float(loss) for step, loss in found}


def load_example(path: Path = EXAMPLE) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_on_two(arguments: list[str], log: str, path: Path = EXAMPLE) -> None:
    """In a worker of the pool, with what it prints kept."""
    with Path(f"{log}.{os.environ['RANK']}").open("w") as file:
        stdout, sys.stdout = sys.stdout, file
        try:
            load_example(path).main(arguments)
        finally:
            sys.stdout = stdout


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The text is tokenised once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def alone(capsys):
    """Runs the example in this process."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        load_example().main([*TINY, *arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def on_two(pool2, tmp_path):
    """Runs the example on two workers; what rank 0 printed."""

    def run(*arguments: str, how: str = "--use_ddp") -> str:
        log = tmp_path / "log"
        pool2.run(run_on_two, [*TINY, how, *arguments], str(log), init=False)
        assert Path(f"{log}.1").read_text() == "", "only the main process logs"
        return Path(f"{log}.0").read_text()

    return run


def forget_after(folder: Path, step: int) -> None:
    """As if the run had been killed before the checkpoints that follow."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def test_two_processes_train_as_one_at_the_same_global_batch(alone, on_two, tmp_path):
    common = ["--dropout", "0"]
    whole = losses(alone(*common, "--batch_size", "8", "--output_dir", str(tmp_path / "a")))
    accumulated = ["--batch_size", "2", "--gradient_accumulation_steps", "4"]
    parts = losses(alone(*common, *accumulated, "--output_dir", str(tmp_path / "b")))
    halves = ["--batch_size", "2", "--gradient_accumulation_steps", "2"]
    two = losses(on_two(*common, *halves, "--output_dir", str(tmp_path / "c")))
    assert list(whole) == list(two) == list(range(1, 9))
    assert two == pytest.approx(whole, abs=2e-5)
    assert parts == pytest.approx(whole, abs=2e-5)
    assert whole[8] < whole[1]
    unlike = losses(alone(*common, "--batch_size", "8", "--seed", "1", "--output_dir", str(tmp_path / "d")))
    assert unlike != pytest.approx(whole, abs=1e-2)


def test_a_run_on_two_goes_on_with_the_same_losses(on_two, alone, tmp_path):
    """With dropout: the random numbers follow from the place in the run."""
    undisturbed = losses(on_two("--batch_size", "2", "--output_dir", str(tmp_path)))
    forget_after(tmp_path, 4)
    output = on_two("--batch_size", "2", "--output_dir", str(tmp_path), "--resume")
    assert "from iter 4, sample 16" in output
    assert losses(output) == {step: undisturbed[step] for step in (5, 6, 7, 8)}
    # One process goes on from what two have saved; without dropout, which is drawn by rank.
    still = ["--dropout", "0", "--output_dir", str(tmp_path / "still")]
    undisturbed = losses(on_two("--batch_size", "2", *still))
    forget_after(tmp_path / "still", 4)
    output = alone("--batch_size", "4", *still, "--resume")
    assert "from iter 4, sample 16" in output
    assert losses(output) == pytest.approx({step: undisturbed[step] for step in (5, 6, 7, 8)}, abs=2e-5)


def test_a_killed_run_goes_on(alone, tmp_path):
    undisturbed = losses(alone("--batch_size", "2", "--output_dir", str(tmp_path / "a")))
    arguments = ["--batch_size", "2", "--output_dir", str(tmp_path / "b")]
    command = [sys.executable, str(EXAMPLE), *TINY, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        seen = ""
        for line in process.stdout:
            seen += line
            if line.startswith("iter 5"):
                process.kill()
                break
    assert process.returncode == -9
    assert losses(seen) == {step: undisturbed[step] for step in range(1, 6)}
    output = alone(*arguments, "--resume")
    first = int(re.search(r"from iter (\d+), sample (\d+)", output)[1])
    assert first >= 4
    assert losses(output) == {step: undisturbed[step] for step in range(first + 1, 9)}
    assert "iter " not in alone(*arguments, "--resume").replace("from iter 8", "")


def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(ROOT / "scripts" / script), *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow  # the tests below train the same in the processes of a pool
@pytest.mark.parametrize("machines", [1, 2])
def test_the_scripts_start_two_processes(alone, tmp_path, machines):
    """On one machine or on two; there are eight samples per update, by processes or by accumulation."""
    common = [*TINY, "--dropout", "0", "--max_iters", "4"]
    keys = {"GLOBAL_BATCH_SIZE": "8", "BATCH_SIZE": "2", "PROCS_PER_NODE": str(2 // machines)}
    if machines == 2:
        keys |= {"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        start("train_distributed.sh", *common, "--output_dir", str(tmp_path / "a"), NODE_RANK=str(rank), **keys)
        for rank in range(machines)
    ]
    outputs = [node.communicate(timeout=PATIENCE_SECONDS) for node in started]
    assert [node.returncode for node in started] == [0] * machines, outputs
    assert "ddp on 2 x cpu, 8 samples per update" in outputs[0][0]
    assert [output for output, _ in outputs[1:]] == [""] * (machines - 1)
    expected = losses(alone(*common, "--batch_size", "8", "--output_dir", str(tmp_path / "c")))
    assert losses(outputs[0][0]) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("script", "environment", "message"),
    [
        ("launch.sh", {}, "usage: scripts/launch.sh"),
        ("launch.sh", {"NUM_NODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR: set it to an address of machine 0"),
        ("launch.sh", {"NUM_NODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK: set it to the number of this machine"),
        ("train_distributed.sh", {"GLOBAL_BATCH_SIZE": "9", "BATCH_SIZE": "2"}, "is not a multiple of BATCH_SIZE=2"),
    ],
)
def test_the_scripts_name_what_is_missing(script, environment, message):
    process = start(script, *["x.py"] if environment else [], **environment)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode != 0
    assert message in errors


def test_help_lists_the_flags(capsys):
    with pytest.raises(SystemExit) as end:
        load_example().main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    flags = (
        "dataset_name batch_size use_ddp use_fsdp distributed gradient_accumulation_steps grad_clip compile dtype "
        "max_iters learning_rate log_freq save_freq resume output_dir block_size n_layer n_embd n_head dropout seed"
    )
    assert [flag for flag in flags.split() if f"--{flag}" not in text] == []


def test_shards_train_as_one_and_replicas_go_on(alone, on_two, tmp_path):
    common = ["--dropout", "0", "--output_dir"]
    whole = losses(alone("--batch_size", "4", *common, str(tmp_path / "a")))
    sharded = on_two("--batch_size", "2", *common, str(tmp_path / "b"), how="--use_fsdp")
    assert "fsdp on 2 x cpu" in sharded
    assert losses(sharded) == pytest.approx(whole, abs=2e-5)
    forget_after(tmp_path / "b", 4)
    replicas = on_two("--batch_size", "2", *common, str(tmp_path / "b"), "--resume")
    assert losses(replicas) == pytest.approx({step: whole[step] for step in (5, 6, 7, 8)}, abs=2e-5)


def test_a_mistake_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--use_fsdp", "--device", "mps"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: training.device = 'mps', but torch sees")


def test_mistakes_are_refused(alone, tmp_path, monkeypatch):
    alone("--max_iters", "1", "--output_dir", str(tmp_path))
    with pytest.raises(UserError, match="exists already; continue with --resume"):
        alone("--output_dir", str(tmp_path))
    with pytest.raises(UserError, match=r"was made with .*'block_size': 32.*give the same flags"):
        alone("--output_dir", str(tmp_path), "--resume", "--block_size", "16")
    with pytest.raises(UserError, match="checkpoint of another model"):
        alone("--output_dir", str(tmp_path), "--resume", "--n_embd", "32")
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="2 processes were started; say --use_ddp"):
        alone("--output_dir", str(tmp_path / "new"))


def test_half_precision_and_your_own_text(alone, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    arguments = ["--dataset_name", str(text), "--distributed", "--learning_rate", "0.01", "--max_iters", "8"]
    exact = losses(alone(*arguments, "--output_dir", str(tmp_path / "a")))
    half = losses(alone(*arguments, "--dtype", "bfloat16", "--output_dir", str(tmp_path / "b")))
    assert half != exact
    assert half == pytest.approx(exact, rel=0.02)
    assert exact[8] < exact[1] - 0.1


def test_two_processes_that_share_every_layer_train_as_one(pool2, capsys, tmp_path):
    step = re.compile(r"^step (\d+)  loss (\S+)", re.M)

    def alone(*arguments: str) -> dict[str, str]:
        capsys.readouterr()
        load_example(SHARED_LAYERS).main(["--device", "cpu", *arguments])
        return dict(step.findall(capsys.readouterr().out))

    def on_two(*arguments: str) -> dict[str, str]:
        log = tmp_path / "log"
        pool2.run(run_on_two, ["--device", "cpu", *arguments], str(log), SHARED_LAYERS, init=False)
        assert Path(f"{log}.1").read_text() == ""
        return dict(step.findall(Path(f"{log}.0").read_text()))

    def numbers(result: dict[str, str]) -> dict[str, Any]:
        return {step: pytest.approx(float(loss), abs=2e-5) for step, loss in result.items()}

    whole = alone("--steps", "30", "--output_dir", str(tmp_path / "a"))
    assert list(whole) == ["10", "20", "30"]
    assert float(whole["30"]) < float(whole["10"]) - 0.3
    halves = on_two("--steps", "20", "--output_dir", str(tmp_path / "b"))
    halves |= alone("--steps", "30", "--output_dir", str(tmp_path / "b"))  # goes on from what two have saved
    assert {step: float(loss) for step, loss in halves.items()} == numbers(whole)


OWN_LOOP = ROOT / "examples" / "plain_loop" / "train.py"


def test_a_run_with_a_loop_of_its_own_on_one_process_and_on_two(pool2, capsys, tmp_path):
    def options(name: str, *others: str) -> list[str]:
        common = ["training.max_steps=20", "training.eval_steps=10", "training.device=cpu", "logging.tensorboard=false"]
        return [*common, f"experiment.output_dir={tmp_path}/{name}", *others]

    def last_metrics(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])

    load_example(OWN_LOOP).main(options("one"))
    assert "step 20, accuracy" in capsys.readouterr().out
    load_example(OWN_LOOP).main(options("one", "training.max_steps=21"))  # goes on
    assert last_metrics("one")["step"] == 21
    load_example(OWN_LOOP).main(options("again"))
    pool2.run(run_on_two, options("two"), str(tmp_path / "log"), OWN_LOOP, init=False)
    assert Path(f"{tmp_path}/log.1").read_text() == ""
    two, one = last_metrics("two"), last_metrics("again")
    for key in ("eval/loss", "eval/accuracy"):
        assert two[key] == pytest.approx(one[key], abs=1e-4)
    assert one["eval/loss"] < 0.6


def run_layers_of_the_mesh_page() -> dict[str, tuple[int, ...]]:
    """Runs the loop on the page; returns the shapes of what this rank holds."""
    source = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "mesh.md").read_text(), re.M | re.S)[1]
    names: dict[str, Any] = {}
    exec(source, names)
    return {name: tuple(local_part(parameter).shape) for name, parameter in names["loop"].model.named_parameters()}


def test_the_layers_of_the_mesh_page_are_cut(pool2):
    (first, second), whole = pool2.run(run_layers_of_the_mesh_page, init=False), run_layers_of_the_mesh_page()
    assert whole["up.weight"] == (256, 64)
    assert first == second == whole | {"up.weight": (128, 64), "up.bias": (128,), "down.weight": (64, 128)}


@pytest.mark.slow
def test_the_model_of_the_mesh_page_is_cut_as_its_plan_says(pool2, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "mesh.md").read_text()
    source = re.search(r"^```python\n(# counting.py.*?)^```", page, re.M | re.S)[1]
    config = re.search(r"^```yaml\n(# run.yaml.*?)^```", page, re.M | re.S)[1]
    (tmp_path / "counting.py").write_text(source)
    (tmp_path / "run.yaml").write_text(config)
    monkeypatch.syspath_prepend(str(tmp_path))
    for verdict in prove(load_run(tmp_path / "run.yaml"), 2, ["tp", "tp_sp", "pp"], 2, runner=runner_on(pool2)):
        assert verdict.checks, verdict
        assert failed(verdict) == {}, verdict.layout


@pytest.mark.slow
def test_compiled(alone, tmp_path):
    arguments = ["--dropout", "0", "--max_iters", "3"]
    eager = losses(alone(*arguments, "--output_dir", str(tmp_path / "a")))
    compiled = losses(alone(*arguments, "--compile", "--output_dir", str(tmp_path / "b")))
    assert compiled == pytest.approx(eager, abs=1e-4)


CLASSIFIER = ROOT / "examples" / "classifier" / "run.yaml"


def train_classifier(folder: str) -> None:
    keys = ["training.num_epochs=null", "training.max_steps=8", "training.eval_steps=4", "training.eval_batches=1"]
    saved = ["checkpoint.every=3", "checkpoint.keep_last=9", "logging.every=1", "logging.tensorboard=false"]
    train(load_run(CLASSIFIER, [*keys, *saved, "training.device=cpu", f"experiment.output_dir={folder}"]))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_classifier_goes_on_to_the_bit(tmp_path: Path, pool2: Pool, processes: int) -> None:
    """Metrics, BatchNorm, a schedule, an average of the weights and early stopping, as if nothing had happened."""
    run = train_classifier if processes == 1 else partial(pool2.run, train_classifier, init=False)
    run(str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    steps = {
        path.name: path for path in (tmp_path / "resumed" / "checkpoints").iterdir() if path.name > "step_00000003"
    }
    assert len(steps) > 1
    for path in steps.values():
        shutil.rmtree(path)
    run(str(tmp_path / "resumed"))
    first, second = (tmp_path / name for name in ("whole", "resumed"))
    lines = [
        [
            {key: value for key, value in json.loads(line).items() if not re.search("second|memory|slowest", key)}
            for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        for folder in (first, second)
    ]
    assert lines[0] == lines[1]
    assert any("eval/accuracy" in line for line in lines[0])
    one, other = (open_checkpoint(folder / "checkpoints" / "step_00000008").read() for folder in (first, second))
    for tensors, others in ((one.model, other.model), (one.callbacks, other.callbacks)):
        assert tensors.keys() == others.keys()
        assert tensors
        assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def test_the_classifier_is_short() -> None:
    assert len((CLASSIFIER.parent / "shapes.py").read_text().splitlines()) <= 60
