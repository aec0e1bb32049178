"""Find the Megatron checkpoint in a folder: the one that its tracker names, or the folder itself."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from ucformat.engines.megatron.vocabulary import FilesBeside, padded_rows
from ucformat.errors import IntegrityError, NotFound, UcformatError, UsageError, first_names
from ucformat.reading.stand_ins import Inert
from ucformat.sources.base import PickleOptions, option
from ucformat.storage.base import check_key, exists

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucformat.geometry.layout import Layout
    from ucformat.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class MegatronSourceOptions(PickleOptions):
    """The options of `Megatron`."""

    stacked: bool = option(
        default=False,
        how="flag",
        text=(
            "of a distributed checkpoint, show the stacked tensors of all layers under their "
            "keys, as stored"
        ),
    )
    vocab_size: int | None = option(
        None,
        "number",
        "rows of the vocabulary without its padding, if the checkpoint does not record it",
    )
    optimizer: bool = option(
        default=True,
        how="flag",
        text=(
            "whether to read the optimizer's states; false if their parameters cannot be determined"
        ),
    )
    layout: Layout | None = option(  # noqa: RUF009 - it makes a field
        None,
        "layout",
        "of a classic checkpoint, how parameters are sharded over tensor-parallel ranks if "
        "Megatron's own names do "
        "not determine it: rules over the axis `tp`",
    )
    cuts: Mapping[str, str | int] | None = option(
        None,
        "cuts",
        "the same for the parameters that a pattern matches: `replicate`, `halves` (two tensors, "
        "one after the other, "
        "each sharded), or the dim along which parts are joined; it takes precedence over `layout`",
    )


TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "metadata.json"  # of a distributed checkpoint
COMMON = "common.pt"  # likewise
METADATA = ".metadata"  # of PyTorch DCP
DIST = "torch_dist"
WEIGHTS, CONTEXT = "weights", "context"  # the folders of a checkpoint of NeMo 2
VERL = "dist_ckpt"  # the folder in one of veRL, beside `huggingface`
MODEL = re.compile(
    r"mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/(model_optim_rng|model_rng)\.pt"
)
RANK_FOLDER = re.compile(r"mp_rank_\d{1,6}(_\d{1,6}){0,2}")

_ITERATION = re.compile(r"iter_\d{7,}|release")
_FSDP_ENTRIES = (b"checkpoint_version", b"param_to_group_meta")
_MAX_KEYS = 10_000
_MAX_METADATA_BYTES = 4096  # bytes of metadata.json
_MAX_TRACKER_BYTES = 64  # bytes of the tracker
_MAX_ASSET_BYTES = 64 << 20  # of a file in `context`


@dataclass(frozen=True, slots=True)
class MegatronFolder:
    """A checkpoint's folder in the store ("" for the root), and the tracker if it names the folder.

    `context` are the files that NeMo stores beside the folder of weights; None if this is no
    checkpoint of NeMo's.
    """

    folder: str
    tracker: str | None
    classic: bool
    fsdp: bool = False
    context: tuple[str, ...] | None = None

    @classmethod
    def of(cls, store: Store, folder: str, tracker: str | None = None) -> MegatronFolder:
        """The folder of one iteration, by the files in it."""
        if backend_of(store, folder) is not None:
            return cls(folder, tracker, classic=False)
        fsdp = exists(store, f"{folder}/{METADATA}" if folder else METADATA)
        return cls(folder, tracker, classic=not fsdp, fsdp=fsdp)


def is_marker(name: str) -> bool:
    """Whether a folder with such a file holds Megatron checkpoints."""
    return name in (TRACKER, "model_optim_rng.pt", "model_rng.pt")


def find_place(store: Store) -> MegatronFolder | None:
    """Find the checkpoint; None if there is none."""
    if backend_of(store) is not None:
        return MegatronFolder("", None, classic=False)
    if backend_of(store, WEIGHTS) is not None:
        context = tuple(i.key for i in store.list(CONTEXT) if i.size <= _MAX_ASSET_BYTES)
        return MegatronFolder(WEIGHTS, None, classic=False, context=context)
    if backend_of(store, VERL) is not None:
        return MegatronFolder(VERL, None, classic=False)
    if _ITERATION.fullmatch(store.url.rstrip("/").rpartition("/")[2]) and _is_fsdp(store):
        return MegatronFolder("", None, classic=False, fsdp=True)
    named = _named(store)
    if named is None and exists(store, TRACKER):
        raise UsageError(
            f"{store.url}/{TRACKER} names no iteration",
            hint="open the folder of one iteration itself",
        )
    if named is not None:
        if next(iter(store.list(named)), None) is None:
            verl = store.list(f"global_step_{named.rpartition('_')[2].lstrip('0')}")
            if next(iter(verl), None) is not None:
                return None  # of veRL, which writes the same tracker
            raise NotFound(
                f"{store.url}/{TRACKER} names {named}, but there is no such folder",
                hint=(
                    "it was moved or deleted, or the save did not finish; open another "
                    "iteration's folder itself"
                ),
            )
        return MegatronFolder.of(store, named, TRACKER)
    keys = [info.key for info in islice(store.list(), _MAX_KEYS)]
    if any(MODEL.fullmatch(k) for k in keys):
        return MegatronFolder("", None, classic=True)
    inside = {k.split("/", 1)[0] for k in keys if _inside(k)}
    folders = sorted(filter(_ITERATION.fullmatch, inside))
    if len(folders) > 1:
        raise UsageError(
            f"{store.url} holds several iterations and no {TRACKER}: {first_names(folders, 10)}",
            hint="open the folder of one of them",
        )
    return MegatronFolder.of(store, folders[0]) if folders else None


def _is_fsdp(store: Store) -> bool:
    """Whether a folder has a `.metadata` with Megatron-FSDP's entries."""
    return exists(store, METADATA) and any(mark in store.read(METADATA) for mark in _FSDP_ENTRIES)


