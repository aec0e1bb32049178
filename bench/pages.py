"""Pages of large catalogs: how long each takes, and its size.

`python -m bench.pages [--rounds N] [--folder FOLDER]`. Catalogs on SQLite of 10,000 checkpoints of 1,000 tensors,
and of a million of one tensor, each in 20 runs, are served by `ucp serve`. Each page is asked for once before it is
timed; each request has a new connection. Catalogs that are in the folder already are not filled again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlsplit

from bench.catalog import FILTER, SORT
from bench.catalog_fill import Plan, fill
from bench.common import median, table, targets
from bench.serve import running_ucp
from ucformat.catalog.catalog import Catalog

RUN = "run07"
PAGES = {
    "the newest": "/ui/",
    "configuration, metric and tag, sorted": f"/ui/?where={quote(FILTER)}&sort={SORT}",
    "a rare tag of a run": "/ui/?where=" + quote(f"tag = 'release' and run = '{RUN}'"),
    "after the newest 5,000": "/ui/?offset=5000",
    "completion of a filter": "/ui/complete?where=" + quote("config.opt"),
    "a run": f"/ui/run/{RUN}",
}
CATALOGS = {
    "10,000 x 1,000": (Plan(10_000, 1_000), 100),
    "1,000,000": (Plan(1_000_000, 1), 250),
}
LARGEST = 300_000  # bytes of a page


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    asked = parser.parse_args()
    rounds = asked.rounds
    times: dict[str, dict[str, float]] = {}
    sizes: dict[str, int] = dict.fromkeys(PAGES, 0)
    filled = []
    with tempfile.TemporaryDirectory(prefix="ucp-bench-") as folder:
        for name, (plan, _) in CATALOGS.items():
            file = Path(asked.folder or folder, f"{plan.checkpoints}.db")
            url = f"sqlite:///{file}"
            if not file.exists():
                begun = time.perf_counter()
                with closing(Catalog(url)) as catalog:
                    fill(catalog, plan)
                filled.append(f"{time.perf_counter() - begun:.0f} s ({name})")
            with running_ucp(["--catalog", url]) as (place, _):
                times[name] = measure(place, rounds, sizes)
            if not asked.folder:
                file.unlink()
    told = f"Filled in {', '.join(filled)}. " if filled else ""
    print(f"{told}Milliseconds, median of {rounds}:\n")
    print(
        table(
            ["page", *CATALOGS, "bytes"],
            [
                [
                    page,
                    *(f"{t[page]:.0f}" for t in times.values()),
                    f"{sizes[page]:,}",
                ]
                for page in PAGES
            ],
        )
    )
    print()
    worst = {name: max(of_catalog.values()) for name, of_catalog in times.items()}
    print(
        targets(
            *(
                (f"slowest page of {name}, ms", f"<= {most}", worst[name])
                for name, (_, most) in CATALOGS.items()
            ),
            ("largest page, kB", f"<= {LARGEST // 1000}", max(sizes.values()) / 1000),
        )
    )


def measure(place: str, rounds: int, sizes: dict[str, int]) -> dict[str, float]:
    """The median milliseconds of each page; the largest sizes are noted."""
    times: dict[str, list[float]] = {page: [] for page in PAGES}
    for number in range(rounds + 1):
        for page, path in PAGES.items():
            begun = time.perf_counter()
            nbytes = get(place, path)
            if number:
                times[page].append(1000 * (time.perf_counter() - begun))
            sizes[page] = max(sizes[page], nbytes)
    return {page: median(each) for page, each in times.items()}


def get(place: str, path: str) -> int:
    """Ask for a page; its bytes."""
    with closing(HTTPConnection(urlsplit(place).netloc, timeout=120)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
    assert answer.status == 200, (path, answer.status, body[:300])
    return len(body)


if __name__ == "__main__":
    main()
