"""Draws large tensors in several threads, to the same bits as one after another.

A generator gives its numbers in order, so one tensor cannot be drawn in parts. But each module is drawn under a seed of
its own, so modules need not wait for each other: a draw into a large weight is put off, the next module begins, and a
thread draws with a generator of its own. Whatever else uses the weight, or the generator, waits for the draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.tensors import local_part, local_slices
from shoal.torch_private import TorchDispatchMode, has_dispatch_mode, storage_key

MAX_THREADS = 8
MIN_ELEMENTS = 2**20
"""Smaller draws take less than 10 ms, and are put off only if they follow a large one."""
MAX_WAITING_BYTES = 2**30
"""The most bytes of whole tensors that wait for their draws while the next module begins."""

_NORMAL, _UNIFORM = torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default
_FLOATS = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
_MEMORY_ACCESS = {
    getattr(Tensor, name)
    for name in (
        *("numpy", "tolist", "apply_", "map_", "map2_", "share_memory_"),
        *("data_ptr", "const_data_ptr", "mutable_data_ptr", "storage", "untyped_storage"),
        *("__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__"),
    )
    if hasattr(Tensor, name)
}
"""Methods that read, write or hand out the memory of a tensor without an operation that a dispatch mode sees."""


class ParallelDraws:
    """A context in which functions that reset modules run, and draw large weights in threads.

    All draws run at once if torch has one thread, if no parameter is large, or under another dispatch mode, such as
    FakeTensorMode: it would not see what threads do. Two kinds of code in a reset could see a weight before it is
    drawn: C++ that reads memory without an operation of torch, and threads that the reset starts itself.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        num_threads = min(MAX_THREADS, torch.get_num_threads())
        is_parallel = num_threads > 1 and any(p.numel() >= MIN_ELEMENTS for p in parameters) and not has_dispatch_mode()
        self._pool = ThreadPoolExecutor(num_threads, "draw_weights") if is_parallel else None
        # Of the unit that is drawn, which is one module, or several if a parent resets its children's weights again.
        self._unit_bytes = 0
        self._drawable: dict[int, Tensor] = {}  # the memory into which draws may be put off, by storage
        self._open_batch: _Batch | None = None  # the draws of the reset that runs
        # Of all units.
        self._batches: dict[int, _Batch] = {}  # draws that may not have ended, by the storage into which they draw
        self._waiting_units: list[_Unit] = []  # the oldest first
        self._draw_by_marker: dict[bytes, tuple[_Batch, int]] = {}  # see `_mark`

    def __enter__(self) -> ParallelDraws:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._pool is None:
            return
        try:
            if error is None or isinstance(error, Exception):  # Ctrl-C does not wait
                self.finish()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns memory for a whole tensor of the unit that is drawn, once earlier units have left room for it."""
        self._unit_bytes += math.prod(shape) * dtype.itemsize
        while self._waiting_units and max(self._unit_bytes, self._waiting_bytes()) > MAX_WAITING_BYTES:
            self._finish_unit(self._waiting_units[0])
        tensor = torch.empty(shape, dtype=dtype)
        if self._pool is not None:
            self._drawable[storage_key(tensor)] = tensor
        return tensor

    def run(self, reset: Callable[[], None]) -> None:
        """Calls `reset` and puts off its large draws into tensors that `allocate` has returned."""
        if self._pool is None:
            reset()
            return
        try:
            with _Operations(self), _MemoryAccess(self):
                reset()
        finally:
            self._start_open_batch()

    def end_unit(self, whole_tensors: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Gives parameters the values of their whole tensors, or their parts of them; if draws were put off, later."""
        copies = [
            (local_part(parameter), whole.detach()[tuple(local_slices(parameter))])
            for parameter, whole in whole_tensors.items()
        ]
        has_known_storages = all(_has_one_storage(tensor) for copy in copies for tensor in copy)
        if self._batches and has_known_storages and any(storage_key(source) in self._batches for _, source in copies):
            self._waiting_units.append(_Unit(copies, self._unit_bytes))
        else:
            self._copy(copies)
        self._unit_bytes, self._drawable = 0, {}

    def put_off(self, draw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Puts off a draw and returns True, or returns False if it has to run at once."""
        if not _is_simple_draw(draw, args, kwargs) or storage_key(args[0]) not in self._drawable:
            return False
        tensor, generator = args[0], torch.default_generator
        batch = self._open_batch
        if batch is None or self._draw_by_marker.get(_state_bytes(generator)) != (batch, batch.num_draws - 1):
            if tensor.numel() < MIN_ELEMENTS:
                return False
            self._start_open_batch()
            self._settle(generator)
            batch = self._open_batch = _Batch(generator.get_state())
        if self._batches.get(storage_key(tensor)) is not batch:
            self._finish_draws(tensor)
            self._batches[storage_key(tensor)] = batch
        batch.add(partial(draw, tensor.data, *args[1:]))
        self._mark(generator, batch)
        return True

    def prepare(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Waits for the draws on which an operation depends."""
        if operation.namespace != "aten":  # it may use tensors and generators that are not its arguments
            self.finish()
        values = [*_flat([*args, *kwargs.values()])]
        for value in values:
            if isinstance(value, Tensor):
                self._finish_memory(value)
        if operation.namespace != "aten" or torch.Tag.nondeterministic_seeded in operation.tags:
            for generator in (torch.default_generator, *values):
                if isinstance(generator, torch.Generator):
                    self._settle(generator)

    def draw_at_once(self, tensor: Tensor) -> None:
        """Puts off no more draws into a tensor: code that has its memory may look at any time."""
        if _has_one_storage(tensor):
            self._drawable.pop(storage_key(tensor), None)

    def finish(self) -> None:
        """Does everything that was put off, and sets the generator to the state after it."""
        while self._waiting_units:
            self._finish_unit(self._waiting_units[0])
        while self._batches:
            self._wait_for(self._batches.popitem()[1])
        self._settle(torch.default_generator)

    def _waiting_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self._waiting_units)

    def _start_open_batch(self) -> None:
        if self._open_batch is not None and self._pool is not None:
            self._open_batch.start(self._pool)
        self._open_batch = None

    def _wait_for(self, batch: _Batch) -> None:
        if batch is self._open_batch:
            self._open_batch = None
        batch.wait()

    def _finish_unit(self, unit: _Unit) -> None:
        self._waiting_units.remove(unit)
        self._copy(unit.copies)

    def _copy(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        for target, source in copies:
            if self._batches:
                self._finish_memory(source)
            target.copy_(source)

    def _finish_memory(self, tensor: Tensor) -> None:
        """Gives a tensor the values that it would have without threads, be it a parameter or a whole tensor."""
        if not _has_one_storage(tensor):
            self.finish()
            return
        self._finish_draws(tensor)
        for unit in [unit for unit in self._waiting_units if storage_key(tensor) in unit.target_storages]:
            self._finish_unit(unit)

    def _finish_draws(self, tensor: Tensor) -> None:
        batch = self._batches.pop(storage_key(tensor), None)
        if batch is not None:
            self._wait_for(batch)

    def _mark(self, generator: torch.Generator, batch: _Batch) -> None:
        """Gives a generator a state that stands for the one after the last draw of a batch, which is not known yet.

        A reset may seed the generator, or save its state and set it again, and this class sees neither. So each draw
        has a marker of its own: if the generator has it before the next draw, that draw follows. A generator does not
        get there by itself: the numbers are those of another seed than the one that the state names.
        """
        marker = torch.Generator("cpu").manual_seed(
            (generator.initial_seed() + len(self._draw_by_marker) + 1) % 2**32  # of a seed, torch uses 32 bits
        )
        state = marker.get_state()
        state[:8] = generator.get_state()[:8]  # what `initial_seed` returns
        generator.set_state(state)
        self._draw_by_marker[_state_bytes(generator)] = batch, batch.num_draws - 1

    def _settle(self, generator: torch.Generator) -> None:
        """Gives a generator the state that it would have without threads."""
        if self._draw_by_marker and (draw := self._draw_by_marker.get(_state_bytes(generator))):
            batch, index = draw
            self._wait_for(batch)
            generator.set_state(batch.states[index])


class _Batch:
    """Draws that follow each other in one generator. One thread does them all."""

    def __init__(self, state: Tensor):
        self.num_draws = 0
        self.states: list[Tensor] = []
        """The state of the generator after each draw that is done."""
        self._generator = torch.Generator("cpu")
        self._generator.set_state(state)
        self._draws: list[Callable[..., Any]] = []
        self._future: Future[None] | None = None

    def add(self, draw: Callable[..., Any]) -> None:
        self.num_draws += 1
        self._draws.append(draw)

    def start(self, pool: ThreadPoolExecutor) -> None:
        self._future = pool.submit(self._run)

    def wait(self) -> None:
        """Returns once all draws are done. If no thread has been told to do them, this one does."""
        if self._future is not None:
            self._future.result()
        else:
            self._run()

    def _run(self) -> None:
        while self._draws:
            self._draws[0](generator=self._generator)
            self.states.append(self._generator.get_state())
            del self._draws[0]  # and with it the whole tensor, if its values are copied


class _Unit:
    """Copies from whole tensors to parameters that can be made when the draws into the whole tensors are done."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]], num_bytes: int):
        self.copies = copies
        self.num_bytes = num_bytes
        self.target_storages = {storage_key(target) for target, _ in copies}


class _Operations(TorchDispatchMode):
    """Sees every operation of torch while a module is reset."""

    supports_higher_order_operators = True

    def __init__(self, draws: ParallelDraws):
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._draws.put_off(func, args, kwargs):
            return args[0]
        self._draws.prepare(func, args, kwargs)
        return func(*args, **kwargs)


class _MemoryAccess(TorchFunctionMode):
    """Sees calls of methods that use the memory of a tensor without an operation."""

    def __init__(self, draws: ParallelDraws):
        super().__init__()
        self._draws = draws

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEMORY_ACCESS:
            for value in _flat(args):
                if isinstance(value, Tensor):
                    value.detach()  # an operation, before which `_Operations` waits for the draws into the tensor
                    self._draws.draw_at_once(value)
        return func(*args, **(kwargs or {}))


def _is_simple_draw(draw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operation draws a tensor from torch's generator for the CPU, and with numbers that are valid.

    Others run at once, so that errors are raised where the reset called them.
    """
    if draw not in (_NORMAL, _UNIFORM) or any(value is not None for value in kwargs.values()):
        return False
    tensor = args[0]
    if not _has_one_storage(tensor) or tensor.device.type != "cpu" or tensor.dtype not in _FLOATS:
        return False
    if not tensor.is_contiguous() or tensor.is_inference():
        return False
    if draw is _NORMAL:
        return _normal_is_valid(*args[1:])
    return _uniform_is_valid(torch.finfo(tensor.dtype).max, *args[1:])


def _normal_is_valid(mean: float = 0.0, std: float = 1.0) -> bool:
    return std >= 0


def _uniform_is_valid(largest: float, low: float = 0.0, high: float = 1.0) -> bool:
    return -largest <= low <= high <= largest and high - low <= largest


def _has_one_storage(tensor: Tensor) -> bool:
    """Returns whether the memory of a tensor is its storage: a sparse tensor or a DTensor has others inside."""
    return tensor.layout is torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _state_bytes(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())
