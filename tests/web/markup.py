"""The parts of a page that tests compare with its twin in JSON."""

from __future__ import annotations

from tests.markup import Markup


class Page(Markup):
    """A page.

    Attributes:
        links: the addresses of links, with their texts.
        rows: the texts of cells of all tables, row by row.
    """

    void = frozenset({"meta", "link", "input", "br", "hr", "img"})

    def __init__(self, page: str) -> None:
        self.links: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        super().__init__(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "a":
            self.links.append((str(dict(attrs)["href"]), ""))

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if "a" in self.inside:
            address, text = self.links[-1]
            self.links[-1] = (address, text + data)
        if {"td", "th"} & set(self.inside):
            self.rows[-1][-1] += data


def parse(body: bytes) -> Page:
    """Read a page, which must have no script of its own."""
    page = Page(body.decode())
    for tag, values in page.elements:
        assert not any(name.startswith("on") or name == "style" for name in values), (tag, values)
        assert tag not in ("style", "iframe", "object", "embed", "base")
        if tag == "script":
            assert str(values["src"]).startswith("/ui/static/")
    return page
