"""Checkpoints"""

# processes: 2

from pathlib import Path

import torch
from familiar.models import Net, adamw, backward

import shoal.distributed
from shoal import CheckpointManager, FSDPStrategy, Loop
from shoal.distributed import (
    DistributedTrainer,
    auto_resume,
    cleanup_distributed,
    find_latest_checkpoint,
    load_checkpoint_distributed,
    save_checkpoint_distributed,
    setup_distributed,
    wrap_model_ddp,
)

strategy = FSDPStrategy(device="cpu")
strategy.setup()
loop = Loop(strategy)
model, optimizer = loop.wrap(Net(), adamw)
backward(loop, model)
loop.step()
weight = model.head.weight.full_tensor()
path = "out/here"


#: Writes a folder of safetensors and JSON that any layout opens. Every other keyword is anything that JSON can hold.
strategy.save_checkpoint(path, model, optimizer, step=1, epoch=0, note={"lr": [0.1]})

assert Path(path, "manifest.json").exists()

#: All of it, on the CPU: the keywords of the save, `model` by name, and `optimizer` by parameter and slot.
state = strategy.load_checkpoint(path)

assert (state["step"], state["epoch"], state["note"]) == (1, 0, {"lr": [0.1]})
torch.testing.assert_close(state["model"]["head.weight"], weight)
assert state["optimizer"]["head.weight"]["exp_avg"].abs().sum() > 0

#: Into the model and the optimizer; returns the keywords of the save.
state = strategy.load_checkpoint(path, model, optimizer)

assert state == {"step": 1, "epoch": 0, "note": {"lr": [0.1]}}

#: The weights alone, for inference. The model may also be a plain one.
strategy.load_checkpoint(path, model, optimizer=None)
plain = Net()
strategy.load_checkpoint(path, plain)

torch.testing.assert_close(plain.head.weight, weight)

#: Keeps the last ones in `out/checkpoints/step_00000002`, and so on.
manager = CheckpointManager("out", keep_last=3)
for step in (2, 3, 4, 5):
    manager.save(strategy, step, model=model, optimizer=optimizer, epoch=1, metrics={"eval/loss": 1 / step})

strategy.barrier()
assert sorted(path.name for path in Path("out/checkpoints").iterdir()) == [f"step_0000000{i}" for i in (3, 4, 5)]

#: The folder, and the newest good checkpoint.
folder, latest = manager.output_dir, manager.latest()

assert (folder, latest) == (Path("out"), Path("out/checkpoints/step_00000005"))

#: `out/checkpoints/final`, which is never removed, and comes after all steps.
manager.save(strategy, 5, model=model, optimizer=optimizer, final=True)

strategy.barrier()
assert manager.latest().name == "final"

#: `last` and `best` work wherever a checkpoint path is taken: here, in `shoal checkpoint`, and in a config.
last, best = strategy.load_checkpoint("out/last"), strategy.load_checkpoint("out/best")

assert (last["step"], best["step"], best["metrics"]) == (5, 5, {"eval/loss": 0.2})
loop.save("elsewhere/step_100", step=100)

#: Also sees `step_100` and the like, in the folder itself.
found = find_latest_checkpoint("elsewhere")

assert found == Path("elsewhere/step_100")
strategy.teardown()
rank, _, _ = setup_distributed(device="cpu")

#: Saved as a step of the manager. Under DDP only rank 0 needs to call it.
model = wrap_model_ddp(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
if rank == 0:
    save_checkpoint_distributed(model, optimizer, scaler, 7, CheckpointManager("ddp"))

torch.distributed.barrier()
scaler.scale(torch.ones(1))  # which makes its state
scaler.update(4.0)
weights = [p.detach().clone() for p in model.parameters()]
torch.nn.init.zeros_(model.module.head.weight)

#: Into model, optimizer and scaler; returns the step.
step = load_checkpoint_distributed(model, optimizer, scaler, "ddp/last")

assert (step, scaler.get_scale()) == (7, 8.0)
torch.testing.assert_close([*model.parameters()], weights)

#: The last good checkpoint of a folder, into a wrapped model; `{}` if there is none.
state = auto_resume("ddp", model, optimizer)

assert state["step"] == 7
assert auto_resume("nowhere", model, optimizer) == {}

#: Calls `trainer.load_checkpoint(path)`; the folder is that of `config["output_dir"]` or `config.output_dir`.
trainer = DistributedTrainer(Net())
state = auto_resume({"output_dir": "ddp"}, trainer)

assert state["step"] == 7
torch.testing.assert_close([*trainer.loop.model.parameters()], weights)
assert shoal.distributed.is_main_process() == (rank == 0)
cleanup_distributed()
