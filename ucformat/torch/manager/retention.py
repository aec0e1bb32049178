"""Retention of a run's checkpoints: through the catalog if there is one, else by the contents of the run's folder.

Both follow docs/retention.md. The catalog deletes softly; checkpoints of the run that are past
their grace are purged at once, as by `ucp gc`. Without a catalog there is no grace. Each purge
writes the tombstone before it removes files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucformat.catalog.filter.syntax import like_literal
from ucformat.catalog.lines import contradictions
from ucformat.catalog.refs import parent_name, same_url
from ucformat.catalog.retention import OWN_KIND, RetentionRow, load_policy, plan_retention
from ucformat.catalog.stamp import now
from ucformat.errors import (
    Conflict,
    IntegrityError,
    NotACheckpoint,
    PermissionDenied,
    UcformatError,
    UnsupportedError,
    UpgradeNeeded,
    UsageError,
)
from ucformat.jobs.documents import protections_of
from ucformat.jobs.gc import consult, purge  # `collect` would also purge other runs
from ucformat.jobs.record import ask_catalog
from ucformat.jobs.register import register
from ucformat.jobs.removal import read_tombstone, remove
from ucformat.jobs.thin import thin_at
from ucformat.schema import MANIFEST
from ucformat.schema.policy import Keep as Rules
from ucformat.schema.policy import Policy
from ucformat.settings import load_settings, source_of
from ucformat.storage.url import open_store
from ucformat.torch.manager.steps import folder_of, list_steps, read_step

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ucformat.catalog.catalog import Catalog
    from ucformat.storage.base import Store
    from ucformat.torch.manager.steps import RunStep

    Keep = int | Mapping[str, Any] | Sequence[Mapping[str, Any]] | Policy | str | Path

_log = logging.getLogger("ucformat")


def policy_of(keep: Keep) -> Policy:
    """Return the policy that the `keep` argument of `Manager` describes; the last checkpoint is always kept whole."""
    if isinstance(keep, int):
        keep = {"last": keep}
    if isinstance(keep, Policy):
        policy = keep
    elif isinstance(keep, str | Path):
        policy = load_policy(keep)
    elif isinstance(keep, Mapping):
        whole = {"version": 1, **keep}
        policy = load_policy(
            whole if "keep" in keep else {"version": 1, "keep": keep, "grace": "0s"}
        )
    else:
        policy = load_policy({"version": 1, "keep": list(keep), "grace": "0s"})
    if any(rule.group == "run" for k in policy.keep if not k.states for rule in k.last):
        return policy
    return policy.model_copy(update={"keep": (*policy.keep, Rules.model_validate({"last": 1}))})


class RunRetention:
    """Applies a policy to the checkpoints of a run. One process of the run calls `apply`.

    Args:
        tiers: other folders of the run, which have copies of them. With a catalog, what the policy
            deletes is deleted there, too.
    """

    def __init__(self, root: str, policy: Policy, tiers: Sequence[str] = ()) -> None:
        self.root, self.policy, self._tiers = root, policy, tiers
        self._catalog = load_settings().catalog_url()
        self._known: dict[str, RunStep] | None = None  # by url; only without a catalog
        self._registered = False
        self._warned: set[str] = set()
        if self._catalog is None and policy.filters():
            raise UsageError(
                "`where` and `scope` need a catalog, which is switched off",
                hint="set UCP_CATALOG, or use only last, every, best and younger",
            )

    def apply(self, url: str, step: int) -> list[str]:
        """Delete what the policy does not keep, after a commit; the ids of what was removed.

        Failures are logged, and retried after the next commit.
        """
        try:
            if self._catalog is not None and self._usable(self._catalog):
                return self._in_catalog(self._catalog)
            if self._known is None:
                listed = list_steps(self.root)
                for interrupted in listed.being_purged:
                    _finish_purge(interrupted)
                self._known = {s.url: s for s in listed.steps}
            self._known[url] = read_step(url, step)
            return self._in_folder(self._known)
        except Exception as error:  # noqa: BLE001 - of the database or the storage
            _log.warning(
                "old checkpoints below %s are not deleted: %s",
                self.root,
                getattr(error, "message", error),
            )
            return []

    def _usable(self, url: str) -> bool:
        """Whether to use the catalog: not the default one if that cannot be opened (as in a home folder on NFS)."""
        if self._registered or source_of("catalog") != "default" or self.policy.filters():
            return True
        from ucformat.catalog.catalog import Catalog

        try:
            Catalog(url).close()
        except UcformatError as error:
            _log.warning(
                "the policy is applied to %s without a catalog: %s", self.root, error.message
            )
            self._catalog = None
        return self._catalog is not None

    def _in_catalog(self, catalog_url: str) -> list[str]:
        from ucformat.catalog.catalog import Catalog

        root = same_url(self.root)
        below = f"url like '{like_literal(root)}/step-%'"
        with Catalog(catalog_url) as catalog:
            # the catalog may be newer than the run, or have missed a commit
            if not self._registered:
                register([self.root], catalog, recursive=True)
                self._registered = True
            entries = catalog.find(below)
            own = tuple(f"{place}/" for place in (root, *map(same_url, self._tiers)))
            copied = [e.id for e in entries if any(not u.startswith(own) for u in e.urls)]
            scope = below if self.policy.scope is None else f"({self.policy.scope}) and {below}"
            if copied:  # deleting such a checkpoint would delete the copy elsewhere
                scope += f" and id not in ({', '.join(map(repr, copied))})"
            policy = self.policy.model_copy(update={"scope": scope})
            plan = catalog.retain(policy)
            self._warn_once(f"the rule keeps nothing: {rule}" for rule in plan.idle)
            self._warn_once(plan.contradictions)
            self._warn_once(
                f"{i[:12]} is kept, because it has another location too" for i in copied
            )
            if plan.delete or plan.thin:
                try:
                    catalog.retain(policy, apply=plan.id)
                except Conflict:  # the catalog has changed: plan again after the next commit
                    return []
                except UcformatError as error:  # what is to be deleted was
                    _log.warning("%s: %s", self.root, error.message)
            return self._purge(catalog, below)

    def _purge(self, catalog: Catalog, below: str) -> list[str]:
        """Remove the files of this run's deleted checkpoints whose grace is over."""
        of_run = {
            e.id: e.state
            for e in catalog.find(f"state in ('deleted', 'thinned', 'purging') and {below}")
        }
        due = [r.id for r in catalog.purgeable().purge if r.id in of_run]
        unclear = consult(catalog, due)
        # asked again: `consult` may have imported what protects some of them
        due = [r.id for r in catalog.purgeable().purge if r.id in of_run and r.id not in unclear]
        for why in unclear.values():
            _log.warning("not purged: %s", why)
        purged = []
        for checkpoint in [*due, *(i for i, state in of_run.items() if state == "purging")]:
            try:
                if purge(catalog, checkpoint):
                    purged.append(checkpoint)
            except UcformatError as error:
                _log.warning("not purged: %s: %s", checkpoint, error.message)
        return purged

    def _in_folder(self, by_url: dict[str, RunStep]) -> list[str]:
        steps = list(by_url.values())
        plan = plan_retention(
            self.policy, [_row(s, n, self.root) for n, s in enumerate(steps)], now()
        )
        self._warn_once(f"the rule keeps nothing: {rule}" for rule in plan.idle)
        self._warn_once(contradictions(steps, attrgetter("url")))
        removed = []
        for step in (steps[row.serial] for row in plan.delete):
            if protections_of(step.url, step.id, known=False):
                continue
            if remove(open_store(step.url), step.id):  # protected in the meantime
                continue
            del by_url[step.url]
            removed.append(step.id)
        for thinned in plan.thin:
            step = steps[thinned.row.serial]
            try:
                thin_at(step.url, step.id, thinned.states, "the run's policy")
            except Conflict as error:  # protected, or replaced
                self._warn_once([error.message])
            else:
                by_url[step.url] = read_step(step.url, step.step)
        return removed

    def _warn_once(self, texts: Iterable[str]) -> None:
        """Log each warning once."""
        for text in set(texts) - self._warned:
            self._warned.add(text)
            _log.warning("%s: %s", self.root, text)


