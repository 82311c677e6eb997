"""The pool that the distributed tests run on: what a run is given, and what a failed one costs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import MAX_THREADS, PATIENCE_SECONDS, Pool, WorkerFailure, num_threads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def rank_and_arguments(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def sum_of_ranks():
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def own_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return sum_of_ranks(), os.environ["MASTER_PORT"]


def train_step(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    return loss.item()


def sharded_sum(groups_before):
    """A sum that needs a collective over columns of a 2×2 mesh, whose group names depend on the groups before."""
    for _ in range(groups_before):
        dist.new_group([0, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    whole = torch.arange(8.0).reshape(4, 2)
    return distribute_tensor(whole, mesh["columns"], [Shard(0)]).sum(0).full_tensor().tolist()


def change_global_state():
    torch.manual_seed(dist.get_rank() + 7)
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def global_state():
    return (
        torch.rand(()).item(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        os.environ.get("LEFT_BEHIND"),
        Path.cwd(),
    )


def recipe_answer():
    import scratch_recipe

    return scratch_recipe.ANSWER


def variable(name):
    return os.environ.get(name)


def raise_on(rank):
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("the sky is green")
    sum_of_ranks()


def sleep_on(rank):
    if dist.get_rank() == rank:
        time.sleep(1000)


def stay_away_from_all_reduce(rank):
    if dist.get_rank() != rank:
        sum_of_ranks()


def die_on(rank, how):
    if dist.get_rank() == rank:
        os._exit(3) if how == "exit" else os.kill(os.getpid(), signal.SIGKILL)
    sum_of_ranks()


def returns_a_lambda():
    return lambda: None


def running(pid):
    """Zombies do not count: a fork server that is itself gone cannot reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(running, pids))


def test_results_come_by_rank(pool2, pool4):
    assert pool2.run(rank_and_arguments, 1, a=2) == [(0, (1,), {"a": 2}), (1, (1,), {"a": 2})]
    assert [rank for rank, _, _ in pool4.run(rank_and_arguments)] == [0, 1, 2, 3]


def test_workers_are_reused_and_groups_are_fresh(pool2, pool4):
    before = pool2.run(os.getpid)
    assert [pool2.run(sum_of_ranks) for _ in range(3)] == [[1.0, 1.0]] * 3
    assert pool2.run(os.getpid) == before
    assert pool4.run(sum_of_ranks) == [6.0] * 4


def test_a_function_may_make_its_own_group(pool2):
    runs = [pool2.run(own_group, init=False) for _ in range(2)]
    assert [[total for total, _ in run] for run in runs] == [[1.0, 1.0]] * 2
    assert len({port for run in runs for _, port in run}) == 2


def test_dtensor_remembers_no_group_of_an_earlier_run(pool4):
    for groups_before in (0, 1, 2, 0):
        assert pool4.run(sharded_sum, groups_before) == [[12.0, 16.0]] * 4


