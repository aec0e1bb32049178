"""`save`: a training state of any layout becomes one universal checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ucformat.errors import UsageError
from ucformat.torch.agree import Terms
from ucformat.torch.group import TIMEOUT, meeting
from ucformat.torch.memory import copied_to_host, host_memory
from ucformat.torch.state import listing_of, local_state
from ucformat.torch.writing import Note, save_listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    import torch.distributed as dist

    from ucformat.schema.manifest import LineageDoc
    from ucformat.torch.group import Group
    from ucformat.torch.local import LocalState
    from ucformat.torch.writing import Saved

__all__ = ["save", "save_held", "save_local", "terms_of"]

_NO_NOTE = Note()


def save(
    state: Mapping[str, Any],
    url: str | PathLike[str],
    *,
    step: int | None = None,
    run: str | None = None,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    lineage: Sequence[LineageDoc] = (),
    after: int | None = None,
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save a training state; all ranks call it together, and return when it is committed.

    Args:
        state: nested mappings of modules, optimizers, tensors (plain, DTensor, ShardedTensor), objects with a state
            dict, PerRank values and plain values; or the state dicts of all these.
        url: where the checkpoint is to lie; the same on all ranks.
        step: the training step.
        run: the name of the training run, for the catalog.
        metrics: numbers to note, for the catalog: `{"val_loss": 2.1}`.
        config: the configuration of the training, plain JSON values.
        form: `zarr` writes arrays, for which ranks send each other parts of shards; `packed` writes one file for each
            rank without any sending, which opens the same, and which `ucp materialize` makes arrays of.
        overwrite: replace a checkpoint that is committed there; it stays whole until this one is.
        lineage: what this checkpoint comes from.
        after: the greatest count of commits (`Manifest.commits`) among the run's checkpoints, 0 if there are none; as
            `Manager` says it. This one counts one more than that, and than those in `lineage`. Without both it has no
            count, and its step says how new it is.
        replicas: what ranks hold in common must be `equal` (objects and tensors of at most 64 KiB are compared, of
            larger ones that ranks hold whole a few places), or that of the `first` rank is taken.
        chunk_bytes: the most bytes of a chunk of the Zarr form (default 1 MiB).
        shard_bytes: the most bytes of a shard of the Zarr form (default 128 MiB).
        group: the ranks that take part (default: all). Threads that save at once to one url need one each.
        timeout: seconds after which a silent rank is taken for dead.

    Raises:
        Conflict: a checkpoint is committed there already.
        UsageError: ranks disagree on what should be the same.
        CoverageError: nobody holds some part of a tensor.
        UcformatError: a rank failed or died; nothing is committed. Every rank gets the same error.
    """
    with meeting(group, timeout, "save", url) as ranks:
        with ranks.telling():
            held = local_state(state)
            terms = terms_of(url, form, overwrite, chunk_bytes, shard_bytes, replicas)
            note = Note.of(step, run, metrics, config, lineage, after)
        return save_held(held, terms, note, ranks)


def save_local(
    state: LocalState,
    url: str | PathLike[str],
    *,
    note: Note = _NO_NOTE,
    form: Literal["zarr", "packed"] = "zarr",
    overwrite: bool = False,
    replicas: Literal["equal", "first"] = "equal",
    chunk_bytes: int | None = None,
    shard_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT,
) -> Saved:
    """Save what this rank holds, whatever engine it was collected from; see `save`."""
    with meeting(group, timeout, "save", url) as ranks:
        with ranks.telling():
            terms = terms_of(url, form, overwrite, chunk_bytes, shard_bytes, replicas)
        return save_held(state, terms, note, ranks)


def save_held(state: LocalState, terms: Terms, note: Note, ranks: Group) -> Saved:
    """Save what this rank holds, together with the ranks of one of our own groups."""
    with ranks.telling():
        memories = [host_memory(copied_to_host(t.tensor)) for t in state.tensors]
    return save_listed(listing_of(state), memories, terms, note, ranks)


def terms_of(
    url: str | PathLike[str],
    form: Literal["zarr", "packed"],
    overwrite: bool,  # noqa: FBT001 - as `save` has it
    chunk_bytes: int | None,
    shard_bytes: int | None,
    replicas: Literal["equal", "first"],
) -> Terms:
    """What must be the same on all ranks, looked at before anything is done."""
    if form not in ("zarr", "packed"):
        raise UsageError(f"there is no form {form!r}", hint='"zarr" or "packed"')
    if replicas not in ("equal", "first"):
        raise UsageError(f"replicas cannot be {replicas!r}", hint='"equal" or "first"')
    for what, given in (("chunk_bytes", chunk_bytes), ("shard_bytes", shard_bytes)):
        if given is not None and given < 1:
            raise UsageError(f"{what} must be at least 1, not {given}")
    return Terms(str(url), form, overwrite, chunk_bytes, shard_bytes, replicas)
