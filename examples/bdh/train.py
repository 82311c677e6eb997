"""Train BDH on text in a loop you can read, on one process or many.

    python examples/bdh/train.py                                           # one process
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_ddp            # two: one per GPU, or both on the CPU
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_fsdp           # two that share out the model as well
    torchrun --nproc_per_node=2 examples/bdh/train.py --use_ddp --resume   # go on where the last one stopped, any way

What data parallelism is: torchrun starts this same script several times. Every process (a "rank") has the whole model
and the same weights, and takes other samples. After the backward pass the ranks average their gradients, so that all
of them take the same step and their weights stay equal. The result is that of one process with a larger batch.

What sharding (FSDP) adds: a rank keeps only its part of the weights, their gradients and the optimizer's state. The
ranks gather the whole weights for the moment of computing with them, and each gets the average of its part of the
gradients. The steps are the same; the memory of a rank is less, and the ranks talk more.

Only four things below know about it: `wrap_model`, `accumulate`, `reduce`, and the loader's `data_rank`.
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
from shoal.distributed import auto_resume, checkpoint_path, find_latest_checkpoint, get_world_size, seed_everything
from shoal.errors import UserError
from shoal.models.bdh import BDH, BDHConfig
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, SingleStrategy

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train BDH on text, on one process or many.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--dataset_name", default="stdlib", help="stdlib (Python's own source), a text file or folder, or a Hub name")
    add("--output_dir", default="runs/bdh_example", help="where checkpoints go")
    add("--use_ddp", action="store_true", help="replicas of the model that average their gradients")
    add("--use_fsdp", action="store_true", help="shards of the model, gathered where they are needed")
    add("--distributed", action="store_true", help="use all processes that were started, the usual way (--use_ddp)")
    add("--batch_size", type=int, default=8, help="samples in one forward pass of one process")
    add("--gradient_accumulation_steps", type=int, default=1, help="forward passes of each process per update")
    add("--max_iters", type=int, default=1000, help="updates in all, those before a --resume included")
    add("--learning_rate", type=float, default=3e-3, help="its peak; it warms up and then falls along a cosine")
    add("--warmup_iters", type=int, default=50, help="updates until the peak")
    add("--grad_clip", type=float, default=1.0, help="the longest gradient; 0 for any")
    add("--dtype", choices=DTYPES, default="float32", help="what to compute in; weights stay float32")
    add("--compile", action="store_true", help="compile the model: slow to start, then faster")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--log_freq", type=int, default=10, help="updates between lines of the log")
    add("--save_freq", type=int, default=100, help="updates between checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output_dir, if there is one")
    add("--seed", type=int, default=0, help="decides weights, order of samples and dropout")
    add("--block_size", type=int, default=128, help="tokens in a sample")
    add("--n_layer", type=int, default=3, help="levels; all of them share their weights")
    add("--n_embd", type=int, default=64, help="width of a token's vector")
    add("--n_head", type=int, default=4, help="heads")
    add("--mlp_internal_dim_multiplier", type=int, default=16, help="neurons per unit of width")
    add("--dropout", type=float, default=0.1, help="share of the neurons left out")
    return parser.parse_args(argv)


def choose_strategy(args: argparse.Namespace) -> DistributedStrategy:
    """The place the loop runs on. The loop is the same for all of them."""
    options = {"device": args.device, "mixed_precision": DTYPES[args.dtype]}
    if args.use_fsdp:
        return FSDPStrategy(**options)
    if args.use_ddp or args.distributed:
        return DDPStrategy(**options)
    if get_world_size() > 1:  # without DDP they would train the same model, each for itself
        raise UserError(f"{get_world_size()} processes were started; say --use_ddp or --use_fsdp, or start one")
    return SingleStrategy(**options)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A function of the step alone, so that there is no scheduler to save, or to forget to save."""
    if step < args.warmup_iters:
        return args.learning_rate * (step + 1) / (args.warmup_iters + 1)
    progress = (step - args.warmup_iters) / max(1, args.max_iters - args.warmup_iters)
    return args.learning_rate * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)  # down to a tenth


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    strategy = choose_strategy(args)
    if not args.resume and (found := find_latest_checkpoint(args.output_dir)):
        raise UserError(f"{found} is there already; go on with --resume or choose another --output_dir")

    # Before the ranks meet: whoever comes first tokenises the text, and the others may wait for it as long as it takes.
    # Inside the process group they would give up on each other after a while.
    on_disk = Path(args.dataset_name).exists()
    source = {"name": "text", "files": args.dataset_name} if on_disk else {"name": args.dataset_name}
    data, _ = open_text(TextDataset(**source, seq_length=args.block_size))

    with strategy:  # from here to the end of the block, the ranks can talk to each other
        train(args, strategy, data)


def train(args: argparse.Namespace, strategy: DistributedStrategy, data: Sequence[dict[str, torch.Tensor]]) -> None:
    def log(line: str) -> None:
        if strategy.is_main_process:  # or every line would come once per rank
            print(line, flush=True)

    # Every rank builds the same model. DDP would make sure anyway: it sends rank 0's weights to the others.
    seed_everything(args.seed)
    sizes = {name: getattr(args, name) for name in ("n_layer", "n_embd", "n_head", "dropout")}
    model = BDH(BDHConfig(**sizes, mlp_internal_dim_multiplier=args.mlp_internal_dim_multiplier))
    if args.compile:
        for level in model.levels:  # they are alike, so compiling the first serves all
            level.compile()
    # To the device; under DDP into the module that averages gradients; under FSDP into shards. The optimizer comes
    # after it, because it is to hold what this rank holds.
    model = strategy.wrap_model(model)
    # Fused: one kernel for all parameters, which can also clip, and skip an update that is not finite.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    # A checkpoint has the names of the plain model, so one saved on two ranks opens on one, or on eight.
    about_data = {"dataset_name": args.dataset_name, "block_size": args.block_size, "seed": args.seed}
    saved = auto_resume(args.output_dir, model, optimizer, strategy) if args.resume else {}
    if saved.get("data", about_data) != about_data:
        raise UserError(f"the checkpoint was made with {saved['data']}, not {about_data}; give the same flags")
    step, samples = saved.get("step", 0), saved.get("samples", 0)

    # One endless order of samples, the same for any number of ranks. An update takes the next `global_batch_size` of
    # it, and each rank its share of those. How many were taken is all there is to know to go on at the exact sample.
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
            # Dropout follows from where we are, not from what was drawn before: a resumed run repeats it, and each rank
            # has its own, or all would drop the same neurons.
            seed_everything(args.seed, step, index, strategy.data_rank)
            batch = strategy.to_device(micro.data)
            # Gradients add up over the micro-batches, and one exchange at the last of them is enough.
            with strategy.accumulate(model, last=index == len(micro_batches) - 1):
                with strategy.autocast():
                    _, loss = model(batch["input_ids"], batch["labels"])  # a mean over this rank's samples
                loss = loss / len(micro_batches)  # so that the sum over micro-batches is a mean again
                strategy.backward(loss)
            mean_loss += loss.detach()
        info = strategy.step(optimizer, max_norm=args.grad_clip or None)  # clip, update, set gradients to zero
        step += 1

        if step % args.log_freq == 0 or step == args.max_iters:
            # All ranks take part in a `reduce`, so it stands outside `log`: if one rank stayed away, the others would
            # wait for it. Reading numbers waits for the device, which is why it is not done at every step.
            loss_now, norm = strategy.reduce(mean_loss, "mean").item(), info.grad_norm.item()
            tokens = (step - clock_step) * global_batch_size * args.block_size
            speed = tokens / (time.perf_counter() - clock)
            log(f"iter {step}  loss {loss_now:.6f}  grad_norm {norm:.4f}  {speed:,.0f} tokens/s")
            clock, clock_step = time.perf_counter(), step

        if step % args.save_freq == 0 or step == args.max_iters:
            path = checkpoint_path(args.output_dir, step)  # all ranks save: each writes a part of it
            strategy.save_checkpoint(path, model, optimizer, step=step, samples=loader.position, data=about_data)
            log(f"saved {path}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:  # something you can put right: one line, no traceback
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
