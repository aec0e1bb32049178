"""`merge_deltas`: beside a training, makes a whole checkpoint of the newest one and the deltas since."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from ucformat.errors import UsageError, check_keywords
from ucformat.format.structure import read_manifest
from ucformat.references import open_reference
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadArguments
from ucformat.torch.loading.deltas import chain_of, number_in
from ucformat.torch.loading.replay import replay
from ucformat.torch.manager.steps import list_steps
from ucformat.torch.saving.save import save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from os import PathLike

    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.deltas import ChainLink
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.manager.steps import RunStep

__all__ = ["merge_deltas"]


def merge_deltas(
    run: str | PathLike[str],
    into: str | PathLike[str],
    state: Mapping[str, Any],
    step_fn: Callable[..., Any] | None = None,
    **arguments: Unpack[LoadArguments],
) -> LoadReport | None:
    """Replay the newest deltas of a run, and save everything as it is after them; all ranks call this together.

    Other processes than those of the training do this while it goes on, with a state of their own, of
    any layout, such as one on the CPU: they only read what is committed. The replay starts from what
    they have saved last.

    Args:
        run: the folder of the run, as of `Manager`.
        into: another folder, for whole checkpoints, each as `step-00001000`. With `Deltas(merged=…)`,
            `Manager.restore_latest` starts from the newest of them.
        state: as for `load`; it has the state of the newest checkpoint afterwards.
        step_fn: as for `replay`.
        arguments: those of `replay`, by keyword.

    Returns:
        the report of the replay; None if the newest checkpoint of the run has no deltas, or was merged before.
    """
    check_keywords("merge_deltas", arguments, LoadArguments)
    if open_store(run).url == open_store(into).url:
        raise UsageError(f"{into} is the run itself", hint="merge into another folder")
    timeout, group = arguments.get("timeout", TIMEOUT), arguments.get("group")
    with group_for_call("merge_deltas", run, group, timeout) as ranks:
        found: tuple[str, str] = ranks.combine(
            None, then=lambda _: _to_merge(run, into), answer_kind=tuple[str, str]
        )
    newest, start = found
    if not newest:
        return None
    report = replay(newest, state, step_fn, start=start or None, **arguments)
    place = f"{open_store(into).url}/step-{report.step:08}"
    save(
        state,
        place,
        step=report.step,
        form="packed",
        lineage=[report.lineage],
        group=group,
        timeout=timeout,
    )
    return report


def _to_merge(run: str | PathLike[str], into: str | PathLike[str]) -> tuple[str, str]:
    """The places of the newest checkpoint of a run and of the newest one that is merged; empty if there is none."""
    steps = list_steps(open_store(run).url).steps
    chain = _chain(steps[0].url) if steps else []
    merged = _newest_merged(chain, into) if chain else None
    if not chain or (merged is not None and merged.step == steps[0].step):
        return "", ""
    return steps[0].url, "" if merged is None else merged.url


def find_merged(ref: str, into: str | PathLike[str], ranks: Group) -> str:
    """The place of the newest whole checkpoint that was made of a chain of deltas; empty if there is none."""

    def find(_: None) -> str:
        chain = _chain(ref)
        merged = _newest_merged(chain, into) if chain else None
        return "" if merged is None else merged.url

    place: str = ranks.combine(None, then=find, answer_kind=str)
    return place


def _chain(ref: str) -> list[ChainLink]:
    """The chain of a checkpoint of deltas; none of another one."""
    ck = open_reference(ref).universal
    return [] if ck is None or ck.manifest.deltas is None else chain_of(ref, ck)


def _newest_merged(chain: list[ChainLink], into: str | PathLike[str]) -> RunStep | None:
    """The newest whole checkpoint that was made of deltas of a chain."""
    made = {link.manifest.step for link in chain[1:]}
    steps = (s for s in list_steps(open_store(into).url).steps if s.step in made)
    return next(
        (
            step
            for step in sorted(steps, key=lambda s: s.step, reverse=True)
            if number_in(chain, read_manifest(open_store(step.url))[0]) is not None
        ),
        None,
    )
