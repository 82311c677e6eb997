"""Starting processes"""

# processes: 1
# slow

from pathlib import Path

from shoal.distributed import get_rank, launch_distributed

Path("train.py").write_text('import os\nopen(f"rank{os.environ[\'RANK\']}", "w").close()\n')
Path("run.yaml").write_text("")


def ten_times(number):
    return number * get_rank()


#: Runs a function in processes of this machine, and returns what it returns by rank. On several machines, start the
#: script on each with `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `NODE_RANK`. Without
#: `start_method="fork"` a script calls it below `if __name__ == "__main__":`, as with torch.multiprocessing.spawn.
results = launch_distributed(ten_times, 10, processes=2, start_method="fork")

assert results == [0, 10]

#: Runs `train.py --config run.yaml` by torchrun. On several machines, call it on each, with `NODE_RANK` set.
script, config = "train.py", "run.yaml"
launch_distributed(script, config, num_nodes=1, gpus_per_node=2, master_addr="localhost", master_port=29500)

assert sorted(path.name for path in Path().glob("rank*")) == ["rank0", "rank1"]
