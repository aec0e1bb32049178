"""Markup as a browser reads it: its elements, and its text."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import ClassVar


class Markup(HTMLParser):
    """Markup, which must close what it opens, in order.

    Attributes:
        elements: the names of elements, with their attributes.
        text: all text.
        inside: the elements that are open where it is being read.
    """

    #: Elements without an end.
    void: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(page)
        self.close()
        assert not self.inside

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.void:
            self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