def _finish_purge(url: str) -> None:
    """Remove the files that an interrupted purge has left."""
    store = open_store(url)
    tombstone = read_tombstone(store)
    if tombstone is not None:
        remove(store, tombstone.id)


def _row(step: RunStep, serial: int, run: str) -> RetentionRow:
    return RetentionRow(
        serial,
        step.id,
        OWN_KIND,
        "committed",
        run,
        step.step,
        step.created,
        step.nbytes,
        commits=step.commits,
        metrics=step.metrics,
        states=step.states,
        launch=step.launch,
        continues=step.continues,
    )


def known_commits(root: str, run: str | None) -> int:
    """Return the greatest commit count of a run in the catalog; 0 if there is no catalog, or it cannot be queried."""
    name = run or parent_name(f"{same_url(root)}/{folder_of(0)}")
    if name is None:
        return 0
    return ask_catalog(f"the commits of the run {name}", lambda c: c.commits(name), 0)


def free_place(root: str, step: int, damaged: Collection[str]) -> tuple[str, bool]:
    """Find where to save a step again that was saved before the training was set back.

    Args:
        damaged: urls of damaged checkpoints. These are replaced, unless they are protected or the
            storage cannot replace files; others are kept, and the new checkpoint is saved in a
            folder beside them.

    Returns:
        the url, and whether a checkpoint there is to be replaced.
    """
    for again in chain((0,), count(2)):  # step-00000100, then step-00000100.2
        url = f"{root}/{folder_of(step, again)}"
        store = open_store(url)
        try:
            if read_tombstone(store) is not None:
                continue
            existing = read_step(url, step)
        except NotACheckpoint:
            return url, False
        except (IntegrityError, UpgradeNeeded) as error:
            _log.warning("%s is left as it is: %s", url, error.message)
            continue
        if url not in damaged:
            continue
        protections = protections_of(url, existing.id)
        if protections:
            _log.warning("%s is not replaced: %s", url, "; ".join(protections))
        elif _can_replace(store):
            return url, True
    raise AssertionError  # the loop has no end


def _can_replace(store: Store) -> bool:
    """Whether a storage can replace a manifest, tried with a version that no content has, so nothing is replaced."""
    try:
        store.replace(MANIFEST, b"", "")
    except Conflict:
        return True
    except (PermissionDenied, UnsupportedError):
        pass
    return False
