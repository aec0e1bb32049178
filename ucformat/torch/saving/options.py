"""Where and how to write a checkpoint, and its launch: the arguments of `save`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args
from uuid import uuid4

from ucformat.errors import UsageError
from ucformat.format.arrays import lay_out
from ucformat.format.lossy_states import check_encode, check_fits, lossy_codec
from ucformat.schema.limits import MOST_COMMITS
from ucformat.schema.manifest import LaunchDoc, LineageDoc
from ucformat.schema.tensors import BLOSC
from ucformat.storage.url import path_text
from ucformat.torch.comm.wire import message
from ucformat.torch.saving.deltas import Deltas
from ucformat.torch.saving.experts import Experts
from ucformat.torch.saving.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    import torch
    import torch.distributed as dist

    from ucformat.format.arrays import StoredArray
    from ucformat.geometry.tensor import Key, TensorInfo
    from ucformat.torch.loading.load import LoadReport
    from ucformat.torch.state.changed import ChangedRows
    from ucformat.torch.state.local import LocalState

#: The base that is the newest checkpoint in the same folder.
LATEST = "latest"

#: How tensors are stored.
Form = Literal["zarr", "packed", "safetensors"]

#: How tensors are encoded, if they are.
Codec = Literal["blosc", "raw"]


class RunArguments(TypedDict, total=False):
    """How a training run is saved, the same for all its checkpoints.

    Attributes:
        run: name of the training run, for the catalog.
        config: configuration of the training, JSON values.
        form: `zarr` (the default) writes arrays, for which ranks send each other parts of shards; `packed`
            writes one file per rank without communication, which can be opened alike, and which `ucp
            materialize` converts to arrays; `safetensors` writes the weights to files that Hugging
            Face's tools load (`Checkpoint.hf_url`), each rank its own parts, and everything else as
            arrays. Tensors below 256 KiB are packed instead of arrays if there are more than 1,000
            of them, since each array is two files.
        codec: `blosc` compresses what is stored, without loss: byte planes of elements, by zstd (extra
            `codecs`); `raw` leaves it as it is, and gives packed files an index with the fingerprint
            of each tile, so that later checkpoints can be based on them (default: neither).
            Safetensors files stay as they are, for the tools that load them.
        encode: encode states of optimizers with loss, by patterns of their names: `{"exp_avg*":
            "int8-blockwise"}`, or `"adaptive:N"` with the more bits, the more often the training
            will be restored. They are packed, whatever the `form` is; `load` refuses them without
            `lossy=True`. Weights are never encoded with loss (default: nothing is).
        assets: a folder whose `config.json`, tokenizer and similar files are stored, too. The
            `config.json` of a model of transformers in the state, or the `adapter_config.json` of
            PEFT's, is stored by default.
        overwrite: replace an existing checkpoint, which stays intact until the new one is
            committed (default: no).
        names: the names in the whole model of what this rank names locally, such as the layers of a
            pipeline stage: `{"layers.*": 16}` adds 16 to the number in the place of the star, in
            the names of modules and of optimizers' parameters.
        replicas: `equal` (the default) requires objects and tensors to be equal on all ranks that
            have them under one name. `first` saves the value of the first rank unchecked.
        base: write nothing of tensors that equal those of this checkpoint, a path, url or reference,
            but refer to it: `True` or `"latest"` is the newest one beside `url`, if there is one and
            fewer than 64 are patches of each other (default: everything is written). The base must
            stay, and is protected. The weights of the form `safetensors` are always written.
        patch: store tensors that differ from those of `base` as patches of them, tile by tile, where
            these are smaller (extra `codecs`); of the base each rank reads what it writes. What is
            not equal to the base is packed then, whatever the `form` is, unless there is no base.
        partial: write only some experts of a mixture of experts, or one group of tensors of a window;
            tensors of the base stand for the others, which are older. `base` is the newest checkpoint
            beside `url` unless it is given, and must be of the same training (`False`: everything is
            written).
        verify_changed: compare the rows that `changed` does not mark with the base.
        certify: compare fingerprints of the tensors as they are at the call with those of what was
            written, and commit nothing if they differ (default: no). `Manager` compares what ranks
            hold after a load, too.
        log_to: a tracker of experiments, which gets a reference to each checkpoint when it is
            committed, and no bytes of it: `"mlflow"` or `"wandb"` for the run that is active on rank
            0, a `SummaryWriter` of TensorBoard, or an object with a method `log_checkpoint`, as
            `ucformat.Tracker`. If that fails, the save does not: a warning tells it.
        chunk_bytes: the maximum size of a chunk of the Zarr form (default 1 MiB).
        shard_bytes: the maximum size of a shard of the Zarr form (default 128 MiB).
        group: the ranks that take part (default: all). Threads that save to the same url at once
            need different ones.
        timeout: seconds after which an unresponsive rank is considered dead (default 1800).
    """

    run: str | None
    config: Mapping[str, Any] | None
    form: Form
    codec: Codec | None
    encode: Mapping[str, str] | None
    assets: str | PathLike[str] | None
    overwrite: bool
    names: Mapping[str, int] | None
    replicas: Literal["equal", "first"]
    base: str | PathLike[str] | bool | None
    patch: bool
    partial: Experts | Window | Deltas | None
    verify_changed: bool
    certify: bool
    log_to: Literal["mlflow", "wandb"] | Any | None
    chunk_bytes: int | None
    shard_bytes: int | None
    group: dist.ProcessGroup | None
    timeout: float


class SaveArguments(RunArguments, total=False):
    """The arguments of saves besides the state and the url; those of `RunArguments` too.

    Attributes:
        step: the training step.
        metrics: numbers to record in the catalog: `{"val_loss": 2.1}`.
        lineage: the checkpoints that this one was derived from.
        after: the greatest commit count of the run's checkpoints, 0 if there are none; `Manager`
            passes it. This checkpoint gets the next count after that and those in `lineage`. With
            neither it gets none, and its step determines how new it is.
        launch: the launch of the training; `Manager` passes it. The checkpoints of a folder without
            it count as those of one launch.
        changed: the rows, indices of the first dim, that changed since the base was saved: a bool for
            each row of the whole tensor, by the tensor's name, for all its states with as many rows;
            rows count as changed that any rank says did. Or `ChangedRows`, on all ranks. Patches are
            then made without reading the base, but of tiles with all rows marked; these, and other
            tensors, are compared with it. A row that changed
            and is not marked is an error where the base's index tells, or with `verify_changed`;
            otherwise the checkpoint cannot be read there.
        tokens: with `partial`, how many tokens each expert was given since training began, on all
            ranks together: a list for each layer, as the pattern names it; the same on all ranks.
        deltas: with `partial=Deltas(…)`, what each step after the base applied: `{step: {name: tensor}}`,
            dense or sparse tensors or DTensors; plain ones are the same on all ranks. Without,
            everything is saved.
        times: of the fast tier of a `Manager`, which passes it: how many times what this rank
            writes its node will hold, which is checked before anything is written. What is saved
            there is in no catalog, because each node has a part of it.
    """

    step: int | None
    metrics: Mapping[str, float] | None
    lineage: Sequence[LineageDoc]
    after: int | None
    launch: LaunchDoc | None
    changed: Mapping[str, Any] | ChangedRows | None
    tokens: Mapping[str, Sequence[int]] | None
    deltas: Mapping[int, Mapping[str, torch.Tensor]] | None
    times: int


@message
class SaveOptions:
    """Where and how to write a checkpoint: arguments of `save` that are the same on all ranks."""

    url: str
    form: Form = "zarr"
    overwrite: bool = False
    replicas: Literal["equal", "first"] = "equal"
    chunk_bytes: int | None = None
    shard_bytes: int | None = None
    certify: bool = False
    codec: Codec | None = None
    base: str | None = None
    patch: bool = False
    verify_changed: bool = False
    encode: Mapping[str, str] = field(default_factory=dict)
    partial: Experts | Window | Deltas | None = None
    times: int = 0
    announced: bool = True  # whether the catalog is told of the commit

    @classmethod
    def of(cls, url: str, arguments: RunArguments) -> SaveOptions:
        """Create them from the arguments of `save`."""
        names = {f.name for f in fields(cls)} - {"announced", "base", "encode"}
        base = arguments.get("base")
        if base is None and arguments.get("partial") is not None:
            base = LATEST
        if isinstance(base, bool):
            base = LATEST if base else None
        return cls(
            url,
            base=None if base is None else path_text(base),
            announced=not arguments.get("times"),  # the fast tier of a node is in no catalog
            encode=dict(arguments.get("encode") or {}),
            **{k: v for k, v in arguments.items() if k in names},  # type: ignore[arg-type]
        )

    def __post_init__(self) -> None:
        for name, allowed in (
            ("form", get_args(Form)),
            ("replicas", ("equal", "first")),
            ("codec", (None, *get_args(Codec))),
        ):
            if getattr(self, name) not in allowed:
                listed = " or ".join(f'"{value}"' if value else "None" for value in allowed)
                raise UsageError(f"{name}={getattr(self, name)!r} is not supported", hint=listed)
        if self.patch and self.base is None:
            raise UsageError(
                "patch=True needs a base, of which tiles are patches",
                hint='base="latest", or another checkpoint',
            )
        if self.patch and self.form == "safetensors":
            raise UsageError(
                'patch=True is not possible with form="safetensors", whose files other tools load',
                hint='form="packed", or without patch',
            )
        if self.partial is not None and self.form == "safetensors":
            raise UsageError(
                'partial= is not possible with form="safetensors", whose files have all weights',
                hint='form="packed", or "zarr"',
            )
        if self.encode and isinstance(self.partial, Deltas):
            raise UsageError(
                "encode= is not possible with partial=Deltas(…): what is replayed has to be exact",
                hint="leave one of them out",
            )
        check_encode(self.encode)
        for name in ("chunk_bytes", "shard_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise UsageError(f"{name} must be at least 1, not {size}")

    @property
    def compares_tiles(self) -> bool:
        """Whether tiles are compared with those of a base."""
        return self.base is not None and (self.patch or self.form == "packed")

    @property
    def tile_codec(self) -> Codec | None:
        """The codec of packed files: with a base they have an index, by which others can be based on them."""
        if self.codec is None and self.patch:
            return "blosc"
        return self.codec or ("raw" if self.compares_tiles or self.encode else None)

    def stored_like(self, other: SaveOptions) -> bool:
        """Return whether tensors are stored alike with other options."""
        return (self.form, self.chunk_bytes, self.shard_bytes, self.codec, self.encode) == (
            other.form,
            other.chunk_bytes,
            other.shard_bytes,
            other.codec,
            other.encode,
        )

    def lossy_states(self, infos: Sequence[TensorInfo]) -> tuple[str, ...]:
        """The states of which tensors are encoded with loss.

        Raises:
            UsageError: a pattern in `encode` fits none, or two different ones fit one.
        """
        if not self.encode:
            return ()
        check_fits(self.encode, {info.state for info in infos})
        return tuple(sorted({i.state for i in infos if lossy_codec(self.encode, i) is not None}))

    def check(self, state: LocalState) -> None:
        """Check whether a state can be saved with these options."""
        sharded = next((t for t in state.tensors if t.sharded_wrapper), None)
        if self.replicas == "first" and sharded is not None:
            raise UsageError(
                f"{sharded.key} is inside a sharded wrapper, of which ranks must compare what "
                "they have in common",
                hint=(
                    'leave replicas="first" out, and give values that differ between ranks as '
                    "PerRank(value)"
                ),
            )

    def arrays(
        self, infos: Sequence[TensorInfo], attempt: str, folders: Mapping[Key, str] | None = None
    ) -> list[StoredArray]:
        """Return the arrays of tensors in the Zarr form.

        Args:
            folders: of the arrays, if these are not all tensors of the checkpoint.
        """
        folder = f"data/{attempt}"
        codec = (
            BLOSC if self.codec == BLOSC else None
        )  # there are no arrays with raw chunks and an index
        return lay_out(infos, folder, self.chunk_bytes, self.shard_bytes, folders, codec)


class LaunchArguments(TypedDict):
    """The arguments of `save` that describe the launch, so that launches can be told apart."""

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

    def recorded(self) -> None:
        """A checkpoint records the launch: those that follow need not record again how it was loaded."""
        self.lineage = tuple(edge.model_copy(update={"readers": ()}) for edge in self.lineage)

    def next_save(self) -> LaunchArguments:
        """Count a commit, and return the arguments of `save` that describe the launch."""
        after, self.commits = self.commits, min(self.commits + 1, MOST_COMMITS)
        launch = LaunchDoc(id=self._id, continues=self.continues)
        return {"lineage": self.lineage, "after": after, "launch": launch}
