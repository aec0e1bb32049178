"""What the files beside a checkpoint of Megatron say of its model: run configurations, `config.json`, tokenizers.

Megatron pads the rows of a vocabulary, and its own arguments often do not say from which size: with a
tokenizer of Hugging Face, `vocab_size` is not set at all.
"""

from __future__ import annotations

import logging
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

from ucformat.errors import AmbiguousLayout, IntegrityError, option_text
from ucformat.sources.model_files import read_json
from ucformat.storage.base import exists
from ucformat.storage.concurrency import map_io

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucformat.storage.base import Store

_log = logging.getLogger("ucformat")

#: Where Megatron Bridge, NeMo 2 and veRL store the files of a model, below the checkpoint's folder.
_FOLDERS = ("", "tokenizer/", "huggingface/", "context/", "context/nemo_tokenizer/")
_BRIDGE, _NEMO = "run_config.yaml", "context/model.yaml"
_MODEL_OF = {_BRIDGE: "model", _NEMO: "config"}  # the key of the model's settings
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"
_VOCAB, _ADDED = "vocab.json", "added_tokens.json"
_INNER = ("text_config", "llm_config", "thinker_config")  # of models with several parts
_MAX_RUN_BYTES = 4 << 20
_MAX_INNER = 4  # levels of configurations inside each other


class FilesBeside:
    """The small files beside a checkpoint, by their keys.

    Attributes:
        model: the model's settings in a run's configuration (numbers, texts and booleans only).
        run: the key of that configuration; empty if there is none.
        keys: those of all files that were found.
        rows: the rows of the vocabulary that a `config.json` gives, by its key.
    """

    def __init__(self, store: Store | None = None, *folders: str) -> None:
        self._store = store
        self.model: dict[str, Any] = {}
        self.run = ""
        self.rows: dict[str, int] = {}
        self.keys: tuple[str, ...] = ()
        places = [f"{folder}/" if folder else "" for folder in dict.fromkeys(folders)]
        self._places = [place + below for place in places for below in _FOLDERS]
        if store is None:
            return
        keys = [place + name for place in places for name in _MODEL_OF]
        keys += [p + n for p in self._places for n in (_CONFIG, _TOKENIZER, _VOCAB, _ADDED)]
        keys = list(dict.fromkeys(keys))
        self.keys = tuple(compress(keys, map_io(lambda key: exists(store, key), keys)))
        self._read_run(store, [key for key in self.keys if key.endswith((_BRIDGE, _NEMO))])
        for place in self._places:
            if size := _vocab_size(self._json(place + _CONFIG)):
                self.rows[place + _CONFIG] = size

    def true_rows(self, claims: Mapping[str, int], stored: int, multiple: int) -> int | None:
        """The rows of a vocabulary without padding; None if nothing says it.

        Args:
            claims: by where it is said, sizes whose padding is known to lead to `stored`.
            stored: the rows with padding.
            multiple: of what Megatron makes the rows a multiple; 0 if that is unknown.
        """
        claims = {**claims, **self.rows}
        sizes = {*claims.values()}
        if sizes == {stored}:
            return None
        tokens = {f"the tokens of {key}": rows for key, rows in self._tokens.items()}
        if not claims:
            sizes = {n for n in tokens.values() if multiple and padded_rows(n, multiple) == stored}
        if len(sizes) > 1 or any(max((n, *tokens.values())) > n or n > stored for n in sizes):
            rows_by_source = {**claims, **tokens, "the tensor": stored}
            raise AmbiguousLayout(
                "it is not clear which rows of the vocabulary are padding: "
                + ", ".join(f"{rows:,} rows by {where}" for where, rows in rows_by_source.items()),
                hint=f"give the number without padding: {option_text('vocab_size', '50257')}",
            )
        return next(iter(sizes), None)

    @cached_property
    def _tokens(self) -> dict[str, int]:
        """The rows that the tokens of each tokenizer need; a tokenizer has megabytes."""
        out: dict[str, int] = {}
        for place in self._places:
            whole, vocab = self._json(place + _TOKENIZER), self._json(place + _VOCAB)
            added = self._json(place + _ADDED)
            if rows := _rows(_numbers(whole)):
                out[place + _TOKENIZER] = rows
            elif isinstance(vocab, dict) and (
                rows := _rows({**vocab, **(added if isinstance(added, dict) else {})}.values())
            ):
                out[place + _VOCAB] = rows
        return out

    def _read_run(self, store: Store, keys: Iterable[str]) -> None:
        """Read the settings of the model in the first configuration of a run."""
        for key in keys:
            if (size := store.info(key).size) > _MAX_RUN_BYTES:
                _log.warning("%s/%s is not used: it has %s bytes", store.url, key, f"{size:,}")
                continue
            try:
                value = _plain_yaml(store.read(key))
            except ValueError as error:
                _log.warning("%s/%s is no YAML, and is not used: %s", store.url, key, error)
                continue
            name = next(name for name in _MODEL_OF if key.endswith(name))
            inner = value.get(_MODEL_OF[name]) if isinstance(value, dict) else None
            if isinstance(inner, dict):
                plain = (
                    (k, v) for k, v in inner.items() if isinstance(v, bool | int | float | str)
                )
                self.model = {k: v for k, v in plain if isinstance(k, str)}
                self.run = key
                return

    def _json(self, key: str) -> Any:
        """A JSON document; None if there is none, or, with a warning, none that can be read."""
        if self._store is None or key not in self.keys:
            return None
        try:
            return read_json(self._store, key)
        except IntegrityError as error:
            _log.warning("%s/%s is not used: %s", self._store.url, key, error.message)
            return None


def padded_rows(size: int, multiple: int) -> int:
    """The rows that Megatron gives a vocabulary."""
    return -(-size // multiple) * multiple


def _plain_yaml(text: bytes) -> Any:
    """The value of a YAML document without merge keys; ValueError of any other."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            """Leave merge keys (`<<`), which are errors then: a few that merge each other fill the memory."""

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe one
    # the last two are of scalars that are not what their tags say
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _vocab_size(config: Any, depth: int = 0) -> int | None:
    """The rows of the vocabulary in a configuration of Hugging Face."""
    if not isinstance(config, dict) or depth > _MAX_INNER:
        return None
    size = config.get("vocab_size")
    if type(size) is int and size > 0:
        return size
    inner = (_vocab_size(config.get(name), depth + 1) for name in _INNER)
    return next((size for size in inner if size), None)


def _numbers(tokenizer: Any) -> list[Any]:
    """The numbers of all tokens in a `tokenizer.json`, those that were added too; none of another file."""
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        numbers = list(vocab.values())
    elif isinstance(vocab, list):  # of Unigram: pairs in the order of their numbers
        numbers = list(range(len(vocab)))
    else:
        return []
    added = tokenizer.get("added_tokens")
    added = added if isinstance(added, list) else []
    return numbers + [token.get("id") if isinstance(token, dict) else None for token in added]


def _rows(numbers: Iterable[Any]) -> int | None:
    """The rows that tokens need: numbers may have gaps; None if there are none, or others than numbers of tokens."""
    numbers = list(numbers)
    if not numbers or not all(type(n) is int and n >= 0 for n in numbers):
        return None
    return int(max(numbers)) + 1
