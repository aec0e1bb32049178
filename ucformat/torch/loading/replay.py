"""`replay`: one exact state from a window of checkpoints, or from a whole one and the deltas since."""

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
from ucformat.torch.loading.deltas import DeltaReader, GradientSteps, chain_of, number_in
from ucformat.torch.loading.load import load_state
from ucformat.torch.loading.match import edge_of
from ucformat.torch.loading.share import open_together
from ucformat.torch.saving.window import Groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    import torch

    from ucformat.checkpoint import Checkpoint
    from ucformat.format.bases import BaseCheckpoint
    from ucformat.schema.manifest import Manifest
    from ucformat.torch.comm.group import Group
    from ucformat.torch.loading.deltas import ChainLink
    from ucformat.torch.loading.load import LoadReport

__all__ = ["replay"]

_log = logging.getLogger("ucformat")


def replay(
    ref: str | PathLike[str] | Checkpoint,
    state: Mapping[str, Any],
    step_fn: Callable[..., Any] | None = None,
    *,
    start: str | PathLike[str] | None = None,
    **arguments: Unpack[LoadArguments],
) -> LoadReport:
    """Fill a training state with the exact one of a checkpoint that has older tensors; all ranks call this together.

    Of a chain of deltas, the checkpoint that has everything is loaded, and then the deltas of each
    step are applied, read batch by batch, dense ones by each rank as far as its layout needs them.
    After each batch the rows of weights that its checkpoint has are compared with what comes out.

    Of windows, the checkpoints of the newest complete window are loaded in turn over the state, each as far as it
    has tensors of its own step, and the steps between them, and after the last one up to `ref`, are
    trained again. Before a checkpoint is loaded, what each of the window has in full is compared with
    it, and after the last one everything that a checkpoint has of its own step, so that a training
    that does not repeat itself bit for bit is found. If groups of a complete window cover everything,
    nothing can be compared, which a warning tells.

    Args:
        ref: a checkpoint that was saved with `partial=Deltas(…)` or `partial=Window(…)`, or any other
            without older tensors, which is only loaded.
        state: as for `load`.
        step_fn: of deltas, `step_fn(step, deltas)` applies those of a step, by name; dense ones of
            parameters have the layout of these (default: they are gradients, which the optimizers
            and LR schedulers of the state apply). Of a window, `step_fn(step)` trains one step, the one
            of this number: forward and backward pass, and update, with the data of that step.
        start: of deltas, a checkpoint that `merge_deltas` made of an earlier part of the chain: only the
            deltas after its step are applied (default: the one that has everything).
        arguments: those of `LoadArguments`, by keyword, but `strict_step`. `certify` compares what
            was loaded last, too.

    Returns:
        the report of the last load, with the step of `ref`.

    Raises:
        UsageError: `ref` is neither of a window nor of a chain of deltas, there is no `step_fn`, or `start`
            is not of the chain.
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
            chain = _chain(opened)
            parts = [link.place for link in chain] or _parts(opened)
            if step_fn is None and not chain and (parts[1:] or opened.metadata.older):
                raise UsageError(
                    f"{opened.url} is of a window, whose steps have to be trained again",
                    hint="replay(ref, state, step_fn), where step_fn(step) trains a step",
                )
        whole = open_together(parts[0] if start is None else start, ranks, more=True)
        with ranks.sharing_errors():
            if start is not None:
                parts = _parts_after(whole, chain, opened)
        report = load_state(state, whole, ranks, replace(options, strict_step=False))
        compared: int | None
        if chain:
            report, compared = _apply_deltas(state, opened, parts, step_fn, ranks, options, report)
        else:
            report, compared = _train_again(state, opened, parts, step_fn, ranks, options, report)
        if options.certify:
            _check_repeated(state, opened, ranks, options)
    if compared == 0 and not ranks.rank:
        _log.warning(
            "nothing that %s has tells whether the steps before it were repeated: all that they change is "
            "of earlier steps there",
            opened.url,
        )
    continues = report.lineage.kind != "finetune"
    readers = report.lineage.readers
    return replace(
        report,
        url=opened.url,
        id=opened.id,
        step=opened.metadata.step,
        lineage=edge_of(opened, report.layout, continues=continues, readers=readers),
        launch=None if opened.universal is None else opened.universal.manifest.launch,
        older={},
        older_asked=True,
    )


def _apply_deltas(
    state: Mapping[str, Any],
    ck: Checkpoint,
    parts: Sequence[str],
    step_fn: Callable[[int, Mapping[str, torch.Tensor]], Any] | None,
    ranks: Group,
    options: LoadOptions,
    report: LoadReport,
) -> tuple[LoadReport, int]:
    """Apply the deltas of all checkpoints after the first, and load what else the last one has.

    Returns how many tensors were compared.
    """
    with ranks.sharing_errors():
        apply = GradientSteps(state, options.names) if step_fn is None else step_fn
        reader = DeltaReader(state, options)
    compared = 0
    for place in parts[1:]:
        part = ck if place == parts[-1] else open_together(place, ranks, more=True)
        # a rank that cannot read must not leave others alone in a step
        with ranks.sharing_errors():
            steps = reader.read(part)
        for step, deltas in steps.items():
            apply(step, deltas)
        with ranks.sharing_errors():
            count, differing = reader.check(part)
            if differing:
                raise _not_repeated(differing, part)
        compared += count
    rest = load_state(state, ck, ranks, replace(options, own_step=True))
    both = replace(
        rest,
        nbytes=report.nbytes + reader.nbytes + rest.nbytes,
        seconds=report.seconds + rest.seconds,
        problems=report.problems | rest.problems,
        left=tuple(dict.fromkeys((*report.left, *rest.left))),
    )
    return both, compared


def _parts_after(whole: Checkpoint, chain: Sequence[ChainLink], ck: Checkpoint) -> list[str]:
    """The place of a whole checkpoint to which a part of a chain of deltas leads, and those of the rest of the chain.

    Raises:
        UsageError: it is no such checkpoint.
    """
    number = None
    if whole.universal is not None and not whole.metadata.older:
        number = number_in(chain, whole.universal.manifest)
    if number is None:
        raise UsageError(
            f"{whole.url} is no whole checkpoint to which deltas of {ck.url} lead",
            hint="one that merge_deltas has made of this run; or leave start out",
        )
    return [_place(whole), *(link.place for link in chain[number + 1 :])]


def _chain(ck: Checkpoint) -> list[ChainLink]:
    """The checkpoints of a chain of deltas, in order; none if nothing has to be replayed by deltas."""
    if ck.universal is None or not ck.metadata.older or ck.universal.manifest.deltas is None:
        return []
    return chain_of(_place(ck), cast("BaseCheckpoint", ck.universal))


def _place(ck: Checkpoint) -> str:
    return ck.opened[0] if ck.opened else ck.url


def _train_again(
    state: Mapping[str, Any],
    ck: Checkpoint,
    parts: Sequence[str],
    step_fn: Callable[[int], Any] | None,
    ranks: Group,
    options: LoadOptions,
    report: LoadReport,
) -> tuple[LoadReport, int | None]:
    """Load the other checkpoints of a window over its first, with a step before each, and train up to the end.

    Returns how many tensors were compared; None if no step was trained.
    """
    step, compared = ck.metadata.step, 0
    if report.step == step:
        return report, None
    assert step_fn is not None  # noqa: S101 - checked by the caller
    for place in parts[1:]:
        step_fn((report.step or 0) + 1)
        part = open_together(place, ranks)
        compared += _check_repeated(state, part, ranks, options, _whole_in_each(part))
        report = load_state(state, part, ranks, replace(options, own_step=True))
    last = report.step
    with ranks.sharing_errors():
        between = _saved_between(ck, last or 0)
    for number in range((last or 0) + 1, (step or 0) + 1) if last != step else ():
        step_fn(number)
        if number in between:
            compared += _check_repeated(
                state, open_together(between[number], ranks), ranks, options
            )
    if last != step:
        compared += _check_repeated(state, ck, ranks, options)
    return report, compared


def _whole_in_each(ck: Checkpoint) -> Callable[[Key], bool]:
    """Whether a tensor is in each checkpoint of the window of one."""
    window = None if ck.universal is None else ck.universal.manifest.window
    assert window is not None  # noqa: S101 - it is a part of one
    groups = Groups(window)
    return lambda key: groups.of(key.name) is None


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
        return [_place(ck)]
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
    counts: Callable[[Key], bool] = lambda _: True,
) -> int:
    """Check that tensors are those of their own step in a checkpoint, and return how many were compared.

    Args:
        counts: which tensors have to be equal.
    """
    asked = replace(options, strict_step=False, certify=False, own_step=True)
    certificate = certify_state(state, ck, ranks, asked, record=False)
    equal, wrong = (
        [key for e in entries if e.state and counts(key := Key(e.name, e.state))]
        for entries in (certificate.equal, certificate.different)
    )
    if wrong:
        raise _not_repeated(wrong, ck)
    return len(equal)


def _not_repeated(different: Sequence[object], ck: Checkpoint) -> NotCertified:
    return NotCertified(
        f"the step before {ck.metadata.step} was not repeated as when {ck.url} was saved: "
        f"{first_names(different, 5)} differ",
        hint="a training has to repeat itself bit for bit: the same data, generators of random "
        "numbers, deterministic algorithms, and the same parallel layout where it changes sums; deltas "
        "have to be applied as they were, with the same optimizer and learning rates. A "
        "training that was restarted from older tensors (strict_step=False) cannot be repeated "
        "before its first complete window",
    )
