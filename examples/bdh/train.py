"""Train BDH on text, in a loop you can read, on one process or many.

    python examples/bdh/train.py                                           # one process
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_ddp            # two: one per GPU, or both on the CPU
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_fsdp           # two, each with half of the model
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_ddp --resume   # continue a run, also one made another way

Data parallelism (DDP): torchrun starts this script several times. Every process (a "rank") has the whole model with the
same weights, and takes different samples. During the backward pass the ranks average their gradients, so that all of
them make the same update and their weights stay equal. The result is that of one process with a larger batch.

Sharding (FSDP): a rank keeps only its part of the weights, of their gradients and of the optimizer's state. The ranks
gather the whole weights while they compute with them, and each rank receives the average of its part of the gradients.
The updates are the same; each rank needs less memory, and the ranks communicate more.

Only four places below depend on it: `loop.wrap`, `loop.accumulate`, `loop.reduce`, and the loader's `data_rank`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import islice
from math import cos, pi
from pathlib import Path

import torch
from torch.utils.data import default_collate

from shoal.data import BatchSchedule, Loader, TextDataset, open_text
from shoal.distributed import checkpoint_path, find_latest_checkpoint, get_world_size, resume, seed_everything
from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop, SingleStrategy

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train BDH on text, on one process or many.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--dataset_name", default="stdlib", help="stdlib (Python's own source), a text file or folder, or a Hub name")
    add("--output_dir", default="runs/bdh_example", help="folder for checkpoints")
    add("--use_ddp", action="store_true", help="every process has the whole model; gradients are averaged")
    add("--use_fsdp", action="store_true", help="every process has a part of the model and gathers the rest")
    add("--distributed", action="store_true", help="use all processes that were started; the same as --use_ddp")
    add("--batch_size", type=int, default=8, help="samples in one forward pass of one process")
    add("--gradient_accumulation_steps", type=int, default=1, help="forward passes of each process per update")
    add("--max_iters", type=int, default=1000, help="updates in all, including those before a --resume")
    add("--learning_rate", type=float, default=3e-3, help="highest learning rate, after warmup and before cosine decay")
    add("--warmup_iters", type=int, default=50, help="updates until the highest learning rate")
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0 turns clipping off")
    add("--dtype", choices=DTYPES, default="float32", help="type to compute in; weights stay float32")
    add("--compile", action="store_true", help="compile the model: slow to start, then faster")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--log_freq", type=int, default=10, help="updates between lines of the log")
    add("--save_freq", type=int, default=100, help="updates between checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint in --output_dir, if there is one")
    add("--seed", type=int, default=0, help="seed of weights, order of samples and dropout")
    add("--block_size", type=int, default=128, help="tokens in a sample")
    add("--n_layer", type=int, default=3, help="number of levels; all of them share their weights")
    add("--n_embd", type=int, default=64, help="size of a token's vector")
    add("--n_head", type=int, default=4, help="number of heads")
    add("--mlp_internal_dim_multiplier", type=int, default=16, help="neurons per element of a token's vector")
    add("--dropout", type=float, default=0.1, help="fraction of the neurons that dropout sets to zero")
    return parser.parse_args(argv)


def choose_strategy(args: argparse.Namespace) -> DistributedStrategy:
    """Returns the strategy, which says how the model is spread over processes. The loop is the same for all of them."""
    options = {"device": args.device, "mixed_precision": DTYPES[args.dtype]}
    if args.use_fsdp:
        return FSDPStrategy(**options)
    if args.use_ddp or args.distributed:
        return DDPStrategy(**options)
    if get_world_size() > 1:  # without DDP each of them would train a model of its own
        raise UserError(f"{get_world_size()} processes were started; say --use_ddp or --use_fsdp, or start one")
    return SingleStrategy(**options)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Returns the learning rate, from the step alone: no scheduler has to be saved."""
    if step < args.warmup_iters:
        return args.learning_rate * (step + 1) / (args.warmup_iters + 1)
    progress = (step - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.learning_rate * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)  # down to a tenth


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    strategy = choose_strategy(args)
    if not args.resume and (found := find_latest_checkpoint(args.output_dir)):
        raise UserError(f"{found} exists already; continue with --resume or choose another --output_dir")

    # Before the processes are connected: the first one tokenises the text, and the others wait for it as long as it
    # takes. Once they are connected, a process that waits too long for another one gives up.
    on_disk = Path(args.dataset_name).exists()
    source = {"name": "text", "files": args.dataset_name} if on_disk else {"name": args.dataset_name}
    data, _ = open_text(TextDataset(**source, seq_length=args.block_size))

    with strategy:  # inside this block the processes are connected
        train(args, strategy, data)


