"""What devices do to saving and loading, on a make-believe accelerator; one scenario after another, in one process.

Nothing that is begun there is done before somebody waits for it: on that device, and in that stream
or in all. A program that waits on the wrong device so gets the wrong bytes, every time.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch.utils import backend_registration

import ucformat
from ucformat.errors import UsageError
from ucformat.torch import Rng, load, save, state_dict
from ucformat.torch.loading import read as reading
from ucformat.torch.loading import share
from ucformat.torch.loading.match import Matched
from ucformat.torch.saving.background import HostBuffer, room_for, stage
from ucformat.torch.state import memory, subclasses
from ucformat.torch.state.elements import map_shared
from ucformat.torch.state.local import local_of, local_state

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS"]

COUNT = 4


class Accelerator:
    """Devices, the streams on them, and what waits in each; a stream belongs to the thread that uses it."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, object], list[Callable[[], object]]] = {}
        self._current = threading.local()
        self.generators = [torch.zeros(16, dtype=torch.uint8) for _ in range(COUNT)]

    def current(self) -> int:
        return getattr(self._current, "index", 0)

    def use(self, device: Any) -> None:
        self._current.index = self.index(device)

    def index(self, device: Any = None) -> int:
        if device is None:
            return self.current()
        return device if isinstance(device, int) else torch.device(device).index or 0

    def begin(self, device: int, work: Callable[[], object], stream: object = None) -> None:
        self.waiting.setdefault((device, stream or threading.get_ident()), []).append(work)

    def finish(self, device: int, stream: object) -> None:
        for work in self.waiting.pop((device, stream), []):
            work()

    def synchronize(self, device: Any = None) -> None:
        for at, stream in list(self.waiting):
            if at == self.index(device):
                self.finish(at, stream)

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(self.index(device), threading.get_ident())


class Stream:
    def __init__(self, device: int, thread: int) -> None:
        self.device, self.thread = device, thread

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        fake.finish(self.device, self.thread)


class OnDevice(torch.Tensor):
    """A tensor of the make-believe accelerator; its elements are held on the host."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: Any) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = [a.held if isinstance(a, OnDevice) else a for a in args]
        device = next(a.device for a in args if isinstance(a, OnDevice))
        if func is torch.ops.aten.copy_.default:
            fake.begin(device.index, lambda: plain[0].copy_(plain[1]))
            if not (len(args) > 2 and args[2]):
                fake.finish(device.index, threading.get_ident())
            return args[0]
        if (
            func is torch.ops.aten._to_copy.default
            and torch.device(kwargs.get("device", device)).type == "cpu"
        ):
            fake.finish(device.index, threading.get_ident())
            return plain[0].clone()
        assert func in VIEWS, func
        return OnDevice(func(*plain, **kwargs), device)


VIEWS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.as_strided.default,
}


class Module(backend_registration._DummyBackendModule):
    """What `torch.get_device_module` gives."""

    def device_count(self) -> int:
        return COUNT

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [g.clone() for g in fake.generators]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        fake.generators[device] = state.clone()


fake = Accelerator()


class _On:
    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before = fake.current()
        fake.use(self.index)

    def __exit__(self, *_: object) -> None:
        fake.use(self.before)


def install() -> None:
    backend_registration._setup_privateuseone_for_python_backend("fakegpu", backend_module=Module())
    module: Any = torch.accelerator
    module.synchronize, module.current_stream = fake.synchronize, fake.current_stream
    module.current_device_index, module.set_device_index, module.device_index = (
        fake.current,
        fake.use,
        _On,
    )
    empty = torch.empty

    def empty_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            PINNED_ON.append(fake.current())
        return empty(*size, **options)

    torch.empty = empty_pinned
    refused = subclasses.why_refused
    subclasses.why_refused = lambda tensor: (
        None if isinstance(tensor, OnDevice) else refused(tensor)
    )


PINNED_ON: list[int] = []


def whole(seed: int, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def on_devices(seed: int = 0) -> dict[str, OnDevice]:
    """A tensor on each of the devices 1 to 3."""
    return {f"on{d}": OnDevice(whole(seed + d), f"fakegpu:{d}") for d in (1, 2, 3)}


def empty_on_devices() -> dict[str, OnDevice]:
    return {f"on{d}": OnDevice(torch.zeros(64, 32), f"fakegpu:{d}") for d in (1, 2, 3)}


def saved(folder: Path) -> Path:
    save({f"on{d}": whole(d) for d in (1, 2, 3)}, folder / "saved", overwrite=True)
    return folder / "saved"


def check(tensors: dict[str, OnDevice]) -> None:
    for d in (1, 2, 3):
        assert torch.equal(tensors[f"on{d}"].held, whole(d)), f"device {d}"


def staging(folder: Path) -> None:
    """Each device's copies are done when the copy is staged, whatever device is current."""
    state = local_state(on_devices())
    buffer = HostBuffer(room_for(state))
    with ThreadPoolExecutor(1) as pool:
        _, slots = stage(state, buffer, pool)
    memory = map_shared(buffer.fd, buffer.nbytes)
    for d, (begin, end) in zip((1, 2, 3), slots, strict=True):
        assert memory[begin:end].tobytes() == whole(d).numpy().tobytes(), f"device {d}"
    buffer.close()


