"""`python -m tests.mutants`: how many single changes of the code the tests notice; see the package's text."""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.sites import sites
from tests.mutants.trial import PACKAGES, Reached, copies, reach

if TYPE_CHECKING:
    import queue
    from collections.abc import Iterable, Sequence

    from tests.mutants.sites import Site
    from tests.mutants.trial import Copy

ROOT = Path(__file__).parents[2]
_TESTS = "ucformat/testing/stores.py"  # itself tests, that stores outside the repository run too: nothing tests it


def every_site(root: Path, packages: Iterable[str]) -> list[Site]:
    """All changes of some packages."""
    starts = tuple(f"ucformat/{p}" for p in packages)
    files = {str(f.relative_to(root)): f for f in sorted((root / "ucformat").rglob("*.py"))}
    return [
        s
        for name, f in files.items()
        if name.startswith(starts) and name != _TESTS
        for s in sites(f, root)
    ]


def pick(choice: Sequence[Site], seed: int, count: int) -> list[Site]:
    """Some changes; as many of each kind, as far as there are, since some kinds are rare and hard to notice."""
    shuffled = random.Random(seed).sample(choice, len(choice))
    by_kind: dict[str, list[Site]] = {}
    for site in shuffled:
        by_kind.setdefault(site.change, []).append(site)
    rounds = zip_longest(*(by_kind[kind] for kind in sorted(by_kind)))
    return [site for site in chain.from_iterable(rounds) if site][:count]


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the verdict on each change, and the counts; 1 where one survived that is not argued for."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of changes")
    parser.add_argument("--count", type=int, default=200, help="how many changes to try")
    parser.add_argument(
        "--package", action="append", choices=list(PACKAGES), help="only these; can be repeated"
    )
    parser.add_argument("--only", default="", help="only changes whose name contains this text")
    parser.add_argument(
        "--json",
        type=Path,
        help="a file for the verdicts, one a line; a run goes on where it ended",
    )
    parser.add_argument("--jobs", type=int, default=2, help="changes that are tried at once")
    parser.add_argument(
        "--patience",
        type=float,
        default=900,
        help="seconds for the whole files of tests of a folder",
    )
    given = parser.parse_args(words)

    choice = [s for s in every_site(root, given.package or PACKAGES) if given.only in s.name]
    picked = pick(choice, given.seed, given.count)
    earlier = _read(given.json) if given.json and given.json.exists() else {}
    verdicts = {s.name: earlier[s.name] for s in picked if s.name in earlier}
    left = [s for s in picked if s.name not in verdicts and s.name not in EQUIVALENT]
    click.echo(f"{len(choice)} possible changes, {len(picked)} picked, {len(left)} to try")

    with copies(root, given.jobs) as free, ThreadPoolExecutor(given.jobs) as pool:

        def tried(site: Site) -> dict[str, Any]:
            copy = free.get()
            try:
                return {
                    "name": site.name,
                    "line": site.line,
                    **asdict(copy.verdict(site, reached[site], given.patience)),
                }
            finally:
                free.put(copy)

        reached = _reached(left, given, free)
        for future in as_completed([pool.submit(tried, site) for site in left]):
            result = future.result()
            verdicts[result["name"]] = result
            if given.json:
                with given.json.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            click.echo(
                f"{result['verdict']:<9} {result['seconds']:>5.0f} s  {result['name']}  {result['by']}"
            )
    return _report(picked, verdicts)


def _reached(
    left: Sequence[Site], given: argparse.Namespace, free: queue.Queue[Copy]
) -> dict[Site, Reached]:
    """Which tests reach each place; kept beside the verdicts, since finding it takes as long as the folders' tests."""
    file = given.json and given.json.with_suffix(".reached.json")
    earlier = json.loads(file.read_text()) if file and file.exists() else {}
    result = {site: Reached(**earlier[site.name]) for site in left if site.name in earlier}
    if unknown := [site for site in left if site not in result]:
        copy = free.get()
        probed, failed = reach(copy, unknown, given.jobs)
        free.put(copy)
        for test in failed:
            click.echo(f"fails without a change: {test}")
        result |= probed
        if file:
            file.write_text(
                json.dumps(earlier | {site.name: asdict(place) for site, place in probed.items()})
            )
    return result


def _read(file: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in map(json.loads, file.read_text().splitlines())}


def _report(picked: Sequence[Site], verdicts: dict[str, dict[str, Any]]) -> int:
    counts: dict[str, dict[str, int]] = {}
    for site in picked:
        package = next(p for p in PACKAGES if site.file.startswith(f"ucformat/{p}"))
        row = counts.setdefault(package, dict.fromkeys(("killed", "survived", "equivalent"), 0))
        verdict = "equivalent" if site.name in EQUIVALENT else verdicts[site.name]["verdict"]
        row["survived" if verdict == "unreached" else verdict] += 1
        if verdict in ("survived", "unreached"):
            click.echo(f"{verdict}: {site.file}:{site.line} {site.name}")
    counts["all"] = {
        key: sum(row[key] for row in counts.values())
        for key in ("killed", "survived", "equivalent")
    }
    for package, row in counts.items():
        share = row["killed"] / max(1, row["killed"] + row["survived"])
        numbers = ", ".join(f"{n} {key}" for key, n in row.items())
        click.echo(
            f"{package:<18} {numbers}; {share:.1%} of those that are not equivalent are killed"
        )
    return int(counts["all"]["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
