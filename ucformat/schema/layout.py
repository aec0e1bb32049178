"""The layout file: the language in which people write how tensors lie on ranks. `docs/layout.md` explains it."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Discriminator, Field, Tag, TypeAdapter, ValidationError

from ucformat.schema.view import Count as Size
from ucformat.schema.view import ExpectedTensor, Index, Names, Step, Text, Written, keys_of

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

VERSION = 1
_MAX_FAULTS = 100  # the most that an error lists


class ShardDoc(Written):
    """Cut along a dim over one or several axes; by default as `torch.chunk` cuts."""

    shard: int = Field(description="The dim; -1 is the last.")
    over: Names
    sizes: list[Index] | None = Field(None, description="The width for each coordinate.")
    parts: list[Index | list[Index]] | None = Field(
        None,
        description="The dim is a concatenation of parts, each cut by itself: widths or proportions, or for each "
        "part a list of widths, one for each coordinate.",
    )
    pad_to: Size | None = Field(
        None, description="Pad the dim to a multiple of this, then cut evenly."
    )
    even: bool = Field(
        False, description="What the degree does not divide is an error: heads, experts."
    )


class FlatDoc(Written):
    """The local tensors of a group, flattened, joined, padded and cut over one or several axes."""

    flat: Text = Field(
        description="The group: optimizer, all, tensor, or a /regex/ whose first capture names it."
    )
    over: Names
    order: Literal["checkpoint", "reverse", "round_robin"] = "checkpoint"
    cut: Literal["after_join", "before_join"] = "after_join"
    tensor_align: Size = Field(
        1, description="Elements to a multiple of which each tensor's start is aligned."
    )
    group_pad: Size = Field(
        1, description="The end is padded to a multiple of this times the degree."
    )
    total_align: Size = Field(1, description="The end is padded to a multiple of this, too.")
    max_elements: Size | None = Field(None, description="A buffer with so many elements is closed.")


class StageDoc(Written):
    """Only one stage holds it: this one, or by the first layer of each stage."""

    stage: int | Annotated[list[Index], Field(min_length=1)] = Field(
        description="The stage (-1 is the last), or the first layer of each stage."
    )
    over: Names


class OwnerDoc(Written):
    """Only one coordinate holds it: this one over the axes, by default over the whole mesh."""

    owner: Index
    over: Names | None = None


class PartialDoc(Written):
    """Each coordinate holds its own value; reduce to read."""

    partial: Literal["mean"]
    over: Names | None = None


class PatternDoc(Written):
    """A pattern of the Universal Checkpointing paper (USENIX ATC '25, section 5.3), by its name there."""

    pattern: Literal["unique", "replicate", "partial", "shard-V", "shard-H", "shard-Hy", "shard-NC"]
    over: Names | None = None
    dims: Annotated[list[int], Field(min_length=1)] | None = Field(
        None,
        description=(
            "shard-Hy: the dim that each axis of `over` cuts; shard-NC: the dim, by default 0."
        ),
    )
    parts: list[Index | list[Index]] | None = Field(
        None, description="shard-NC: the parts, as of a shard."
    )
    owner: Index = Field(0, description="unique: the coordinate that holds it.")


_KINDS = ("shard", "flat", "stage", "owner", "partial", "pattern")


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "replicate"
    # a pattern may have an owner, too
    return next((kind for kind in reversed(_KINDS) if kind in keys_of(value)), None)


Placement = Annotated[
    Annotated[Literal["replicate"], Tag("replicate")]
    | Annotated[ShardDoc, Tag("shard")]
    | Annotated[FlatDoc, Tag("flat")]
    | Annotated[StageDoc, Tag("stage")]
    | Annotated[OwnerDoc, Tag("owner")]
    | Annotated[PartialDoc, Tag("partial")]
    | Annotated[PatternDoc, Tag("pattern")],
    Discriminator(
        _kind,
        custom_error_type="placement",
        custom_error_message=(
            f"a placement is replicate, or a mapping with one of the keys {', '.join(_KINDS)}"
        ),
    ),
]


class RuleDoc(Written):
    """Tensors by name and state, and how they are placed."""

    match: Names = Field(
        description="Globs, in which * and ? match dots too, or /regex/es, of the whole name."
    )
    states: list[Text] = Field([], description="Globs of states; by default all.")
    mesh: Text | None = Field(None, description="Which of several meshes; by default the first.")
    place: list[Placement] = Field(
        description="Placements, each on the local shape that the last one left."
    )


class OrderedMesh(Written):
    """A mesh spelled so that no tool which sorts keys can change it, and that may list its ranks."""

    axes: Annotated[
        list[Annotated[dict[Text, Size], Field(min_length=1, max_length=1)]], Field(min_length=1)
    ] = Field(description="One mapping of a name to a size for each axis, slowest first.")
    ranks: list[Index] | None = Field(
        None, description="The rank at each coordinate, in row-major order."
    )


class NamedMesh(OrderedMesh):
    """One of several meshes."""

    name: Text


def _mesh_kind(value: Any) -> str:
    ordered = isinstance(value, OrderedMesh) or (
        isinstance(value, dict) and isinstance(value.get("axes"), list)
    )
    return "ordered" if ordered else "axes"


Mesh = Annotated[
    Annotated[dict[Text, Size], Field(min_length=1), Tag("axes")]
    | Annotated[OrderedMesh, Tag("ordered")],
    Discriminator(_mesh_kind),
]


class RenameDoc(Written):
    r"""A source's name, as a regex of the whole name, and the target's, which may say `\1` or `\g<name>`."""

    from_: Text = Field(alias="from")
    to: Text


class CapturedDoc(Written):
    """Of which engine and model `ucformat.torch.capture` recorded a layout: it fits no others."""

    engine: Annotated[dict[Text, Text], Field(min_length=1)] = Field(
        description="The packages of the engine, and their versions."
    )
    model: Text = Field(description="The class of the model.")
    config: Any = Field(None, description="The configuration of the model.")
    rank: Index = Field(description="The rank that loaded.")
    ranks: Size = Field(description="How many ranks there were.")
    tensors: dict[Text, ExpectedTensor] = Field(
        description="All parameters and persistent buffers of the model on this rank."
    )
    ties: dict[Text, Text] = Field({}, description="Further names of these, and the first ones.")
    kept: list[Text] = Field([], description="Those that the loader does not fill.")
    unused: list[Text] = Field([], description="Tensors of the checkpoint that it does not use.")


class LayoutDocument(Written):
    """A whole layout file."""

    version: Literal[1]
    mesh: Mesh | None = Field(None, description="Axis names and sizes, slowest first.")
    meshes: (
        Annotated[dict[Text, Mesh], Field(min_length=1)]
        | Annotated[list[NamedMesh], Field(min_length=1)]
        | None
    ) = Field(
        None,
        description=(
            "Several meshes over the same ranks, by name, instead of `mesh`; the first "
            "is the default."
        ),
    )
    stages: list[RuleDoc] = Field(
        [], description="Which pipeline stage holds a tensor; if given, for every tensor."
    )
    view: list[Step] = Field(
        [], description="What becomes of the source's tensors before all else, step by step."
    )
    rules: list[RuleDoc] = Field([], description="How a tensor is cut; the first match wins.")
    data: list[RuleDoc] = Field(
        [],
        description=(
            "How what is left is spread over data-parallel ranks (ZeRO, FSDP); if given, "
            "for every tensor."
        ),
    )
    renames: list[RenameDoc] = Field(
        [], description="Names of a source's tensors; the first match wins."
    )
    captured: CapturedDoc | None = Field(
        None, description="What it was captured from; `CapturedLayout` checks it."
    )


class Faults(ValueError):
    """The faults of a document, one on each line: `rules[3].place[0].shard.over: Field required`."""


def checked(model: type[Model], document: Any) -> Model:
    """Validate a document as a model."""
    return checked_as(TypeAdapter(model), document)


def checked_as(kind: TypeAdapter[T], document: Any) -> T:
    """Validate a document as a value of a type."""
    try:
        return kind.validate_python(document)
    except ValidationError as e:
        lines = []
        for fault in islice(
            e.errors(include_url=False, include_context=False, include_input=False), _MAX_FAULTS
        ):
            where = "".join(
                f"[{p}]" if isinstance(p, int) else f".{p}" for p in fault["loc"]
            ).lstrip(".")
            lines.append(f"{where}: {fault['msg']}" if where else fault["msg"])
        omitted = e.error_count() - len(lines)
        raise Faults("\n".join([*lines, f"and {omitted} more"] if omitted else lines)) from e


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a layout file, published as `docs/schemas/layout-v1.json`."""
    schema = LayoutDocument.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "ucformat layout, version 1",
    }
