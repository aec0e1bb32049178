"""What ranks go through in `test_faults.py`: each scenario is called on every rank, and gives what it saw."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.patience import PATIENCE, wait_until
from ucformat.storage.strided import write_all
from ucformat.torch import PerRank, async_save, load, save
from ucformat.torch.saving import background
from ucformat.torch.saving.handles import SaveHandle, wait_until_done

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: So long that nobody reaches it: one who waits for a rank that died, and is not told, hangs, and
#: fails the test.
TIMEOUT = 10 * PATIENCE
#: So that a small state has many shards, and a rank many writes and messages.
SMALL: dict[str, Any] = {"chunk_bytes": 4096, "shard_bytes": 16384}


def full_state(seed: int, rows: int = 301, columns: int = 203) -> dict[str, torch.Tensor]:
    """The whole tensors of a state, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(rows, columns, generator=generator),
        "columns": torch.randn(rows, columns, generator=generator),
        "both": torch.randn(columns, generator=generator),
    }


def sharded(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
    """What this rank has of a tensor that is cut along a dim over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if dim is None:
        return DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False)
    parts = whole.chunk(dist.get_world_size(), dim)
    rank = dist.get_rank()
    mine = parts[rank].clone() if rank < len(parts) else whole.narrow(dim, 0, 0).clone()
    return DTensor.from_local(
        mine, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def state_of(seed: int) -> dict[str, Any]:
    """A state over all ranks, of which each rank holds other boxes than the grid of shards has."""
    whole = full_state(seed)
    dims = {"rows": 0, "columns": 1, "both": None}
    return {"model": {name: sharded(t, dims[name]) for name, t in whole.items()}, "step": seed}


@contextmanager
def error_of() -> Iterator[dict[str, Any]]:
    """What the block raises."""
    seen: dict[str, Any] = {}
    try:
        yield seen
    except Exception as error:  # noqa: BLE001 - looked at by the tests
        seen.update(kind=type(error).__name__, message=getattr(error, "message", str(error)))


def hook_writes(act: Callable[[int], None]) -> None:
    """Call `act` with the bytes written so far, after every 4 KiB of data."""
    total = 0

    def hooked(fd: int, data: memoryview) -> None:
        nonlocal total
        for start in range(0, data.nbytes, 4096):
            act(total)
            write_all(fd, data[start : start + 4096])
            total += len(data[start : start + 4096])

    mock.patch("ucformat.storage.local.write_all", hooked).start()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def plain_save(folder: Path, name: str, seed: int, form: str, *, overwrite: bool = False) -> str:
    """Save, and give the id."""
    options = SMALL if form == "zarr" else {}
    saved = save(
        state_of(seed),
        folder / name,
        form=form,  # type: ignore[arg-type]
        overwrite=overwrite,
        timeout=TIMEOUT,
        **options,
    )
    return saved.id


def killed_in_save(folder: Path, form: str, doomed: int, *, overwrite: bool) -> Any:
    """Rank `doomed` is killed after some writes of its data; the others tell what they saw."""
    plain_save(folder, "other", 1, form)
    plain_save(folder, "here", 2, form)
    if dist.get_rank() == doomed:
        hook_writes(lambda total: die() if total > 40_000 else None)
    name = "here" if overwrite else "new"
    with error_of() as seen:
        plain_save(folder, name, 3, form, overwrite=overwrite)
    return seen


#: What the writing process of a rank runs before it serves, so that the scenario has a hand on it.
GUARDED = "from tests.torch import faults_program as f; f.guard(); "


def guard() -> None:
    """Let writes wait while there is a file `hold` or `hold-<rank>`; kill this process where there is `die-<rank>`."""
    folder = Path(os.environ["UCFORMAT_TEST_FOLDER"])

    def act(total: int) -> None:
        if total > 20_000:
            (folder / f"writing-{os.environ['RANK']}").touch()
            while (folder / "hold").exists() or (folder / f"hold-{os.environ['RANK']}").exists():
                time.sleep(0.01)
            if (folder / f"die-{os.environ['RANK']}").exists():
                (folder / f"die-{os.environ['RANK']}").unlink()
                die()

    hook_writes(act)


def guard_writers(folder: Path) -> None:
    os.environ["UCFORMAT_TEST_FOLDER"] = str(folder)
    background._MAIN = GUARDED + background._MAIN


def killed_in_async_save(folder: Path, form: str, doomed: int) -> Any:
    """Rank `doomed` is killed while its writer writes."""
    plain_save(folder, "other", 1, form)
    plain_save(folder, "here", 2, form)
    guard_writers(folder)
    rank = dist.get_rank()
    (folder / f"hold-{doomed}").touch()
    options = SMALL if form == "zarr" else {}
    handle = async_save(
        state_of(3),
        folder / "here",
        form=form,  # type: ignore[arg-type]
        overwrite=True,
        timeout=TIMEOUT,
        **options,
    )
    wait_until((folder / f"writing-{doomed}").exists)
    if rank == doomed:
        die()
    with error_of() as seen:
        handle.wait(PATIENCE)
    with error_of() as again:
        async_save(state_of(3), folder / "more", form=form, timeout=TIMEOUT)  # type: ignore[arg-type]
    return seen, again


@contextmanager
def full_disk(how: str, after: int) -> Iterator[None]:
    """No more than so many bytes can be written by this process, in all or to one file."""
    if how == "no space":
        write, left = os.write, [after]

        def limited(fd: int, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(fd, data)

        os.write = limited
        try:
            yield
        finally:
            os.write = write
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))  # Python ignores SIGXFSZ
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def disk_full(folder: Path, doomed: int) -> Any:
    """The disk of one rank is full, in both forms; then it has room again."""
    out = []
    for form in ("zarr", "packed"):
        for how in ("no space", "file size"):
            name = f"{form}-{how}"
            with error_of() as seen:
                if dist.get_rank() == doomed:
                    with full_disk(how, 60_000 if how == "no space" else 9_000):
                        plain_save(folder, name, 1, form)
                else:
                    plain_save(folder, name, 1, form)
            dist.barrier()
            left = sorted(
                str(p.relative_to(folder)) for p in (folder / name).rglob("*") if p.is_file()
            )
            dist.barrier()
            plain_save(folder, name, 2, form)
            out.append((name, seen, left))
    return out


def async_life(folder: Path) -> Any:
    """Saves in the background: what they copy, how many are under way, and what their failures do."""
    guard_writers(folder)
    rank = dist.get_rank()
    out: dict[str, Any] = {}
    hold, dying = folder / "hold", folder / "die-1"

    def begin(name: str, seed: int, in_flight: int = 1) -> SaveHandle:
        return async_save(
            state_of(seed), folder / name, in_flight=in_flight, timeout=TIMEOUT, **SMALL
        )

    def only_rank_0(act: Callable[[], object]) -> None:
        dist.barrier()
        if not rank:
            act()
        dist.barrier()

    state = state_of(1)
    handle = async_save(state, folder / "copied", timeout=TIMEOUT, **SMALL)
    for tensor in state["model"].values():
        tensor.to_local().fill_(-1)  # training goes on
    out["copied"] = (handle.staged, handle.wait(PATIENCE).id, handle.committed, handle.error())

    only_rank_0(hold.touch)
    first = begin("first", 2)
    out["under way"] = (first.staged, first.done, first.committed)
    second = begin("second", 3, in_flight=2)
    out["two under way"] = (first.done, second.done)
    with error_of() as seen:
        second.wait(0.05)
    out["impatient"] = seen["kind"]
    waited = []

    def settle_once_all_wait(handle: SaveHandle) -> None:
        waited.append(handle)
        (folder / f"waits-{rank}").touch()
        wait_until(lambda: all((folder / f"waits-{r}").exists() for r in range(2)))
        hold.unlink(missing_ok=True)
        wait_until_done(handle)

    vars(background)["wait_until_done"] = settle_once_all_wait
    third = begin("third", 4, in_flight=2)
    out["room made"] = (waited == [first], first.done)
    vars(background)["wait_until_done"] = wait_until_done
    fourth = begin("fourth", 5)
    out["back-pressure"] = (second.done, third.done)
    fourth.wait(PATIENCE)

    # a writer dies: all that wait see it, and go on
    only_rank_0(dying.touch)
    handle = begin("dead", 6)
    with error_of() as seen:
        handle.wait(PATIENCE)
    out["died"] = (seen, handle.done, handle.committed)
    out["after"] = begin("after", 7).wait(PATIENCE).id

    # only rank 0 looks at it: the next call raises on all
    only_rank_0(dying.touch)
    handle = begin("unseen", 8)
    if not rank:
        with error_of():
            handle.wait(PATIENCE)
    with error_of() as seen:
        begin("refused", 9)
    out["unseen"] = seen

    # a writer that idles dies: nobody loses anything
    (mine,) = background.writers.values() or [None]
    assert mine is None
    begin("before", 10).wait(PATIENCE)
    (mine,) = background.writers.values()
    if rank == 1:
        os.kill(mine._process.pid, signal.SIGKILL)
        mine._process.wait()
    out["idle"] = begin("idle", 11).wait(PATIENCE).id

    # a rank that cannot stage tells all
    (mine,) = background.writers.values()
    if rank == 1:
        mine._pool.shutdown()
    with error_of() as seen:
        begin("unstaged", 12).wait(PATIENCE)
    out["unstaged"] = seen
    mapped = [p for p in Path("/proc/self/fd").iterdir() if "ucformat-stage" in os.path.realpath(p)]
    (mine,) = background.writers.values()
    out["buffers"] = (
        len(mapped),
        2 * len(mine._buffers),
    )  # its descriptor, and that of the mapping
    return out


def manners(folder: Path) -> Any:
    """Conflicts and differences between ranks: the same error on all, at once, and the group stays usable."""
    rank = dist.get_rank()
    out: dict[str, Any] = {"id": plain_save(folder, "taken", 1, "zarr")}
    attempts: dict[str, Callable[[], Any]] = {
        "conflict": lambda: plain_save(folder, "taken", 2, "packed"),
        "object": lambda: save({"a": {"b": rank}}, folder / "x", timeout=TIMEOUT),
        "tensor": lambda: save({"w": torch.full((3,), float(rank))}, folder / "x", timeout=TIMEOUT),
        "parts": lambda: save(
            {"w": torch.full((200, 200), float(rank))}, folder / "x", timeout=TIMEOUT
        ),
        "shape": lambda: save({"w": torch.ones(2 + rank)}, folder / "x", timeout=TIMEOUT),
        "dtype": lambda: save(
            {"w": torch.ones(2, dtype=[torch.float32, torch.int32][rank])}, folder / "x"
        ),
        "terms": lambda: save({"w": torch.ones(2)}, folder / f"x{rank}", timeout=TIMEOUT),
        "collect": lambda: save(
            {"w": torch.ones(2), "f": (lambda: 0) if rank else 0}, folder / "x", timeout=TIMEOUT
        ),
        "async": lambda: async_save(
            {"f": (lambda: 0) if rank else 0}, folder / "x", timeout=TIMEOUT
        ),
        "hole": lambda: save(
            {"w": sharded(torch.ones(6), 0)} if not rank else {}, folder / "x", timeout=TIMEOUT
        ),
        "open": lambda: load(
            {"both": torch.ones(203)}, folder / ("taken" if rank else "nowhere"), timeout=TIMEOUT
        ),
        "fit": lambda: load({"both": torch.ones(203 + rank)}, folder / "taken", timeout=TIMEOUT),
    }
    for name, attempt in attempts.items():
        with error_of() as seen:
            attempt()
        out[name] = seen
    state: dict[str, Any] = {
        "w": torch.full((3,), float(rank)),
        "n": rank,
        "mine": PerRank({"rank": rank}),
    }
    save(state, folder / "first", replicas="first", timeout=TIMEOUT)
    load(state, folder / "first", timeout=TIMEOUT)
    out["first"] = (state["w"].tolist(), state["n"], state["mine"].value)
    return out
