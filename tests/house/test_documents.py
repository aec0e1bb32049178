"""The examples of the README and the guides run as they are printed."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ucformat
from tests.fakes import FakeSource, random_array
from ucformat.checkpoint import Checkpoint
from ucformat.jobs.where import JobArguments
from ucformat.storage.memory import MemoryStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint under the names that the examples use."""
    shapes = {"mlp.up_proj": (16, 12), "mlp.down_proj": (12, 16)}
    arrays = {
        (f"model.layers.0.{n}.weight", state): random_array(shape, "float32", i)
        for i, (n, shape) in enumerate(shapes.items())
        for state in ("weight", "exp_avg")
    }
    arrays["model.norm.weight", "weight"] = random_array((8,), "bfloat16")
    ucformat.convert(
        Checkpoint(FakeSource.write(MemoryStore("documents"), arrays)), tmp_path / "global_step100"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def shell(lines: str) -> None:
    for line in lines.splitlines():
        words = line.removeprefix("$ ").split()
        assert words[0] == "ucp"
        command = [sys.executable, "-m", "ucformat.cli", *words[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_readme(folder: Path) -> None:
    reading, training = blocks("README.md", "python")
    exec(compile(reading, "README.md", "exec"), {})  # noqa: S102
    (lines,) = blocks("README.md", "console")
    shell(lines)

    torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    model = torch.nn.Linear(3, 2)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(compile(training, "README.md", "exec"), names)  # noqa: S102
    assert (names["report"].step, names["handle"].committed) == (1000, True)


def test_every_public_name_of_the_training_loop_is_documented() -> None:
    pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    import ucformat.torch

    text = (ROOT / "docs" / "api.md").read_text()
    assert [n for n in ucformat.torch.__all__ if f"ucformat.torch.{n}" not in text] == []
    assert ucformat.torch.__all__ == sorted(ucformat.torch.__all__)
    assert all(getattr(ucformat.torch, name).__doc__ for name in ucformat.torch.__all__)


def test_every_public_name_of_jax_is_documented() -> None:
    """Without importing JAX, which `.venv` does not have."""
    code = (ROOT / "ucformat/jax/__init__.py").read_text()
    (listed,) = re.findall(r"^__all__ = \[(.*?)\]", code, re.MULTILINE | re.DOTALL)
    names = re.findall(r'"(\w+)"', listed)
    text = (ROOT / "docs" / "api.md").read_text()
    assert [n for n in names if f"ucformat.jax.{n}" not in text] == []
    assert names == sorted(names)


def modules() -> list[str]:
    """Where users find the public names of the registered integrations."""
    if find_spec("torch") is None:
        return []
    from ucformat.torch.integration import INTEGRATIONS

    return sorted({found.module for _, found in INTEGRATIONS.items() if found.module})


@pytest.mark.parametrize("module", modules())
def test_every_name_of_an_integration_is_documented(module: str) -> None:
    """Without importing its framework, which takes long."""
    code = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
    (names,) = re.findall(r"^__all__ = \[(.*?)\]", code, re.MULTILINE | re.DOTALL)
    text = (ROOT / "docs" / "api.md").read_text()
    assert f"\n| `{module}` |" in text
    assert [n for n in re.findall(r'"(\w+)"', names) if f"`{n}" not in text] == []


def test_every_module_of_integrations_is_registered() -> None:
    pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    files = (ROOT / "ucformat/torch/integrations").glob("[a-z]*.py")
    assert {f"ucformat.torch.integrations.{file.stem}" for file in files} <= set(modules())


def test_the_guide_for_evaluators(folder: Path) -> None:
    pytest.importorskip("zarr", reason="pip install 'ucformat[zarr]'")
    ucformat.convert("global_step100", "universal")
    names: dict[str, object] = {}
    for code in blocks("docs/guides/evaluate.md", "python"):
        exec(compile(code, "evaluate.md", "exec"), names)  # noqa: S102
    assert names["half"].shape == (8, 12)  # type: ignore[attr-defined]


def test_every_rule_of_security_names_the_tests_that_prove_it() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rules, missing = text.split("## Rules")[1].split("## Not yet held")
    listed = re.findall(r"^\| ([\d, ]+) \|", missing, re.MULTILINE)
    open_rules = {int(n) for numbers in listed for n in numbers.split(",")}
    rules_seen, file = [], ""
    for number, row in re.findall(r"^\| (\d+)[a-z]? \|(.*)$", rules, re.MULTILINE):
        rules_seen.append(int(number))
        tests = re.findall(r"`([\w/]*(?:\.py)?)::(test_\w+)`", row)
        assert tests or int(number) in open_rules, (
            f"rule {number} has no test, and is said to be held"
        )
        for where, name in tests:
            file = where or file
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
    assert sorted(set(rules_seen)) == list(range(1, 20))


def arguments(call: str) -> list[tuple[str, bool]]:
    """Each parameter of a call as documented, and whether it must be given by name."""
    (function,) = ast.parse(
        f"def f({re.sub(r'=(?=[,)]|$)', '=...', call).replace('…', '...')}): ..."
    ).body
    assert isinstance(function, ast.FunctionDef)
    a = function.args
    return [(x.arg, False) for x in (*a.posonlyargs, *a.args)] + [
        (x.arg, True) for x in a.kwonlyargs
    ]


def test_every_public_function_is_documented_with_its_parameters() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    calls = re.findall(r"`ucformat\.([A-Za-z_]+)\(([^`]*?)\)(?: ->[^`]*)?`", text)
    documented = dict(reversed(calls))  # the first call of each; examples come after
    functions = [n for n in ucformat.__all__ if inspect.isfunction(getattr(ucformat, n))]
    assert set(functions) - documented.keys() == {"register_zarr_dtypes"} - documented.keys()
    for name in {*functions, "Catalog"} & documented.keys():
        function = getattr(ucformat, name)
        expected = []
        for p in inspect.signature(function).parameters.values():
            if p.kind is not p.VAR_KEYWORD:
                expected.append((p.name, p.kind is p.KEYWORD_ONLY))
            elif shared := re.fullmatch(r"Unpack\[(\w+)\]", str(p.annotation)):
                keys = function.__globals__[shared[1]].__annotations__
                expected += [(key, True) for key in keys]
            elif name == "export":  # whose other keywords are options of the format
                expected += [(key, True) for key in JobArguments.__annotations__]
        assert sorted(arguments(documented[name])) == sorted(expected), name


def test_every_form_of_a_value_is_documented() -> None:
    code = (ROOT / "ucformat" / "reading" / "values.py").read_text()
    forms = set(re.findall(r'"(\$[a-z]+)"', code.split('"""', 2)[2]))
    listed = (
        (ROOT / "docs" / "sources" / "README.md")
        .read_text()
        .split("## Values as JSON")[1]
        .split("\n## ")[0]
    )
    assert forms
    assert forms <= set(re.findall(r'"(\$[a-z]+)"', listed))
