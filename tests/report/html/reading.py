"""Parses HTML pages into elements for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "input", "br", "link", "img", "hr"}


@dataclass
class Element:
    """An element, with its text and that of its descendants."""

    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]
    text: str = ""
    children: list[Element] = field(default_factory=list)


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        elements: All elements, in the order of their start tags.
        wrong: Unmatched tags.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.wrong: list[str] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        self.wrong += [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs}, tuple(e.tag for e in self._open))
        self.elements.append(element)
        if self._open:
            self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1].tag == tag:
            self._open.pop()
        else:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        """Returns the elements with a tag."""
        return [element for element in self.elements if element.tag == tag]

    @property
    def text(self) -> str:
        """Text of the body."""
        (body,) = self.all("body")
        return body.text
