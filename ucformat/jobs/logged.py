"""References to checkpoints in the runs of experiment trackers."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError
from ucformat.jobs.attest import facts_of, uri_of
from ucformat.redacted import shown_url
from ucformat.references import open_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    #: Logs a reference, and returns how the tracker calls it.
    Log = Callable[["Reference"], str]

__all__ = ["Log", "Reference", "Tracker", "bind", "log_reference", "reference_to"]

#: The tag of the text that a writer of TensorBoard gets.
TAG = "ucformat/checkpoint"
#: The tag of the checkpoint's id that W&B and MLflow get.
ID_TAG = "ucformat.id"
_WANDB_NAME = re.compile(r"[^a-zA-Z0-9_\-.]")  # what a name of an artifact must not have


@dataclass(frozen=True, slots=True)
class Reference:
    """A committed checkpoint, as a tracker gets it: no bytes of it, and no secret of its url.

    `certified` is whether the tensors that ranks have, or had at the save, equal what was written;
    None if nobody has compared them.
    """

    id: str
    name: str
    url: str
    step: int | None
    run: str | None
    manifest_sha256: str | None
    certified: bool | None


class Tracker(Protocol):
    """A tracker of experiments of one's own, for `log_to`."""

    def log_checkpoint(self, reference: Reference) -> object:
        """Log a reference to a checkpoint that was committed; called on rank 0, perhaps in a thread of its own."""


def log_reference(
    place: str | PathLike[str] | Checkpoint, tracker: Literal["wandb", "mlflow"] | Tracker | Any
) -> str:
    """Log a reference to a checkpoint, no bytes of it, to the active run of an experiment tracker.

    W&B gets an artifact of the type `model` with a reference to the place, MLflow (3 or later) an
    external model; both have the id, the place, and the SHA-256 of the manifest. A writer of
    TensorBoard gets a text.

    Args:
        place: a checkpoint, or its path, url or reference.
        tracker: `wandb`, `mlflow`, a `SummaryWriter` of TensorBoard, or an object with a method
            `log_checkpoint`.

    Returns:
        The name of the artifact, the id of the model, or the tag of the text; else the checkpoint's
        name.

    Raises:
        UsageError: no run is active, or it is no tracker.
        UnsupportedError: the package is not installed.
    """
    return bind(tracker)(reference_to(place))


def reference_to(
    place: str | PathLike[str] | Checkpoint, *, certified: bool | None = None
) -> Reference:
    """The reference to a checkpoint; `certified` if that is known, else what the catalog has."""
    facts = facts_of(place if isinstance(place, Checkpoint) else open_reference(place))
    return Reference(
        facts.ck.id,
        facts.name,
        shown_url(facts.urls[0]),
        facts.manifest.step,
        facts.manifest.run,
        facts.sha256,
        facts.certified if certified is None else certified,
    )


def bind(tracker: Any) -> Log:
    """How references are logged to the run that is active now.

    Raises:
        UsageError: no run is active, or it is no tracker.
        UnsupportedError: the package is not installed.
    """
    if tracker == "wandb":
        return _bind_wandb()
    if tracker == "mlflow":
        return _bind_mlflow()
    if callable(getattr(tracker, "log_checkpoint", None)):

        def log(reference: Reference) -> str:
            tracker.log_checkpoint(reference)
            return reference.name

        return log
    if callable(getattr(tracker, "add_text", None)):
        return lambda reference: _log_text(tracker, reference)
    hint = "'mlflow' or 'wandb' for the active run, a SummaryWriter, or an object with a method log_checkpoint"
    raise UsageError(f"{tracker!r} is no tracker", hint=hint)


def _tags(reference: Reference) -> dict[str, str]:
    members = {f"ucformat.{key}": value for key, value in asdict(reference).items()}
    members |= {"ucformat.name": None, ID_TAG: reference.id}
    return {key: str(value) for key, value in members.items() if value is not None}


def _bind_wandb() -> Log:
    try:
        import wandb
    except ImportError:
        raise _not_installed("wandb") from None
    if (run := wandb.run) is None:
        raise UsageError("no run of W&B is active", hint="call wandb.init() first")

    def log(reference: Reference) -> str:
        tags = _tags(reference)
        name = _WANDB_NAME.sub("-", reference.name)
        artifact = wandb.Artifact(name, type="model", metadata=tags)
        # by its content W&B tells versions apart, and a reference is only a place
        with artifact.new_file("ucformat.json") as file:
            json.dump(tags, file)
        # a checksum would read all files
        artifact.add_reference(uri_of(reference.url), name="checkpoint", checksum=False)
        run.log_artifact(artifact)
        return name

    return log


def _bind_mlflow() -> Log:
    try:
        import mlflow
    except ImportError:
        raise _not_installed("mlflow") from None
    if (run := mlflow.active_run()) is None:  # of this thread
        raise UsageError("no run of MLflow is active", hint="call mlflow.start_run() first")

    def log(reference: Reference) -> str:
        # MLflow refuses these
        name = "".join("-" if c in "/:.%\"'" else c for c in reference.name)
        model = mlflow.create_external_model(
            name,
            source_run_id=run.info.run_id,
            tags=_tags(reference),
            experiment_id=run.info.experiment_id,
        )
        model_id: str = model.model_id
        return model_id

    return log


def _log_text(writer: Any, reference: Reference) -> str:
    writer.add_text(TAG, json.dumps(asdict(reference)), reference.step)
    writer.flush()
    return TAG


def _not_installed(package: str) -> UnsupportedError:
    return UnsupportedError(
        f"{package} is not installed", hint=f"pip install 'ucformat[{package}]'"
    )
