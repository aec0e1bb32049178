"""The parts of a page that tests compare with its twin in JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

#: Elements without an end.
_VOID = {"meta", "link", "input", "br", "hr", "img"}


@dataclass
class Page(HTMLParser):
    """A page as a browser reads it.

    Attributes:
        links: the addresses of links, with their texts.
        rows: the texts of cells of all tables, row by row.
        elements: the names of elements, with their attributes.
        text: all text.
    """

    links: list[tuple[str, str]] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def __hash__(self) -> int:
        return id(self)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.elements.append((tag, values))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "a":
            self.links.append((str(values["href"]), ""))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "a" in self._open:
            address, text = self.links[-1]
            self.links[-1] = (address, text + data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data


def parse(body: bytes) -> Page:
    """Read a page, which must close what it opens, and have no script of its own."""
    page = Page()
    page.feed(body.decode())
    page.close()
    assert not page._open
    for tag, values in page.elements:
        assert not any(name.startswith("on") or name == "style" for name in values), (tag, values)
        assert tag not in ("style", "iframe", "object", "embed", "base")
        if tag == "script":
            assert str(values["src"]).startswith("/ui/static/")
    return page
