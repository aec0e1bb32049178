"""The table of tensors in a manifest's JSON as a list of entries, which tests change one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

OF_KIND = ("state", "dtype", "shape", "chunk", "shard", "itemsize")


def entries(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry of each tensor of a valid manifest, whose names are plain."""
    table, out = document["tensors"], []
    for row, (number, kind) in enumerate(zip(table["name"], table["kind"], strict=True)):
        name, of = table["names"][number], table["kinds"][kind]
        found = {
            "name": name,
            **{k: of.get(k) for k in OF_KIND},
            "at": table.get("at", {}).get(str(row), []),
        }
        if table.get("digest"):
            found["digest"] = table["digest"][row]
        if of.get("path") is not None:
            found["path"] = table.get("path", {}).get(
                str(row), f"{of['path']}/{quote(name, safe='')}"
            )
        out.append(found)
    return out


def with_entries(document: dict[str, Any], listed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A manifest with these tensors, valid or not, each of a kind of its own."""
    names = list(dict.fromkeys(e["name"] for e in listed))
    table = {
        "names": names,
        "kinds": [
            {k: e[k] for k in OF_KIND if e.get(k) is not None}
            | ({} if e.get("path") is None else {"path": e["path"].rpartition("/")[0] or "x"})
            for e in listed
        ],
        "name": [names.index(e["name"]) for e in listed],
        "kind": list(range(len(listed))),
        "digest": [e.get("digest") for e in listed],
        "path": {str(n): e["path"] for n, e in enumerate(listed) if e.get("path") is not None},
        "at": {str(n): e["at"] for n, e in enumerate(listed) if e.get("at")},
    }
    return {**document, "tensors": table}


def changed_entry(document: dict[str, Any], number: int, **values: Any) -> dict[str, Any]:
    """A manifest with one entry changed."""
    listed = entries(document)
    listed[number] |= values
    return with_entries(document, listed)
