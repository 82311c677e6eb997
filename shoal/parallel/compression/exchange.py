"""The exchange of a step's gradients by a method of compression, with its residuals and its account."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.schema_distributed import CompressionConfig
from shoal.errors import UserError
from shoal.parallel.compression.cast import CODECS, Cast
from shoal.parallel.compression.method import Method
from shoal.parallel.compression.powersgd import PowerSGD
from shoal.parallel.compression.rank_state import state_of_rank, tag_with_rank
from shoal.parallel.compression.topk import TopK
from shoal.parallel.compression.wire import Wire, all_reduce_bytes, sum_in_buckets
from shoal.torch_private import is_fake

_RESIDUAL = "residual/"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of gradients that are compressed; others are summed as they are."""


def build_method(config: CompressionConfig) -> Method:
    """Returns the method that a section names."""
    if config.method == "powersgd":
        return PowerSGD(config.rank, config.warm_start, config.min_compression, config.seed)
    if config.method == "topk":
        return TopK(config.ratio, config.min_compression)
    return Cast(CODECS[config.method]())


class CompressedExchange:
    """Sums gradients over the ranks of a group, compressed from `start_step` on."""

    loss_scale: Callable[[], Tensor] | None = None
    """Returns the factor that gradients carry under fp16. Residuals are kept without it, because it changes."""
    on_exchange: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor]], None] | None = None
    """Is called with the gradients and residuals before an exchange and the gradients after it, for a proof."""

    def __init__(self, config: CompressionConfig, group: dist.ProcessGroup | None, mesh: Mapping[str, int]):
        self.config, self.method = config, build_method(config)
        self.wire = Wire(group)
        self.residuals: dict[str, Tensor] = {}
        self._origin = {**config.model_dump(exclude={"start_step"}), "mesh": dict(mesh)}

    @torch.no_grad()
    def sum_over_ranks(self, gradients: Mapping[str, Tensor], step: int) -> None:
        """Replaces each gradient by the sum over ranks. All ranks have the same names and shapes."""
        if not gradients:
            return
        wire = self.wire
        if is_fake(next(iter(gradients.values()))):  # a planner's tensors have no values to compress
            sum_in_buckets([*gradients.values()], wire)
            return
        wire.start()
        total_bytes = sum(gradient.nbytes for gradient in gradients.values())
        wire.bytes_uncompressed = all_reduce_bytes(total_bytes, wire.ranks)
        before = None
        if self.on_exchange is not None:
            before = {name: gradient.clone() for name, gradient in gradients.items()}, dict(self.residuals)
        with wire.exchanging(next(iter(gradients.values())).device):
            self._exchange(gradients, step)
        if self.on_exchange is not None and before is not None:
            self.on_exchange(*before, gradients)

    def _exchange(self, gradients: Mapping[str, Tensor], step: int) -> None:
        wire = self.wire
        chosen = {name: gradient for name, gradient in gradients.items() if self._compresses(gradient)}
        self._note_sizes(gradients, chosen)
        if step < self.config.first_step:
            chosen = {}
        sum_in_buckets([gradient for name, gradient in gradients.items() if name not in chosen], wire)
        if not chosen:
            return
        device = next(iter(chosen.values())).device
        with wire.coding(device):
            ends = torch.stack([end.float() for gradient in chosen.values() for end in gradient.aminmax()])
            is_finite = ends.isfinite().all()
        is_finite = wire.all_reduce((~is_finite).float()) == 0  # on every rank
        scale = self.loss_scale() if self.loss_scale is not None else None
        with wire.coding(device):
            tensors = {name: self._with_residual(name, gradient, scale) for name, gradient in chosen.items()}
        outcomes = self.method.exchange(tensors, step, is_finite, wire)
        with wire.coding(device):
            for name, (total, unsent) in outcomes.items():
                chosen[name].copy_(total)
                if self.config.feeds_back:
                    unsent = unsent if scale is None else unsent / scale
                    self.residuals[name] = self._new_residual(name, unsent, is_finite)

    def _new_residual(self, name: str, unsent: Tensor, is_finite: Tensor) -> Tensor:
        """Returns what was not sent, or the residual before if the step is thrown away."""
        if is_finite.device.type == "cpu" and is_finite:  # the host need not wait for a device to know
            return unsent
        before = self.residuals.get(name)
        return torch.where(is_finite, unsent, torch.zeros_like(unsent) if before is None else before)

    def _compresses(self, gradient: Tensor) -> bool:
        return gradient.dtype in _DTYPES and self.method.compresses(gradient.shape)

    def _note_sizes(self, gradients: Mapping[str, Tensor], chosen: Mapping[str, Tensor]) -> None:
        """Notes what an exchange with compression sends; also before it begins, for the report."""
        wire = self.wire
        wire.parameters, wire.compressible = len(gradients), len(chosen)
        if wire.bytes_compressed == 0:
            whole = sum(gradient.nbytes for name, gradient in gradients.items() if name not in chosen)
            coded = sum(self.method.message_bytes(gradient.shape, wire.ranks) for gradient in chosen.values())
            wire.bytes_compressed = int(all_reduce_bytes(whole, wire.ranks) + coded)

    def describe(self) -> str:
        """Returns what is in force, for the report."""
        config, wire = self.config, self.wire
        detail = {"topk": f" {config.ratio:g} of the elements", "powersgd": f" rank {config.rank}"}
        words = [
            f"{config.method}{detail.get(config.method, '')}",
            "error feedback" if config.feeds_back else "no error feedback",
            f"from step {config.first_step} on" if config.first_step else "",
            f"{wire.compressible} of {wire.parameters} parameters",
            f"{wire.bytes_compressed / 1e6:.3g} instead of {wire.bytes_uncompressed / 1e6:.3g} MB sent by a rank in a "
            "step",
        ]
        return f"{', '.join(filter(None, words))}; not the same training as on one device"

    def check(self) -> None:
        """Refuses compression that has no effect. Called after the first step."""
        config = self.config
        if self.wire.compressible == 0:
            size = "rank" if config.method == "powersgd" else "ratio"
            raise UserError(
                f"distributed.compression = {config.method}: none of the {self.wire.parameters} parameters becomes "
                f"shorter by min_compression = {config.min_compression:g}; lower it or {size}, or leave "
                "compression out"
            )

    def _with_residual(self, name: str, gradient: Tensor, scale: Tensor | None) -> Tensor:
        gradient = gradient.float().contiguous()
        if name not in self.residuals:
            return gradient
        residual = self.residuals[name] = self.residuals[name].to(gradient.device)
        return gradient + (residual if scale is None else residual * scale)

    def num_stored_copies(self, slots: int) -> int:
        """Returns how many numbers a checkpoint has at most for each parameter besides weights and moments."""
        return self.wire.ranks * self.config.feeds_back

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint has of this rank."""
        residuals = {f"{_RESIDUAL}{name}": residual for name, residual in self.residuals.items()}
        return tag_with_rank({**residuals, **self.method.state()}, self._origin, dist.get_rank())

    def load_state(self, stored: Mapping[str, Any]) -> str:
        """Takes the state of this rank from that of a checkpoint; returns why it starts at zero, or an empty text."""
        state, other = state_of_rank(stored, self._origin, dist.get_rank())
        residuals = {name: t for name, t in state.items() if name.startswith(_RESIDUAL)}
        self.residuals = {name.removeprefix(_RESIDUAL): t.clone() for name, t in residuals.items()}
        self.method.load_state({name: t for name, t in state.items() if name not in residuals})
        return "" if other is None else _say_other(other, self._origin)


def _say_other(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if not then:
        return "the checkpoint has no state of gradient compression, which starts at zero"
    key = next((key for key in now if then.get(key) != now[key]), "method")
    return (
        f"the state of gradient compression starts at zero: {key} was {_say(then.get(key))} in the checkpoint and is "
        f"{_say(now[key])}"
    )


def _say(value: Any) -> str:
    if isinstance(value, Mapping):
        return " × ".join(f"{side} {size}" for side, size in value.items() if size != 1) or "one process"
    return str(value)