def backend_of(store: Store, folder: str = "") -> str | None:
    """The format that `metadata.json` names; None if this is no distributed checkpoint.

    One that lost `metadata.json` is recognised by `common.pt` and DCP's `.metadata`.
    """
    below = f"{folder}/" if folder else ""
    backend = _named_backend(store, below + CONFIG)
    if backend is None and exists(store, below + COMMON) and exists(store, below + METADATA):
        return DIST
    return backend


def _named_backend(store: Store, key: str) -> str | None:
    if not exists(store, key) or (size := store.info(key).size) > _MAX_METADATA_BYTES:
        return None
    try:
        document = json.loads(store.read(key, 0, size).decode())
    except (ValueError, RecursionError):
        return None
    backend = document.get("sharded_backend") if isinstance(document, dict) else None
    return backend if isinstance(backend, str) else None


def _inside(key: str) -> bool:
    below = key.split("/", 1)[-1]
    return below in (CONFIG, COMMON, METADATA) or MODEL.fullmatch(below) is not None


def _named(store: Store) -> str | None:
    """The folder that the tracker names."""
    if not exists(store, TRACKER) or (size := store.info(TRACKER).size) > _MAX_TRACKER_BYTES:
        return None
    text = store.read(TRACKER, 0, size).decode(errors="replace").strip()
    if text == "release":
        return text
    return check_key(f"iter_{int(text):07d}") if text.isdecimal() else None


#: What reading values raises that Megatron would not write.
_NOT_WRITTEN = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


@contextmanager
def built_by_megatron(where: str) -> Iterator[None]:
    """Report values that Megatron would not write, at any depth, as damage."""
    try:
        yield
    except UcformatError:
        raise
    except _NOT_WRITTEN as error:
        raise IntegrityError(
            f"{where} holds values that Megatron does not write ({type(error).__name__}: {error})",
            hint=(
                "the files are damaged, or of a version that ucformat does not know; report it "
                "if Megatron reads them"
            ),
        ) from error