def other_streams(folder: Path) -> None:
    """What training has begun in streams of its own is in the checkpoint, staged or saved."""
    for way in ("staged", "saved"):
        tensors = {
            name: OnDevice(torch.zeros(64, 32), t.device) for name, t in on_devices().items()
        }
        for d in (1, 2, 3):
            fake.begin(d, partial(tensors[f"on{d}"].held.copy_, whole(d)), stream="training")
        if way == "saved":
            save(tensors, folder / "streams")
            ck = ucformat.open(folder / "streams")
            assert all(np.array_equal(ck[f"on{d}"][...], whole(d).numpy()) for d in (1, 2, 3))
            continue
        state = local_state(tensors)
        buffer = HostBuffer(room_for(state))
        with ThreadPoolExecutor(1) as pool:
            _, slots = stage(state, buffer, pool)
        for d, (begin, end) in zip((1, 2, 3), slots, strict=True):
            assert buffer.memory[begin:end].tobytes() == whole(d).numpy().tobytes(), f"device {d}"
        buffer.close()


def failing_copy(folder: Path) -> None:
    """Where one copy fails, those begun before it are done: the memory may be given back."""
    tensors: dict[str, Any] = {**on_devices(), "wrong": OnDevice(whole(9), "fakegpu:1")}
    state = local_state(tensors)
    buffer = HostBuffer(room_for(state))

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    state.tensors[-1].tensor.__class__ = type(
        "Refusing", (OnDevice,), {"__torch_dispatch__": refuse}
    )
    with ThreadPoolExecutor(1) as pool:
        try:
            stage(state, buffer, pool)
        except RuntimeError:
            assert not fake.waiting
        else:
            raise AssertionError
    buffer.close()


def loading(folder: Path) -> None:
    """Buffers are filled again when their copies are done, on each device; pinned memory is asked for on a device."""
    place = saved(folder)
    reading.STAGED_BYTES = 2048  # so that each buffer is used many times
    PINNED_ON.clear()
    tensors = empty_on_devices()
    load(tensors, place)
    check(tensors)
    assert not fake.waiting
    assert set(PINNED_ON) <= {1, 2, 3}
    assert PINNED_ON


