"""`replay`: one exact state from a window of checkpoints, each of which has full states of a part of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from ucformat.errors import (
    MissingData,
    NotCertified,
    UnsupportedError,
    UsageError,
    check_keywords,
    first_names,
)
from ucformat.geometry.tensor import Key
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.loading.arguments import LoadArguments, LoadOptions
from ucformat.torch.loading.certify import certify_state
from ucformat.torch.loading.load import load_state
from ucformat.torch.loading.match import edge_of
from ucformat.torch.loading.share import open_together
from ucformat.torch.saving.window import Groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from os import PathLike

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.bases import BaseCheckpoint
    from ucformat.schema.manifest import Manifest
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.load import LoadReport

__all__ = ["replay"]

_log = logging.getLogger("ucformat")


def replay(
    ref: str | PathLike[str] | Checkpoint,
    state: Mapping[str, Any],
    step_fn: Callable[[int], Any],
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Fill a training state with the exact one of a checkpoint of a window; all ranks call this together.

    The checkpoints of the newest complete window are loaded in turn over the state, each as far as it
    has tensors of its own step, and the steps between them, and after the last one up to `ref`, are
    trained again. Before a checkpoint is loaded, what each of the window has in full is compared with
    it, and after the last one everything that a checkpoint has of its own step, so that a training
    that does not repeat itself bit for bit is found. If groups of a complete window cover everything,
    nothing can be compared, which a warning tells.

    Args:
        ref: a checkpoint that was saved with `partial=Window(…)`, or any other without older tensors,
            which is only loaded.
        state: as for `load`.
        step_fn: trains one step, the one of this number: forward and backward pass, and update, with
            the data of that step.
        arguments: those of `LoadArguments`, by keyword, but `strict_step`. `certify` compares what
            was loaded last, too.

    Returns:
        the report of the last load, with the step of `ref`.

    Raises:
        UsageError: `ref` is not of a window.
        MissingData: no window before it is complete.
        NotCertified: the training did not repeat itself.
    """
    check_keywords("replay", arguments, LoadArguments)
    timeout = arguments.get("timeout", TIMEOUT)
    with group_for_call("replay", ref, arguments.get("group"), timeout) as ranks:
        opened = open_together(ref, ranks, more=True)
        with ranks.sharing_errors():
            if "strict_step" in arguments:
                raise UsageError("strict_step is not an argument of replay", hint="leave it out")
            options = LoadOptions.of("report", arguments)
            parts = _parts(opened)
        report = load_state(
            state, open_together(parts[0], ranks), ranks, replace(options, strict_step=False)
        )
        compared, trained = 0, opened.metadata.step != report.step
        for place, then in zip(parts, [*parts[1:], ""], strict=True):
            if place != parts[0]:
                ck = open_together(place, ranks)
                compared += _check_repeated(state, ck, ranks, options)
                report = load_state(state, ck, ranks, replace(options, own_step=True))
            if then:
                step_fn((report.step or 0) + 1)
        last, step = report.step, opened.metadata.step
        with ranks.sharing_errors():
            between = _saved_between(opened, last or 0)
        for number in range((last or 0) + 1, (step or 0) + 1) if last != step else ():
            step_fn(number)
            if number in between:
                ck = open_together(between[number], ranks)
                compared += _check_repeated(state, ck, ranks, options, exact=True)
        if last != step:
            compared += _check_repeated(state, opened, ranks, options, exact=True)
        elif options.certify:
            _check_repeated(state, opened, ranks, options, exact=True)
    if trained and not compared and not ranks.rank:
        _log.warning(
            "no checkpoint from which %s was replayed has a tensor that tells whether the training "
            "repeated itself: the groups of its window cover everything",
            opened.url,
        )
    continues = report.lineage.kind != "finetune"
    readers = report.lineage.readers
    return replace(
        report,
        url=opened.url,
        id=opened.id,
        step=step,
        lineage=edge_of(opened, report.layout, continues=continues, readers=readers),
        launch=None if opened.universal is None else opened.universal.manifest.launch,
        older={},
        older_asked=True,
    )


def _saved_between(ck: Checkpoint, last: int) -> dict[int, str]:
    """The places of checkpoints after a step on which one is based that is in a window which is not complete."""
    if ck.universal is None or not ck.metadata.older:
        return {}
    bases = _bases(cast("BaseCheckpoint", ck.universal))
    return {
        base.manifest.step: place
        for place, base in bases
        if base.manifest.step is not None and base.manifest.step > last
    }


