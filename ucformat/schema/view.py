"""The steps of a view: how the tensors of one family of models become another's. `docs/view.md` explains them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ucformat.schema import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Collection

Text = Annotated[str, Field(min_length=1)]
Names = Text | Annotated[list[Text], Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Indices = Annotated[
    list[Index | Annotated[str, Field(pattern=r"^[0-9]{1,18}:[0-9]{1,18}$")]], Field(min_length=1)
]

_NAMES = "Globs, in which * and ? match dots too, or /regex/es, of the whole name."
_REGEX = r"A /regex/ of the whole name."
_TEMPLATE = r"A name, in which \1 and \g<name> are what the /regex/ captured."
_STATES = "Globs of states; by default all."
_INDICES = "Indices, and ranges of them without their end: [0, 8:16, 40]."
_FIRST = "How many of the first, instead of `indices`."


class Written(BaseModel):
    """What people write: nothing is coerced, and nothing unknown passes."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class KeepStep(Written):
    """Only these tensors stay."""

    keep: Names = Field(description=_NAMES)
    states: list[Text] = Field([], description=_STATES)


class Drop(Written):
    """These tensors go."""

    drop: Names = Field(description=_NAMES)
    states: list[Text] = Field([], description=_STATES)


class RenameStep(Written):
    """Tensors get other names."""

    rename: Names = Field(description=_NAMES)
    to: Text = Field(description=_TEMPLATE)


class RenameStates(Written):
    """States get other names: {mu: exp_avg}."""

    rename_states: Annotated[dict[Text, Text], Field(min_length=1)] = Field(
        description="Old name of a state -> new."
    )
    match: Names = Field("*", description=_NAMES)


class Transpose(Written):
    """The dims are put in another order."""

    transpose: Names = Field(description=_NAMES)
    axes: list[Index] | None = Field(
        None, description="For each new dim the old one; by default the reverse."
    )


class Trim(Written):
    """Only the first indices along a dim stay: padding goes."""

    trim: Names = Field(description=_NAMES)
    dim: Index = Field(0, description="The dim.")
    size: Index = Field(description="How many indices stay.")


def _one_of_both(step: Any) -> Any:
    if (step.indices is None) == (step.first is None):
        raise PydanticCustomError("indices", "one of `indices` and `first` is needed, not both")
    return step


class Take(Written):
    """Only these indices along a dim stay, in this order: neurons, heads, the width of a sub-model."""

    take: Names = Field(description=_NAMES)
    dim: Index = Field(0, description="The dim.")
    of: Count | None = Field(
        None,
        description=(
            "The dim is so many equal blocks, such as heads, which the indices count; "
            "default: elements."
        ),
    )
    indices: Indices | None = Field(None, description=_INDICES)
    first: Count | None = Field(None, description=_FIRST)

    _either = model_validator(mode="after")(_one_of_both)


class Select(Written):
    """Of numbered tensors only these stay, and get the numbers 0, 1, 2, … in this order: layers, experts."""

    select: Names = Field(
        description="/regex/es of the whole name. The group `i`, or else the first, is the number."
    )
    indices: Indices | None = Field(None, description=_INDICES)
    first: Count | None = Field(None, description=_FIRST)

    _either = model_validator(mode="after")(_one_of_both)


class Split(Written):
    """One tensor becomes several, cut along a dim."""

    split: Names = Field(description=_NAMES)
    into: Annotated[list[Text], Field(min_length=2)] = Field(description=_TEMPLATE)
    dim: Index = Field(0, description="The dim.")
    sizes: list[Count] | None = Field(
        None, description="Widths or proportions; by default equal parts."
    )
    repeat: Count = Field(
        1, description="The dim is so many blocks, each cut so: Megatron's QKV of each group."
    )


class Fuse(Written):
    """Several tensors become one, joined along a dim: the reverse of split."""

    fuse: Text = Field(description=_REGEX + " The first of the tensors that are joined.")
    and_: Annotated[list[Text], Field(min_length=1)] = Field(
        alias="and", description="The others. " + _TEMPLATE
    )
    into: Text = Field(description=_TEMPLATE)
    dim: Index = Field(0, description="The dim.")
    repeat: Count = Field(1, description="Each is cut in so many blocks, which take turns.")


class Stack(Written):
    """Tensors numbered 0, 1, 2, … become one, with a new dim."""

    stack: Text = Field(
        description=_REGEX + " Its group `i`, or else the first, captures the number."
    )
    into: Text = Field(description=_TEMPLATE)
    dim: Index = Field(0, description="The new dim.")


class Unstack(Written):
    """One tensor becomes as many as a dim is long, without that dim: the reverse of stack."""

    unstack: Names = Field(description=_NAMES)
    into: Text = Field(description=_TEMPLATE + " `{i}` is the number.")
    dim: Index = Field(0, description="The dim.")
    start: Index = Field(0, description="The first number.")


class AliasStep(Written):
    """Further names of stored tensors: {lm_head.weight: model.embed_tokens.weight}."""

    alias: Annotated[dict[Text, Text], Field(min_length=1)] = Field(
        description="Further name -> stored name."
    )


class Untie(Written):
    """Further names become tensors of their own."""

    untie: Names = Field(description=_NAMES)


