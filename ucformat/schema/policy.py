"""The policy file: which checkpoints stay, and for how long those that do not can be restored (docs/retention.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticCustomError, core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

VERSION = 1

_UNITS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = "^[0-9]{1,10}[smhdw]$"
_LONGEST = timedelta(days=36500)  # can be added to any present date


def parse_duration(text: Any) -> timedelta:
    """Parse a duration such as `90s`, `15m`, `48h`, `7d` or `2w`."""
    if isinstance(text, timedelta):
        return text
    if not isinstance(text, str) or not re.fullmatch(_DURATION, text):
        raise PydanticCustomError(
            "duration", "{given} is not a duration: write 90s, 15m, 48h, 7d or 2w", _given(text)
        )
    seconds = int(text[:-1]) * _UNITS[text[-1]]
    if seconds > _LONGEST.total_seconds():
        raise PydanticCustomError("duration", "{given} is more than a hundred years", _given(text))
    return timedelta(seconds=seconds)


def duration_text(duration: timedelta) -> str:
    """Format a duration for a policy file, in the largest unit of which it is a multiple: `2d` for 48 hours."""
    seconds = int(duration.total_seconds())
    unit = next(u for u, n in _UNITS.items() if seconds % n == 0) if seconds else "s"
    return f"{seconds // _UNITS[unit]}{unit}"


def _given(value: Any) -> dict[str, str]:
    return {"given": repr(value)}


def _some(duration: timedelta) -> timedelta:
    if not duration:
        raise PydanticCustomError("duration", "no checkpoint is younger than 0s")
    return duration


def _counted(value: Any) -> Any:
    return {"count": value} if isinstance(value, int) else value


class _OneOrMore:
    """Marks a tuple for which a single value that is not a list is accepted too."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._listed, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        many = handler(schema)
        return {"anyOf": [many["items"], {**many, "minItems": 1}]}

    @staticmethod
    def _listed(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            return (value,)
        if not value:
            raise PydanticCustomError("empty", "the list is empty")
        return tuple(value)


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Duration = Annotated[
    timedelta,
    BeforeValidator(
        parse_duration, json_schema_input_type=Annotated[str, Field(pattern=_DURATION)]
    ),
    PlainSerializer(duration_text),
]
Group = Annotated[
    Literal["run", "all"],
    Field(
        description=(
            "Whether a checkpoint competes with those of its run, or with all that are in scope."
        )
    ),
]


class _PolicyDocument(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _name_faulty_keys(cls, document: Any) -> Any:
        """A rule that is misspelled, or left empty in YAML, would keep nothing: it must not pass unseen."""
        if isinstance(document, cls):
            return document
        if not isinstance(document, Mapping):
            message = "{given} is not a mapping of {keys}"
            raise PydanticCustomError(
                "mapping", message, {**_given(document), "keys": ", ".join(cls.model_fields)}
            )
        faults = []
        for key, value in document.items():
            if key not in cls.model_fields:
                near = get_close_matches(str(key), cls.model_fields, 1, 0.5)
                advice = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"there are {', '.join(cls.model_fields)}"
                )
                faults.append(f"unknown key {key!r}; {advice}")
            elif value is None:
                faults.append(f"{key!r} has no value")
        if faults:
            raise PydanticCustomError("keys", "{faults}", {"faults": "; ".join(faults)})
        return dict(document)


class Last(_PolicyDocument):
    """The last checkpoints: those of the highest steps, and the newest."""

    count: Count
    group: Group = "run"


LastRule = Annotated[Last, BeforeValidator(_counted, json_schema_input_type=Count | Last)]


class Best(_PolicyDocument):
    """The checkpoints with the best values of a metric, and those tied with the last of them."""

    metric: Text
    count: Count
    mode: Literal["min", "max"] = Field(
        description="Whether less or more is better; a guess could keep the worst."
    )
    group: Group = "run"


def _with_weights(states: tuple[str, ...]) -> tuple[str, ...]:
    if not any(fnmatchcase("weight", pattern) for pattern in states):
        raise PydanticCustomError(
            "states", "no state is `weight`: what remains would be states of missing weights"
        )
    return states


class Keep(_PolicyDocument):
    """What stays: the union of these rules."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    last: Annotated[tuple[LastRule, ...], _OneOrMore()] = Field(
        (), description="The last ones, by step and by time."
    )
    every: Count | None = Field(None, description="Those whose step is divisible by this.")
    best: Annotated[tuple[Best, ...], _OneOrMore()] = Field((), description="The best by a metric.")
    younger: Annotated[Duration, AfterValidator(_some)] | None = Field(
        None, description="Those created less than this ago."
    )
    where: Annotated[tuple[Text, ...], _OneOrMore()] = Field(
        (), description="Those that match a filter, as of `ucp ls`, or one of several."
    )
    states: Annotated[tuple[Text, ...], _OneOrMore(), AfterValidator(_with_weights)] = Field(
        (),
        description=(
            "Of the checkpoints that only rules with `states` keep, only these states stay: names "
            "or globs. By default all."
        ),
    )

    @model_validator(mode="after")
    def _keep_something(self) -> Keep:
        if not self.model_fields_set - {"states"}:
            raise PydanticCustomError(
                "keep", "no rule: everything that nothing protects would be deleted"
            )
        return self


class Policy(_PolicyDocument):
    """A whole policy file."""

    version: Literal[1]
    scope: Text | None = Field(
        None,
        description=(
            "A filter, as of `ucp ls`: only these are judged, others are left alone. By "
            "default all."
        ),
    )
    keep: Annotated[tuple[Keep, ...], _OneOrMore()] = Field(
        description="One set of rules, or several, each for the states that it names."
    )
    grace: Duration = Field(
        timedelta(days=7),
        description="How long a deleted checkpoint can be restored.",
        json_schema_extra={"default": "7d"},
    )

    def filters(self) -> tuple[str, ...]:
        """The filters that must be evaluated for each checkpoint: `scope`, if there is one, then those of `where`."""
        where = tuple(text for keep in self.keep for text in keep.where)
        return (() if self.scope is None else (self.scope,)) + where

    def metrics(self) -> frozenset[str]:
        """The metrics whose values must be known of each checkpoint."""
        return frozenset(best.metric for keep in self.keep for best in keep.best)

    @property
    def thins(self) -> bool:
        """Whether it may keep only some states of a checkpoint."""
        return any(keep.states for keep in self.keep)


class _Schema(GenerateJsonSchema):
    """Without what stands for a key that is not given: no file can say it."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return (
            super().default_schema(schema)
            if schema.get("default")
            else self.generate_inner(schema["schema"])
        )


def policy_json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, published as `docs/schemas/policy-v1.json`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Policy.model_json_schema(schema_generator=_Schema),
        "title": "ucformat retention policy, version 1",
    }
