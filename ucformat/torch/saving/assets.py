"""The files beside the weights that a model's own library needs: given by the caller, or as the library writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.sources.model_files import find_assets
from ucformat.storage.url import open_store
from ucformat.torch.integration import integrations

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike


def assets_of(
    state: Mapping[str, Any], folder: str | PathLike[str] | None, form: str
) -> dict[str, bytes]:
    """The configuration of the model in a state, and the files of a folder, which take precedence.

    Args:
        folder: with `config.json`, tokenizer and similar files (None: there is none).
    """
    found = [
        make
        for value in state.values()
        for integration in integrations()
        if (make := integration.model_files(value, form)) is not None
    ]
    assets = found[0]() if len(found) == 1 else {}
    if folder is None:
        return assets
    store = open_store(folder)
    given = find_assets(store.list())
    if not given:
        raise UsageError(f"{store.url} has no config.json, tokenizer or similar file")
    return {**assets, **{name: store.read(name) for name in given}}
