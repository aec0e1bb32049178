"""Which checkpoints of a run continue which, by their launches, and their order by age.

A launch is a training from its start, or from a load, to its end. It continues others up to a
position: of a recorded launch a count of commits, of a folder (what has no launch: an engine's
checkpoints, plain saves) a step. The newest checkpoint of a launch is a *head*, unless another
launch of the run continues it. The *line* of a head is all that is behind it; lines that a launch
forked share their beginning.

A training counts its commits (`commits` of a manifest), which decide because clocks may be wrong.
Within a family, launches of a run that continue each other, the checkpoint with the higher count is
newer, since its writer had loaded or seen the others; with equal counts the one with the higher
step, then the one that was created later. A checkpoint without a count (of an engine, or converted)
is treated as having the highest count at its step or before. Families, and checkpoints with neither
step nor count, are compared by time, where a checkpoint is never earlier than those of its family
that it is newer than.
"""

from __future__ import annotations

from collections import defaultdict
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    Positions = Mapping[str | None, int]


class Dated(Protocol):
    """The properties of a checkpoint that determine its order."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def run(self) -> str | None:
        """The name of its run."""

    @property
    def step(self) -> int | None:
        """The training step."""

    @property
    def commits(self) -> int | None:
        """The number of checkpoints that the run had committed, including this one."""

    @property
    def created(self) -> datetime:
        """When it was created, by its writer's clock."""


class OfFamily(Dated, Protocol):
    """A checkpoint with its family."""

    @property
    def family(self) -> object:
        """What its launch has in common with those that it continues, and with those that continue it."""


D = TypeVar("D", bound=Dated)
F = TypeVar("F", bound=OfFamily)


def newest_first(items: Iterable[F]) -> list[F]:
    """Sort checkpoints, newest first."""
    families: dict[object, list[F]] = {}
    for item in items:
        alone = item.run is None or (item.step is None and item.commits is None)
        families.setdefault(("", item.id) if alone else (item.run, item.family), []).append(item)
    dated: list[tuple[tuple[Any, ...], F]] = []
    for family in families.values():
        latest = min(item.created for item in family)
        for *rank, item in sorted(ranked(family), key=lambda r: r[:-1]):
            latest = max(latest, item.created)
            dated.append(((latest, *rank), item))
    return [item for _, item in sorted(dated, key=itemgetter(0), reverse=True)]


def ranked(items: Iterable[D]) -> list[tuple[int, int, datetime, str, D]]:
    """Give each checkpoint of a family its rank, by which the newest is the greatest: count, step, time and id."""
    count, ranks = 0, []
    for item in sorted(items, key=lambda i: (_step(i), i.commits is None)):
        count = max(count, item.commits or 0)
        own = count if item.commits is None else item.commits
        ranks.append((own, _step(item), item.created, item.id, item))
    return ranks


def _step(item: Dated) -> int:
    return -1 if item.step is None else item.step


class PlacedInLaunch(Protocol):
    """A checkpoint with its place in a launch."""

    @property
    def launch(self) -> str | None:
        """The id of its launch, or the folder that stands for one."""

    @property
    def commits(self) -> int | None:
        """Its count of commits."""

    @property
    def step(self) -> int | None:
        """The training step."""


class Launched(PlacedInLaunch, Dated, Protocol):
    """A checkpoint with what its launch records."""

    @property
    def continues(self) -> Mapping[str, int]:
        """The positions up to which its launch continues others."""


T = TypeVar("T", bound=Launched)


def folder_launch(url: str) -> str:
    """What stands for the launch of a checkpoint that records none: the folder that it is in, with a slash."""
    return f"{url.rstrip('/').rpartition('/')[0]}/"


def launch_label(launch: str | None) -> str:
    """A launch as it is shown: the beginning of its id, or the whole folder."""
    return "-" if launch is None else launch if "/" in launch else launch[:8]


def position(launch: str | None, commits: int | None, step: int | None) -> int | None:
    """Where a checkpoint is in its launch; None if that is unknown."""
    return step if launch is not None and "/" in launch else commits


def _is_behind(item: PlacedInLaunch, positions: Positions) -> bool:
    bound = positions.get(item.launch)
    here = position(item.launch, item.commits, item.step)
    return bound is not None and (here is None or here <= bound)


def all_continued(
    launch: str | None, direct: Mapping[str | None, Mapping[str, int]]
) -> dict[str | None, int]:
    """The positions up to which a launch continues others, also by way of a third."""
    reached: dict[str | None, int] = {}
    todo = [launch]
    while todo:
        for other, bound in direct.get(todo.pop(), {}).items():
            if other == launch:
                continue
            if other not in reached:
                todo.append(other)
            reached[other] = max(bound, reached.get(other, bound))
    return reached


def heads(
    newest: Mapping[str | None, PlacedInLaunch], direct: Mapping[str | None, Mapping[str, int]]
) -> list[str | None]:
    """Return the launches of a run that no other continues to the end.

    Launches that claim each other are both heads.
    """
    continued: set[tuple[str | None, str | None]] = set()
    for launch in newest:
        positions = all_continued(launch, direct)
        continued |= {
            (other, launch)
            for other in positions
            if other in newest and _is_behind(newest[other], positions)
        }
    ended = {other for other, launch in continued if (launch, other) not in continued}
    return [launch for launch in newest if launch not in ended] or list(newest)


