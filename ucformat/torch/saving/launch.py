"""What checkpoints record about their launch, so that a catalog can tell launches apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict
from uuid import uuid4

from ucformat.schema.limits import MOST_COMMITS
from ucformat.schema.manifest import LaunchDoc, LineageDoc

if TYPE_CHECKING:
    from ucformat.torch.loading.load import LoadReport


class LaunchArguments(TypedDict):
    """The arguments of `save` that describe the launch."""

    lineage: tuple[LineageDoc, ...]
    after: int
    launch: LaunchDoc


class TrainingLaunch:
    """A training from its start, or a load, to its end; the id of rank 0 counts.

    `commits` is the greatest commit count that it knows.
    """

    def __init__(self) -> None:
        self.lineage: tuple[LineageDoc, ...] = ()  # the checkpoint that it began with
        self.continues: dict[str, int] = {}
        self.commits = 0
        self._id = uuid4().hex

    def begin(self, report: LoadReport | None = None) -> None:
        """Begin anew, from the checkpoint that was loaded or from none."""
        self._id = uuid4().hex
        if report is None:
            self.lineage, self.continues = (), {}
            return
        count = report.lineage.commits
        self.lineage = (report.lineage,)
        self.continues = {} if report.launch is None else report.launch.after(count)
        self.commits = max(self.commits, count or 0)

    def next_save(self) -> LaunchArguments:
        """Count a commit, and return the arguments of `save` that describe the launch."""
        after, self.commits = self.commits, min(self.commits + 1, MOST_COMMITS)
        launch = LaunchDoc(id=self._id, continues=self.continues)
        return {"lineage": self.lineage, "after": after, "launch": launch}
