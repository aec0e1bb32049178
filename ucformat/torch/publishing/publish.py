"""`publish`: saves a version of a model as a patch of an earlier one, or whole when that pays, and announces it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    UcformatError,
    UsageError,
    check_keywords,
    refuse_arguments,
)
from ucformat.format.structure import read_manifest
from ucformat.jobs.removal import discard
from ucformat.schema.documents import ChannelDoc, VersionDoc
from ucformat.storage.concurrency import map_io
from ucformat.storage.url import open_store
from ucformat.torch.comm.group import TIMEOUT, group_for_call
from ucformat.torch.comm.wire import message
from ucformat.torch.manager.increments import Increments, choose_base
from ucformat.torch.manager.steps import described_step, read_step
from ucformat.torch.publishing.channel import Channel, content_digest, named
from ucformat.torch.saving.options import RunArguments, SaveOptions
from ucformat.torch.saving.patching import KeptTiles
from ucformat.torch.saving.save import prepare, save_in_group

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import torch

    from ucformat.torch.comm.group import Group
    from ucformat.torch.manager.steps import RunStep
    from ucformat.torch.saving.options import SaveArguments
    from ucformat.torch.saving.save import Saved

__all__ = ["Published", "Publisher", "publish"]

_log = logging.getLogger("ucformat")

_PATCHES = Increments(patch=True)


@message
class Published:
    """A version that receivers can load.

    `id` and `url` are those of its checkpoint. `base` is the version of which it is a patch, None if
    it is whole. `nbytes` are the bytes that this rank wrote, `seconds` the duration on this rank.
    """

    version: int
    url: str
    id: str
    base: int | None
    nbytes: int
    seconds: float


@message
class _Plan:
    """What the ranks save: the number of the version, its place, and the number and the place of its base."""

    number: int
    folder: str
    base: int | None
    base_url: str | None


class Publisher:
    """Publishes the versions of a model to a channel, from any number of ranks.

        publisher = Publisher("s3://bucket/policy", keep=4)
        for step in range(steps):
            train()
            publisher.publish(model)

    It keeps between calls what `publish` has to read from the channel, with a copy on the host of
    what each rank has written last, of which the next patch is made.

    Args:
        channel: a folder, or a prefix in an object store; created by the first version.
        increments: what a version is a patch of, and when it is whole (default: of the version
            before, and at most 8 of these in a row). None: each version is whole.
        keep: how many versions stay, besides those that they are patches of (default: all). Older
            ones are removed after each version; failures are logged as warnings.
        arguments: those of `RunArguments`, by keyword, but `base`, `patch` and `overwrite`. The form
            is `packed` by default.
    """

    def __init__(
        self,
        channel: str | PathLike[str],
        *,
        increments: Increments | None = _PATCHES,
        keep: int | None = None,
        **arguments: Unpack[RunArguments],
    ) -> None:
        check_keywords("Publisher", arguments, RunArguments)
        for name in ("base", "patch", "overwrite"):
            if name in arguments:
                raise UsageError(
                    f"{name} is not an argument of Publisher",
                    hint="`increments` says what a version is based on, and each has a new place",
                )
        refuse_arguments(
            "Publisher",
            arguments,
            {
                "log_to": "log the versions that matter by `ucformat.log_reference`",
                "partial": "subscribers would get experts of different steps",
            },
        )
        if keep is not None and keep < 1:
            raise UsageError(f"keep must be at least 1, not {keep}")
        self._channel = Channel(channel)
        self._arguments: RunArguments = {"form": "packed", **arguments}
        self._increments, self._keep = increments, keep
        SaveOptions.of(self.url, self._on(self.url))  # checks them
        self._kept = KeptTiles()
        # on rank 0, those versions that the next one may be based on, the newest first:
        self._steps: list[RunStep] = []
        self._document: ChannelDoc | None = None
        self._content_version: str | None = None
        self._old: list[str] = []  # folders that are to be removed
        self._is_swept = False  # whether this publisher has looked for what others have left

    @property
    def url(self) -> str:
        """The place of the channel."""
        return self._channel.url

    def publish(
        self, state: torch.nn.Module | Mapping[str, Any], version: int | None = None
    ) -> Published:
        """Publish the next version; all ranks call this together.

        When it returns, receivers can load the version. If it raises, they find the one before.

        Args:
            state: a model, or a state as for `save`.
            version: its number, higher than that of the one before (default: the next one).

        Raises:
            Conflict: this version, or a later one, has been published; or another publisher has
                published meanwhile.
            UcformatError: as for `save`.
        """
        begun = time.monotonic()
        group, timeout = self._arguments.get("group"), self._arguments.get("timeout", TIMEOUT)
        with group_for_call("publish", self.url, group, timeout) as ranks:
            plan: _Plan = ranks.combine(None, then=lambda _: self._plan(version), answer_kind=_Plan)
            place = f"{self.url}/{plan.folder}"
            try:
                saved = self._save(state, place, plan, ranks)
            except (IntegrityError, NotFound) as error:
                if plan.base is None:
                    raise
                _log.warning(
                    "version %d of %s is published whole, since version %d, its base, cannot be read: %s",
                    *(plan.number, self.url, plan.base, error.message),
                )
                plan = replace(plan, base=None, base_url=None)
                saved = self._save(state, place, plan, ranks)
            ranks.combine(None, then=lambda _: self._announce(plan, saved))
            if not ranks.rank:
                self._remove_old()
        seconds = time.monotonic() - begun
        return Published(plan.number, saved.url, saved.id, plan.base, saved.nbytes, seconds)

    def _save(
        self, state: torch.nn.Module | Mapping[str, Any], place: str, plan: _Plan, ranks: Group
    ) -> Saved:
        with ranks.sharing_errors():
            arguments: SaveArguments = {**self._on(plan.base_url), "step": plan.number}  # type: ignore[typeddict-item] # mypy demands all
            local, options, metadata, _ = prepare(named(state), place, ranks, arguments)
        return save_in_group(local, options, metadata, ranks, self._kept)

    def _plan(self, version: int | None) -> _Plan:
        """Decide on rank 0 what is saved."""
        self._document, self._content_version = self._channel.read()
        versions = () if self._document is None else self._document.versions
        last = versions[0].number if versions else 0
        number = last + 1 if version is None else version
        if number <= last:
            raise Conflict(
                f"version {number} is not later than version {last}, the newest of {self.url}",
                hint="leave out `version` for the next one",
            )
        if [v.id for v in versions[:1]] != [step.id for step in self._steps[:1]]:
            self._steps = self._read_steps(versions)
        base = None
        if self._increments is not None and self._steps:
            base = choose_base(self._increments, number, self._steps)
        return _Plan(
            number,
            self._channel.free_folder(number),
            None if base is None else base.step,
            None if base is None else base.url,
        )

    def _read_steps(self, versions: tuple[VersionDoc, ...]) -> list[RunStep]:
        """What manifests say of versions, but of those that are gone."""

        def read(version: VersionDoc) -> RunStep | None:
            try:
                step = read_step(self._channel.place(version), version.number)
            except NotACheckpoint:
                return None
            return step if step.id == version.id else None

        return [step for step in map_io(read, versions) if step is not None]

    def _on(self, base: str | None) -> RunArguments:
        """The arguments of a save on a base, or of a whole one."""
        arguments = self._arguments.copy()
        if base is not None and self._increments is not None:
            arguments |= {"base": base, "patch": self._increments.patch}
        elif arguments["form"] == "packed":
            # with an index, by which tiles that stay equal are told without reading them
            arguments.setdefault("codec", "raw")
        return arguments

    def _announce(self, plan: _Plan, saved: Saved) -> None:
        """Let receivers know of a version that is committed."""
        self._is_swept, was_swept = False, self._is_swept  # if this fails, the version is left
        manifest, _ = read_manifest(open_store(saved.url))
        steps = [described_step(saved.url, manifest, plan.number), *self._steps]
        anchor = next((n for n, step in enumerate(steps) if not step.bases), len(steps))
        stay = _with_bases(steps, self._keep or anchor + 1)
        new = VersionDoc(
            number=plan.number,
            folder=plan.folder,
            id=saved.id,
            content=content_digest(manifest),
        )
        before = () if self._document is None else self._document.versions
        document = ChannelDoc(versions=(new, *(v for v in before if v.id in stay)))
        try:
            self._channel.announce(document, self._content_version)
        except Conflict:
            discard(saved.url)  # nobody has been told of it
            raise
        # the bytes of all that follow the anchor tell when the next one pays
        self._steps = [s for n, s in enumerate(steps) if n <= anchor or s.id in stay]
        self._document = document
        self._old = [v.folder for v in before if v.id not in stay]
        self._is_swept = was_swept

    def _remove_old(self) -> None:
        """Remove on rank 0 the versions that do not stay, and those that a killed publisher has not announced."""
        if self._keep is None or self._document is None:
            return
        try:
            if not self._is_swept:
                versions = self._document.versions
                stay, newest = {v.folder for v in versions}, versions[0].number
                left = {f: n for f, n in self._channel.folders().items() if n <= newest}
                self._old = sorted(left.keys() - stay, key=left.__getitem__, reverse=True)
            for folder in self._old:  # each before what it is based on
                discard(f"{self.url}/{folder}")
            self._is_swept = True
        except UcformatError as error:
            _log.warning("old versions of %s are not removed: %s", self.url, error.message)


def _with_bases(steps: list[RunStep], count: int) -> set[str]:
    """The ids of the first versions, and of all that they are based on."""
    ids = {step.id for step in steps[:count]}
    for step in steps:  # each before what it is based on
        if step.id in ids:
            ids.update(step.bases)
    return ids


def publish(
    state: torch.nn.Module | Mapping[str, Any],
    channel: str | PathLike[str],
    *,
    version: int | None = None,
    increments: Increments | None = _PATCHES,
    keep: int | None = None,
    **arguments: Unpack[RunArguments],
) -> Published:
    """Publish a version of a model to a channel; all ranks call this together.

    A program that publishes many uses a `Publisher`, which makes fewer requests.

    Args:
        state: as for `Publisher.publish`.
        channel: as for `Publisher`.
        version: as for `Publisher.publish`.
        increments: as for `Publisher`.
        keep: as for `Publisher`.
        arguments: as for `Publisher`.

    Raises:
        Conflict: as for `Publisher.publish`.
        UcformatError: as for `save`.
    """
    publisher = Publisher(channel, increments=increments, keep=keep, **arguments)
    return publisher.publish(state, version)