# The model's sizes and the parallel degrees: from a checkpoint's own arguments (`args`) and the
# caller's options.

_MAX_RANKS = 1 << 20
_VOCABULARY = (
    "word_embeddings.weight",
    "output_layer.weight",
    "lm_head.weight",
    "output_layer.bias",
    "lm_head.bias",
)


@dataclass(frozen=True, slots=True)
class MegatronArguments:
    """`args` of a checkpoint, or what a run's configuration has of them; every value is None without both."""

    values: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None  # as the caller gave it
    file: str = ""
    beside: FilesBeside = field(default_factory=FilesBeside)

    @classmethod
    def of(
        cls, value: Any, vocab_size: int | None, file: str, beside: FilesBeside | None = None
    ) -> MegatronArguments:
        """Parse `args`; without any, the files beside the checkpoint tell what they know."""
        if isinstance(value, Inert):
            value = value.state
        beside = beside or FilesBeside()
        values = value if isinstance(value, dict) and value else beside.model
        file = beside.run if values is beside.model and beside.run else file
        return cls(
            {k: v for k, v in values.items() if isinstance(k, str)}, vocab_size, file, beside
        )

    def number(self, *names: str) -> int | None:
        """The first of these arguments that is an integer; None if there is none."""
        for name in names:
            value = self.values.get(name)
            if value is None or isinstance(value, bool) or not isinstance(value, int):
                continue
            if not 0 <= value <= _MAX_RANKS * 1024:
                raise IntegrityError(f"{self.file}: {name} is {value}")
            return value
        return None

    def degree(self, *names: str) -> int | None:
        """The first of these arguments that is a number of ranks; None if none is."""
        value = self.number(*names)
        if value is not None and not 1 <= value <= _MAX_RANKS:
            raise IntegrityError(f"{self.file}: {names[0]} is {value}")
        return value

    def flag(self, *names: str) -> bool | None:
        """The first of these arguments that is a boolean; None if there is none."""
        return next((v for name in names if isinstance(v := self.values.get(name), bool)), None)

    def layout(self) -> dict[str, Any]:
        """The recorded degrees of parallelism, in the form of manifests."""
        axes = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}
        degrees = {a: self.degree(f"{name}_model_parallel_size") for a, name in axes.items()}
        return {axis: n for axis, n in degrees.items() if n is not None}

    @property
    def tied(self) -> bool | None:
        """Whether the output layer is the input embedding."""
        untied = self.flag("untie_embeddings_and_output_weights")
        return self.flag("share_embeddings_and_output_weights") if untied is None else not untied

    def rows(self, name: str, stored: int) -> int:
        """The rows of a vocabulary without padding; of others, or if unknown, `stored`."""
        if not any(name == v or name.endswith("." + v) for v in _VOCABULARY):
            return stored
        rows_kept = self.vocab_size
        if rows_kept is None:
            size, unit = self._tokens(), self.number("make_vocab_size_divisible_by") or 0
            multiple = unit * (self.degree("tensor_model_parallel_size") or 1)
            padded = padded_rows(size, multiple) if size and multiple else None
            recorded = self.number("padded_vocab_size")
            # Megatron ignores `vocab_size` for most tokenizers, and pads from theirs.
            is_padded_from = size and (padded or recorded) == stored == (recorded or padded)
            claims = {self.file: size} if size and is_padded_from else {}
            rows_kept = self.beside.true_rows(claims, stored, multiple)
        return rows_kept if rows_kept is not None and 0 < rows_kept < stored else stored

    def _tokens(self) -> int | None:
        """The tokens of the vocabulary, if the arguments tell."""
        size = self.number("vocab_size")
        if self.flag("should_pad_vocab") is False:
            return None  # the rows, as the program was given them
        # it is the only tokenizer that adds a token to the size that it is given
        return size + 1 if size and self.values.get("tokenizer_type") == "NullTokenizer" else size
