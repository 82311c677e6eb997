import itertools
import multiprocessing
import os
import random
import re
import signal
import time
import traceback
from itertools import islice

import numpy as np
import pytest
import torch
from conftest import PATIENCE_SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import start_process

from shoal.data import BatchSchedule, Loader, samples_at
from shoal.data import loader as loader_module
from shoal.errors import UserError
from shoal.seeding import mix, seed_generators
from shoal.types import BatchPhase

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": torch.tensor(index)}


class Augmented(Numbers):
    """Draws from all three global generators, and draws a different amount of numbers for each sample."""

    def __getitem__(self, index):
        for _ in range(index % 3):
            random.random(), np.random.rand(), torch.rand(1)
        return {"x": torch.tensor([random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)}


class DrawsForFew(Numbers):
    def __getitem__(self, index):
        return {"x": torch.tensor(random.random() + np.random.rand() + torch.rand(1).item() if index > 12 else 0.0)}


class ReturnsItsProcessId(Numbers):
    def __getitem__(self, index):
        return {"x": torch.tensor(os.getpid())}


class Slow(Numbers):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Failing(Numbers):
    def __init__(self, size, error):
        super().__init__(size)
        self.error = error

    def __getitem__(self, index):
        if index == 5:
            raise self.error
        return super().__getitem__(index)


class KillsItsProcess(Numbers):
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def stack(samples):
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def masked(samples):
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    return {**stack(samples), "mask": torch.tensor(drawn, dtype=torch.float64)}


def contents(steps):
    """Returns the whole content of some steps as plain lists, for comparison."""
    return [
        [(list(m.epochs), list(m.ids), m.weight, {k: v.tolist() for k, v in m.data.items()}) for m in step]
        for step in steps
    ]


def keys_of(ranks):
    """Returns the keys of one step in global order, put together from what each rank received."""
    assert len({len(step) for step in ranks}) == 1
    return [
        (epoch, i)
        for slots in zip(*ranks, strict=True)
        for micro in slots
        if micro.weight
        for epoch, i in zip(micro.epochs, micro.ids, strict=True)
    ]


segments = st.lists(
    st.tuples(
        st.integers(1, 5),  # ranks
        st.integers(1, 7),  # batch size
        st.integers(1, 40),  # global batch size
        st.integers(0, 4),  # steps before the next change
        st.dictionaries(st.integers(1, 4), st.integers(1, 25), max_size=2),  # global batch size from later epochs on
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(epoch_size=st.integers(1, 60), seed=st.integers(0, 2**32), segments=segments)
def test_any_change_of_ranks_and_batches_keeps_the_order(epoch_size, seed, segments):
    position, received = 0, []
    for ranks, batch_size, global_batch_size, num_steps, later in segments:
        phases = [(0, global_batch_size), *sorted(later.items())]
        batches = BatchSchedule(tuple(BatchPhase(e, g, batch_size) for e, g in phases))
        loaders = [
            Loader(Numbers(epoch_size), stack, batches, seed=seed, data_rank=rank, data_size=ranks, position=position)
            for rank in range(ranks)
        ]
        for steps in islice(zip(*loaders, strict=True), num_steps):
            received += keys_of(steps)
            for micro in (micro for step in steps for micro in step):
                assert micro.data["x"].tolist() == list(micro.ids)
                assert len(micro.ids) == batch_size or micro.weight
        assert len({loader.position for loader in loaders}) == 1
        position = loaders[0].position
    assert received == samples_at(0, position, epoch_size, seed, True)
    for epoch in range(position // epoch_size):
        assert sorted(i for e, i in received if e == epoch) == list(range(epoch_size))


def test_fillers_repeat_the_first_samples_of_the_step_with_weight_0():
    batches = BatchSchedule.constant(5, 4)
    ranks = [
        next(iter(Loader(Numbers(100), stack, batches, seed=0, data_rank=r, data_size=3, shuffle=False)))
        for r in range(3)
    ]
    assert [(list(m.ids), m.weight) for [m] in ranks] == [([0, 1, 2], 1), ([3, 4], 1), ([0, 1, 2, 3], 0)]
    [filler] = next(iter(Loader(Numbers(100), stack, BatchSchedule.constant(1, 3), seed=0, data_rank=1, data_size=2)))
    assert len(filler.ids) == 3
    assert filler.weight == 0


@pytest.mark.parametrize("dataset", [Numbers(23), Augmented(23)], ids=["plain", "augmented"])
def test_workers_change_nothing(dataset):
    def run(num_workers, **options):
        batches = BatchSchedule((BatchPhase(0, 10, 2), BatchPhase(1, 7, 3)))
        loader = Loader(
            dataset, stack, batches, seed=3, data_rank=1, data_size=2, end=80, num_workers=num_workers, **options
        )
        return contents(loader)

    alone = run(0)
    assert len(alone) == BatchSchedule((BatchPhase(0, 10, 2), BatchPhase(1, 7, 3))).steps_between(0, 80, 23)
    assert run(1) == alone
    assert run(3, prefetch=4) == alone


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_position_is_exact_however_far_workers_read_ahead(num_workers):
    def loader(position=0):
        batches = BatchSchedule.constant(6, 2)
        return Loader(
            Numbers(20), stack, batches, seed=1, position=position, end=50, num_workers=num_workers, prefetch=4
        )

    whole = contents(loader())
    first = loader()
    start = contents(islice(first, 3))
    assert first.position == 18
    first.close()
    second = loader(first.position)
    assert start + contents(second) == whole
    assert second.position == 50


@pytest.mark.parametrize(("batch_size", "num_workers", "data_size"), [(1, 0, 1), (5, 2, 1), (4, 0, 3), (2, 1, 2)])
def test_random_numbers_belong_to_the_sample(batch_size, num_workers, data_size):
    def draws(batch_size, num_workers=0, data_size=1, seed=5):
        found = {}
        for rank in range(data_size):
            loader = Loader(
                Augmented(17),
                stack,
                BatchSchedule.constant(12, batch_size),
                seed=seed,
                data_rank=rank,
                data_size=data_size,
                end=51,
                num_workers=num_workers,
            )
            for micro in (micro for step in loader for micro in step):
                for epoch, i, x in zip(micro.epochs, micro.ids, micro.data["x"].tolist(), strict=True):
                    assert found.setdefault((epoch, i), x) == x
        return found

    reference = draws(3)
    assert draws(batch_size, num_workers, data_size) == reference
    assert len(reference) == 51
    for place in range(3):  # python, numpy, torch: every sample, epoch and seed has a different number
        assert len({x[place] for x in reference.values()}) == 51
        assert draws(3, seed=6)[0, 0][place] != reference[0, 0][place]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_draws_for_few_samples_repeats_itself(num_workers):
    """The first micro-batches draw nothing, but a run that goes on in the middle begins with one that draws."""

    def steps(position=0):
        random.seed(), np.random.seed(), torch.seed()  # another process has other states
        batches = BatchSchedule.constant(4, 2)
        options = {"shuffle": False, "position": position, "end": 24, "num_workers": num_workers}
        return contents(Loader(DrawsForFew(24), stack, batches, seed=0, **options))

    whole = steps()
    assert steps() == whole
    assert steps(position=12) == whole[3:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_of_a_collate_function_repeat(num_workers):
    def steps(position=0):
        random.seed(), np.random.seed(), torch.seed()
        batches = BatchSchedule.constant(6, 3)
        options = {"position": position, "end": 24, "num_workers": num_workers}
        return contents(Loader(Numbers(24), masked, batches, seed=0, **options))

    whole = steps()
    assert steps() == whole
    assert steps(position=12) == whole[2:]
    masks = [tuple(micro[3]["mask"]) for step in whole for micro in step]
    assert len(set(masks)) == len(masks)


def test_the_random_state_of_the_process_is_restored():
    def seed():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    seed()
    expected = draw(), draw()
    seed()
    first = draw()
    list(Loader(Augmented(10), stack, BatchSchedule.constant(4, 2), seed=0, end=10))
    assert (first, draw()) == expected


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_draw_from_any_generator_is_noticed(name):
    class Draws(Numbers):
        def __getitem__(self, index):
            draw = {"python": random.random, "numpy": np.random.randn, "torch": lambda: torch.rand(1).item()}[name]
            return {"x": torch.tensor(draw() if index == 7 else 0.0)}

    found = [
        next(iter(Loader(Draws(9), stack, BatchSchedule.constant(1, 1), seed=seed, shuffle=False, position=7)))
        for seed in (0, 0, 1)
    ]
    first, same, other = (step[0].data["x"].item() for step in found)
    assert first == same != other


def test_a_dataset_that_draws_nothing_is_read_once_and_not_seeded(monkeypatch):
    seeded, read = [], []

    class Noted(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    def seed_and_note(seed):
        seeded.append(seed)
        seed_generators(seed)

    monkeypatch.setattr(loader_module, "seed_generators", seed_and_note)
    list(Loader(Noted(30), stack, BatchSchedule.constant(6, 3), seed=0, end=30))
    assert sorted(read) == list(range(30))
    assert len(seeded) == 10  # once for each micro-batch


def test_the_three_generators_draw_different_numbers():
    seed_generators(mix(0, "sample", 0, 0))
    words = [random.getrandbits(32), int(np.random.randint(1 << 32)), torch.randint(1 << 32, (1,)).item()]
    assert len(set(words)) == 3


def test_starting_workers_does_not_advance_the_generator_of_torch():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(Loader(Numbers(4), stack, BatchSchedule.constant(2, 2), seed=0, end=4, num_workers=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_can_be_iterated_again_and_closed(persistent):
    loader = Loader(
        ReturnsItsProcessId(12),
        stack,
        BatchSchedule.constant(4, 2),
        seed=0,
        end=12,
        num_workers=2,
        persistent_workers=persistent,
    )
    children = set(multiprocessing.active_children())
    runs = []
    for steps in (None, 1, None):  # the second iteration stops in the middle
        found = list(islice(loader, steps))
        assert len(found) == (steps or 3)
        assert loader.position == 4 * len(found)
        runs.append({pid for step in found for micro in step for pid in micro.data["x"].tolist()})
    assert (runs[0] == runs[2]) is persistent
    assert os.getpid() not in runs[0]
    steps = iter(loader)
    next(steps)
    loader.close()
    for process in set(multiprocessing.active_children()) - children:
        process.join(30)  # they end by themselves once they are told to
    assert set(multiprocessing.active_children()) <= children
    with pytest.raises(RuntimeError, match="closed"):
        iter(loader)


@pytest.mark.parametrize("error", [ValueError("sample 5 is broken"), UserError("dataset.files: broken")])
def test_an_error_in_a_worker_is_raised_in_the_training_process(error):
    loader = Loader(Failing(20, error), stack, BatchSchedule.constant(4, 2), seed=0, num_workers=2)
    with pytest.raises(type(error), match="broken") as raised:
        list(islice(loader, 10))
    if isinstance(error, UserError):
        assert str(raised.value) == "dataset.files: broken"
    loader.close()
    traceback.clear_frames(raised.tb)  # ends the workers: of an iterator that is garbage they take ten seconds


def load_until_a_worker_dies():
    loader = Loader(KillsItsProcess(20), stack, BatchSchedule.constant(4, 2), seed=0, num_workers=2)
    print("started", flush=True)
    for _ in loader:
        pass


def test_a_killed_worker_is_an_error_and_not_a_hang(tmp_path):
    # In a separate process, because torch reports the death from a signal handler, which may interrupt any code.
    out, err = tmp_path / "out", tmp_path / "err"
    process = start_process(load_until_a_worker_dies, out=out, err=err)
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 1
    assert "started" in out.read_text()
    assert re.search("killed|EOFError|Connection", err.read_text())


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_start_methods(method):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        loader = Loader(Numbers(9), stack, BatchSchedule.constant(4, 2), seed=0, end=9, num_workers=1)
        assert contents(loader) == contents(Loader(Numbers(9), stack, BatchSchedule.constant(4, 2), seed=0, end=9))
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_time_spent_waiting_for_data_is_counted(num_workers):
    loader = Loader(Slow(6), stack, BatchSchedule.constant(3, 3), seed=0, end=6, num_workers=num_workers)
    for _ in loader:
        pass
    assert loader.waited_seconds >= 0.03


def test_an_empty_dataset_is_refused():
    with pytest.raises(UserError, match=r"train_data/eval_data: .*length 0"):
        Loader(Numbers(0), stack, BatchSchedule.constant(4, 2), seed=0)


def test_an_iterator_is_refused_because_it_cannot_be_resumed():
    with pytest.raises(UserError, match=r"train_data/eval_data: list_iterator has neither .* open\(start\)"):
        Loader(iter([1, 2]), stack, BatchSchedule.constant(4, 2), seed=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_are_pinned(num_workers):
    def collate(samples):
        batch = stack(samples)
        return {**batch, "pair": (batch["x"].clone(), [batch["x"].clone()]), "name": "kept"}

    loader = Loader(
        Numbers(8), collate, BatchSchedule.constant(4, 4), seed=0, end=8, num_workers=num_workers, pin_memory=True
    )
    for [micro] in loader:
        assert micro.data["x"].is_pinned()
        assert micro.data["pair"][0].is_pinned()
        assert micro.data["pair"][1][0].is_pinned()
        assert micro.data["name"] == "kept"


class Finite:
    """A stream of thirteen samples."""

    def open(self, start):
        return ({"x": torch.tensor(i)} for i in range(start, 13))


class Shards:
    num_shards = 2

    def open(self, shard, offset):
        return ({"x": torch.tensor(2 * item + shard)} for item in itertools.count(offset))


def ids_by_rank(dataset, batches, **options):
    """Returns the samples of each micro-batch that is not a filler, by rank and step."""
    ranks = [Loader(dataset, stack, batches, seed=0, data_rank=rank, data_size=2, **options) for rank in range(2)]
    return [[[m.data["x"].tolist() for m in step if m.weight] for step in loader] for loader in ranks]


def test_a_stream_that_ends_leaves_no_micro_batch_of_one_sample():
    first, second = ids_by_rank(Finite(), BatchSchedule.constant(16, 4))
    assert first == [[[0, 1, 2, 3], [8, 9, 10]]]
    assert second == [[[4, 5, 6, 7], [11, 12]]]


def test_drop_last_leaves_out_the_end_of_a_stream():
    assert ids_by_rank(Finite(), BatchSchedule.constant(8, 4), drop_last=True) == [[[[0, 1, 2, 3]]], [[[4, 5, 6, 7]]]]


def test_shards_leave_no_micro_batch_of_one_sample():
    first, second = ids_by_rank(Shards(), BatchSchedule.constant(9, 4), end=9)
    assert first == [[[0, 2, 4], [6, 8]]]
    assert second == [[[1, 3, 5, 7]]]