class Cast(Written):
    """The values are rounded to another dtype."""

    cast: Names = Field(description=_NAMES)
    states: list[Text] = Field([], description=_STATES)
    dtype: str = Field(
        description="A floating-point dtype.", json_schema_extra={"enum": [*sorted(CASTABLE)]}
    )


#: The dtypes of numbers of steps.
Number = Literal["float32", "float64", "int32", "int64", "uint32", "uint64"]
_NUMBER = "The dtype, to which the number is converted exactly; by default its own."


class Give(Written):
    """A tensor of one element becomes a state of others: {give: opt_state.0.count, to: "params.*", state: step}."""

    give: Text = Field(description="The tensor; it goes.")
    to: Names = Field(description="The tensors that get it. " + _NAMES)
    state: Text = Field(description="The name of the state.")
    dtype: Number | None = Field(None, description=_NUMBER)


class Gather(Written):
    """A state of one element, equal in all of these, becomes a tensor of its own: the reverse of give."""

    gather: Names = Field(description="The tensors that have it; the state goes. " + _NAMES)
    state: Text = Field(description="The name of the state.")
    into: Text = Field(description="The name of the tensor.")
    dtype: Number | None = Field(None, description=_NUMBER)


class Mean(Written):
    """Tensors numbered 0, 1, 2, … become their mean: the paper's pattern *partial*."""

    mean: Text = Field(
        description=_REGEX + " Its group `i`, or else the first, captures the number."
    )
    into: Text = Field(description=_TEMPLATE)


class ComposedPart(Written):
    """A box of a tensor that becomes a box of another one."""

    from_: Text = Field(alias="from", description="The tensor that it is taken from.")
    start: list[Index] | None = Field(None, description="Where the box begins; default: at 0.")
    size: list[Index] | None = Field(
        None, description="The shape of the box; default: the tensor's."
    )
    at: list[Index] | None = Field(
        None, description="Where it begins in the composed tensor; default: at 0."
    )
    axes: list[Index | None] | None = Field(
        None,
        description=(
            "For each dim of the composed tensor the dim of the box, null for one of size 1; by "
            "default the same dims."
        ),
    )
    cast: str | None = Field(
        None,
        description="The dtype to which values are rounded.",
        json_schema_extra={"enum": [*sorted(CASTABLE)]},
    )


class ComposedTensor(Written):
    """A tensor composed of boxes of others, which tile it."""

    shape: list[Index]
    parts: Annotated[list[ComposedPart], Field(min_length=1)]


class ExpectedTensor(Written):
    """What a tensor must be."""

    dtype: Text
    shape: list[Index]


class Compose(Written):
    """Only these tensors are left, each composed of boxes of others: what an engine's loader makes."""

    compose: Annotated[dict[Text, ComposedTensor], Field(min_length=1)] = Field(
        description="Name -> shape and parts."
    )
    of: dict[Text, ExpectedTensor] = Field(
        {}, description="What the tensors must be of which these are composed."
    )


class Preset(Written):
    """The steps between two families of models."""

    preset: Text = Field(description="Its name: megatron-to-llama, ….")
    options: dict[Text, int | bool | None] = Field(
        {},
        alias="with",
        description=(
            "Numbers that the names do not tell, such as heads; by default the checkpoint's."
        ),
    )


#: Verb -> model.
STEPS: dict[str, type[Written]] = {
    next(iter(model.model_fields)): model
    for model in (
        *(
            KeepStep,
            Drop,
            RenameStep,
            RenameStates,
            Transpose,
            Trim,
            Take,
            Select,
            Split,
            Fuse,
            Stack,
            Unstack,
        ),
        *(AliasStep, Untie, Cast, Give, Gather, Mean, Compose, Preset),
    )
}


def keys_of(value: Any) -> Collection[str]:
    """The keys of a mapping or of a model that may be one of several."""
    if isinstance(value, BaseModel):
        return type(value).model_fields
    return value if isinstance(value, dict) else ()


def _verb(value: Any) -> str | None:
    return next((verb for verb in STEPS if verb in keys_of(value)), None)


Step = Annotated[
    Annotated[KeepStep, Tag("keep")]
    | Annotated[Drop, Tag("drop")]
    | Annotated[RenameStep, Tag("rename")]
    | Annotated[RenameStates, Tag("rename_states")]
    | Annotated[Transpose, Tag("transpose")]
    | Annotated[Trim, Tag("trim")]
    | Annotated[Take, Tag("take")]
    | Annotated[Select, Tag("select")]
    | Annotated[Split, Tag("split")]
    | Annotated[Fuse, Tag("fuse")]
    | Annotated[Stack, Tag("stack")]
    | Annotated[Unstack, Tag("unstack")]
    | Annotated[AliasStep, Tag("alias")]
    | Annotated[Untie, Tag("untie")]
    | Annotated[Cast, Tag("cast")]
    | Annotated[Give, Tag("give")]
    | Annotated[Gather, Tag("gather")]
    | Annotated[Mean, Tag("mean")]
    | Annotated[Compose, Tag("compose")]
    | Annotated[Preset, Tag("preset")],
    Discriminator(
        _verb,
        custom_error_type="step",
        custom_error_message=f"a step is a mapping with one of the keys {', '.join(STEPS)}",
    ),
]

#: A step, and the label that errors give it.
Labelled = tuple[str, Step]
