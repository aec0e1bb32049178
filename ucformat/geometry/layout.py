"""Layouts: meshes, and rules that map tensor names to placements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ucformat.config_files import line_of, read_config_file
from ucformat.errors import LayoutError, UpgradeNeeded, first_names
from ucformat.geometry.bound import BoundLayout
from ucformat.geometry.patterns import compile_pattern, expand
from ucformat.geometry.placement import (
    Flat,
    Mesh,
    Owner,
    Partial,
    Placed,
    Placement,
    Replicate,
    Rule,
    Shard,
    Stage,
    place,
)
from ucformat.schema import layout as schema
from ucformat.schema.view import Step

if TYPE_CHECKING:
    from os import PathLike

    from ucformat.geometry.patterns import Pattern
    from ucformat.geometry.tensor import Key, TensorList
    from ucformat.schema.view import Labelled


# Converts between layout files and layouts: read, validate, lower to placements, and lift back.


_STEP: TypeAdapter[Step] = TypeAdapter(Step)


def read(path: Path) -> Any:
    """The content of a YAML or JSON file; LayoutError names the line of a syntax error."""
    return read_config_file(path, "layout file", LayoutError)


def validate(document: Any) -> schema.LayoutDocument:
    """Validate a layout document."""
    version = document.get("version") if isinstance(document, Mapping) else None
    if isinstance(version, int) and version > schema.VERSION:
        raise UpgradeNeeded(
            f"the layout is of version {version}; this ucformat reads up to {schema.VERSION}",
            hint="upgrade ucformat",
        )
    try:
        model = schema.checked(schema.LayoutDocument, document)
    except schema.Faults as e:
        raise LayoutError(f"not a layout:\n{e}", hint="docs/layout.md describes the file") from e
    if model.view and not (model.rules or model.stages or model.data or model.mesh or model.meshes):
        return model
    if (model.mesh is None) == (model.meshes is None):
        raise LayoutError("a layout needs either mesh or meshes, not both")
    if not model.rules:
        raise LayoutError(
            "not a layout:\nrules: there must be at least one",
            hint="docs/layout.md describes the file",
        )
    return model


def read_document(path: Path) -> schema.LayoutDocument:
    """Read and validate a layout file."""
    document = read(path)
    try:
        return validate(document)
    except LayoutError as e:
        lines = [_with_line(path, line) for line in e.message.splitlines()]
        raise type(e)(f"{path}: " + "\n".join(lines), hint=e.hint) from e


def _with_line(path: Path, message: str) -> str:
    place, colon, reason = message.partition(": ")
    line = line_of(path, place) if colon else None
    return message if line is None else f"line {line}, {place}: {reason}"


def lower(model: schema.LayoutDocument, path: Path | None = None) -> dict[str, Any]:
    """The keyword arguments of `Layout` for a validated document.

    Args:
        path: the file it was read from, whose line numbers then appear in the labels of rules
            (None: not from a file).
    """

    def label(place: str) -> str:
        line = None if path is None else line_of(path, place)
        return place if line is None else f"{place}, line {line}"

    meshes: Any = {}
    if model.mesh is not None:
        meshes = _mesh(model.mesh)
    elif isinstance(model.meshes, dict):
        meshes = {name: _mesh(mesh) for name, mesh in model.meshes.items()}
    else:
        meshes = {mesh.name: _mesh(mesh) for mesh in model.meshes or ()}
    return {
        "mesh": meshes,
        **{
            s: [_rule(r, label(f"{s}[{i}]")) for i, r in enumerate(getattr(model, s))]
            for s in ("stages", "rules", "data")
        },
        "renames": [(r.from_, r.to) for r in model.renames],
        "view": [(label(f"view[{i}]"), step) for i, step in enumerate(model.view)],
    }


def lower_rule(rule: Rule | Mapping[str, Any], label: str) -> Rule:
    """A rule with a label."""
    if isinstance(rule, Rule):
        return replace(rule, label=label)
    try:
        return _rule(schema.checked(schema.RuleDoc, dict(rule)), label)
    except schema.Faults as e:
        raise LayoutError(f"{label} is not a valid rule:\n{e}") from e


def lower_step(step: Step | Mapping[str, Any], label: str) -> Step:
    """A step of a view."""
    try:
        return schema.checked_as(_STEP, step)
    except schema.Faults as e:
        raise LayoutError(
            f"{label} is not a valid step:\n{e}", hint="docs/view.md describes them"
        ) from e


def _mesh(mesh: dict[str, int] | schema.OrderedMesh) -> Mesh:
    if isinstance(mesh, dict):
        return Mesh(mesh)
    axes = [pair for axis in mesh.axes for pair in axis.items()]
    if len(dict(axes)) < len(axes):
        raise LayoutError(f"a mesh names an axis twice: {', '.join(name for name, _ in axes)}")
    return Mesh(dict(axes), mesh.ranks)


def _rule(rule: schema.RuleDoc, label: str) -> Rule:
    match = (rule.match,) if isinstance(rule.match, str) else tuple(rule.match)
    try:
        return Rule(
            match,
            tuple(p for placed in rule.place for p in _placements(placed)),
            tuple(rule.states),
            rule.mesh,
            label,
        )
    except LayoutError as e:
        if e.message.startswith(label):
            raise
        raise LayoutError(
            f"{label} (match {', '.join(map(repr, match))}): {e.message}", hint=e.hint
        ) from e


def _placements(p: schema.Placement) -> tuple[Placement, ...]:
    if not isinstance(p, schema.PatternDoc):
        return (_placement(p),)
    over = _over(p.over)
    if p.pattern.startswith("shard") and not over:
        raise LayoutError(f"the pattern {p.pattern} needs `over`: the axes to shard over")
    match p.pattern:
        case "unique":
            return (Owner(p.owner, over),)
        case "partial":
            return (Partial("mean", over),)
        case "shard-V" | "shard-H":
            return (Shard(0 if p.pattern == "shard-V" else 1, over),)
        case "shard-Hy":
            if p.dims is None or len(p.dims) != len(over):
                raise LayoutError(
                    "the pattern shard-Hy needs `dims`: the dim that each axis of `over` shards"
                )
            return tuple(Shard(dim, axis) for dim, axis in zip(p.dims, over, strict=True))
        case "shard-NC":
            if p.parts is None or len(p.dims or (0,)) != 1:
                raise LayoutError("the pattern shard-NC needs `parts`, for one dim")
            return (Shard((p.dims or (0,))[0], over, parts=_widths(p.parts)),)
    return (Replicate(),)


def _placement(p: schema.Placement) -> Placement:
    match p:
        case schema.ShardDoc():
            sizes = None if p.sizes is None else tuple(p.sizes)
            return Shard(p.shard, _over(p.over), sizes, _widths(p.parts), p.pad_to, p.even)
        case schema.FlatDoc():
            return Flat(
                _over(p.over),
                p.flat,
                p.order,
                p.cut,
                p.tensor_align,
                p.group_pad,
                p.total_align,
                p.max_elements,
            )
        case schema.StageDoc():
            index = p.stage if isinstance(p.stage, int) else None
            return Stage(_over(p.over), index, None if isinstance(p.stage, int) else tuple(p.stage))
        case schema.OwnerDoc():
            return Owner(p.owner, _over(p.over))
        case schema.PartialDoc():
            return Partial(p.partial, _over(p.over))
        case _:
            return Replicate()


def _widths(parts: list[int | list[int]] | None) -> tuple[int | tuple[int, ...], ...] | None:
    if parts is None:
        return None
    return tuple(w if isinstance(w, int) else tuple(w) for w in parts)


def _over(over: str | list[str] | None) -> tuple[str, ...]:
    return () if over is None else (over,) if isinstance(over, str) else tuple(over)


def lift_mesh(mesh: Mesh) -> dict[str, Any]:
    """A mesh as a JSON document that keeps the order of axes even if its keys are sorted."""
    out: dict[str, Any] = {"axes": [{name: n} for name, n in mesh.axes.items()]}
    return out if mesh.ranks == tuple(range(mesh.size)) else {**out, "ranks": list(mesh.ranks)}


def lift_rule(rule: Rule) -> dict[str, Any]:
    """A rule as a JSON document; fields with their default value are left out."""
    out: dict[str, Any] = {"match": rule.match[0] if len(rule.match) == 1 else list(rule.match)}
    if rule.states:
        out["states"] = list(rule.states)
    if rule.mesh is not None:
        out["mesh"] = rule.mesh
    return {**out, "place": [_lift(p) for p in rule.place]}


def _lift(p: Placement) -> str | dict[str, Any]:
    model: schema.ShardDoc | schema.FlatDoc | schema.StageDoc | schema.OwnerDoc | schema.PartialDoc
    match p:
        case Replicate():
            return "replicate"
        case Shard():
            parts = (
                None if p.parts is None else [w if isinstance(w, int) else list(w) for w in p.parts]
            )
            sizes = None if p.sizes is None else list(p.sizes)
            model = schema.ShardDoc(
                shard=p.dim, over=_names(p), sizes=sizes, parts=parts, pad_to=p.pad_to, even=p.even
            )
        case Flat():
            model = schema.FlatDoc(
                flat=p.group, over=_names(p), order=p.order, cut=p.cut, tensor_align=p.tensor_align,
                group_pad=p.group_pad, total_align=p.total_align, max_elements=p.max_elements,
            )  # fmt: skip
        case Stage():
            model = schema.StageDoc(
                stage=p.index if p.starts is None else list(p.starts),  # type: ignore[arg-type]
                over=_names(p),
            )
        case Owner():
            model = schema.OwnerDoc(owner=p.index, over=_names(p) or None)
        case Partial():
            model = schema.PartialDoc(partial=p.reduction, over=_names(p) or None)
    return model.model_dump(exclude_defaults=True)


def _names(p: Shard | Flat | Stage | Owner | Partial) -> str | list[str]:
    return p.over[0] if len(p.over) == 1 else list(p.over)


__all__ = ["Layout"]

Rules = Sequence[Rule | Mapping[str, Any]]
_SECTIONS = ("stages", "rules", "data")


class Layout:
    """How tensors are distributed over ranks; immutable.

    Three sections of rules apply one after another: `stages` selects the ranks that hold a tensor,
    `rules` how it is sharded, `data` how the result is distributed over data-parallel ranks. In
    each section the first rule that matches applies; a section that is given must match every
    tensor. A rule may be a mapping, with the keys of a layout file.

    Args:
        mesh: one mesh (axes and their sizes, slowest first), or several by name over the same
            ranks; the first is the default.
        rules: how tensors are sharded; at least one.
        stages: which ranks hold each tensor, e.g. pipeline stages (default: all).
        data: how tensors are distributed over data-parallel ranks (default: replicated).
        renames: pairs of a regex, which must match the whole name in the source, and a template for
            the name in the target.
        view: steps that transform a source's tensors before all this (`docs/view.md`).

    Raises:
        LayoutError: there are no rules, or a rule does not fit its mesh.
    """

    def __init__(
        self,
        mesh: Mesh | Mapping[str, int] | Mapping[str, Mesh | Mapping[str, int]],
        rules: Rules,
        *,
        stages: Rules = (),
        data: Rules = (),
        renames: Sequence[tuple[str, str]] = (),
        view: Sequence[Labelled | Step | Mapping[str, Any]] = (),
    ) -> None:
        if view and not rules:
            raise LayoutError(
                "a view alone places nothing on ranks",
                hint=(
                    "see tensors through it with `--view`, or Checkpoint.view; a layout has a "
                    "mesh and rules too"
                ),
            )
        self.meshes = _meshes(mesh)
        self.stages = _labelled("stages", stages)
        self.rules = _labelled("rules", rules)
        self.data = _labelled("data", data)
        self.renames = tuple((str(a), str(b)) for a, b in renames)
        self.view = tuple(
            step if isinstance(step, tuple) else (f"view[{i}]", lower_step(step, f"view[{i}]"))
            for i, step in enumerate(view)
        )
        self._renames = [_compiled(i, a, b) for i, (a, b) in enumerate(self.renames)]
        if not self.rules:
            raise LayoutError(
                "a layout without rules places nothing", hint=_CATCH_ALL.format("rules")
            )
        for section_rules in self.sections.values():
            for rule in section_rules:
                self._check(rule)

    @property
    def mesh(self) -> Mesh:
        """The mesh, or the default one of several."""
        return next(iter(self.meshes.values()))

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Layout:
        """The layout that a document describes.

        Raises:
            LayoutError: the document is not a valid layout; the message names the invalid rule.
            UpgradeNeeded: the document has a newer version.
        """
        return cls(**lower(validate(document)))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Layout:
        """The layout of a YAML or JSON file.

        Raises:
            LayoutError: the file is not a valid layout; the message names the line or the rule.
            UpgradeNeeded: the document has a newer version.
        """
        return cls(**lower(read_document(Path(path)), Path(path)))

    def dump(self) -> dict[str, Any]:
        """The document that `parse` turns into this layout: JSON values; the order of keys does not matter."""
        out: dict[str, Any] = {"version": 1}
        if tuple(self.meshes) == (_DEFAULT_MESH,):
            out["mesh"] = lift_mesh(self.mesh)
        else:
            out["meshes"] = [
                {"name": name, **lift_mesh(mesh)} for name, mesh in self.meshes.items()
            ]
        for section, rules in self.sections.items():
            if rules:
                out[section] = [lift_rule(rule) for rule in rules]
        if self.view:
            out["view"] = [
                step.model_dump(by_alias=True, exclude_defaults=True) for _, step in self.view
            ]
        if self.renames:
            out["renames"] = [{"from": a, "to": b} for a, b in self.renames]
        return out

    def rename(self, name: str) -> str:
        """The name in the target of a source's tensor: by the first rename whose regex matches, otherwise unchanged."""
        for pattern, template in self._renames:
            if match := pattern.fullmatch(name):
                return expand(match, template)
        return name

    @property
    def sections(self) -> dict[str, tuple[Rule, ...]]:
        """The rules of the three sections, in the order in which they apply."""
        return {section: getattr(self, section) for section in _SECTIONS}

    def rules_for(self, name: str, states: Iterable[str]) -> list[Rule]:
        """The rules that apply to a tensor: in each section the first that matches, for each of its states."""
        by_section: dict[str, Rule] = {}
        for candidates in self._matches(name).values():
            for state in states:
                hit = next((rule for rule, _ in candidates if rule.has_state(state)), None)
                if hit is not None:
                    by_section[hit.label] = hit
        return list(by_section.values())

    def bind(self, tensor_list: TensorList) -> BoundLayout:
        """Apply the rules to the tensors of a tensor list.

        Raises:
            LayoutError: no rule matches a tensor, rules contradict each other, or a placement does
                not fit a tensor's shape; the message names the tensor, its state and the rule.
        """
        placed: dict[Key, Placed] = {}
        composed: dict[tuple[object, ...], Placed] = {}
        matches = {
            n: self._matches(n) for n in dict.fromkeys(info.name for info in tensor_list.tensors)
        }
        missing: dict[str, list[Key]] = {}
        for info in tensor_list.tensors:
            if info.key in placed:
                raise LayoutError(f"the tensor list lists {info.key} twice")
            of_tensor = []
            for section, candidates in matches[info.name].items():
                hit = next((c for c in candidates if c[0].has_state(info.state)), None)
                if hit is None:
                    missing.setdefault(section, []).append(info.key)
                else:
                    of_tensor.append(hit)
            if missing:
                continue
            # Rules and captures determine the placement; thousands of tensors share a few
            # combinations.
            combination = tuple((rule.label, match.re, match.groups()) for rule, match in of_tensor)
            if combination not in composed:
                try:
                    composed[combination] = place(self._mesh_of(of_tensor), of_tensor)
                except LayoutError as e:
                    raise LayoutError(f"{info.key}: {e.message}", hint=e.hint) from e
            placed[info.key] = composed[combination]
        for section, keys in missing.items():
            raise LayoutError(
                f"no rule of the section {section} matches {first_names(keys, 4)}",
                hint=_CATCH_ALL.format(section),
            )
        return BoundLayout(self.meshes, tensor_list, placed)

    def _matches(self, name: str) -> dict[str, list[tuple[Rule, re.Match[str]]]]:
        """The rules of each section that match a name, in any state."""
        return {
            section: [(rule, m) for rule in rules if (m := rule.find(name))]
            for section, rules in self.sections.items()
            if rules
        }

    def _mesh_of(self, matches: list[tuple[Rule, re.Match[str]]]) -> Mesh:
        """The one mesh that all placements of a tensor refer to."""
        named = {rule.mesh: rule for rule, _ in matches if rule.mesh is not None}
        if len(named) > 1:
            raise LayoutError(" and ".join(map(str, named.values())) + " name different meshes")
        return self.meshes[next(iter(named))] if named else self.mesh

    def _check(self, rule: Rule) -> None:
        """Fail before any tensor list is known: a rule must fit its mesh, or at least one mesh if it names none."""
        if rule.mesh is not None and rule.mesh not in self.meshes:
            raise LayoutError(
                f"{rule} names the mesh {rule.mesh!r}",
                hint=f"the meshes are {', '.join(self.meshes)}",
            )
        errors = []
        for mesh in self.meshes.values() if rule.mesh is None else (self.meshes[rule.mesh],):
            try:
                return rule.check(mesh)
            except LayoutError as e:
                errors.append(e)
        raise errors[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.dump() == other.dump()

    def __hash__(self) -> int:
        return hash((tuple(self.meshes.items()), self.stages, self.rules, self.data, self.renames))

    def __repr__(self) -> str:
        meshes = ", ".join(f"{name} {mesh}" for name, mesh in self.meshes.items())
        return f"<Layout {meshes}: {len(self.stages)} + {len(self.rules)} + {len(self.data)} rules>"


_DEFAULT_MESH = "mesh"  # name of the mesh of a layout that has only one
_CATCH_ALL = 'end the section {} with a catch-all: {{match: "*", place: [replicate]}}'


def _meshes(mesh: Mesh | Mapping[str, Any]) -> dict[str, Mesh]:
    if isinstance(mesh, Mesh):
        return {_DEFAULT_MESH: mesh}
    if not mesh or all(isinstance(n, int) for n in mesh.values()):
        return {_DEFAULT_MESH: Mesh(mesh)}
    out = {name: m if isinstance(m, Mesh) else Mesh(m) for name, m in mesh.items()}
    sizes = {m.size for m in out.values()}
    if len(sizes) > 1:
        sizes_of = ", ".join(f"{name} {m} has {m.size} ranks" for name, m in out.items())
        raise LayoutError(f"all meshes must be over the same ranks, but {sizes_of}")
    return out


def _labelled(section: str, rules: Rules) -> tuple[Rule, ...]:
    return tuple(
        rule if isinstance(rule, Rule) and rule.label else lower_rule(rule, f"{section}[{i}]")
        for i, rule in enumerate(rules)
    )


def _compiled(i: int, pattern: str, template: str) -> tuple[Pattern, str]:
    try:
        compiled = compile_pattern(pattern)
        compiled.regex.sub(template, "")  # parses the template, too
    except LayoutError as e:
        raise LayoutError(f"renames[{i}]: {e.message}", hint=e.hint) from e
    except (re.error, IndexError) as e:
        raise LayoutError(f"renames[{i}]: {pattern!r} to {template!r}: {e}") from e
    return compiled, template