def test_global_state_is_reset(pool2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = pool2.run(global_state)
    pool2.run(change_global_state)
    assert pool2.run(global_state) == before
    assert before[0][1:] == (False, torch.float32, True, None, tmp_path)


def test_the_caller_s_environment_and_modules_are_used(pool2, tmp_path, monkeypatch):
    monkeypatch.setenv("COLOUR", "blue")
    assert pool2.run(variable, "COLOUR") == ["blue", "blue"]
    monkeypatch.syspath_prepend(tmp_path)
    for answer in (41, 4242):
        (tmp_path / "scratch_recipe.py").write_text(f"ANSWER = {answer}")
        assert pool2.run(recipe_answer) == [answer, answer]


@pytest.mark.parametrize("function", [lambda: None, returns_a_lambda()], ids=["lambda", "closure"])
def test_closures_are_refused(pool2, function):
    with pytest.raises(TypeError, match="defined at the top of a module"):
        pool2.run(function)


FAILURES = {
    "raise": (raise_on, (1,), 1, "rank 1 raised ValueError: the sky is green"),
    "sleep": (sleep_on, (1,), 1, "rank 1 of 2 did not finish in 5 s"),
    "absence": (stay_away_from_all_reduce, (1,), 0, "rank 0 of 2 did not finish in 5 s"),
    "exit": (die_on, (1, "exit"), 1, "rank 1 died (exit code 3)"),
    "kill": (die_on, (0, "kill"), 0, "rank 0 died (exit code -9)"),
    "result": (returns_a_lambda, (), None, "returns_a_lambda"),
}


@pytest.mark.parametrize(
    "failure", [pytest.param(name, marks=() if name == "raise" else pytest.mark.slow) for name in FAILURES]
)
def test_a_failure_costs_one_run(pool2, failure):
    function, args, rank, message = FAILURES[failure]
    pids = pool2.run(os.getpid)
    started = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        pool2.run(function, *args, timeout=5 if failure in ("sleep", "absence") else PATIENCE_SECONDS)
    print(f"{failure}: {time.monotonic() - started:.2f} s\n{caught.value}")
    report = str(caught.value)
    assert message in report
    assert rank is None or caught.value.rank == rank
    for section in report.split("---- rank ")[1:]:
        assert "most recent call first" in section or "died" in section
    assert report.count("---- rank ") == 2
    assert gone(pids)
    started = time.monotonic()
    assert pool2.run(sum_of_ranks) == [1.0, 1.0]
    print(f"next run: {time.monotonic() - started:.2f} s")


@pytest.mark.slow
def test_a_raise_shows_where_the_peer_waits_and_what_it_printed(pool2):
    with pytest.raises(WorkerFailure) as caught:
        pool2.run(raise_on, 1)
    report = str(caught.value)
    assert "in raise_on" in report.partition("---- rank 0")[0]
    peer = report.partition("---- rank 0: still running")[2].partition("---- rank 1")[0]
    assert "in all_reduce" in peer
    assert "in sum_of_ranks" in peer
    assert "about to fail" in peer


@pytest.mark.slow
def test_an_interrupt_ends_the_workers(pool2):
    pids = pool2.run(os.getpid)
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pool2.run(sleep_on, 0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone(pids)
    assert pool2.run(sum_of_ranks) == [1.0, 1.0]


@pytest.mark.slow
def test_twenty_small_trainings(pool2):
    started = time.monotonic()
    losses = [pool2.run(train_step, kind, seed) for seed in range(10) for kind in ("ddp", "fsdp")]
    print(f"20 runs: {time.monotonic() - started:.1f} s")
    assert len(losses) == 20
    for ddp, fsdp in zip(losses[::2], losses[1::2], strict=True):
        assert ddp == pytest.approx(fsdp, rel=1e-5)


@pytest.mark.slow
def test_close_leaves_no_process():
    with Pool(2) as pool:
        pids = pool.run(os.getpid)
        assert all(map(running, pids))
    assert not any(map(running, pids))
    pool.close()


CALLER = """
import os, sys, time
import torch.distributed as dist
from pool import Pool

def never_return():
    time.sleep(1000) if dist.get_rank() == 1 else dist.barrier()

if __name__ == "__main__":
    pool = Pool(2)
    print(*pool.run(os.getpid), flush=True)
    if sys.argv[1] == "kill":
        pool.run(never_return)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_worker_outlives_the_caller(tmp_path, end):
    """`exit`: without closing the pool. `kill`: by SIGKILL, while one worker sleeps and one sits in a collective."""
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    # The folder of temporary files is the test's own: a killed caller leaves its workers' output there.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(script), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(pids) == 2
        if end == "kill":
            time.sleep(0.5)
            assert all(map(running, pids))
            caller.kill()
        assert caller.wait(PATIENCE_SECONDS) == (-signal.SIGKILL if end == "kill" else 0)
    assert gone(pids)


def leave_a_group() -> None:
    """Leaves a process group behind that only the garbage collector can free, as a training does that froze it."""
    cycle: list[Any] = [dist.new_group()]
    cycle.append(cycle)
    gc.collect()
    gc.freeze()
    gc.unfreeze()


def test_process_groups_of_earlier_runs_are_freed(pool2):
    before = pool2.run(num_threads, init=False)
    for _ in range(3):
        pool2.run(leave_a_group)
    assert pool2.run(num_threads, init=False) == before


def keep_threads(number: int) -> int:
    for _ in range(number):
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
    return os.getpid()


@pytest.mark.slow
def test_workers_with_too_many_threads_are_replaced():
    with Pool(1) as pool:
        first, *_ = pool.run(keep_threads, 1)
        assert pool.run(keep_threads, MAX_THREADS) == [first]
        assert pool.run(os.getpid) != [first]


class SlowToFree:
    """Garbage that takes long to free, as a process group may that waits for a thread."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(600)


def leave_garbage():
    SlowToFree()
    return dist.get_rank()


def test_a_worker_that_hangs_after_its_run_is_replaced(monkeypatch):
    monkeypatch.setattr("pool.RESET_SECONDS", 2)
    with Pool(2) as pool:
        with pytest.warns(UserWarning, match=r"(?s)the workers are started anew: rank 0, 1 of 2 did not finish in 2 s"):
            assert pool.run(leave_garbage) == [0, 1]
        assert not pool.workers
        assert pool.run(dist.get_rank) == [0, 1]
