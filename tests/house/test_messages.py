"""No message of ours is a pickle, and nothing listens but where one module says so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ucformat

ROOT = Path(ucformat.__file__).parent
FILES = sorted(str(f.relative_to(ROOT)) for f in ROOT.rglob("*.py"))

#: Libraries that make objects of bytes by running what these say.
UNSAFE = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "jsonpickle",
}
#: What each file may use of them: a value of a program that has no JSON form is kept as a pickle,
#: which is opened for those alone who say that they trust it (`trust=True`); and what torch says of
#: a pickle that it refuses.
ALLOWED = {
    "torch/state/objects.py": {"pickle.dumps", "pickle.loads"},
    "engines/pytorch/dcp_writer.py": {"pickle.UnpicklingError"},
}
#: Collectives that pickle.
COLLECTIVES = {
    f"{verb}_object{ending}"
    for verb in ("all_gather", "broadcast", "gather", "scatter", "send", "recv")
    for ending in ("", "_list")
}
#: Of multiprocessing: a pipe that carries bytes, and descriptors of files.
PIPES = {"Connection", "wait", "recv_handle", "send_handle"}
#: What opens a port, and who may.
PORTS = {"create_server", "bind", "listen", "TCPStore", "start_server", "HTTPServer", "make_server"}
NETWORK = {
    "socket",
    "socketserver",
    "asyncio",
    "http.server",
    "wsgiref.simple_server",
    "torch.distributed",
}
LISTENS = {"torch/comm/group.py": {"create_server"}}


def names(tree: ast.AST) -> dict[str, str]:
    """What names stand for modules that are imported."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0]: a.name.split(".")[0] for a in node.names}
    return found


def problems(file: str, code: str) -> set[str]:
    """What a file uses that it must not."""
    tree = ast.parse(code)
    modules, found = names(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            top = node.module.split(".")[0]
            found |= {f"{top}.{a.name}" for a in node.names if top in UNSAFE}
            found |= {
                f"multiprocessing.{a.name}" for a in node.names if top == "multiprocessing"
            } - {f"multiprocessing.{p}" for p in PIPES}
            found |= {a.name for a in node.names if a.name in COLLECTIVES}
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if modules.get(owner) in UNSAFE:
                found.add(f"{modules[owner]}.{node.attr}")
            if modules.get(owner) == "multiprocessing" or node.attr in COLLECTIVES:
                found.add(f"{owner}.{node.attr}")
        if isinstance(node, ast.Call):
            found |= calls(node, modules)
    if not NETWORK & imported(tree):
        found -= PORTS
    return found - ALLOWED.get(file, set()) - LISTENS.get(file, set())


def imported(tree: ast.AST) -> set[str]:
    """The modules that a file imports."""
    nodes = list(ast.walk(tree))
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def calls(node: ast.Call, modules: dict[str, str]) -> set[str]:
    if not isinstance(node.func, ast.Attribute | ast.Name):
        return set()
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name == "load" and owner == "torch" and given.get("weights_only") != "True":
        return {"torch.load without weights_only=True"}
    if (
        name == "load"
        and modules.get(owner) == "numpy"
        and given.get("allow_pickle", "False") != "False"
    ):
        return {"numpy.load with pickles"}
    if name == "recv" and not node.args and not node.keywords:
        return {"recv() of a pipe, which unpickles"}
    if name in PORTS and not (name == "listen" and not owner):
        return {name}
    return set()


def test_nothing_that_is_received_is_unpickled() -> None:
    for file in FILES:
        assert problems(file, (ROOT / file).read_text()) == set(), file


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle as p\np.loads(x)", {"pickle.loads"}),
        ("from pickle import loads", {"pickle.loads"}),
        (
            "import torch.distributed as dist\ndist.all_gather_object(a, b)",
            {"dist.all_gather_object"},
        ),
        ("from torch.distributed import broadcast_object_list", {"broadcast_object_list"}),
        ("torch.load(f)", {"torch.load without weights_only=True"}),
        ("torch.load(f, weights_only=True)", set()),
        ("pipe.recv()", {"recv() of a pipe, which unpickles"}),
        ("pipe.recv(9)", set()),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", {"numpy.load with pickles"}),
        ("from multiprocessing import Queue", {"multiprocessing.Queue"}),
        ("import multiprocessing\nmultiprocessing.Pipe()", {"multiprocessing.Pipe"}),
        ("import torch.distributed as dist\ndist.TCPStore('', 0)", {"TCPStore"}),
        ("import socket\nsock.bind(('', 0))", {"bind"}),
    ],
)
def test_the_test_itself(code: str, found: set[str]) -> None:
    assert problems("x.py", code) == found


def test_the_exceptions_are_used() -> None:
    for allowed in (ALLOWED, LISTENS):
        for file, uses in allowed.items():
            text = (ROOT / file).read_text()
            assert all(use.rpartition(".")[2] in text for use in uses)


def test_no_name_of_every_interface() -> None:
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text())
        if NETWORK & imported(tree):
            words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            assert not words & {"0.0.0.0", "::"}, file  # noqa: S104
