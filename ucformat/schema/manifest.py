"""The manifest: the one document that makes a checkpoint of the files beside it (docs/spec/format.md, "Manifest")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ucformat.schema import ATTEMPT, LINEAGE_KINDS
from ucformat.schema.limits import MAX_CHAIN, MAX_INTEGER, MAX_RANKS, MOST_COMMITS
from ucformat.schema.tensors import Digest, Size, StatePath, TensorTable, Text  # noqa: TC001 - pydantic reads them
from ucformat.schema.values import Finite, Instant, Number, Time, Values  # noqa: TC001 - pydantic reads them

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMAT_VERSION = 1

#: Against which text of this version ucformat writes; it only informs, and readers ignore it.
FORMAT_MINOR = 0

#: What `requires` may name: forms in which tensors are stored that are not plain arrays.
PACKED, EXTENTS, VIRTUAL = "packed", "extents", "virtual"
CODECS, PATCHES, BASES, LOSSY = "codecs", "patches", "bases", "lossy"
STEPS = "steps"  # what is stored of some tensors is older than the checkpoint
DELTA = "delta"  # with which the states of deltas begin
FEATURES = frozenset({PACKED, EXTENTS, VIRTUAL, CODECS, PATCHES, BASES, LOSSY, STEPS})

Edge = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Integer = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]
Commits = Annotated[int, Field(ge=1, le=MOST_COMMITS)]


def used_features(tensors: TensorTable, bases: Sequence[BaseDoc] = ()) -> list[str]:
    """The features that a manifest uses by itself; its sidecar may use others."""
    encoded = [kind for kind in tensors.kinds if kind.codec is not None]
    used = {
        BASES: bool(bases),
        CODECS: bool(encoded),
        PATCHES: any(kind.base is not None for kind in encoded),
        LOSSY: any(kind.lossy is not None for kind in tensors.kinds),
        STEPS: any(kind.step is not None for kind in tensors.kinds),
    }
    return [feature for feature, is_used in used.items() if is_used]


class _ManifestPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class GridDoc(_ManifestPart):
    """The targets, in bytes, from which the writer computed the chunk and shard shapes of the arrays."""

    chunk_bytes: Edge
    shard_bytes: Edge


class FileDoc(_ManifestPart):
    """A file that the checkpoint holds besides its tensors."""

    path: Text
    nbytes: Size
    digest: Digest


class RangesDoc(FileDoc):
    """A file with the values of `ranks` consecutive ranks, from number `first` on: a range for each."""

    first: Annotated[int, Field(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]


class PerRankDoc(_ManifestPart):
    """The values that the `ranks` that saved have as their own, under these names; the files are in order of ranks."""

    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    names: tuple[Text, ...]
    files: tuple[RangesDoc, ...]


class SourceFileDoc(_ManifestPart):
    """A file of another checkpoint, as it was when its extents were listed: `roots/<n>/…`, below root number n.

    `modified` is when it was written, in seconds since 1970, where its place tells; `etag` is of an
    object store.
    """

    path: Text
    nbytes: Size
    modified: Finite | None = None
    etag: str | None = None
    digest: Digest | None = None


class SidecarDoc(FileDoc):
    """The extents of tensors that are not arrays.

    Of a virtual checkpoint `roots` are the urls of the places where `sources`, the files that hold
    its bytes, lie.
    """

    roots: tuple[Text, ...] = ()
    sources: tuple[SourceFileDoc, ...] = ()


class BaseDoc(_ManifestPart):
    """Another checkpoint, on which this one is based: tensors of it are tensors of this one, or patched.

    `url` is `../<name>` if both are in one folder, and an absolute path or URL if not.
    """

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    url: Text


class GroupDoc(_ManifestPart):
    """An optimizer group: its parameters by name, in order, and its hyper-parameters.

    `at` is the optimizer's path in the state of the program that saved, and `names` are the
    parameters as that calls them, where these are not `params`. Of `flattened` state dicts each
    parameter's hyper-parameters are entries.
    """

    params: tuple[Text, ...]
    options: Values = {}
    at: StatePath | None = None
    names: tuple[Text, ...] | None = None
    flattened: bool = False


class ReaderDoc(_ManifestPart):
    """What one of the ranks that loaded did: bytes read, and seconds for all and for each phase of it.

    `retries` are requests that it repeated because the storage failed.
    """

    rank: Size
    nbytes: Size
    seconds: Finite
    phases: dict[Text, Finite] = {}
    retries: Size = 0


class LineageDoc(_ManifestPart):
    """What this checkpoint was made from; `commits` is what that one counts, as far as is known.

    `how` tells more of how it was made, such as the method of a merge and the weight of this
    origin. Kinds that are not in `LINEAGE_KINDS` are of later versions and of vendors. `readers` are
    the ranks that loaded this origin, or the slowest of many.
    """

    kind: Annotated[Text, Field(examples=list(LINEAGE_KINDS))]
    url: Text
    id: Text | None = None
    engine: dict[str, str] = {}
    commits: Commits | None = None
    how: Values = {}
    readers: tuple[ReaderDoc, ...] = ()


class LaunchDoc(_ManifestPart):
    """The launch that saved a checkpoint: a training from its start, or from a load, to its end.

    `continues` are the launches behind it, by id, each up to a count of commits: those of the
    checkpoint that it loaded, and those that it found in its folder.
    """

    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    continues: dict[str, Commits] = {}

    def after(self, commits: int | None) -> dict[str, int]:
        """What a launch continues that loads a checkpoint of this one, which has this count of commits."""
        return dict(self.continues) if commits is None else {**self.continues, self.id: commits}


class VerifiedDoc(_ManifestPart):
    """Of which tensors a conversion compared all bytes with the checksums that the source's files carry.

    Of every tensor if `default`, of none if not; of those in `but`, by name and state, the
    opposite. `besides` are the bytes that were read in the end only to complete checksums of which
    other bytes had passed.
    """

    default: bool
    but: tuple[tuple[str, str], ...] = ()
    besides: Size = 0


class ExpertLayerDoc(_ManifestPart):
    """How many tokens each expert of a layer was given, and of how many of them it has learned.

    Attributes:
        seen: the tokens that it was given since training began.
        held: those of which the program's expert has learned, when it saved: others were lost with failures.
        stored: those of which what is stored has learned.
    """

    seen: tuple[Size, ...]
    held: tuple[Size, ...]
    stored: tuple[Size, ...]


class ExpertsDoc(_ManifestPart):
    """The tokens of experts, of a training that saves some of them at a time.

    `lost` is the share of tokens that are lost if the training goes on from here, the mean of
    layers.
    """

    lost: Finite
    layers: dict[Text, ExpertLayerDoc]


class WindowDoc(_ManifestPart):
    """A place in a window of checkpoints, of which each has the full states of one group of tensors.

    Attributes:
        steps: how many checkpoints the window has.
        at: the number of this one, from 0, and of the group of which it has the full states.
        groups: globs of names for each group; empty: experts by their numbers, as `pattern` finds them.
        pattern: a regular expression with the groups `layer` and `expert`; None for the usual names.
        update: globs of names of tensors that only updates need, besides all states but `weight`.
    """

    steps: Annotated[int, Field(ge=2, lt=MAX_CHAIN)]
    at: Size
    groups: tuple[tuple[Text, ...], ...] = ()
    pattern: Text | None = None
    update: tuple[Text, ...] = ()


class SparseDeltaDoc(_ManifestPart):
    """The sparse deltas of a name, whose indices and values are stored one step after another.

    Attributes:
        shape: of the delta of each step.
        counts: how many elements that of each step has.
        coalesced: whether indices are sorted and different.
    """

    shape: tuple[Size, ...]
    counts: tuple[Size, ...]
    coalesced: bool


class DeltasDoc(_ManifestPart):
    """What a training applied in the steps from `first` to `last`, as tensors of the state `delta.<first>`.

    Such a tensor has an item of its first dim for each step; of `partial` names for these steps only.
    `after` is the id of the base with the deltas before these, or with everything. Tensors that are
    older are as they were at the step `since`, at which everything was saved. Of the weights in `checked`,
    tensors of the state `delta.<first>.check` are what they have at `last`: the row of this number, of
    weights of at most one dim all.
    """

    since: Integer
    first: Integer
    last: Integer
    after: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    partial: dict[Text, tuple[Integer, ...]] = {}
    sparse: dict[Text, SparseDeltaDoc] = {}
    checked: dict[Text, Size] = {}

    @property
    def state(self) -> str:
        """The state of its tensors; of `sparse` ones `.indices` and `.values` follow."""
        return delta_state(self.first)

    def steps(self, name: str) -> Sequence[int]:
        """The steps for which a name has deltas."""
        return self.partial.get(name) or range(self.first, self.last + 1)


def delta_state(first: int) -> str:
    """The state of the deltas that begin with a step."""
    return f"{DELTA}.{first}"


def is_delta(state: str) -> bool:
    """Whether tensors of a state are deltas of steps, which are not of a step themselves."""
    return state.startswith(f"{DELTA}.")


class WriterDoc(_ManifestPart):
    """What one of the ranks that saved did: bytes written, seconds for that, seconds for which training stood still.

    `phases` are seconds by what they were spent on. `retries` are requests that it repeated because
    the storage failed.
    """

    rank: Size
    nbytes: Size
    seconds: Finite
    stall: Finite
    phases: dict[Text, Finite] = {}
    retries: Size = 0


class Manifest(_ManifestPart):
    """A committed checkpoint.

    `requires` names the forms besides plain arrays in which its tensors are stored (`FEATURES`), which a
    reader must know. `minor` is that of the text of the format for which it was written. `grid` is
    None where no array was written.

    `commits` counts the commits of its training up to this one, as far as its writer knew them;
    without, it was not saved by a training, or nothing was known. `launch` is that of the training.
    `digest` is that of its file, at whose end it stands (docs/spec/format.md, "Digests"); None before it
    has one.
    """

    # the digests of a million tensors are all different
    model_config = ConfigDict(cache_strings="keys")

    format: Literal["ucformat"] = "ucformat"
    version: Literal[1] = 1
    minor: Size = 0
    requires: tuple[Text, ...] = ()
    id: Text
    # without a name it is of a foreign checkpoint
    attempt: Annotated[str, Field(pattern=f"^({ATTEMPT})?$")]
    created: Time
    producer: dict[str, str] = {}
    run: Text | None = None
    step: Integer | None = None
    commits: Commits | None = None
    launch: LaunchDoc | None = None
    metrics: dict[Text, Number] = {}
    config: Values = {}
    layout: Values = {}
    groups: tuple[GroupDoc, ...] = ()
    lineage: tuple[LineageDoc, ...] = ()
    aliases: dict[Text, Text] = {}
    objects: FileDoc | None = None
    per_rank: PerRankDoc | None = None
    assets: dict[Text, FileDoc] = {}
    sidecar: SidecarDoc | None = None
    grid: GridDoc | None = None
    writers: tuple[WriterDoc, ...] = ()
    verified: VerifiedDoc | None = None
    bases: tuple[BaseDoc, ...] = ()
    experts: ExpertsDoc | None = None
    window: WindowDoc | None = None
    deltas: DeltasDoc | None = None
    tensors: TensorTable
    digest: Digest | None = None

    @property
    def files(self) -> tuple[FileDoc, ...]:
        """The files that it lists besides those of tensors: assets, objects, values of ranks, and the sidecar."""
        of_ranks = () if self.per_rank is None else self.per_rank.files
        files = (*self.assets.values(), self.objects, *of_ranks, self.sidecar)
        return tuple(doc for doc in files if doc is not None)

    @property
    def is_remnant(self) -> bool:
        """Whether this is what is left of a deleted checkpoint, under its id, for those that are based on it."""
        return any(edge.kind == "thin" and edge.id == self.id for edge in self.lineage)

    @property
    def known_commits(self) -> int | None:
        """The manifest's own count of commits, else the greatest of the checkpoints that it was made from."""
        return self.commits or max(
            (e.commits for e in self.lineage if e.commits and e.kind in LINEAGE_KINDS), default=None
        )

    def as_read(self) -> Manifest:
        """This manifest after a round trip through its file."""
        return Manifest.model_validate_json(self.model_dump_json())

    def with_sidecar(self, sidecar: SidecarDoc | None, requires: tuple[str, ...]) -> Manifest:
        """This manifest with another sidecar, and the features that reading that requires, besides its own."""
        features = dict.fromkeys((*requires, *used_features(self.tensors, self.bases)))
        return self.model_copy(update={"sidecar": sidecar, "requires": tuple(features)})