def lines(items: Iterable[T]) -> list[tuple[T, list[T]]]:
    """Return the lines of one run's checkpoints: the head, and all that are behind it, with the head, newest first."""
    launches, direct = _by_launch(items)
    newest = {launch: max(ranked(some))[-1] for launch, some in launches.items()}
    by_head: list[tuple[T, list[T]]] = []
    rest = dict(launches)
    for launch in heads(newest, direct):
        members = _behind(launch, launches, direct)
        by_head.append((newest[launch], [i for some in members.values() for i in some]))
        for other in members:
            rest.pop(other, None)
    return [*by_head, *((newest[launch], _newest_first(some)) for launch, some in rest.items())]


def line_to(items: Iterable[T], head: T) -> list[T]:
    """Return the line of a checkpoint that need not be a head, newest first: it, and all that are behind it."""
    launches, direct = _by_launch(items)
    line = [i for some in _behind(head.launch, launches, direct).values() for i in some]
    return line[[i.id for i in line].index(head.id) :]


def path_of(line: Sequence[T], began: Mapping[str | None, int]) -> list[T]:
    """Return the checkpoints of a line, newest first, through which the training came to its newest one.

    A training that was set back saves steps again. What it had saved later than the checkpoint to
    which it was set back is in its line, and not on its path.

    Args:
        began: the counts of commits of the checkpoints with which launches began, as far as known.
    """
    path: list[T] = []
    for item in line:
        if path:
            last = path[-1]
            bound = None if item.launch == last.launch else began.get(last.launch)
            is_left = bound is not None and item.commits is not None and item.commits > bound
            if is_left or _step(item) >= _step(last):
                continue
        path.append(item)
    return path


def _by_launch(
    items: Iterable[T],
) -> tuple[dict[str | None, list[T]], dict[str | None, Mapping[str, int]]]:
    """The checkpoints of each launch, and the positions up to which it continues others."""
    launches: dict[str | None, list[T]] = defaultdict(list)
    for item in items:
        launches[item.launch].append(item)
    return launches, {launch: some[0].continues for launch, some in launches.items()}


def _behind(
    launch: str | None,
    launches: Mapping[str | None, list[T]],
    direct: Mapping[str | None, Mapping[str, int]],
) -> dict[str | None, list[T]]:
    """The checkpoints of a launch, then of those that it continues as far as it does, each newest first."""
    positions = all_continued(launch, direct)
    members = {
        other: [i for i in launches.get(other, ()) if _is_behind(i, positions)]
        for other in positions
    }
    members[launch] = launches[launch]
    # a launch continues more than any of those that it continues
    order = sorted(members, key=lambda other: len(all_continued(other, direct)), reverse=True)
    return {other: _newest_first(members[other]) for other in order}


def _newest_first(launch: Iterable[T]) -> list[T]:
    return [item for *_, item in sorted(ranked(launch), key=lambda rank: rank[:-1], reverse=True)]


def contradictions(items: Iterable[T], name: Callable[[T], str]) -> list[str]:
    """Warn of runs in which a checkpoint was created earlier than one that it continues, by a clock that was wrong.

    Returns:
        At most one warning for each run, on its newest such checkpoint.
    """
    runs: dict[str, dict[str | None, list[T]]] = defaultdict(lambda: defaultdict(list))
    for item in sorted((i for i in items if i.commits is not None), key=attrgetter("commits")):
        if item.run is not None:
            runs[item.run][item.launch].append(item)
    warnings = []
    for launches in runs.values():
        wrong = [pair for some in launches.values() for pair in _wrong_times(some, launches)]
        if wrong:
            newer, older = max(wrong, key=lambda pair: pair[0].commits or 0)
            warnings.append(contradiction(name(newer), newer.created, name(older), older.created))
    return warnings


def _wrong_times(
    launch: Sequence[T], launches: Mapping[str | None, Sequence[T]]
) -> list[tuple[T, T]]:
    """The checkpoints of a launch that were created before one that they continue, with the latest of those."""
    positions: dict[str | None, int] = dict(launch[0].continues.items())
    before = [i for other in positions for i in launches.get(other, ()) if _is_behind(i, positions)]
    latest = max(before, key=attrgetter("created"), default=launch[0])
    pairs = []
    for item in launch:
        if item.created < latest.created and item.commits != latest.commits:
            pairs.append((item, latest))
        latest = max(latest, item, key=attrgetter("created"))
    return pairs


def contradiction(newer: str, created: datetime, older: str, before: datetime) -> str:
    """The warning for two checkpoints of which one was committed later, but created earlier by its clock."""
    times = f"{created.isoformat()} and {before.isoformat()}"
    return (
        f"{newer} was committed after {older}, but created earlier ({times}): a clock was "
        "wrong; commits decide"
    )
