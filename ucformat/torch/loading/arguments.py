"""How to read a checkpoint: arguments that `load`, `load_into` and the loaders of engines share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypedDict

from ucformat.storage.url import as_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch.distributed as dist

    from ucformat.reading.plan import Verify
    from ucformat.torch.loading.match import Rename, Strict


class ReadArguments(TypedDict, total=False):
    """How to read what a checkpoint and a program have in common.

    Attributes:
        rename: maps names of the checkpoint to names of the program: a function, or `{regex:
            replacement}`, where the regex matches the whole name.
        verify: which checksums to check: `whole` (the default) those of packed files, and of chunks
            of arrays that are read whole anyway; `always` all, by reading whole chunks; `never`
            none.
        threads: how many threads read on this rank (default: as many as the storage can use).
    """

    rename: Rename | None
    verify: Verify
    threads: int | None


class RestoreArguments(ReadArguments, total=False):
    """How all ranks restore a training together; those of `ReadArguments` too.

    Attributes:
        names: the names in the whole model of what this rank names locally, as for `save`.
        leave: what of the checkpoint needs no place in the state: names, prefixes of names that end
            at a dot, or globs (`*.exp_avg`), of tensors, or of their paths and those of values in
            the state that was saved.
        cast: cast tensors to the dtypes of the state (default: no).
        trust: unpickle opaque objects, which may run code (default: no).
        lossy: load states that were encoded with loss (`save(encode=)`; default: that is an error).
        strict_step: of tensors that a partial save took from earlier steps: False loads them as
            asked for; True refuses them, before anything is filled; by default they are loaded, and
            the report is false, and names them.
        certify: after the load compare what the ranks hold then with what is stored, and raise
            `NotCertified` if anything differs (default: no).
        timeout: seconds after which an unresponsive rank is considered dead (default 1800).
    """

    names: Mapping[str, int] | None
    leave: str | Iterable[str]
    cast: bool
    trust: bool
    lossy: bool
    strict_step: bool | None
    certify: bool
    timeout: float


class LoadArguments(RestoreArguments, total=False):
    """The arguments of `load` besides the state, the url and `strict`; those of `RestoreArguments` too.

    Attributes:
        group: the ranks that take part (default: all). Threads that load one checkpoint at once
            need different ones.
        broadcast_group: data-parallel replicas: each byte is read by one of these ranks, and
            broadcast over this group, whose backend must support the devices of the state.
        progress: called with the bytes of each read that is done.
    """

    group: dist.ProcessGroup | None
    broadcast_group: dist.ProcessGroup | None
    progress: Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a rank loads: arguments of `load`.

    `complete` refuses, before anything is changed, what the state has no place for. `own_step` leaves
    what is older than the checkpoint as it is in the state, and deltas, which lead there.
    """

    strict: Strict = "report"
    rename: Rename | None = None
    verify: Verify = "whole"
    threads: int | None = None
    names: Mapping[str, int] | None = None
    leave: tuple[str, ...] = ()
    cast: bool = False
    trust: bool = False
    lossy: bool = False
    strict_step: bool | None = None
    certify: bool = False
    broadcast_group: dist.ProcessGroup | None = None
    progress: Callable[[int], None] | None = None
    complete: bool = False
    own_step: bool = False

    @classmethod
    def of(cls, strict: Strict, arguments: RestoreArguments) -> LoadOptions:
        """Create them from the arguments of `load`."""
        names = {field.name for field in fields(cls)}
        given = {name: value for name, value in arguments.items() if name in names}
        return cls(strict, **given | {"leave": as_strings(arguments.get("leave", ()))})  # type: ignore[arg-type]
