"""Converts between layout files and layouts: read, validate, lower to placements, and lift back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from ucformat.config_files import line_of, read_config_file
from ucformat.errors import LayoutError, UpgradeNeeded
from ucformat.geometry.mesh import Mesh
from ucformat.geometry.placement import Flat, Owner, Partial, Placement, Replicate, Rule, Shard, Stage
from ucformat.schema import layout as schema
from ucformat.schema.view import Step

if TYPE_CHECKING:
    from pathlib import Path

_STEP: TypeAdapter[Step] = TypeAdapter(Step)


def read(path: Path) -> Any:
    """The content of a YAML or JSON file; LayoutError names the line of a syntax error."""
    return read_config_file(path, "layout file", LayoutError)


def validate(document: Any) -> schema.LayoutDocument:
    """Validate a layout document."""
    version = document.get("version") if isinstance(document, Mapping) else None
    if isinstance(version, int) and version > schema.VERSION:
        raise UpgradeNeeded(
            f"the layout is of version {version}; this ucformat reads up to {schema.VERSION}", hint="upgrade ucformat"
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
        raise LayoutError("not a layout:\nrules: there must be at least one", hint="docs/layout.md describes the file")
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
    place, colon, rest = message.partition(": ")
    line = line_of(path, place) if colon else None
    return message if line is None else f"line {line}, {place}: {rest}"


def lower(model: schema.LayoutDocument, path: Path | None = None) -> dict[str, Any]:
    """The keyword arguments of `Layout` for a validated document.

    Args:
        path: the file it was read from, whose line numbers then appear in the labels of rules (None: not from a file).
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
        return _rule(schema.checked(schema.Rule, dict(rule)), label)
    except schema.Faults as e:
        raise LayoutError(f"{label} is not a valid rule:\n{e}") from e


def lower_step(step: Step | Mapping[str, Any], label: str) -> Step:
    """A step of a view."""
    try:
        return schema.checked_as(_STEP, step)
    except schema.Faults as e:
        raise LayoutError(f"{label} is not a valid step:\n{e}", hint="docs/view.md describes them") from e


def _mesh(mesh: dict[str, int] | schema.OrderedMesh) -> Mesh:
    if isinstance(mesh, dict):
        return Mesh(mesh)
    axes = [pair for axis in mesh.axes for pair in axis.items()]
    if len(dict(axes)) < len(axes):
        raise LayoutError(f"a mesh names an axis twice: {', '.join(name for name, _ in axes)}")
    return Mesh(dict(axes), mesh.ranks)


def _rule(rule: schema.Rule, label: str) -> Rule:
    match = (rule.match,) if isinstance(rule.match, str) else tuple(rule.match)
    try:
        return Rule(
            match, tuple(p for placed in rule.place for p in _placements(placed)), tuple(rule.states), rule.mesh, label
        )
    except LayoutError as e:
        if e.message.startswith(label):
            raise
        raise LayoutError(f"{label} (match {', '.join(map(repr, match))}): {e.message}", hint=e.hint) from e


def _placements(p: schema.Placement) -> tuple[Placement, ...]:
    if not isinstance(p, schema.Pattern):
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
                raise LayoutError("the pattern shard-Hy needs `dims`: the dim that each axis of `over` shards")
            return tuple(Shard(dim, axis) for dim, axis in zip(p.dims, over, strict=True))
        case "shard-NC":
            if p.parts is None or len(p.dims or (0,)) != 1:
                raise LayoutError("the pattern shard-NC needs `parts`, for one dim")
            parts = tuple(w if isinstance(w, int) else tuple(w) for w in p.parts)
            return (Shard((p.dims or (0,))[0], over, parts=parts),)
    return (Replicate(),)


def _placement(p: schema.Placement) -> Placement:
    match p:
        case schema.Shard():
            parts = None if p.parts is None else tuple(w if isinstance(w, int) else tuple(w) for w in p.parts)
            sizes = None if p.sizes is None else tuple(p.sizes)
            return Shard(p.shard, _over(p.over), sizes, parts, p.pad_to, p.even)
        case schema.Flat():
            return Flat(
                _over(p.over), p.flat, p.order, p.cut, p.tensor_align, p.group_pad, p.total_align, p.max_elements
            )
        case schema.Stage():
            index = p.stage if isinstance(p.stage, int) else None
            return Stage(_over(p.over), index, None if isinstance(p.stage, int) else tuple(p.stage))
        case schema.Owner():
            return Owner(p.owner, _over(p.over))
        case schema.Partial():
            return Partial(p.partial, _over(p.over))
        case _:
            return Replicate()


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
    model: schema.Shard | schema.Flat | schema.Stage | schema.Owner | schema.Partial
    match p:
        case Replicate():
            return "replicate"
        case Shard():
            parts = None if p.parts is None else [w if isinstance(w, int) else list(w) for w in p.parts]
            sizes = None if p.sizes is None else list(p.sizes)
            model = schema.Shard(shard=p.dim, over=_names(p), sizes=sizes, parts=parts, pad_to=p.pad_to, even=p.even)
        case Flat():
            model = schema.Flat(
                flat=p.group, over=_names(p), order=p.order, cut=p.cut, tensor_align=p.tensor_align,
                group_pad=p.group_pad, total_align=p.total_align, max_elements=p.max_elements,
            )  # fmt: skip
        case Stage():
            model = schema.Stage(stage=p.index if p.starts is None else list(p.starts), over=_names(p))  # type: ignore[arg-type]
        case Owner():
            model = schema.Owner(owner=p.index, over=_names(p) or None)
        case Partial():
            model = schema.Partial(partial=p.reduction, over=_names(p) or None)
    return model.model_dump(exclude_defaults=True)


def _names(p: Shard | Flat | Stage | Owner | Partial) -> str | list[str]:
    return p.over[0] if len(p.over) == 1 else list(p.over)
