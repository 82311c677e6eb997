"""Gradients in fewer bytes, for slow networks; and `local_sgd`, which exchanges weights once in many steps instead.

    gradient + residual ──► method.exchange ──► sum over ranks  = the gradient of the step, equal on all ranks
                               │
                               └──► what this rank did not send = the residual of the next step (error feedback)

A method (cast.py, topk.py, powersgd.py) takes tensors by parameter name and gives back, for each, the sum over ranks
and what of this rank's own tensor is not in that sum. So for every method, and at every step,

    sum + residuals of all ranks after the step = gradients + residuals of all ranks before it

to rounding; `shoal verify` checks it. Sums are never averages: losses are divided by the count of the global batch
before the backward, so the gradient is the sum over ranks.

- **State has the names of parameters**: residuals, and PowerSGD's factors. torch's hooks key theirs by bucket, and
  buckets change after the first backward of a process, so that a restarted run could not repeat one that was not.
- **Exchange comes after the backward** (exchange.py), not in DDP's reducer: the order of messages does not depend on
  the order in which gradients become ready. torch's powerSGD_hook hangs over gloo for that reason. What is lost is the
  overlap with the backward, which is short beside a message on a network that is slow enough for all of this.
- **All ranks compute with the same bytes.** What a rank uses of its own tensor went through the same coding as what
  it got from the others, so replicas stay equal to the bit.
- **A gradient that is not finite** makes the sum not finite on all ranks, so the update is skipped on all of them; the
  state of that step is thrown away.
- **The state of a rank is its own.** A checkpoint has it under the number of the rank (rank_state.py). It is taken back
  if method and mesh are the same; else it starts at zero, and the run says so.

`local_sgd.py` has the outer step of DiLoCo, `wire.py` counts bytes and seconds, `payoff.py` says whether compression
would pay on a network, and `gradient_compressor.py` has the objects for loops written by hand.
"""
