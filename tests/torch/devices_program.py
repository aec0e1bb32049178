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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

import ucformat
from ucformat.errors import UsageError
from ucformat.geometry.box import Box
from ucformat.torch import Rng, certify, load, load_into, save, state_dict
from ucformat.torch.loading import read as reading
from ucformat.torch.loading import share
from ucformat.torch.loading.match import Matched
from ucformat.torch.saving.background import HostBuffer, room_for, stage
from ucformat.torch.state import fingerprint as state_fingerprint
from ucformat.torch.state import memory, subclasses
from ucformat.torch.state.elements import map_shared
from ucformat.torch.state.fingerprint import pieces_fingerprints
from ucformat.torch.state.local import local_of, local_state

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS"]

COUNT = 4


class Accelerator:
    """Devices, and what waits in each of their streams; a thread has a stream of its own unless it enters another.

    Attributes:
        waits: how often the host has waited.
        copied: the bytes of copies to the host that were waited for at once.
        plain: whether there are neither streams nor events nor pinned memory.
        multiply: what is done instead of a multiplication.
    """

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, object], list[Callable[[], object]]] = {}
        self._current = threading.local()
        self.generators = [torch.zeros(16, dtype=torch.uint8) for _ in range(COUNT)]
        self.waits = self.copied = 0
        self.plain = False
        self.multiply: Callable[..., torch.Tensor] | None = None

    def current(self) -> int:
        return getattr(self._current, "index", 0)

    def use(self, device: Any) -> None:
        self._current.index = self.index(device)

    def index(self, device: Any = None) -> int:
        if device is None:
            return self.current()
        return device if isinstance(device, int) else torch.device(device).index or 0

    def begin(self, device: int, work: Callable[[], object], stream: object = None) -> None:
        stream = stream or self.streams().get(device) or threading.get_ident()
        self.waiting.setdefault((device, stream), []).append(work)

    def finish(self, device: int, stream: object = None, until: Any = None) -> None:
        """Do what was begun in a stream (default: the current one), up to and with one of its works."""
        stream = stream or self.streams().get(device) or threading.get_ident()
        works = self.waiting.get((device, stream), [])
        while works and (until is None or until in works):
            works.pop(0)()
        if not works:
            self.waiting.pop((device, stream), None)

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1
        for at, stream in list(self.waiting):
            if at == self.index(device):
                self.finish(at, stream)

    def streams(self) -> dict[int, object]:
        """The streams that this thread has entered, by device."""
        if not hasattr(self._current, "streams"):
            self._current.streams = {}
        streams: dict[int, object] = self._current.streams
        return streams

    def current_stream(self, device: Any = None) -> Stream:
        if self.plain:
            raise NotImplementedError
        index = self.index(device)
        return Stream(f"fakegpu:{index}", self.streams().get(index, threading.get_ident()))


class Stream:
    """A stream of the make-believe accelerator, and an event of it."""

    def __init__(self, device: Any, key: object = None) -> None:
        if fake.plain:
            raise RuntimeError
        self.device, self.key = fake.index(device), key or object()

    def __enter__(self) -> None:
        self.before = fake.streams().get(self.device)
        fake.streams()[self.device] = self.key

    def __exit__(self, *_: object) -> None:
        del fake.streams()[self.device]
        if self.before is not None:
            fake.streams()[self.device] = self.before

    def record_event(self) -> Event:
        works = fake.waiting.get((self.device, self.key))
        return Event(self.device, self.key, works[-1] if works else None)


class Event:
    """What was begun last in a stream when it was recorded."""

    def __init__(self, device: int, key: object, last: Any) -> None:
        self.device, self.key, self.last = device, key, last

    def synchronize(self) -> None:
        fake.waits += 1
        if self.last is not None:
            fake.finish(self.device, self.key, self.last)


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
        device = next(a.device for a in tree_leaves(args) if isinstance(a, OnDevice))
        plain = tree_map_only(OnDevice, lambda a: a.held, args)
        if func is torch.ops.aten.copy_.default:
            fake.begin(device.index, lambda: plain[0].copy_(plain[1]))
            if not (len(args) > 2 and args[2]):
                fake.finish(device.index)
            return args[0]
        if func in VIEWS:
            return OnDevice(func(*plain, **kwargs), device)
        fake.finish(device.index)
        if (
            func is torch.ops.aten._to_copy.default
            and torch.device(kwargs.get("device", device)).type == "cpu"
        ):
            fake.copied += plain[0].nbytes
            return plain[0].clone()
        if func in MULTIPLICATIONS and fake.multiply is not None:
            func = fake.multiply
        out = func(*plain, **{k: v for k, v in kwargs.items() if k != "device"})
        return tree_map_only(torch.Tensor, lambda t: OnDevice(t, device), out)


MULTIPLICATIONS = {torch.ops.aten.mul.Tensor}


