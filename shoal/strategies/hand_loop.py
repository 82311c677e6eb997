"""The verbs of a training loop written by hand, the same on every strategy.

    with DDPStrategy() as strategy:
        loop = Loop(strategy)
        model, optimizer = loop.wrap(model, lambda model: torch.optim.AdamW(model.parameters(), fused=True))
        for batch in loader:
            batch = loop.to_device(batch)
            with loop.autocast():
                loss = mse_loss(model(batch["x"]), batch["y"])  # a mean over this rank's samples
            loop.backward(loss)
            loop.step(max_norm=1.0)

Gradients become the mean over ranks. The optimizer comes as a function that builds it, because it has to hold what this
rank holds once the model is split. Except with DeepSpeed, one that is built from the model after `wrap` works, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.seeding import mix, seed_generators
from shoal.strategies.contract import Builder, DistributedStrategy, to_device
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.module_state import check_storable, share_model
from shoal.strategies.replaced_parameters import remember_replaced
from shoal.strategies.saving import load, save
from shoal.strategies.scaled_gradients import ScaledGradients
from shoal.strategies.update import Update, check_separate
from shoal.torch_private import call_without_hooks, uncompiled
from shoal.transform.precision import autocast
from shoal.types import MicroBatch, Objective, ParallelPlan, StepInfo, Weights
from shoal.weights.parameter_extras import check_trainable

BUILT = Weights("built")
Exchange = Literal["overlapped", "at_step"]


class Loop:
    """A loop of one's own over one model and its optimizers."""

    def __init__(self, strategy: DistributedStrategy):
        self.strategy = strategy
        self._model: nn.Module | None = None
        self._clips: dict[Optimizer, dict[str, float]] = {}
        self._trained: list[bool] = []
        self._skipped: Tensor | None = None
        self._stepped: set[Optimizer] = set()
        """The optimizers that have stepped since the loss scale was last updated."""
        self._in_method = False
        self._is_last = self._starts_step = True
        """Whether gradients are exchanged after this micro-batch, and whether the next forward is a step's first."""
        self._has_evaluated = False
        self._scaled: ScaledGradients | None = None

    def wrap(
        self,
        model: nn.Module,
        *builders: Builder,
        plan: ParallelPlan | None = None,
        weights: Weights = BUILT,
        methods: Sequence[str] = (),
        exchange: Exchange | None = None,
    ) -> tuple[Any, ...]:
        """Puts the model in its place and builds its optimizers; returns the module to call, and the optimizers.

        `methods` are names of the model's methods that the loop calls besides the forward. `exchange` says when DDP
        averages gradients: "overlapped" with the backward, or "at_step", which allows several optimizers that each use
        some of the parameters, and a backward inside a method; that is the default with several optimizers.
        """
        strategy, layout = self.strategy, self.strategy.layout
        self._check_wrap(model, builders, methods, exchange)
        check_storable(model)
        check_trainable(model)
        at_step = layout.engine == "ddp" and (exchange == "at_step" or (exchange is None and len(builders) > 1))
        if weights.kind == "built" and (at_step or layout.engine != "ddp"):
            self._share_weights(model)  # DDP's engine does so itself
        self._model = model
        plan = plan or ParallelPlan.derive(model)
        with remember_replaced(model):
            optimizers = strategy._place_model(
                model, [*map(_from_model, builders)], plan, weights, "none" if at_step else "mean"
            )
        check_separate(optimizers, model)
        self._trained = [p.requires_grad for p in model.parameters()]
        module = strategy.engine
        if strategy._data_groups and strategy.world.group != "imagined":
            module.register_forward_pre_hook(self._before_forward)
        if methods and isinstance(module, DistributedDataParallel):
            self._forbid_backward_in_methods(model)
        for name in methods:
            setattr(module, name, self._through_engine(module, model, name))
        if strategy._loss_scale:
            self._scaled = ScaledGradients(model, strategy._updates)
        return module, *optimizers

    def add(self, optimizer: Optimizer) -> None:
        """Takes an optimizer that was built by hand from the wrapped model. `step` and `clip` do so by themselves."""
        self._update_of(optimizer)

    @property
    def model(self) -> nn.Module:
        """The plain model inside the module that `wrap` returned, with its own names."""
        model, _ = self._wrapped()
        return model

    # A step

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Is entered around the forward and backward of one micro-batch; gradients are exchanged in the last one."""
        _, engine = self._wrapped()
        return self._accumulating(engine, last)

    def autocast(self) -> AbstractContextManager[None]:
        """Is entered around the forward and the loss: computes in the strategy's `mixed_precision`."""
        return autocast(self.strategy.layout.precision, self.strategy.device)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a mean over this rank's samples; gradients become the mean over ranks."""
        _, engine = self._wrapped()
        scale = self.strategy._loss_scale
        if self._scaled:
            self._scaled.after_backward()
        if engine.backward is not None:
            engine.backward(loss, scale.scale if scale else torch.ones((), device=loss.device))
        else:
            (loss * scale.scale if scale else loss).backward()

    def clip(
        self, optimizer: Optimizer | None = None, *, max_norm: float | None = None, max_value: float | None = None
    ) -> None:
        """Makes the optimizer's next step clip its gradient, by its norm or each element by its size."""
        limits = _limits(max_norm=max_norm, max_value=max_value)
        for one in self._chosen(optimizer):
            self._update_of(one)
            self._clips[one] = limits

    def step(self, optimizer: Optimizer | None = None, max_norm: float | None = None) -> StepInfo:
        """Unscales, clips, updates and clears the gradients of an optimizer, or of the only one.

        An update whose gradient is not finite is skipped. The norm before clipping is in what it returns.
        """
        self._check_trained()
        if optimizer is None:
            if len(self._optimizers) != 1:
                raise UserError(f"step(): the loop has {len(self._optimizers)} optimizers; pass the one that steps")
            (optimizer,) = self._optimizers
        limits = _limits(max_norm=max_norm)
        update = self._update_of(optimizer)
        if self._scaled:
            self._scaled.before_step(optimizer)
        info = update.step(**self._clips.pop(optimizer, {}) | limits)
        self._update_scale(optimizer, info)
        return info

    def zero_grad(self, optimizer: Optimizer | None = None) -> None:
        """Clears the gradients of an optimizer, or of all."""
        for one in self._chosen(optimizer):
            self._update_of(one).zero_grad()

    # Around it

    def to_device(self, batch: Any) -> Any:
        """Moves the tensors of a batch to this rank's device, however nested."""
        return to_device(batch, self.strategy.device)

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "max"] = "mean") -> Tensor:
        """Returns the sum, mean or maximum over data-parallel ranks, on every rank. All ranks call it."""
        if op not in ("sum", "mean", "max"):
            raise UserError(f"reduce(op={op!r}): use sum, mean or max")
        reduced, ranks = tensor.clone(), 1
        for group in self.strategy._data_groups:
            dist.all_reduce(reduced, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
            ranks *= dist.get_world_size(group)
        return reduced / ranks if op == "mean" and ranks > 1 else reduced

    def save(self, path: str | Path, **state: Any) -> None:
        """Writes the folder `path`, which appears whole or not at all; `state` is anything that JSON can hold.

        Where every rank has the whole model, rank 0 writes alone, so that only rank 0 needs to call it. Elsewhere all
        ranks call it, and each writes its part.
        """
        self._check_has_optimizer("save")
        save(self.strategy, Path(path), self.model, self._optimizers, state)

    def load(self, path: str | Path, weights_only: bool = False) -> dict[str, Any]:
        """Puts back weights, optimizer state and learning rates, saved in any layout; returns the `state` of that save.

        All ranks call it. Raises UserError if it is of another model or optimizer, DamagedCheckpoint if any rank cannot
        read it; nothing is changed then.
        """
        self._check_has_optimizer("load")
        return load(self.strategy, Path(path), self.model, self._optimizers, weights_only)

    # For runs whose steps are written by hand

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks over which gradients become a mean."""
        return prod(dist.get_world_size(group) for group in self.strategy._data_groups)

    def prepare_batches(self, micro_batches: Sequence[MicroBatch], recipe: Objective) -> list[Any]:
        """Returns micro-batches as the model sees them: on the device, with what the recipe draws for each sample."""
        return self.strategy._prepare_batches(micro_batches, recipe)

    def total(self, values: Sequence[Tensor | int], micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the sum of the values of micro-batches over all data-parallel ranks, without those of fillers."""
        return self.strategy.sum_over_data(self.strategy._sum(values, micro_batches))

    def seed(self, *place: int | str) -> None:
        """Seeds the generators from a place in the run, alike on ranks that compute the same samples."""
        strategy = self.strategy
        seed_generators(mix(strategy._seed, *place, *strategy._rng_key), strategy.device)

    def filler(self) -> AbstractContextManager[None]:
        """Is entered around what is computed for a filler: buffers stay as they are."""
        return self.strategy._executor.surroundings.filler([self.model])

    def warm_up(self) -> None:
        """Lets DDP order its buckets before the first step, so that a restarted run repeats one that was not.

        DDP orders them anew after its first backward, by the order in which gradients came; sums over four ranks or
        more then differ in their last bits. Here they come last parameter first, as they mostly do in a model. A static
        graph cannot be recorded this way, and with unused parameters DDP keeps its order.
        """
        model, engine = self._wrapped()
        options = self.strategy.layout.ddp
        if engine.is_warm or options.static_graph or options.find_unused_parameters:
            return
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        forward = vars(model).get("forward")
        model.forward = lambda: sum(parameter.sum() for parameter in trained)
        try:
            engine.warm_up(engine.module)
        finally:
            vars(model).pop("forward", None)
            if forward is not None:
                model.forward = forward

    def explain(self, error: BaseException | None) -> UserError | None:
        """Returns an error in the user's terms for one that the engine raised, if there is one."""
        _, engine = self._wrapped()
        return engine.explain(error) if isinstance(error, RuntimeError) else None

    # Inside

    @property
    def _optimizers(self) -> list[Optimizer]:
        """The optimizers that `wrap` built, and those that joined later, through the loop or its strategy."""
        return [*self.strategy._updates]

    def _wrapped(self) -> tuple[nn.Module, PlainEngine]:
        """Returns the plain model and what computes it; refuses verbs that come before `wrap`."""
        if self._model is None or self.strategy._engine is None:
            raise UserError("the loop has no model yet; call loop.wrap(model, build_optimizer) first")
        return self._model, self.strategy._engine

    def _chosen(self, optimizer: Optimizer | None) -> list[Optimizer]:
        """Returns the given optimizer, or all that the loop has."""
        self._wrapped()
        return [optimizer] if optimizer else self._optimizers

    def _update_of(self, optimizer: Optimizer) -> Update:
        """Returns what steps this optimizer; one that was built by hand after `wrap` joins the loop here."""
        self.strategy._joined(optimizer, self.model)
        return self.strategy._updates[optimizer]

    def _check_wrap(
        self, model: nn.Module, builders: Sequence[Builder], methods: Sequence[str], exchange: Exchange | None
    ) -> None:
        layout = self.strategy.layout
        if self._model is not None or self.strategy.held():
            raise UserError(
                "wrap: this loop, or its strategy, has a model already; put both into one module, or make another "
                "strategy"
            )
        if uncompiled(model) is not model:
            raise UserError(
                "wrap: torch.compile has put this model into a module with other parameter names; give wrap the plain "
                "model and compile what it returns, or use the strategy's option compile=True"
            )
        if any(isinstance(builder, Optimizer) for builder in builders):
            raise UserError(
                "wrap takes a function that builds the optimizer, not the optimizer: its parameters may be replaced; "
                "write loop.wrap(model, lambda model: torch.optim.AdamW(model.parameters()))"
            )
        if layout.mesh["pp"] > 1:
            raise UserError(
                f"distributed.mesh.pp = {layout.mesh['pp']}: a pipeline runs all micro-batches of a step at once, and "
                "a loop of your own cannot; use a recipe"
            )
        if layout.compression.method != "none" or layout.local_sgd is not None:
            key = "local_sgd" if layout.local_sgd is not None else f"compression = {layout.compression.method}"
            raise UserError(
                f"{key} is for recipes: a loop of your own exchanges gradients in the backward; use a recipe, or "
                "shoal.GradientCompressor with torch's DistributedDataParallel"
            )
        if layout.cuda_graphs:
            raise UserError(
                "training.cuda_graphs = true records a recipe's forward and loss, and a loop of your own computes them "
                "itself; use a recipe, or leave it out"
            )
        if layout.loss_chunks > 1:
            raise UserError(
                f"loss_chunks = {layout.loss_chunks}: a loop of your own computes its loss itself; use a recipe"
            )
        if exchange not in (None, "overlapped", "at_step"):
            raise UserError(f"exchange = {exchange!r}: use overlapped or at_step")
        if exchange == "at_step" and layout.engine not in ("ddp", "plain"):
            raise UserError(f"exchange = at_step is for ddp; {layout.strategy} exchanges gradients during the backward")
        if methods and layout.precision == "pure_bf16":
            raise UserError("methods: under pure_bf16 only the inputs of forward are cast; use mixed_precision = bf16")
        for name in methods:
            if not callable(getattr(model, name, None)):
                raise UserError(f"methods: {type(model).__name__} has no method {name!r}")

    def _share_weights(self, model: nn.Module) -> None:
        """Lets all ranks start from rank 0's weights: a sharded model would be put together from different ones."""
        if self.strategy.world_size > 1 and self.strategy.world.group != "imagined":
            share_model(model)

    @contextmanager
    def _accumulating(self, engine: PlainEngine, last: bool) -> Iterator[None]:
        self._is_last = last
        try:
            with engine.accumulate(last):
                yield
        finally:
            self._is_last = True

    @torch.compiler.disable
    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Makes buffers equal in the first forward of a step, and in the first one of an evaluation.

        As under DDP, a forward is the first of a step unless the one before it was to be accumulated. A rank may
        evaluate a plain model alone, so nothing is sent then.
        """
        _, engine = self._wrapped()
        evaluates = not torch.is_grad_enabled()
        if evaluates and (self._has_evaluated or type(engine) is PlainEngine):
            return
        if self._starts_step:
            self.strategy._start_step()
        self._has_evaluated = evaluates
        if not evaluates:
            self._starts_step = self._is_last

    def _through_engine(self, engine: nn.Module, model: nn.Module, name: str) -> Callable[..., Any]:
        """Returns a function that calls a method of the model as the engine calls its forward, with the same hooks."""
        method, engine_name = getattr(model, name), self.strategy.layout.engine

        def call(*args: Any, **kwargs: Any) -> Any:
            forward, inside = vars(model).get("forward"), self._in_method
            if inside:  # a method that calls another: the engine is already at work
                return method(*args, **kwargs)

            def once(*args: Any, **kwargs: Any) -> Any:
                model.forward = forward or type(model).forward.__get__(model)
                # A nested `self(x)` must not run the hooks that free the parameters which the method still uses.
                shards = engine_name in ("deepspeed", "fully_shard")
                # DeepSpeed turns autocast off around the model.
                with (
                    self.autocast() if engine_name == "deepspeed" else nullcontext(),
                    call_without_hooks(model) if shards else nullcontext(),
                ):
                    return method(*args, **kwargs)

            model.forward, self._in_method = once, True
            try:
                return engine(*args, **kwargs)
            finally:
                self._in_method = False
                vars(model).pop("forward", None)
                if forward is not None:
                    model.forward = forward

        return call

    def _forbid_backward_in_methods(self, model: nn.Module) -> None:
        def check(parameter: Tensor) -> None:
            if self._in_method:
                raise UserError(
                    "a method ran a backward while DDP was still in its forward, so that gradients would not be "
                    "averaged; use loop.wrap(..., exchange='at_step')"
                )

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(check)

    def _check_trained(self) -> None:
        model, engine = self._wrapped()
        if type(engine) is not PlainEngine and [p.requires_grad for p in model.parameters()] != self._trained:
            raise UserError(
                f"requires_grad was changed after wrap, which {self.strategy.name} does not notice; freeze parameters "
                "before wrap, or leave them out of the optimizer"
            )

    def _update_scale(self, optimizer: Optimizer, info: StepInfo) -> None:
        """Updates fp16's loss scale once nobody holds gradients that were made with the old one."""
        scale = self.strategy._loss_scale
        if scale is None:
            return
        self._skipped = info.skipped if self._skipped is None else torch.maximum(self._skipped, info.skipped)
        self._stepped.add(optimizer)
        others = [other for other in self._optimizers if other is not optimizer]
        # Under DDP gradients are never freed; there all optimizers step after the same backward.
        if self._stepped.issuperset(others) or not any(self._update_of(other).has_gradients() for other in others):
            scale.update(self._skipped)
            self._skipped = None
            self._stepped.clear()

    def _check_has_optimizer(self, verb: str) -> None:
        self._wrapped()
        if not self._optimizers:
            raise UserError(
                f"{verb}: the loop has no optimizer; give wrap a function that builds it, or call loop.add(optimizer)"
            )


def _from_model(build: Builder) -> Builder:
    """Returns a builder that says what it gets if it takes the model for a list of parameters."""

    def build_from(model: nn.Module) -> Optimizer:
        try:
            return build(model)
        except TypeError as error:
            if not str(error).endswith("object is not iterable") or type(model).__name__ not in str(error):
                raise
            raise UserError(
                "wrap: the function that builds the optimizer gets the model, not its parameters; write lambda model: "
                "torch.optim.AdamW(model.parameters())"
            ) from error

    return build_from


def _limits(**limits: float | None) -> dict[str, float]:
    """Returns the limits that are not None; refuses 0 and below, which would leave nothing of a gradient."""
    for key, limit in limits.items():
        if limit is not None and not limit > 0:
            raise UserError(f"{key} = {limit}: a limit has to be above 0; leave it out, or give None, to not clip")
    return {key: limit for key, limit in limits.items() if limit is not None}
