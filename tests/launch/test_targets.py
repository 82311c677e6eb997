"""What `shoal launch` would submit, compared with files, and what it refuses.

`PYTHONPATH=tests python tests/launch/test_targets.py --write` writes the files in `golden/`.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from conftest import ToyRun, call_shoal
from ports import free_port

from shoal.config import load_run
from shoal.processes.detect import detect

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CONFIGS = ("plain", "full", "cpu")
TARGETS = {"slurm": "sbatch", "TrainJob": "trainjob.yaml", "PyTorchJob": "pytorchjob.yaml"}
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
PROJECT = "/home/me/project"
"""The folder of the golden files."""


def dry_run(config: str, target: str, folder: Path) -> str:
    """Returns what would be submitted for a config of `golden/`, as if `folder` were `PROJECT`."""
    shutil.copy(GOLDEN / f"{config}.yaml", folder / "run.yaml")
    (folder / "recipe.py").write_text("from shoal.recipes import Recipe\n")
    where = ["slurm"] if target == "slurm" else ["kubernetes", f"launch.kubernetes.kind={target}"]
    result = call_shoal(folder, "launch", "run.yaml", "--dry-run", "--on", *where)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.replace(str(folder.resolve()), PROJECT)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_submitted_is_as_in_the_files(config: str, target: str, tmp_path: Path) -> None:
    assert dry_run(config, target, tmp_path) == (GOLDEN / f"{config}.{TARGETS[target]}").read_text()


@pytest.mark.parametrize("script", [*sorted(GOLDEN.glob("*.sbatch")), *sorted(ROOT.glob("scripts/*.sh"))], ids=str)
def test_scripts_are_right_for_bash_and_shellcheck(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed; `make test-clusters` installs it")
    result = subprocess.run([SHELLCHECK, "--external-sources", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_a_dry_run_leaves_nothing_behind(toy: ToyRun) -> None:
    before = sorted(toy.folder.rglob("*"))
    result = toy.call("launch", "run.yaml", "--dry-run", "--on", "slurm", "--nodes", "2", "--procs-per-node", "4")
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --gpus-per-node=4\n" in result.stdout
    assert "-m shoal train run.yaml launch.target=slurm launch.nodes=2 launch.procs_per_node=4 &" in result.stdout
    assert [path for path in sorted(toy.folder.rglob("*")) if "__pycache__" not in path.parts] == before


@pytest.fixture
def tools(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH; tests put programs of a cluster there."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("bash", "cat"):
        (folder / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_job_is_submitted_with_sbatch(toy: ToyRun, tools: Path) -> None:
    add_tool(tools, "sbatch", f'echo "$@" > {tools}/arguments; echo "42;cluster"')
    result = toy.call("launch", "run.yaml", "--on", "slurm")
    assert result.returncode == 0, result.stderr
    job = toy.output / "slurm" / "job.sbatch"
    assert (tools / "arguments").read_text() == f"--parsable {job}\n"
    assert result.stdout.splitlines() == [
        "submitted job 42",
        f"its output   tail -F {toy.output}/slurm/42-node0.log",
        "its state    squeue --job 42",
        "stop it      scancel 42",
    ]
    assert job.read_text() == toy.call("launch", "run.yaml", "--on", "slurm", "--dry-run").stdout


def test_without_sbatch_the_file_is_written(toy: ToyRun, tools: Path) -> None:
    result = toy.call("launch", "run.yaml", "--on", "slurm")
    job = toy.output / "slurm" / "job.sbatch"
    assert result.returncode == 2
    assert result.stderr == (
        f"shoal: error: launch.target = slurm: sbatch is not installed here; the job is in {job}: submit it with "
        f"`sbatch {job}` on a machine of the cluster\n"
    )
    assert job.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=run\n")


KUBERNETES = ("--on", "kubernetes", "launch.kubernetes.image=me:1", "launch.kubernetes.claim=runs")
KUBERNETES_TOY = (*KUBERNETES, "experiment.output_dir=/runs/toy", "launch.kubernetes.files=[toy_recipe.py]")


def test_objects_are_created_with_kubectl(toy: ToyRun, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    add_tool(tools, "kubectl", f'echo "$@" >> {tools}/arguments; echo --- >> {tools}/objects; cat >> {tools}/objects')
    result = toy.call("launch", "run.yaml", *KUBERNETES_TOY)
    assert result.returncode == 0, result.stderr
    assert (tools / "arguments").read_text() == "create -f -\n" * 2
    shown = toy.call("launch", "run.yaml", *KUBERNETES_TOY, "--dry-run").stdout
    assert [*yaml.safe_load_all((tools / "objects").read_text())] == [*yaml.safe_load_all(shown)]
    assert result.stdout.startswith("created TrainJob run in namespace default\n")
    add_tool(tools, "kubectl", 'echo "Error from server (AlreadyExists): it exists" >&2; exit 1')
    result = toy.call("launch", "run.yaml", *KUBERNETES_TOY)
    assert result.returncode == 2
    assert result.stderr == (
        "shoal: error: launch.kubernetes.job_name = run: namespace default has a TrainJob of this name; delete it, or "
        "choose another name\n"
    )


def test_files_of_this_machine_that_pods_may_not_have_are_named(toy: ToyRun) -> None:
    (toy.folder / "weights").mkdir()
    keys = (*KUBERNETES, "experiment.output_dir=/runs/toy", "checkpoint.init_from=weights", "--dry-run")
    result = toy.call("launch", "run.yaml", *keys)
    assert result.returncode == 0
    assert result.stderr.splitlines() == [
        "shoal: warning: checkpoint.init_from = 'weights' is on this machine; pods find it only if the image has it at "
        "this path; put it into the image, or into the claim and name it below /runs",
        "shoal: warning: recipe = toy_recipe:Toy: it is in toy_recipe.py on this machine; pods find it only if the "
        "image has it; add it to launch.kubernetes.files, or put it into the image",
    ]
    assert toy.call("launch", "run.yaml", *KUBERNETES_TOY, "--dry-run").stderr == ""


def test_the_pods_find_a_config_that_is_the_same_run(toy: ToyRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    shown = toy.call("launch", "run.yaml", *KUBERNETES_TOY, "training.max_steps=3", "--dry-run").stdout
    config_map, job = yaml.safe_load_all(shown)
    pod = tmp_path_factory.mktemp("pod")
    for name, text in config_map["data"].items():
        (pod / name).write_text(text)
    command = [word.replace("/etc/shoal", str(pod)) for word in job["spec"]["trainer"]["args"]]
    assert command[0] == "train"
    result = call_shoal(pod, *command[:2], f"experiment.output_dir={pod}/out")
    assert result.returncode == 0, result.stderr
    assert "finished at step 3" in result.stdout


@pytest.mark.parametrize("target", ["TrainJob", "PyTorchJob"])
@pytest.mark.parametrize(("config", "nodes", "procs"), [("plain", 1, 8), ("full", 4, 2), ("cpu", 2, 1)])
def test_pods_know_their_place(config: str, nodes: int, procs: int, target: str, tmp_path: Path) -> None:
    config_map, job = yaml.safe_load_all((GOLDEN / f"{config}.{TARGETS[target]}").read_text())
    (tmp_path / "run.yaml").write_text(config_map["data"]["run.yaml"])
    run = load_run(tmp_path / "run.yaml")
    last = nodes - 1
    # What the controllers set in the last pod.
    variables = {"PET_NNODES": nodes, "PET_NODE_RANK": last, "PET_MASTER_ADDR": "first-pod", "PET_MASTER_PORT": 29500}
    if target == "TrainJob":
        variables["PET_NPROC_PER_NODE"] = job["spec"]["trainer"]["numProcPerNode"]
    else:
        variables |= {"RANK": last, "WORLD_SIZE": nodes * procs, "MASTER_ADDR": "first-pod", "MASTER_PORT": 29500}
        variables["PET_NPROC_PER_NODE"] = job["spec"]["nprocPerNode"]
    world = detect({name: str(value) for name, value in variables.items()}, run.config.launch)
    assert (world.rank, world.size, world.starts) == (last, nodes, procs if procs > 1 else 0)
    assert world.address == ("first-pod" if nodes > 1 else "127.0.0.1")


MISTAKES = {
    "--on moon": "launch.target (command line) = 'moon': should be 'local', 'slurm', 'kubernetes' or 'ray'",
    "--on slurm launch.slurm.gpus_per_node=0": "launch.slurm.gpus_per_node = 0: training.device = auto would find no "
    "GPU; ask for 1, or set training.device to cpu",
    "--on slurm --procs-per-node 8 launch.slurm.gpus_per_node=4": "launch.slurm.gpus_per_node = 4: each "
    "process needs a GPU of its own; ask for 8, or use distributed.backend = gloo",
    "--on slurm training.device=cpu launch.slurm.gpus_per_node=4": "launch.slurm.gpus_per_node = 4: training.device = "
    "cpu uses no GPU; leave one of the two keys out",
    "--on slurm --nodes 1:4": "launch.nodes = 1:4: with launch.target = slurm the number of machines is fixed; use 4",
    "--on slurm distributed.strategy=single --nodes 2": "distributed.strategy",
    "--on kubernetes": "launch.kubernetes.image is missing; name a container image that has shoal and your recipe",
    "--on kubernetes launch.kubernetes.image=me:1": "launch.kubernetes.claim is missing: checkpoints would be lost "
    "with the pods; name a PersistentVolumeClaim",
    " ".join(KUBERNETES): "it would be lost with the pods; choose a folder below launch.kubernetes.claim_path = /runs",
    " ".join((*KUBERNETES_TOY[:-1], "launch.kubernetes.files=[none.py]")): "launch.kubernetes.files = 'none.py': "
    "cannot be read: No such file or directory",
    " ".join((*KUBERNETES_TOY, "launch.kubernetes.gpus_per_node=0")): "launch.kubernetes.gpus_per_node = 0: ",
    " ".join((*KUBERNETES_TOY, "launch.kubernetes.secrets.PET_X=a/b")): "Kubeflow sets variables that begin with "
    "PET_ itself",
    "--on slurm launch.slurm.setup=[[]]": "launch.slurm.setup",
    "--on ray launch.ray.gpus_per_worker=0.5": "launch.ray.gpus_per_worker = 0.5: each process needs a GPU of its own; "
    "ask for 1",
    "--on ray launch.ray.gpus_per_worker=0": "launch.ray.gpus_per_worker = 0: training.device = auto",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(arguments: str, toy: ToyRun, tools: Path) -> None:
    result = toy.call("launch", "run.yaml", *arguments.split(" "))
    assert result.returncode == 2
    assert MISTAKES[arguments] in result.stderr
    assert result.stderr.count("\n") == 1
    assert not toy.output.exists()


@pytest.mark.parametrize("page", ["slurm", "kubernetes", "ray"])
def test_the_commands_in_the_docs_say_what_would_be_submitted(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    config = "recipe: bdh\ntraining: {max_steps: 10, batch_size: 4}\n"
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S):
        config = block if "recipe:" in block else config + block
    (tmp_path / "run.yaml").write_text(config)
    commands = re.findall(r"^shoal (launch run\.yaml [^#\n]*)", text, re.M)
    assert commands
    for command in commands:
        result = call_shoal(tmp_path, *shlex.split(command), "--dry-run")
        assert result.returncode == 0, result.stderr


def test_what_ray_is_asked_for(toy: ToyRun) -> None:
    keys = ("launch.ray.cpus_per_worker=2", "launch.ray.storage_path=/mnt/ray", "launch.max_restarts=7")
    arguments = ("launch", "run.yaml", "--dry-run", "--on", "ray", "--nodes", "2", "--procs-per-node", "4", *keys)
    asked = yaml.safe_load(toy.call(*arguments, "launch.env.NOTE=hello").stdout)
    assert asked.pop("name").startswith("run-20")
    assert asked.pop("command")[:2] == ["train", "run.yaml"]
    assert asked == {
        "num_workers": 8,
        "resources_per_worker": {"CPU": 2, "GPU": 1},
        "max_failures": 7,
        "storage_path": "/mnt/ray",
        "timeout_seconds": 1860,
        "env": {"NOTE": "hello"},
    }
    asked = yaml.safe_load(toy.call("launch", "run.yaml", "--dry-run", "--on", "ray", "training.device=cpu").stdout)
    assert (asked["resources_per_worker"], asked["storage_path"]) == ({"CPU": 1}, f"{toy.output}/ray")


def test_a_ray_cluster_that_is_not_there_is_one_line(toy: ToyRun) -> None:
    port = free_port()
    result = toy.call("launch", "run.yaml", "--on", "ray", f"launch.ray.address=127.0.0.1:{port}")
    assert result.returncode == 2
    assert result.stderr == (
        f"shoal: error: launch.ray.address = 127.0.0.1:{port}: there is no Ray cluster ([Errno 111] Connection "
        "refused); start one with `ray start --head`, or leave the key out\n"
    )


def test_a_missing_ray_names_the_extra(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train.torch", None)
    result = toy.call("launch", "run.yaml", "--on", "ray")
    assert result.returncode == 2
    assert result.stderr == 'shoal: error: launch.target = ray: Ray is not installed; pip install "shoal[ray]"\n'


def test_the_job_script_says_how_it_is_used() -> None:
    result = subprocess.run([ROOT / "scripts" / "slurm_job.sh"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "usage: sbatch [--nodes=N …] scripts/slurm_job.sh CONFIG [KEY=VALUE …]\n"


if __name__ == "__main__" and "--write" in sys.argv:
    for config in CONFIGS:
        for target, ending in TARGETS.items():
            with tempfile.TemporaryDirectory() as folder:
                (GOLDEN / f"{config}.{ending}").write_text(dry_run(config, target, Path(folder)))