def train(args: argparse.Namespace, strategy: DistributedStrategy, data: Sequence[dict[str, torch.Tensor]]) -> None:
    def log(line: str) -> None:
        if strategy.is_main_process:  # otherwise every rank would print the line
            print(line, flush=True)

    # Every rank builds the same model; `wrap` would also send rank 0's weights to the others.
    seed_everything(args.seed)
    sizes = {name: getattr(args, name) for name in ("n_layer", "n_embd", "n_head", "dropout")}
    model = BDH(BDHConfig(**sizes, mlp_internal_dim_multiplier=args.mlp_internal_dim_multiplier))
    if args.compile:
        for level in model.levels:  # they have the same code, so that one compilation serves all
            level.compile()
    # `wrap` moves the model to the device. Under DDP it returns the module that averages gradients; under FSDP it
    # shards the model. It builds the optimizer last, because that holds only the parameters that this rank has.
    # Fused: one kernel for all parameters, which can also clip, and skip an update that is not finite.
    loop = Loop(strategy)
    model, optimizer = loop.wrap(
        model, lambda model: torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    )

    # A checkpoint has the parameter names of the plain model: one saved on two ranks can be loaded on one, or on eight.
    about_data = {"dataset_name": args.dataset_name, "block_size": args.block_size, "seed": args.seed}
    saved = resume(args.output_dir, loop) if args.resume else {}
    if saved.get("data", about_data) != about_data:
        raise UserError(f"the checkpoint was made with {saved['data']}, not {about_data}; give the same flags")
    step, samples = saved.get("step", 0), saved.get("samples", 0)

    # The order of samples is endless and does not depend on the number of ranks. An update takes the next
    # `global_batch_size` samples, and each rank takes its part of them. To continue at the exact sample, it is enough
    # to know how many samples were taken.
    global_batch_size = args.batch_size * args.gradient_accumulation_steps * strategy.data_size
    loader = Loader(
        data,
        default_collate,
        BatchSchedule.constant(global_batch_size, args.batch_size),
        seed=args.seed,
        position=samples,
        data_rank=strategy.data_rank,
        data_size=strategy.data_size,
    )
    log(f"{strategy.name} on {strategy.world_size} x {strategy.device.type}, {global_batch_size} samples per update")
    log(f"from iter {step}, sample {samples}" if saved else "from scratch")

    clock, clock_step = time.perf_counter(), step
    for micro_batches in islice(loader, max(0, args.max_iters - step)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)

        mean_loss = torch.zeros((), device=strategy.device)
        for index, micro in enumerate(micro_batches):
            # Seeded by the place in the run, so that a resumed run repeats its dropout. Each rank has a seed of its
            # own; with the same seed all of them would drop the same neurons.
            seed_everything(args.seed, step, index, strategy.data_rank)
            batch = loop.to_device(micro.data)
            # Gradients add up over the micro-batches; the ranks average them once, in the last one.
            with loop.accumulate(last=index == len(micro_batches) - 1):
                with loop.autocast():
                    _, loss = model(batch["input_ids"], batch["labels"])  # a mean over this rank's samples
                loss = loss / len(micro_batches)  # so that the sum over micro-batches is a mean again
                loop.backward(loss)
            mean_loss += loss.detach()
        info = loop.step(max_norm=args.grad_clip or None)  # clips, updates, and clears the gradients
        step += 1

        if step % args.log_freq == 0 or step == args.max_iters:
            # Every rank calls `reduce`, so it is not inside `log`: if one rank did not call it, the others would wait.
            # Reading a number waits for the device, so it is not done in every step.
            loss_now, norm = loop.reduce(mean_loss).item(), info.grad_norm.item()
            tokens = (step - clock_step) * global_batch_size * args.block_size
            speed = tokens / (time.perf_counter() - clock)
            log(f"iter {step}  loss {loss_now:.6f}  grad_norm {norm:.4f}  {speed:,.0f} tokens/s")
            clock, clock_step = time.perf_counter(), step

        if step % args.save_freq == 0 or step == args.max_iters:
            path = checkpoint_path(args.output_dir, step)
            # Every rank calls `save`: under FSDP each of them writes its part, under DDP rank 0 writes.
            loop.save(path, step=step, samples=loader.position, data=about_data)
            log(f"saved {path}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # a mistake that you can correct: one line, no traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
