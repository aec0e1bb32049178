"""How long ranks took to save and to load, in plain characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.cli.ui.output import Heading
from ucformat.cli.ui.text import table
from ucformat.texts import bytes_text, clean, count, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PHASES = ("copy", "plan", "write", "sync", "commit", "read", "put")
_BAR = 24  # characters for the longest time
_SHADES = " .:-=+*#%@"
_DONE = {"writers": "wrote", "readers": "read"}
_ROWS = 12  # ranks of a heat map


def timing_lines(
    title: str, timings: Mapping[str, Any], member: str, width: int | None
) -> Iterator[str]:
    """A table of what ranks did in a save or load, with a bar for the time of each, and its stragglers.

    Args:
        member: of the timings that has the ranks, `writers` or `readers`.
    """
    ranks, longest = timings[member], timings["seconds"]
    phases = [p for p in _PHASES if any(p in r["phases"] for r in ranks)]
    phases += sorted({p for r in ranks for p in r["phases"]} - set(phases))
    retried = ["retries"] if any(r["retries"] for r in ranks) else []
    stalled = ["stall"] if any("stall" in r for r in ranks) else []
    rows = [
        [
            count(r["rank"]),
            bytes_text(r["bytes"]),
            *(_seconds(r["phases"].get(p)) for p in phases),
            *(_seconds(r[key]) for key in stalled),
            *(count(r[key]) for key in retried),
            _seconds(r["seconds"]),
            "#" * round(_BAR * r["seconds"] / longest) if longest > 0 else "",
        ]
        for r in ranks
    ]
    head = ["rank", "bytes", *phases, *stalled, *retried, "seconds", ""]
    speed = timings["bytes_per_second"]
    rate = "" if speed is None else f", {bytes_text(int(speed))} per second"
    amount = bytes_text(timings["bytes"])
    yield Heading(
        f"{clean(title)}: {longest:.2f} s; the ranks below {_DONE[member]} {amount}{rate}"
    )
    yield from table(head, rows, left=(len(head) - 1,), shrink=(), width=width)
    if timings["ranks"] is not None and timings["ranks"] > len(ranks):
        yield f"those of {plural(timings['ranks'], 'rank')} that took longest"
    yield from _stragglers(timings)


def heat_lines(title: str, saves: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A heat map of the seconds in which ranks wrote: a column for each save, a row for each rank."""
    times = [{w["rank"]: w["seconds"] for w in save["writers"]} for save in saves]
    totals: dict[int, float] = {}
    for of_save in times:
        for rank, seconds in of_save.items():
            totals[rank] = totals.get(rank, 0.0) + seconds
    shown = sorted(sorted(totals, key=lambda rank: -totals[rank])[:_ROWS])
    most = max(max(of_save.values()) for of_save in times)
    yield Heading(f"{clean(title)}: {plural(len(saves), 'save')}")
    for rank in shown:
        cells = "".join(_shade(of_save.get(rank), most) for of_save in times)
        yield f"  rank {count(rank):>6} |{cells}|"
    yield f"  seconds in which ranks wrote: '{_SHADES[1]}' 0 to '{_SHADES[-1]}' {most:.2f}"
    if len(totals) > len(shown):
        yield f"  the {len(shown)} of {plural(len(totals), 'recorded rank')} that wrote longest"
    late: dict[int, int] = {}
    for save in saves:
        for rank in save["stragglers"]:
            late[rank] = late.get(rank, 0) + 1
    for rank, number in sorted(late.items(), key=lambda item: -item[1])[:3]:
        yield f"  rank {count(rank)} is a straggler in {number} of {plural(len(saves), 'save')}"


def _shade(seconds: float | None, most: float) -> str:
    """The character of a time; a blank if there is none."""
    if seconds is None:
        return _SHADES[0]
    return _SHADES[1 + round((len(_SHADES) - 2) * (seconds / most if most > 0 else 0.0))]


def _stragglers(timings: Mapping[str, Any]) -> Iterator[str]:
    usual = timings["median_seconds"]
    for rank in timings["stragglers"]:
        yield f"rank {count(rank)} is a straggler: the median of the ranks above is {usual:.2f} s"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
