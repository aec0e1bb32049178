"""What the pages of one checkpoint show: its origin, its parameters, its files, and its neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.catalog import find_dependents
from ucformat.catalog.as_json import data_of, entry_data
from ucformat.catalog.filter.syntax import quoted
from ucformat.errors import TensorNotFound, UcformatError
from ucformat.geometry.amounts import add_tensor, by_state, parameters
from ucformat.geometry.tensor import TensorInfo
from ucformat.web.library import NoFile, reasons

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.catalog.entries import Entry
    from ucformat.checkpoint import Checkpoint
    from ucformat.web.library import Access, Library

_FILES = 100  # of the largest, that are listed
_NODES = 24  # of a neighbourhood
_BRANCHES = 200  # nodes of a tree that are shown together
_EVENTS = 30
_NEEDED = "needed by "


class Opened:
    """A checkpoint that a page is about.

    Attributes:
        entry: what the client may know of what the catalog has of it; None of a given place.
        urls: its places, whatever the client may know.
        checkpoint: the opened one; None if it cannot be opened.
        problem: why it cannot.
    """

    def __init__(self, library: Library, access: Access, ref: str) -> None:
        self.library, self._asked = library, ref
        self.entry: Entry | None = None
        self.urls: tuple[str, ...] = ()
        self.checkpoint: Checkpoint | None = None
        self.problem: dict[str, Any] | None = None
        if ref in library.visible_places(access):
            self.checkpoint = library.reference(ref, access).checkpoint
            return
        entry = library.entry(ref, access)
        self.entry, self.urls = library.shown(entry, access), entry.urls
        try:
            self.checkpoint = library.open(entry).checkpoint
        except UcformatError as error:
            self.problem = library.shown_error(error, access)

    @property
    def ref(self) -> str:
        """What leads to it again: its id, or the name of the place."""
        return self._asked if self.entry is None else self.entry.id

    @property
    def name(self) -> str:
        """Its name for people."""
        return self._asked if self.entry is None else self.entry.name

    def readable(self) -> Checkpoint:
        """The opened checkpoint.

        Raises:
            TensorNotFound: it cannot be opened.
        """
        if self.checkpoint is None:
            assert self.problem is not None  # noqa: S101 - else it was opened
            raise TensorNotFound(self.problem["message"], hint=self.problem["hint"])
        return self.checkpoint

    def infos(self) -> Sequence[TensorInfo]:
        """Its tensors; of one that cannot be opened, as the catalog has them."""
        if self.checkpoint is not None:
            return list(self.checkpoint.tensors.values())
        assert self.entry is not None  # noqa: S101 - else it was opened
        assert self.library.catalog is not None  # noqa: S101 - it has the entry
        listed = self.library.catalog.tensors(self.entry.id)
        return [TensorInfo(t.name, t.state, t.dtype, t.shape) for t in listed]


def checkpoint_data(library: Library, access: Access, ref: str) -> dict[str, Any]:
    """The data of the page of a checkpoint."""
    opened = Opened(library, access, ref)
    entry, ck = opened.entry, opened.checkpoint
    infos, limited = opened.infos(), library.is_limited(access)
    data: dict[str, Any] = {
        "ref": opened.ref,
        "name": opened.name,
        "entry": None if entry is None else entry_data(entry),
        "problem": opened.problem,
        "origin": None if ck is None else _origin(ck, limited=limited),
        "states": by_state(infos),
        "parameters": parameters(infos),
        "tree": branches(infos, ""),
        "storage": None if ck is None or limited else _storage(ck),
        "events": [],
        "lineage": None,
        "protections": [],
    }
    catalog = library.catalog
    if catalog is not None and entry is not None:
        if not limited:
            data["events"] = data_of(tuple(catalog.events(entry.id, _EVENTS)))
        data["lineage"] = _lineage(library, access, catalog, entry)
        data["protections"] = _protections(catalog, entry, opened.urls, limited=limited)
    return data


def tree_data(library: Library, access: Access, ref: str, prefix: str) -> dict[str, Any]:
    """The data of a part of the tree of parameters."""
    opened = Opened(library, access, ref)
    tree = branches(opened.infos(), prefix)
    if not tree["nodes"]:
        raise NoFile(f"{opened.name} has no parameter below {prefix!r}")
    return {"ref": opened.ref, "name": opened.name, "tree": tree}


def _origin(ck: Checkpoint, *, limited: bool) -> dict[str, Any]:
    """What wrote it, and in which layout."""
    metadata = ck.metadata
    return {
        "kind": ck.kind,
        "url": None if limited else ck.url,
        "step": metadata.step,
        "engine": dict(metadata.engine),
        "layout": dict(metadata.layout),
        "tied": dict(ck.aliases),
        "unreadable": reasons(ck, limited=limited),
        "objects": list(ck.objects),
        "assets": list(ck.assets),
    }


def branches(infos: Iterable[TensorInfo], prefix: str) -> dict[str, Any]:
    """The nodes of the tree of names below a prefix, such as `model.layers.`.

    A node is a tensor, with its states, or stands for all that begin with `prefix`.
    """
    nodes: dict[tuple[str, bool], dict[str, Any]] = {}
    for info in infos:
        if not info.name.startswith(prefix):
            continue
        label, dot, _ = info.name[len(prefix) :].partition(".")
        node = nodes.get((label, bool(dot)))
        if node is None:
            node = {
                "label": label,
                "prefix": f"{prefix}{label}." if dot else None,
                "dtypes": [],
                "tensors": 0,
                "elements": 0,
                "bytes": 0,
                "stored": [],
            }
            nodes[label, bool(dot)] = node
        add_tensor(node, info)
        if not dot:
            stored = {"state": info.state, "dtype": info.dtype, "shape": list(info.shape)}
            node["name"] = info.name
            node["stored"].append(stored | {"bytes": info.nbytes})
    every = list(nodes.values())
    return {
        "prefix": prefix,
        "nodes": every[:_BRANCHES],
        "others": max(0, len(every) - _BRANCHES),
    }


def _storage(ck: Checkpoint) -> dict[str, Any]:
    """The files that it consists of, the largest first; of what is in bases only these."""
    try:
        if ck.universal is None:
            sizes = [(info.key, info.size) for info in ck.files()]
        else:
            sizes = [(info.key, info.size) for info in ck.universal.store.list()]
    except UcformatError as error:
        return {"problem": error.message, "files": [], "others": 0, "count": 0, "bytes": 0}
    sizes.sort(key=lambda item: (-item[1], item[0]))
    return {
        "problem": None,
        "files": [{"name": name, "bytes": nbytes} for name, nbytes in sizes[:_FILES]],
        "others": max(0, len(sizes) - _FILES),
        "count": len(sizes),
        "bytes": sum(nbytes for _, nbytes in sizes),
    }


def _lineage(library: Library, access: Access, catalog: Catalog, entry: Entry) -> dict[str, Any]:
    """The next ancestors and descendants; those that a client may not see are only counted."""
    nodes: dict[str, dict[str, Any]] = {}
    edges: list[dict[str, Any]] = []
    for direction, sign, depth in (("up", -1, 2), ("down", 1, 1)):
        graph = catalog.lineage(entry.id, direction, depth)  # type: ignore[arg-type]
        for key, node in graph.nodes.items():
            values = {"key": key, "id": node.id, "name": node.name, "state": node.state}
            nodes.setdefault(key, values | {"distance": sign * node.distance})
        edges += [
            {
                "child": edge.child,
                "parent": edge.parent,
                "kind": edge.kind,
                "label": edge.label,
                "depends": edge.depends,
            }
            for edge in graph.edges
        ]
    visible = _visible(library, access, nodes)
    shown = dict(list(visible.items())[:_NODES])
    return {
        "nodes": list(shown.values()),
        "edges": [e for e in edges if e["child"] in shown and e["parent"] in shown],
        "hidden": len(nodes) - len(shown),
    }


def _visible(
    library: Library, access: Access, nodes: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The nodes that a client may see."""
    if not library.is_limited(access):
        return dict(nodes)
    ids = [node["id"] for node in list(nodes.values())[: 10 * _NODES] if node["id"] is not None]
    among = f"id in ({', '.join(map(quoted, ids))})"
    seen = {entry.id: entry.name for entry in library.entries(access, among)} if ids else {}
    return {
        key: node | {"name": seen[node["id"]]} for key, node in nodes.items() if node["id"] in seen
    }


def _protections(
    catalog: Catalog, entry: Entry, urls: Sequence[str], *, limited: bool
) -> list[str]:
    """What keeps it from being deleted; others that need it are not named to whom may not see all."""
    from ucformat.catalog.retention import needed_by

    texts = [text for url in urls or ("",) for text in catalog.protections(entry.id, url)]
    try:  # of increments, and of other catalogs' checkpoints, there are records beside the files
        dependents = find_dependents({entry.id: urls})
        texts += needed_by(sorted(dependents.get(entry.id, ())))
    except UcformatError as error:
        why = "" if limited else f": {error.message}"
        texts.append(f"whether others need it is not known{why}")
    if limited:
        texts = [f"{_NEEDED}others" if text.startswith(_NEEDED) else text for text in texts]
    return list(dict.fromkeys(texts))
