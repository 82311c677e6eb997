"""Pipeline parallelism"""

# processes: 2

import pytest
import torch
import torch.distributed as dist
from familiar.models import Block
from torch import nn
from torch.nn.functional import mse_loss

from shoal import UserError
from shoal.distributed import PipelineParallelModel, apply_pipeline_parallelism, cleanup_distributed, setup_distributed

setup_distributed(device="cpu")
torch.manual_seed(0)


def same_layers():
    torch.manual_seed(1)
    return [Block() for _ in range(4)]


layers = iter(same_layers())
factory = lambda: next(layers)  # noqa: E731
x, targets = torch.randn(8, 8), torch.randn(8, 8)


#: Every process holds some of the layers. `layer` makes one; `num_gpus` is the number of processes.
model = PipelineParallelModel(num_layers=4, num_gpus=2, layer=factory)

assert len([*model.parameters()]) == 8

#: The output, on every process, computed in micro-batches.
output = model.forward(x, num_microbatches=4)

alone = nn.Sequential(*same_layers())
torch.testing.assert_close(output, alone(x))
with pytest.raises(UserError, match=r"call model.forward_backward\(x, targets, loss_fn, num_microbatches\)"):
    output.sum().backward()

#: Trains: the gradients of the mean loss, for this process's layers. Backwards overlap with forwards.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model.forward_backward(x, targets, mse_loss, num_microbatches=4)
optimizer.step()

expected = mse_loss(alone(x), targets)
expected.backward()
torch.testing.assert_close(loss, expected.detach())
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
optimizer.step()
trained = dict(alone.named_parameters(prefix="layers"))
for name, parameter in model.named_parameters():
    torch.testing.assert_close(parameter, trained[name])

#: A list of layers works, too.
model = PipelineParallelModel(same_layers(), num_gpus=2)

torch.testing.assert_close(model(x, num_microbatches=3), output)

#: The same for a model that is there, over the ranks of a group; one that is no nn.Sequential needs a plan.
pp_group = dist.group.WORLD
model = apply_pipeline_parallelism(nn.Sequential(*same_layers()), pp_group)

torch.testing.assert_close(model(x, num_microbatches=2), output)
cleanup_distributed()