def _parts(ck: Checkpoint) -> list[str]:
    """The places of the checkpoints of the newest complete window up to a checkpoint, in order."""
    universal = ck.universal
    if universal is None or not ck.metadata.older:
        return [ck.opened[0] if ck.opened else ck.url]
    if universal.manifest.window is None:
        raise UsageError(
            f"{ck.url} has tensors of earlier steps, and is not of a window",
            hint="ucformat.torch.load(…, strict_step=False) loads them as they are",
        )
    place, whole = _complete(cast("BaseCheckpoint", universal), ck.url)
    manifest = whole.manifest
    if manifest.window is None:
        return [place]
    parts = {
        base.manifest.window.at: (base.manifest.step, base_place)
        for base_place, base in _bases(whole)
        if base.manifest.window is not None and _is_before(base.manifest, manifest)
    }
    if sorted(parts) != list(range(manifest.window.steps - 1)):
        raise UnsupportedError(
            f"{place} is not based on each checkpoint of its window",
            hint="load an earlier checkpoint without older tensors",
        )
    return [*(parts[at][1] for at in sorted(parts)), place]


def _is_before(base: Manifest, last: Manifest) -> bool:
    """Whether a checkpoint is of the same window as its last one."""
    if base.window is None or last.window is None or base.step is None or last.step is None:
        return False
    same = base.window == last.window.model_copy(update={"at": base.window.at})
    return same and last.step - base.step == last.window.at - base.window.at


def _complete(ck: BaseCheckpoint, place: str) -> tuple[str, BaseCheckpoint]:
    """The newest checkpoint, from one downwards, that is whole or the last of its window."""
    complete = _search(ck, place, set())
    if complete is None:
        raise MissingData(
            f"no window up to {place} is complete, so nothing exact can be made of it",
            hint="each step of a window has to be saved; load an earlier checkpoint",
        )
    return complete


def _search(
    ck: BaseCheckpoint, place: str, searched: set[str]
) -> tuple[str, BaseCheckpoint] | None:
    """The same, or None; `searched` are the ids of those below which there is none."""
    window = ck.manifest.window
    if window is None and not any(True for _ in ck.manifest.tensors.older()):
        return place, ck
    if window is not None and window.at == window.steps - 1:
        return place, ck
    searched.add(ck.manifest.id)
    below = sorted(_bases(ck), key=lambda pair: pair[1].manifest.step or 0, reverse=True)
    for base_place, base in below:
        if base.manifest.id not in searched:
            complete = _search(base, base_place, searched)
            if complete is not None:
                return complete
    return None


def _bases(ck: BaseCheckpoint) -> Iterator[tuple[str, BaseCheckpoint]]:
    for number in range(len(ck.manifest.bases)):
        yield ck.bases.place(number), ck.bases.opened(number)


def _check_repeated(
    state: Mapping[str, Any],
    ck: Checkpoint,
    ranks: Group,
    options: LoadOptions,
    *,
    exact: bool = False,
) -> int:
    """Check that tensors are those of their own step in a checkpoint, and return how many were compared.

    Args:
        exact: all of them have to be; else those that each checkpoint of its window has in full.
    """
    window = None if ck.universal is None or exact else ck.universal.manifest.window
    groups = None if window is None else Groups(window)
    asked = replace(options, strict_step=False, certify=False, own_step=True)
    certificate = certify_state(state, ck, ranks, asked, record=False)
    equal, wrong = (
        [
            Key(entry.name, entry.state)
            for entry in entries
            if entry.state and (groups is None or groups.of(entry.name) is None)
        ]
        for entries in (certificate.equal, certificate.different)
    )
    if wrong:
        raise NotCertified(
            f"the step before {ck.metadata.step} was not trained as when {ck.url} was saved: "
            f"{first_names(wrong, 5)} differ",
            hint="step_fn has to repeat the training bit for bit: the same data, generators of random "
            "numbers, deterministic algorithms, and the same parallel layout where it changes sums. A "
            "training that was restarted from older tensors (strict_step=False) cannot be repeated "
            "before its first complete window",
        )
    return len(equal)
