"""`ucp catalog`: the catalog that commands use, and the upgrade of its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.cli.ui.catalogs import url_of_catalog
from ucformat.cli.ui.options import CATALOG, command
from ucformat.cli.ui.output import Heading, terminal_width
from ucformat.cli.ui.text import field
from ucformat.redacted import shown_url
from ucformat.texts import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucformat.catalog.catalog import Catalog
    from ucformat.cli.ui.output import Output

_STATES = ("committed", "deleted", "thinned", "purging", "purged", "replaced")
_SOURCES = {
    "flag": "the option --catalog",
    "env": "the variable UCP_CATALOG",
    "project": "the project's file ucformat.toml",
    "user": "the user's file config.toml",
    "default": "default",
}


@command
@CATALOG
def info(out: Output) -> None:
    """Show which catalog is used, which setting selects it, its revision, and how many checkpoints it has.

    A catalog that does not exist yet is not created.
    """
    from ucformat.errors import UcformatError
    from ucformat.settings import load_settings, source_of

    settings = load_settings()
    url = settings.catalog_url()
    data: dict[str, Any] = {
        "url": None if url is None else shown_url(url),
        "from": source_of("catalog"),
        "state": "off",
        "revision": None,
        "checkpoints": None,
        "runs": None,
        "aliases": None,
        "role": None,
    }
    error = None
    if url is not None:
        try:
            exists = settings.existing_catalog() is not None
            data |= _contents(url) if exists else {"state": "not created yet"}
        except UcformatError as raised:
            error = raised
            data["state"] = "older" if raised.exit_code == 7 else "unreachable"
    out.result(lambda: _describe(data), lambda: data, lambda: [str(data["url"] or "none")])
    if error is not None:
        raise error


def _contents(url: str) -> dict[str, Any]:
    """The state and contents of a catalog that exists."""
    from ucformat.catalog.catalog import Catalog

    with Catalog(url) as catalog:
        return {
            "url": catalog.url,
            "state": "ready" if catalog.database.newer is None else "newer",
            "revision": catalog.database.revision,
            "checkpoints": _checkpoints(catalog),
            "runs": int(catalog.sql("select count(*) from run", trust_role=True).rows[0][0]),
            "aliases": len(catalog.aliases()),
            "role": catalog.excess_rights(),
        }


def _checkpoints(catalog: Catalog) -> dict[str, int]:
    counts = dict(
        catalog.sql("select state, count(*) from checkpoint group by state", trust_role=True).rows
    )
    return {state: int(counts.get(state, 0)) for state in _STATES}


def _describe(data: dict[str, Any]) -> Iterator[str]:
    width = terminal_width()
    yield Heading(data["url"] or "the catalog is switched off")
    yield from field("set by", _SOURCES[data["from"]], width)
    yield from field("state", data["state"], width)
    if data["revision"] is not None:
        yield from field("revision", data["revision"], width)
        for state, n in data["checkpoints"].items():
            if n or state == "committed":
                yield from field(state, count(n), width)
        yield from field("runs", count(data["runs"]), width)
        yield from field("aliases", count(data["aliases"]), width)
        if data["role"] is not None:
            yield from field(
                "role", f"{data['role']}; `ucp sql` needs --trust-role, or a read-only role", width
            )


@command
@CATALOG
def upgrade(out: Output) -> None:
    """Upgrade the tables of a catalog that an older ucformat created. Back it up first.

    The upgrade is atomic; older versions of ucformat cannot write to the catalog afterwards.
    """
    from ucformat.catalog.catalog import Catalog
    from ucformat.errors import UpgradeNeeded

    url = url_of_catalog()
    upgraded = False
    try:
        catalog = Catalog(url)
    except UpgradeNeeded:
        catalog = Catalog(url, upgrade=True)
        upgraded = True
    with catalog:
        data = {"url": catalog.url, "upgraded": upgraded, "revision": catalog.database.revision}
    change = "upgraded to" if upgraded else "already at"
    out.result(
        lambda: [f"{data['url']}: {change} revision {data['revision']}"],
        lambda: data,
        lambda: [str(data["revision"])],
    )
