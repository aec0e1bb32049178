"""Places in the code that can be changed, and the changes."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

#: What is put before a statement, so that running it is recorded.
_MARK = "__import__('ucformat._reached', fromlist=['hit']).hit({number})"

_BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_COMMUTATIVE = ("max", "min", "np.maximum", "np.minimum", "torch.equal", "np.array_equal")


@dataclass(frozen=True)
class Site:
    """One change at one place.

    Args:
        file: relative to the checkout, as `ucformat/geometry/box.py`.
        function: the dotted name of the function in its module.
        change: what is done, as `boundary`.
        code: the changed expression or statement before the change, its first 100 characters.
        line: of the place.
        index: position among all changes of the file, which finds it again.
        twin: number of changes before it in the function that have the same `change` and `code`.
    """

    file: str
    function: str
    change: str
    code: str
    line: int
    index: int
    twin: int

    @property
    def name(self) -> str:
        """The same for as long as the function says the same, wherever it stands."""
        number = f" #{self.twin + 1}" if self.twin else ""
        return f"{self.file}:{self.function}: {self.change}: {self.code}{number}"


@dataclass(frozen=True)
class _Change:
    function: str
    kind: str
    node: ast.expr | ast.stmt
    apply: Callable[[], object]
    block: list[ast.stmt]  # the statements among which the one with the node is
    statement: ast.stmt


def sites(file: Path, root: Path) -> list[Site]:
    """All changes of a module."""
    seen: dict[tuple[str, str, str], int] = {}
    result = []
    for index, change in enumerate(_changes(ast.parse(file.read_text()))):
        code = " ".join(ast.unparse(change.node).split())[:100]
        key = (change.function, change.kind, code)
        twin = seen.get(key, 0)
        seen[key] = twin + 1
        result.append(Site(str(file.relative_to(root)), *key, change.node.lineno, index, twin))
    return result


def changed(source: str, index: int) -> str:
    """A module with one of its changes."""
    tree = ast.parse(source)
    list(_changes(tree))[index].apply()
    return ast.unparse(ast.fix_missing_locations(tree))


def marked(source: str, numbers: dict[int, int]) -> str:
    """A module that records when the statements of some of its changes are run.

    Args:
        source: of the module.
        numbers: position of each of these changes among all of the file -> what is recorded.
    """
    tree = ast.parse(source)
    changes = list(_changes(tree))
    for index, number in numbers.items():
        change = changes[index]
        (mark,) = ast.parse(_MARK.format(number=number)).body
        change.block.insert(
            next(i for i, s in enumerate(change.block) if s is change.statement), mark
        )
    return ast.unparse(ast.fix_missing_locations(tree))


def _changes(tree: ast.Module) -> list[_Change]:
    return list(_of_block(tree.body, prefix="", function=""))


def _of_block(block: list[ast.stmt], prefix: str, function: str) -> Iterator[_Change]:
    """The changes of statements, and of all below them; only those inside functions are changed."""
    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}{statement.name}"
            yield from _of_block(statement.body, f"{name}.", name)
        elif isinstance(statement, ast.ClassDef):
            yield from _of_block(statement.body, f"{prefix}{statement.name}.", function="")
        else:
            if function:
                yield from _of_statement(statement, block, function)
            for inner in _inner_blocks(statement):
                yield from _of_block(inner, prefix, function)


def _inner_blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return
    for field in ("body", "orelse", "finalbody"):
        if block := getattr(statement, field, None):
            yield block
    for clause in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield clause.body


def _of_statement(statement: ast.stmt, block: list[ast.stmt], function: str) -> Iterator[_Change]:
    def change(kind: str, node: ast.expr | ast.stmt, apply: Callable[[], object]) -> _Change:
        return _Change(function, kind, node, apply, block, statement)

    def drop() -> None:
        block[block.index(statement)] = ast.Pass()

    if (
        isinstance(statement, ast.If)
        and not statement.orelse
        and isinstance(statement.body[-1], ast.Raise | ast.Return)
    ):
        yield change("check dropped", statement, drop)
    elif isinstance(statement, ast.Raise) and statement.exc:
        yield change("raise dropped", statement, drop)
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.Await):
        yield change("call dropped", statement, drop)
    if isinstance(statement, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return  # what an error says is no behaviour
    for root in _own_expressions(statement):
        for node in _code_of(root):
            for kind, apply in _of_expression(node):
                yield change(kind, node, apply)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement without those of the statements in it, and without annotations."""
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr):
                yield child
            elif isinstance(child, ast.withitem):
                yield child.context_expr


def _code_of(root: ast.expr) -> Iterator[ast.expr]:
    """The expressions of an expression; none of the texts that people read."""
    if isinstance(root, ast.JoinedStr):
        return
    yield root
    for child in ast.iter_child_nodes(root):
        inner = child.value if isinstance(child, ast.keyword) else child
        if isinstance(inner, ast.comprehension):
            for part in (inner.iter, *inner.ifs):
                yield from _code_of(part)
        elif isinstance(inner, ast.expr):
            yield from _code_of(inner)


def _of_expression(node: ast.expr) -> Iterator[tuple[str, Callable[[], object]]]:
    match node:
        case ast.Compare():
            yield from _of_comparison(node)
        case ast.BoolOp():
            yield (
                "and, or",
                partial(
                    setattr, node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
                ),
            )
        case ast.UnaryOp(op=ast.Not()):
            yield "not dropped", partial(_drop_not, node)
        case ast.BinOp() if not _is_text(node.left) and not _is_text(node.right):
            if type(node.op) in _OPERATORS:
                yield "operator", partial(setattr, node, "op", _OPERATORS[type(node.op)]())
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield "number", partial(setattr, node, "value", value + 1)
        case ast.Call() if ast.unparse(node.func) not in _COMMUTATIVE:
            for at, (first, second) in enumerate(pairwise(node.args)):
                starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
                if not starred and ast.dump(first) != ast.dump(second):
                    yield "arguments swapped", partial(_swap, node.args, at)


def _of_comparison(node: ast.Compare) -> Iterator[tuple[str, Callable[[], object]]]:
    for at, operator in enumerate(node.ops):
        for kind, table in (("boundary", _BOUNDARIES), ("comparison", _OPPOSITES)):
            if other := table.get(type(operator)):
                yield kind, partial(node.ops.__setitem__, at, other())


def _drop_not(node: ast.UnaryOp) -> None:
    """Make `not x` into `not not x`, which is a bool, too."""
    node.operand = ast.UnaryOp(ast.Not(), node.operand)


def _swap(arguments: list[ast.expr], at: int) -> None:
    arguments[at], arguments[at + 1] = arguments[at + 1], arguments[at]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )
