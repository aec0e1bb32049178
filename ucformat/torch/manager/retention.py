"""Which of a run's checkpoints stay: by the catalog where there is one, else by what lies in the run's folder.

Both follow docs/retention.md. The catalog deletes softly, and what is ours and past its grace is purged at once, as
`ucp gc` would; without a catalog there is no grace. Files go as in every purge: tombstone first, manifest next.
"""

from __future__ import annotations

import logging
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.catalog.newest import contradictions
from ucformat.catalog.refs import same_url
from ucformat.catalog.retention import OWN_KIND, RetentionRow, load_policy, plan_retention
from ucformat.catalog.stamp import now
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    NotFound,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.format.commit import MANIFEST
from ucformat.jobs.documents import protections_of
from ucformat.jobs.gc import consult, purge  # `collect`, but of nothing that is not ours
from ucformat.jobs.register import register
from ucformat.jobs.removal import read_tombstone, remove
from ucformat.schema.policy import Last, Policy
from ucformat.settings import load_settings, source_of
from ucformat.storage.url import open_store
from ucformat.torch.manager.steps import folder_of, list_steps, read_step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Store
    from ucformat.torch.manager.steps import RunStep

    Keep = int | Mapping[str, Any] | Policy | str | Path

__all__ = ["Keep", "RunRetention", "deleted_ids", "free_place", "policy_of"]

_log = logging.getLogger("ucformat")


def policy_of(keep: Keep) -> Policy:
    """The policy that `keep` means: a number of last checkpoints, rules, or a whole policy, perhaps in a file.

    What is said without a grace has none. The last checkpoint of a run always stays.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(keep, int):
        keep = {"last": keep}
    if isinstance(keep, Policy):
        policy = keep
    elif isinstance(keep, str | Path):
        policy = load_policy(keep)
    elif "keep" in keep:
        policy = load_policy({"version": 1, **keep})
    else:
        policy = load_policy({"version": 1, "keep": dict(keep), "grace": "0s"})
    if any(rule.group == "run" for rule in policy.keep.last):
        return policy
    last = (*policy.keep.last, Last(count=1))
    return policy.model_copy(update={"keep": policy.keep.model_copy(update={"last": last})})


class RunRetention:
    """Applies a policy to the checkpoints below `root`, and to no others. One process of the run calls `apply`.

    Raises:
        UsageError: the policy has filters, and there is no catalog.
    """

    def __init__(self, root: str, policy: Policy) -> None:
        self.root, self.policy = root, policy
        self._catalog = load_settings().catalog_url()
        self._known: dict[str, RunStep] | None = None  # by url; only without a catalog
        self._begun = False
        self._told: set[str] = set()
        if self._catalog is None and policy.filters():
            raise UsageError(
                "`where` and `scope` need a catalog, and it is switched off",
                hint="set UCP_CATALOG, or keep by last, every, best and younger",
            )

    def apply(self, url: str, step: int) -> list[str]:
        """Delete what the policy does not keep, now that a checkpoint was committed there; the ids of what is gone.

        What goes wrong becomes a warning: training goes on, and the next commit tries again.
        """
        try:
            if self._catalog is not None and self._usable(self._catalog):
                return self._in_catalog(self._catalog)
            if self._known is None:
                listed = list_steps(self.root)
                for place in listed.buried:
                    _end_purge(place)
                self._known = {s.url: s for s in listed.steps}
            self._known[url] = read_step(url, step)
            return self._in_folder(self._known)
        except Exception as error:  # noqa: BLE001 - whatever the catalog and the place say
            _log.warning("what need not stay below %s is not deleted: %s", self.root, getattr(error, "message", error))
            return []

    def _usable(self, url: str) -> bool:
        """Whether to ask the catalog: not one that nobody named, and that cannot be opened (as on a network's home)."""
        if self._begun or source_of("catalog") != "default" or self.policy.filters():
            return True
        from ucformat.catalog.catalog import Catalog

        try:
            Catalog(url).close()
        except UcformatError as error:
            _log.warning("what lies below %s is kept without a catalog: %s", self.root, error.message)
            self._catalog = None
        return self._catalog is not None

    def _in_catalog(self, catalog_url: str) -> list[str]:
        from ucformat.catalog.catalog import Catalog

        root = same_url(self.root)
        below = f"url like '{_literal(root)}/step-%'"
        with Catalog(catalog_url) as catalog:
            if not self._begun:  # this catalog may be younger than the run, or have missed a commit
                register([self.root], catalog, recursive=True)
                self._begun = True
            found = catalog.find(below)
            copied = [e.id for e in found if any(not u.startswith(f"{root}/") for u in e.urls)]
            scope = below if self.policy.scope is None else f"({self.policy.scope}) and {below}"
            if copied:  # to delete one of them would delete the copy elsewhere
                scope += f" and id not in ({', '.join(map(repr, copied))})"
            policy = self.policy.model_copy(update={"scope": scope})
            plan = catalog.retain(policy)
            self._warn_once(f"the rule keeps nothing: {rule}" for rule in plan.idle)
            self._warn_once(plan.contradictions)
            self._warn_once(f"{i[:12]} is not judged, because it lies elsewhere too" for i in copied)
            if plan.delete:
                try:
                    catalog.retain(policy, apply=plan.id)
                except Conflict:  # somebody changed what matters: the next commit plans anew
                    return []
            return self._purge(catalog, below)

    def _purge(self, catalog: Catalog, below: str) -> list[str]:
        """Remove from storage what is deleted and of this run, once its grace is over."""
        ours = {e.id: e.state for e in catalog.find(f"(state = 'deleted' or state = 'purging') and {below}")}
        over = [r.id for r in catalog.purgeable().purge if r.id in ours]
        unclear = consult(catalog, over)
        over = [r.id for r in catalog.purgeable().purge if r.id in ours and r.id not in unclear]
        for why in unclear.values():
            _log.warning("not purged: %s", why)
        gone = []
        for checkpoint in [*over, *(i for i, state in ours.items() if state == "purging")]:
            try:
                if purge(catalog, checkpoint):
                    gone.append(checkpoint)
            except UcformatError as error:
                _log.warning("not purged: %s: %s", checkpoint, error.message)
        return gone

    def _in_folder(self, known: dict[str, RunStep]) -> list[str]:
        steps = list(known.values())
        plan = plan_retention(self.policy, [_row(s, n, self.root) for n, s in enumerate(steps)], now())
        self._warn_once(f"the rule keeps nothing: {rule}" for rule in plan.idle)
        self._warn_once(contradictions(steps, attrgetter("url")))
        gone = []
        for step in (steps[row.serial] for row in plan.delete):
            if protections_of(step.url, step.id, known=False):
                continue
            if remove(open_store(step.url), step.id):  # somebody began to need it at this instant
                continue
            del known[step.url]
            gone.append(step.id)
        return gone

    def _warn_once(self, what: Iterable[str]) -> None:
        """Warn, of each thing once."""
        for text in set(what) - self._told:
            self._told.add(text)
            _log.warning("%s: %s", self.root, text)


def _end_purge(url: str) -> None:
    """Remove what an interrupted purge has left."""
    store = open_store(url)
    tombstone = read_tombstone(store)
    if tombstone is not None:
        remove(store, tombstone.id)


def _literal(text: str) -> str:
    """Text in a pattern of `like`, between quotes."""
    for special in "\\%_":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "''")


