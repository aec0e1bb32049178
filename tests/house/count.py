"""Counts the house: modules, types that hold a box, names used twice, and import circles.

`python -m tests.house.count` counts the last commit of this branch, `python -m tests.house.count
COMMIT` that one beside it. Files are read from git, so that any commit can be counted; what is not
committed is not.

The rules:

- A *module* is a `.py` file of `ucformat`. Its lines are all lines of the file; *lines of code* are
  those that are neither blank nor part of a docstring. The *core* is all but `ucformat/engines`.
- *Characters per line of code* are those of its text, indentation included. *Long lines* have more
  than 100 characters, docstrings included; their share is of all lines that are not blank.
- A *function of many parameters* has eight or more, `self` and `cls` not counted; those of nested
  functions, of lambdas and of methods count, and so do `*args` and `**kwargs`.
- A *box-type* is a dataclass, NamedTuple, TypedDict or pydantic model that says where a part of a
  tensor is. That is one with a field whose annotation names `Box`, `Extent`, `Tiles` or `Copy`, or
  with a field for where it begins (`start`, `offset`, `begin`) beside one for how far it reaches
  (`shape`, `size`, `stop`, `end`, `count`, `numel`, `nbytes`, `sizes`, `strides`). Annotations of
  callables do not count.
- A *duplicate class name* is that of classes at the top of several modules. A *duplicate module
  name* is the last part of the name of several modules; packages are left out.
- An *import circle* is a set of modules each of which imports every other, perhaps through others.
  Imports under `if TYPE_CHECKING` and within functions count too; a package is imported only by who
  imports a name that it defines.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["House", "at", "circles", "here", "imported", "main"]

ROOT = Path(__file__).parents[2]
PACKAGE = "ucformat"
ENGINES = f"{PACKAGE}.engines"
SMALL, LARGE = 40, 800
LONG, MANY = 100, 8

_PLACES = {"Box", "Extent", "Tiles", "Copy"}
_BEGINS = {"start", "offset", "begin"}
_REACHES = {"shape", "size", "stop", "end", "count", "numel", "nbytes", "sizes", "strides"}
_BASES = {"NamedTuple", "TypedDict", "BaseModel", "_Document", "Written"}


@dataclass(frozen=True)
class House:
    """The package at one commit: the text of each module, by its dotted name."""

    texts: Mapping[str, str]

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Each module, parsed."""
        return {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def lines(self) -> dict[str, int]:
        """Lines of each module."""
        return {name: len(text.splitlines()) for name, text in self.texts.items()}

    @cached_property
    def core(self) -> dict[str, int]:
        """Lines of each module of the core."""
        return {name: n for name, n in self.lines.items() if not name.startswith(ENGINES)}

    @cached_property
    def code(self) -> dict[str, list[str]]:
        """The lines of each module that are neither blank nor part of a docstring."""
        return {
            name: [
                line
                for number, line in enumerate(text.splitlines(), 1)
                if line.strip() and number not in documentation
            ]
            for name, text in self.texts.items()
            for documentation in [
                {n for node in ast.walk(self.trees[name]) for n in _documentation(node)}
            ]
        }

    @cached_property
    def long(self) -> list[str]:
        """The lines with more than 100 characters."""
        return [n for t in self.texts.values() for n in t.splitlines() if len(n) > LONG]

    @cached_property
    def written(self) -> int:
        """The number of lines that are not blank."""
        return sum(bool(line.strip()) for t in self.texts.values() for line in t.splitlines())

    @cached_property
    def many_parameters(self) -> dict[str, int]:
        """Functions of eight parameters and more, as `module.function`, and how many."""
        found = {
            f"{name.removeprefix(PACKAGE + '.')}.{node.name}": _parameters(node)
            for name, tree in self.trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        return _several({name: count for name, count in found.items() if count >= MANY})

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """Modules that define a class of this name at their top."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
        return found

    @cached_property
    def box_types(self) -> list[str]:
        """The box-types, as `module.Class`."""
        nodes = (
            (name, n)
            for name, tree in self.trees.items()
            for n in tree.body
            if isinstance(n, ast.ClassDef)
        )
        return sorted(
            f"{name.removeprefix(PACKAGE + '.')}.{node.name}"
            for name, node in nodes
            if _holds_box(node)
        )

    @cached_property
    def twice(self) -> dict[str, int]:
        """Class names that several modules use, and how many."""
        return _several({name: len(modules) for name, modules in self.classes.items()})

    @cached_property
    def modules_twice(self) -> dict[str, int]:
        """Last parts of names that several modules have, and how many."""
        found: dict[str, int] = defaultdict(int)
        for name in self.texts:
            if f"{name}.__init__" not in self.packages:
                found[name.rpartition(".")[2]] += 1
        return _several(found)

    @cached_property
    def packages(self) -> set[str]:
        """The packages, as `name.__init__`."""
        return {
            f"{name}.__init__"
            for name in self.texts
            if any(other.startswith(f"{name}.") for other in self.texts)
        }

    @cached_property
    def circles(self) -> list[list[str]]:
        """Import circles, the largest first."""
        return circles(
            {name: imported(name, tree, self.texts.keys()) for name, tree in self.trees.items()}
        )


def at(commit: str) -> House:
    """The package at a commit.

    Args:
        commit: whatever git takes for one.
    """
    listed = _git("ls-tree", "-r", "--name-only", "-z", commit, f"{PACKAGE}/").split("\0")
    files = [f for f in listed if f.endswith(".py")]
    return House({_name(f): text for f, text in zip(files, _texts(commit, files), strict=True)})


def here() -> House:
    """The package as its files are now, committed or not."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return House({_name(str(f.relative_to(ROOT))): f.read_text() for f in files})


def imported(module: str, tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a module imports anywhere, itself left out."""
    known, found = set(known), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{a.name}" for a in node.names} & known
            found |= parts
            if len(parts) < len(node.names):
                found.add(node.module)
    return found & known - {module}


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The sets of nodes that reach each other, of two and more; the largest first, then by name."""
    reached = {node: _reach(graph, node) for node in graph}
    sets = {
        tuple(sorted(n for n in reached[node] if node in reached[n]))
        for node in graph
        if node in reached[node]
    }
    return [list(one) for one in sorted(sets, key=lambda one: (-len(one), one))]


def _reach(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += graph[node]
    return seen


def _documentation(node: ast.AST) -> range:
    """The numbers of the lines of the docstring of a node that has one."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        match node.body[:1]:
            case [ast.Expr(ast.Constant(str()) as text)]:
                return range(text.lineno, (text.end_lineno or text.lineno) + 1)
    return range(0)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of parameters of a function, but for `self` and `cls`."""
    given = node.args
    named = [a.arg for a in (*given.posonlyargs, *given.args)]
    own = named[:1] in (["self"], ["cls"])
    return len(named) - own + len(given.kwonlyargs) + bool(given.vararg) + bool(given.kwarg)


def _holds_box(node: ast.ClassDef) -> bool:
    decorated = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    if not decorated and not {ast.unparse(b).rpartition(".")[2] for b in node.bases} & _BASES:
        return False
    fields = {
        n.target.id: ast.unparse(n.annotation)
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    named = {
        word.id
        for annotation in fields.values()
        if "Callable" not in annotation
        for word in ast.walk(ast.parse(annotation.strip("'\""), mode="eval"))
        if isinstance(word, ast.Name)
    }
    return bool(named & _PLACES) or bool(fields.keys() & _BEGINS and fields.keys() & _REACHES)


def _several(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(
        sorted(((n, c) for n, c in counts.items() if c > 1), key=lambda item: (-item[1], item[0]))
    )


def _name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def _texts(commit: str, files: Sequence[str]) -> Iterator[str]:
    """The files of a commit, by one process: `git show` for each takes a second in all."""
    asked = "".join(f"{commit}:{file}\n" for file in files).encode()
    out = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=ROOT, input=asked, capture_output=True, check=True
    ).stdout
    at = 0
    for _ in files:
        head, _, _ = out[at : at + 200].partition(b"\n")
        begin, size = at + len(head) + 1, int(head.split()[2])
        yield out[begin : begin + size].decode()
        at = begin + size + 1


def _numbers(house: House) -> dict[str, str]:
    lines, code = house.lines.values(), [line for of in house.code.values() for line in of]
    core = house.core
    return {
        "product lines": f"{sum(lines):,}",
        "lines of code": f"{len(code):,}",
        "core without engines": f"{sum(core.values()):,}",
        "core without engines, code": f"{sum(len(house.code[name]) for name in core):,}",
        "modules": str(len(house.texts)),
        "modules of the core": str(len(core)),
        "median lines": f"{statistics.median(lines):g}",
        f"modules below {SMALL} lines": str(sum(n < SMALL for n in lines)),
        f"modules above {LARGE} lines": str(sum(n > LARGE for n in lines)),
        "characters per line of code": f"{sum(map(len, code)) / len(code):.1f}",
        f"lines above {LONG} characters": f"{len(house.long) / house.written:.1%}",
        "class names used twice": str(len(house.twice)),
        f"functions of {MANY}+ parameters": str(len(house.many_parameters)),
        "box-types": str(len(house.box_types)),
        "module names used twice": str(len(house.modules_twice)),
        "import circles": str(len(house.circles)),
        "modules in circles": str(sum(map(len, house.circles))),
    }


def _counted(counts: Mapping[str, int]) -> list[str]:
    return [f"{name} {count}" for name, count in counts.items()]


def _lists(house: House) -> dict[str, list[str]]:
    return {
        "box-types": house.box_types,
        "class names used twice": _counted(house.twice),
        f"functions of {MANY}+ parameters": _counted(house.many_parameters),
        "module names used twice": _counted(house.modules_twice),
        "import circles": [
            ", ".join(m.removeprefix(PACKAGE + ".") for m in one) for one in house.circles
        ],
    }


def _report(new: House, old: House | None, commit: str) -> Iterator[str]:
    numbers, before = _numbers(new), _numbers(old) if old else {}
    if before:
        yield f"{'':<30}{commit[:16]:>18}{'HEAD':>18}"
    for name, number in numbers.items():
        yield f"{name:<30}{before[name]:>18}{number:>18}" if before else f"{name:<30}{number:>12}"
    gone = _lists(old) if old else {}
    for title, found in _lists(new).items():
        yield f"\n{title}"
        if not gone:
            yield from (f"  {one}" for one in found)
            continue
        yield from (f"  - {one}" for one in gone[title] if one not in found)
        yield from (f"  + {one}" for one in found if one not in gone[title])


def main(arguments: Sequence[str]) -> int:
    """Print the counts, and what was counted; of two commits the numbers side by side, and what came and went."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.count", description="Count the house."
    )
    parser.add_argument(
        "commit", nargs="?", default="", help="a commit to compare the last one with"
    )
    commit = parser.parse_args(arguments).commit
    old = at(commit) if commit else None
    sys.stdout.write("\n".join(_report(at("HEAD"), old, commit)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