class Made(TorchFunctionMode):
    """Tensors that are made on the make-believe accelerator, or copied there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func is torch.Tensor.tolist:  # which takes no tensor of a subclass
            return args[0].cpu().numpy().tolist()
        if func is torch.Tensor.to and isinstance((*args, None)[1], torch.device):
            device, func, args = args[1], torch.Tensor.clone, args[:1]
        if isinstance(device, torch.device) and device.type == "fakegpu":
            kwargs.pop("device", None)
            return OnDevice(func(*args, **kwargs), device)
        return func(*args, **kwargs)


VIEWS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.unsqueeze.default,
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
    torch.Stream = Stream
    empty = torch.empty

    def empty_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and fake.plain:
            raise RuntimeError
        if pin_memory:
            PINNED_ON.append(fake.current())
        return empty(*size, **options)

    torch.empty = empty_pinned
    refused = subclasses.why_refused
    subclasses.why_refused = lambda tensor: (
        None if isinstance(tensor, OnDevice) else refused(tensor)
    )


PINNED_ON: list[int] = []


def whole(seed: int, rows: int = 64, columns: int = 32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


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


def overlapping(folder: Path) -> None:
    """Two batches are read at once, and each is before copies of the one before are waited for."""
    place = saved(folder)
    reading.STAGED_BYTES = 2048  # so that there are four parts, and room for two
    waits: list[int] = []
    read, both = reading._read_straight, threading.Barrier(2)

    def noting(*arguments: Any) -> Any:
        waits.append(fake.waits)
        if 1 < len(waits) <= 3:  # the first call is for what is on the host: nothing
            both.wait(30)
        return read(*arguments)

    module: Any = reading
    module._read_straight = noting
    cores, module.default_threads = module.default_threads, lambda: 2
    tensors = empty_on_devices()
    try:
        fake.waits = 0
        load({"on2": tensors["on2"]}, place, leave=("on1", "on3"))
    finally:
        module._read_straight, module.default_threads = read, cores
    assert torch.equal(tensors["on2"].held, whole(2))
    assert len(waits) == 5
    assert waits[1] == waits[2] < waits[3], waits


def plain_device(folder: Path) -> None:
    """A device without streams of its own, events and pinned memory is loaded and staged all the same."""
    fake.plain = True
    try:
        reading.STAGED_BYTES = 2048
        tensors, place = empty_on_devices(), saved(folder)
        load(tensors, place)
        check(tensors)
        staging(folder)
    finally:
        fake.plain = False


def fingerprints(_: Path) -> None:
    """They are computed on the device, in any layout; hardly anything is copied from there."""
    shapes = {"rows": (1000, 96), "columns": (40, 1024), "some": (60, 700), "long": (50_000,)}
    wholes = {"rows": (1000, 96), "columns": (40, 4096), "some": (60, 1280), "long": (70_000,)}
    with Made():
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
            pieces, expected = [], []
            for name, shape in shapes.items():
                held = whole(1, *shape, *[1] * (2 - len(shape))).reshape(shape)
                held = (held * 100).to(dtype) if dtype != torch.uint8 else held.abs().to(dtype)
                for tensor in (held, OnDevice(held, "fakegpu:1")):
                    shard = local_of(name, "weight", tensor)
                    box = Box(tuple(w - n for w, n in zip(wholes[name], shape, strict=True)), shape)
                    (piece,) = shard.pieces
                    piece = replace(piece, box=box)
                    shard = replace(shard, info=replace(shard.info, shape=wholes[name]))
                    if tensor is held:
                        expected += pieces_fingerprints([(shard, piece)])
                    else:
                        pieces.append((shard, piece))
            for small in (0, 1 << 20):
                with mock.patch.object(state_fingerprint, "_SMALL_BYTES", small):
                    fake.copied = 0
                    assert pieces_fingerprints(pieces) == expected, dtype
                    held_bytes = sum(shard.nbytes for shard, _ in pieces)
                    sums = fake.copied - (held_bytes if small else 0)
                    assert 0 <= sums <= 500, sums


def certifying(folder: Path) -> None:
    """A certificate of tensors on devices, of which it copies sums; one element that differs is found."""
    tensors = {f"on{d}": whole(d, rows=2000) for d in (1, 2, 3)}
    save(tensors, folder / "certified", overwrite=True)
    on_devices = {name: OnDevice(t.clone(), f"fakegpu:{name[2:]}") for name, t in tensors.items()}
    with Made():
        fake.copied = 0
        assert certify(on_devices, folder / "certified")
        assert fake.copied <= 500
        on_devices["on2"].held[1234, 5] += 1
        certificate = certify(on_devices, folder / "certified")
        assert [e.name for e in certificate.different] == ["on2"]
        assert "[1234, 5]" in certificate.different[0].detail


def saving_what_is_still_computed(folder: Path) -> None:
    """The fingerprints of what is in memory are of what kernels in any stream have made of it."""
    tensors = {f"on{d}": OnDevice(torch.zeros(2000, 32), f"fakegpu:{d}") for d in (1, 2, 3)}
    for d in (1, 2, 3):
        fake.begin(d, partial(tensors[f"on{d}"].held.copy_, whole(d, 2000)), stream="training")
    with Made():
        save(tensors, folder / "certified save", certify=True)


def other_arithmetic(_: Path) -> None:
    """A device that has no integers of 64 bits, or whose integers do not wrap, computes no fingerprints."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() * b).clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)

    def missing(*_: object) -> torch.Tensor:
        raise NotImplementedError

    tensor = whole(1, rows=3000)
    host, device = (local_of("w", "weight", t) for t in (tensor, OnDevice(tensor, "fakegpu:1")))
    for multiply in (saturating, missing):
        state_fingerprint._computes_exactly.cache_clear()
        fake.multiply, fake.copied = multiply, 0
        try:
            with Made():
                found, expected = (
                    pieces_fingerprints((shard, piece) for piece in shard.pieces)
                    for shard in (device, host)
                )
        finally:
            fake.multiply = None
            state_fingerprint._computes_exactly.cache_clear()
        assert found == expected
        assert 0 <= fake.copied - tensor.nbytes <= 500


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
    module = torch.nn.ParameterDict({n: OnDevice(t.held, t.device) for n, t in tensors.items()})
    for d in (1, 2, 3):
        fake.begin(d, partial(tensors[f"on{d}"].held.fill_, -1), stream="training")
    load_into(module, place)
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
        overlapping,
        plain_device,
        fingerprints,
        certifying,
        saving_what_is_still_computed,
        other_arithmetic,
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