def loading_in_a_thread(folder: Path) -> None:
    """The same in a pool's thread, whose current device is 0."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loading, folder).result()


def loading_behind_training(folder: Path) -> None:
    """What training still writes to a tensor does not come after what is loaded."""
    place = saved(folder)
    tensors = empty_on_devices()
    for d in (1, 2, 3):
        fake.begin(d, partial(tensors[f"on{d}"].held.fill_, -1), stream="training")
    load(tensors, place)
    for d in (1, 2, 3):
        fake.synchronize(d)
    check(tensors)


def shared_reading(folder: Path) -> None:
    """A thread that reads what is handed on has the current device of the thread that loads."""
    place = saved(folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    reading.STAGED_BYTES = 2048
    seen: list[int] = []
    marks = memory.record_events

    def noting(found: Any) -> Any:
        seen.append(fake.current())
        return marks(found)

    module: Any = reading
    module.record_events = noting
    tensors = empty_on_devices()
    fake.use(2)
    broadcast = dist.broadcast
    dist.broadcast = lambda *_, **__: None  # of one rank
    try:
        load(tensors, place, broadcast_group=dist.group.WORLD)
    finally:
        dist.broadcast, module.record_events = broadcast, marks
        fake.use(0)
        dist.destroy_process_group()
    check(tensors)
    assert set(seen) == {2}


def host_memory(_: Path) -> None:
    """What is copied from memory that ranks share is copied before other parts are read into it."""
    tensors = empty_on_devices()
    targets = [local_of(name, "weight", tensor) for name, tensor in tensors.items()]
    each = whole(1).nbytes
    memory = torch.cat([whole(d) for d in (1, 2, 3)]).view(-1).view(torch.uint8)
    parts = [
        share._Shared(b"", Matched(t, t.info), 0, n * each, (n + 1) * each)
        for n, t in enumerate(targets)
    ]
    share._HostMemory(memory, memory.numel()).fill(0, parts)
    memory.zero_()
    check(tensors)


def cast_and_evaluated(folder: Path) -> None:
    """A cast on the way, and weights that are read on a device."""
    place = saved(folder)
    tensors = {n: OnDevice(t.held.double(), t.device) for n, t in empty_on_devices().items()}
    load(tensors, place, cast=True)
    assert all(torch.equal(tensors[f"on{d}"].held, whole(d).double()) for d in (1, 2, 3))
    assert all(torch.equal(t, whole(int(n[2:]))) for n, t in state_dict(place).items())


def generators(folder: Path) -> None:
    """Random generators go by device; onto fewer devices it is decided before anything is changed."""

    def drawn(*indices: int, count: int = COUNT) -> list[torch.Tensor]:
        return [
            torch.tensor([7] * 8 + [int(i in indices)] * 8, dtype=torch.uint8) for i in range(count)
        ]

    def now() -> list[int]:
        return [int(g[8]) for g in fake.generators]

    rng = Rng()
    fake.generators = drawn(0, 3)
    state = rng.state_dict()
    assert len(state["devices"]) == COUNT
    fake.generators = drawn()
    rng.load_state_dict(state)
    assert now() == [1, 0, 0, 1]

    # one of eight, as of a rank that drives one: its current device has it
    fake.generators = drawn()
    fake.use(1)
    of_eight = {**state, "devices": drawn(6, count=8)}
    settled = [int(g[8]) for g in rng.settled(of_eight)["devices"]]
    assert now() == [0, 0, 0, 0]
    rng.load_state_dict(of_eight)
    fake.use(0)
    assert now() == settled == [0, 1, 0, 0]

    # two of eight: nothing is changed
    fake.generators = drawn()
    torch.manual_seed(3)
    before = rng.state_dict()
    bad = {**state, "devices": drawn(2, 6, count=8), "python": before["python"]}
    for act in (rng.settled, rng.load_state_dict):
        try:
            act(bad)
        except UsageError as error:
            assert "2, 6" in error.message  # noqa: PT017
        else:
            raise AssertionError
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert now() == [0, 0, 0, 0]

    # and no tensor either
    fake.generators = drawn(2, 6, count=8)
    save({"w": torch.ones(3), "rng": rng}, folder / "eight")
    fake.generators = drawn()
    weights = torch.zeros(3)
    try:
        load({"w": weights, "rng": rng}, folder / "eight")
    except ucformat.errors.StateMismatch as error:
        assert "devices 2, 6" in error.message  # noqa: PT017
    else:
        raise AssertionError
    assert not weights.any()


SCENARIOS = {
    f.__name__: f
    for f in (
        staging,
        other_streams,
        failing_copy,
        loading,
        loading_in_a_thread,
        loading_behind_training,
        shared_reading,
        host_memory,
        cast_and_evaluated,
        generators,
    )
}


def main() -> None:
    install()
    out = {}
    for name, scenario in SCENARIOS.items():
        try:
            scenario(Path(sys.argv[1]))
            out[name] = ""
        except BaseException:  # noqa: BLE001 - told to the test
            out[name] = traceback.format_exc()
        fake.waiting.clear()
    print(json.dumps(out))  # noqa: T201


if __name__ == "__main__":
    main()
