"""Verifies a checkpoint before it is loaded; the ranks share the work, and all get the same report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ucformat.checkpoint import open_checkpoint
from ucformat.errors import IntegrityError, MissingData, NotFound, UpgradeNeeded
from ucformat.format.arrays import metadata_documents, shard_key
from ucformat.format.commit import MANIFEST
from ucformat.format.extents import is_whole
from ucformat.format.universal import Universal, grid_of
from ucformat.geometry.tensor import Key, single_extents
from ucformat.jobs.run import Report, run
from ucformat.jobs.verify import Problem, damaged_block, document_problems, verify_shard, wrong_digests
from ucformat.torch.wire import message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.chunking import Grid
    from ucformat.geometry.tensor import Block
    from ucformat.torch.group import Group
    from ucformat.torch.steps import Step

    Mode = Literal["full", "quick"]

__all__ = ["Mode", "verify_together"]

_DAMAGES = (IntegrityError, NotFound, UpgradeNeeded)  # any other error is of the place, and no reason to go back


@dataclass(frozen=True, slots=True)
class _Task:
    """A file, or a part of one, to look at; `run` gives what is wrong with it and the digests of a shard's chunks."""

    nbytes: int
    run: Callable[[], tuple[list[Problem], bytes]]
    key: Key | None = None
    shard: tuple[int, ...] = ()


@message
class _Found:
    """What one rank found."""

    problems: list[Problem] = field(default_factory=list)
    leaves: list[tuple[Key, tuple[int, ...], bytes]] = field(default_factory=list)
    nbytes: int = 0


def verify_together(
    step: Step, mode: Mode, ranks: Group, threads: int | None = None
) -> tuple[Checkpoint | None, Report]:
    """Open a checkpoint and verify it; all ranks call this together, and get the same report.

    `full` reads every byte once, in all ranks together, and compares it with its checksums and digests. `quick` reads
    only the documents (manifest, sidecar, objects) and asks for the size of each file.

    Raises:
        UcformatError: the place cannot be read by some rank; that says nothing about the checkpoint.
    """
    ck = None
    try:
        ck = _open(step)
        found: _Found | Exception = _look(ck, mode, ranks, threads)
    except _DAMAGES as error:
        found = _Found([Problem(MANIFEST, error.message)])
    except Exception as error:  # noqa: BLE001 - told to all ranks
        found = error

    def judge(all_found: Sequence[_Found]) -> list[Report]:
        problems = {str(p): p for f in all_found for p in f.problems}
        if ck is not None and mode == "full" and not problems:
            assert isinstance(ck.source, Universal)  # noqa: S101
            leaves: dict[Key, dict[tuple[int, ...], bytes]] = {}
            for key, shard, digests in (told for f in all_found for told in f.leaves):
                leaves.setdefault(key, {})[shard] = digests
            problems = {str(p): p for p in wrong_digests(ck.source, leaves)}
        nbytes = sum(f.nbytes for f in all_found)
        report = Report(step.url, "ucformat", len(ck.tensors) if ck else 0, nbytes, 0, tuple(problems.values()))
        return [report] * ranks.size

    report: Report = ranks.meet(found, judge, _Found, Report)
    return ck, report


def _open(step: Step) -> Checkpoint:
    ck = open_checkpoint(step.url)
    if ck.id != step.id:
        raise MissingData(f"at {step.url} lies another checkpoint by now")
    return ck


def _look(ck: Checkpoint, mode: Mode, ranks: Group, threads: int | None) -> _Found:
    """This rank's part; every rank reads the documents, which it will need."""
    source = ck.source
    assert isinstance(source, Universal)  # noqa: S101 - it has a manifest
    if source.manifest.sidecar is not None:
        source.sidecar()
    _ = ck.objects
    tasks = sorted(_full(source) if mode == "full" else _quick(source), key=lambda t: -t.nbytes)
    found = _Found()
    mine = tasks[ranks.rank :: ranks.size]
    for task, (problems, leaves) in run(lambda t: t.run(), mine, threads):
        found.problems.extend(problems)
        if task.key is not None:
            found.leaves.append((task.key, task.shard, leaves))
    return _Found(found.problems, found.leaves, sum(t.nbytes for t in mine))


def _full(source: Universal) -> Iterator[_Task]:
    """Everything, by shards, and by tensors where they are not arrays."""
    for doc in source.manifest.assets.values():
        yield _Task(doc.nbytes, lambda d=doc: (_reading(d.path, lambda: source.read_file(d)), b""))  # type: ignore[misc]
    for file, data, owner in metadata_documents(source.manifest):
        yield _Task(
            len(data),
            lambda f=file, d=data, k=owner: (document_problems(source.store, f, d, k), b""),  # type: ignore[misc]
        )
    for key, tensor in source.docs.items():
        if tensor.path is None:
            yield _Task(tensor.nbytes, lambda k=key: (_blocks(source, k), b""))  # type: ignore[misc]
            continue
        grid = grid_of(tensor)
        for shard in grid.shards():

            def check(key: Key = key, grid: Grid = grid, shard: tuple[int, ...] = shard) -> tuple[list[Problem], bytes]:
                leaves, problems = verify_shard(source, key, grid, shard)
                return problems, leaves

            yield _Task(grid.file_nbytes(shard), check, key, shard)


def _blocks(source: Universal, key: Key) -> list[Problem]:
    """What is wrong with the blocks of a tensor that is no array."""
    problems: list[Problem] = []

    def look(file: str, block: Block) -> None:
        if not is_whole(source.store, file, block):
            problems.append(damaged_block(file, block, key))

    for extent in single_extents(source.extents(key)):
        if extent.block is not None:
            problems += _reading(extent.file, lambda e=extent: look(e.file, e.block), key)  # type: ignore[misc]
    return problems


def _quick(source: Universal) -> Iterator[_Task]:
    """The size of each file."""
    ends: dict[str, int] = {}
    for doc in source.manifest.assets.values():
        ends[doc.path] = doc.nbytes
    for key, tensor in source.docs.items():
        if tensor.path is None:
            for e in single_extents(source.extents(key)):
                if e.box.size:
                    ends[e.file] = max(ends.get(e.file, 0), e.last + 1)
            continue
        grid = grid_of(tensor)
        ends |= {shard_key(tensor.path, s): grid.file_nbytes(s) for s in grid.shards()}

    def look(file: str, least: int) -> None:
        size = source.store.info(file).size
        if size < least:
            raise MissingData(f"{source.store.url}/{file} has {size} bytes, and should have {least}")

    for file, least in ends.items():
        yield _Task(0, lambda f=file, n=least: (_reading(f, lambda: look(f, n)), b""))  # type: ignore[misc]


def _reading(file: str, act: Callable[[], object], key: Key | None = None) -> list[Problem]:
    """What is wrong with a file, if reading it finds that."""
    try:
        act()
    except _DAMAGES as error:
        return [Problem(file, error.message, *(key or ()))]
    return []
