"""Every public function and method documents its parameters.

Public is what a module lists in `__all__`, and the methods of such classes without a leading underscore. A method that
overrides one of a base class of the package, or implements one of a protocol, has the documentation of that method.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from tests.house.count import here

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
_ITEM = re.compile(r"^    \*{0,2}(\w+)(?:, \*{0,2}(\w+))*:", re.MULTILINE)


def undocumented(package: str = "") -> list[str]:
    """The public functions of a package with a parameter that `Args:` does not name, as `module.function: names`."""
    trees = here().trees
    methods = _methods(trees)
    return [
        f"{module}.{name}: {', '.join(missing)}"
        for module, tree in trees.items()
        if module.startswith(f"ucformat.{package}")
        for name, function in _public(tree, methods)
        if (missing := _missing(function))
    ]


def _methods(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Of each class of the package, the methods that its base classes and protocols define."""
    classes = [n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)]
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for node in classes:
        own[node.name] |= {f.name for f in node.body if isinstance(f, Function)}
        bases[node.name] |= {ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases}
    for protocol in [name for name, above in bases.items() if "Protocol" in above]:
        for name, defined in own.items():
            if name != protocol and 2 * len(defined & own[protocol]) > len(own[protocol]):  # some have defaults
                bases[name].add(protocol)
    for _ in classes:
        before = sum(map(len, own.values()))
        for name, above in bases.items():
            own[name] |= {m for b in above for m in own.get(b, ())}
        if sum(map(len, own.values())) == before:
            break
    return {name: {m for b in above for m in own.get(b, ())} for name, above in bases.items()}


def _public(tree: ast.Module, inherited: Mapping[str, set[str]]) -> Iterator[tuple[str, Function]]:
    names = next(
        (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and _named(n) == "__all__"), ()
    )
    for node in tree.body:
        if isinstance(node, Function) and node.name in names:
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and node.name in names:
            for function in node.body:
                if not isinstance(function, Function) or function.name.startswith("_"):
                    continue
                if function.name not in inherited.get(node.name, ()):
                    yield f"{node.name}.{function.name}", function


def _named(node: ast.Assign) -> str:
    return node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""


def _missing(function: Function) -> list[str]:
    """The parameters that the docstring does not describe; none of an overload, a property's setter or a test."""
    decorators = {ast.unparse(d).rpartition(".")[2].partition("(")[0] for d in function.decorator_list}
    if decorators & {"overload", "setter", "command"} or function.name.startswith("test_"):
        return []
    a = function.args
    given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    names = [p.arg for p in given if p.arg not in ("self", "cls") and not p.arg.startswith("_")]
    _, _, args = (ast.get_docstring(function) or "").partition("Args:\n")
    section = args.partition("\n\n")[0]
    described = {word for line in _ITEM.finditer(section) for word in re.findall(r"\w+", line[0])}
    return [name for name in names if name not in described]


def test_every_public_function_documents_its_parameters() -> None:
    assert undocumented() == []


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in undocumented(*sys.argv[1:2]))
