"""Foreign checkpoints as tensors and extents, read in place."""

from __future__ import annotations

from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from ucformat.errors import IntegrityError, NotACheckpoint, NotFound, UcformatError
from ucformat.sources.base import with_options
from ucformat.sources.model_files import check_described, check_downloaded
from ucformat.sources.parts import Sibling, marked, part_by_names, refusal
from ucformat.sources.registry import SOURCES, all_sources
from ucformat.storage.base import exists
from ucformat.storage.url import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ucformat.sources.base import OpenSource, Source
    from ucformat.storage.base import Info, Store
    from ucformat.storage.wrappers import WatchedStore


def open_source(store: Store, options: Mapping[str, Any] | None = None) -> OpenSource | None:
    """Open a foreign checkpoint with the first source that recognises its folder.

    Args:
        options: the options of the source, by name; None: defaults.

    Returns:
        the opened checkpoint; None if no source recognises the folder.

    Raises:
        NotACheckpoint: it is only a part of a checkpoint, and the option `part` is not given.
    """
    for source in all_sources():
        if source.find(store):
            chosen = with_options(source, options or {})
            try:
                opened = chosen.open(store)
            except UcformatError as error:
                check_downloaded(store, error)
                part = (
                    "" if isinstance(error, IntegrityError | NotFound) else part_by_names(store, "")
                )
                if part and chosen.options.part is None:
                    raise refusal(store.url, part) from None
                raise
            return _checked(chosen, opened, store.url)
    check_downloaded(store)
    check_described(store)
    return None


def marked_folders(infos: Iterable[Info]) -> set[str]:
    """The folders that look like foreign checkpoints, by the names of their files."""
    markers: dict[str, list[Source]] = {}  # most names are in every step
    folders: set[str] = set()
    for info in infos:
        folder, _, name = info.key.rpartition("/")
        if name not in markers:
            markers[name] = [source for source in all_sources() if source.is_marker(name)]
        folders.update(source.marked_folder(folder) for source in markers[name][:1])
    return folders


def open_source_file(
    place: str | PathLike[str],
    watch: Callable[[Store], WatchedStore],
    options: Mapping[str, Any] | None = None,
) -> OpenSource | None:
    """Open a single file with the first source that recognises it.

    Args:
        options: the options of the source, by name; None: defaults.

    Returns:
        the opened checkpoint; None if there is no such file.

    Raises:
        NotACheckpoint: no source recognises the file, or it is only a part, and the option `part`
            is not given.
    """
    folder, _, name = fspath(place).rpartition("/")
    if not name or folder.lower() in ("file:", "file:/"):  # of a url nothing but the scheme
        return None
    if folder.lower() in ("file://", "file://localhost") or fspath(place).rfind("/") == 0:
        folder += "/"
    store = watch(open_store(folder or "."))
    if not exists(store, name):
        return None
    where = f"{store.url}/{name}"
    for source in all_sources():
        if source.find_file(store, name):
            chosen = with_options(source, options or {})
            try:
                opened = chosen.open_file(store, name)
            except UcformatError as error:
                check_downloaded(store, error, "" if name.endswith(".json") else name)
                if chosen.options.part is None and (part := part_by_names(store, name)):
                    raise refusal(where, part) from None
                raise
            return _checked(chosen, opened, where, name)
    check_downloaded(store, file=name)
    if part := part_by_names(store, name):
        raise refusal(where, part, openable=False)
    raise NotACheckpoint(
        f"{where} is a file, and no checkpoint that ucformat knows",
        hint=f"open its folder; foreign checkpoints that can be read: {titles()}",
    )


def _checked(source: Source, opened: OpenSource, where: str, file: str = "") -> OpenSource:
    """An opened checkpoint, after a check that it is whole, or with a note of what it is a part of."""
    is_part = source.options.part
    if is_part is False:
        return opened
    part = getattr(opened, "part", None)
    if part is None:
        files = opened.metadata.files
        key = file or (files[0] if len(files) == 1 else "")  # of a folder with one file
        shapes = _shapes(opened)
        part = part_by_names(opened.store, key, shapes, partial(_sibling, source, opened.store))
    if is_part is None and part:
        raise refusal(where, part)
    if is_part:
        opened.metadata = marked(opened.metadata, part or "one part, as its user says")
    return opened


def _shapes(opened: OpenSource) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights, or of what else there is, by name."""
    return {info.name: info.shape for info in reversed(opened.metadata.tensor_list.tensors)}


def _sibling(source: Source, store: Store, key: str) -> Sibling:
    """What another file of a folder holds."""
    opened = source.open_file(store, key)
    return Sibling(_shapes(opened), getattr(opened, "part", None) or "")


def titles() -> str:
    """What the sources call the checkpoints that they read, for messages."""
    names = ", ".join(source.title for source in all_sources())
    return "; ".join((names, *(failure.message for failure in SOURCES.failures)))