def _row(step: RunStep, serial: int = 0, run: str = "", **said: Any) -> RetentionRow:
    about = {"commits": step.commits, "metrics": step.metrics, **said}
    return RetentionRow(serial, step.id, OWN_KIND, "committed", run, step.step, step.created, step.nbytes, **about)


def deleted_ids(root: str) -> frozenset[str]:
    """The checkpoints of a run that the catalog, if it can be asked, has as deleted while their files are there."""
    url = load_settings().catalog_url()
    if url is None:
        return frozenset()
    from ucformat.catalog.catalog import Catalog

    try:
        with Catalog(url, read_only=True) as catalog:
            found = catalog.find(f"state != 'committed' and url like '{_literal(same_url(root))}/step-%'")
            return frozenset(e.id for e in found)
    except NotFound:  # no catalog yet
        pass
    except Exception as error:  # noqa: BLE001 - whatever the database says
        _log.warning("the catalog cannot say what was deleted below %s: %s", root, getattr(error, "message", error))
    return frozenset()


def free_place(root: str, step: int, damaged: Collection[str]) -> tuple[str, bool]:
    """Where to save a step again that was saved before training went back, and whether it replaces what lies there.

    That is replaced if it is one of the `damaged`, which were seen not to be whole, where it can be and nothing
    protects it; else the new one lies beside it.
    """
    for again in chain((0,), count(2)):  # step-00000100, then step-00000100.2
        url = f"{root}/{folder_of(step, again)}"
        store = open_store(url)
        try:
            if read_tombstone(store) is not None:
                continue
            there = read_step(url, step)
        except NotACheckpoint:
            return url, False
        except (IntegrityError, UpgradeNeeded) as error:
            _log.warning("%s is left as it is: %s", url, error.message)
            continue
        if url not in damaged:
            continue
        why = protections_of(url, there.id)
        if why:
            _log.warning("%s is not replaced: %s", url, "; ".join(why))
        elif _replaceable(store):
            return url, True
    raise AssertionError  # there is always one more


def _replaceable(store: Store) -> bool:
    """Whether a place can replace a manifest: no content has this version, so nothing is replaced here."""
    try:
        store.replace(MANIFEST, b"", "")
    except Conflict:
        return True
    except (PermissionDenied, UnsupportedError):
        pass
    return False