class AttemptDoc(_ManifestPart):
    """Who is writing what; put before the first byte of data, and replaced by who continues it.

    `id` is that of the checkpoint, whoever commits it, where it has to be known before, because it
    `needs` files in these places. `replacing` is since when it is about to take the place of the
    checkpoint that is there. `removed` is when somebody began to remove the attempt: nobody
    continues or commits it any more.
    """

    format: Literal["ucformat-attempt"] = "ucformat-attempt"
    version: Literal[1] = 1
    attempt: Annotated[str, Field(pattern=f"^{ATTEMPT}$")]
    plan: Digest
    owner: str
    started: Instant
    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")] | None = None
    needs: tuple[str, ...] = ()
    replacing: Instant | None = None
    removed: Instant | None = None


_DIGESTS = ("sha256", "xxh3")


def is_of_unknown_kind(fault: str, place: tuple[str | int, ...], value: object) -> bool:
    """Whether an invalid member is a digest that a later ucformat may have written, not a damaged one."""
    is_digest = bool(place) and (place[-1] == "digest" or place[:2] == ("tensors", "digest"))
    if not is_digest or not isinstance(value, str) or fault != "string_pattern_mismatch":
        return False
    return ":" in value and value.partition(":")[0] not in _DIGESTS


def manifest_json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest."""
    return Manifest.model_json_schema(mode="validation")
