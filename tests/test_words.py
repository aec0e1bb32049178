"""Arguments that are one of a few words: any other value is an error, before anything is written."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
import ucformat.torch
from tests.exporters.sources import universal
from tests.fakes import random_array
from ucformat.catalog.catalog import Catalog
from ucformat.errors import UsageError
from ucformat.jobs.combine.combining import plan_average
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_word_that_is_none_of_those(tmp_path: Path) -> None:
    ck = universal(tmp_path / "a", {("w", "weight"): random_array((3, 4), "float32")})
    tensor, place = ck["w"], str(tmp_path / "a")
    new = str(tmp_path / "new")
    calls: list[Callable[[], Any]] = [
        lambda: tensor.read(verify="nevr"),  # type: ignore[arg-type]
        lambda: tensor.read(verify=None),  # type: ignore[arg-type]
        lambda: tensor.read(verify=0),  # type: ignore[arg-type]
        lambda: tensor.plan(verify="full"),  # type: ignore[arg-type]
        lambda: ucformat.convert(place, new, verify="never"),  # type: ignore[arg-type]
        lambda: ucformat.export(place, new, "safetensors", verify="never"),
        lambda: ucformat.average([place], new, verify="never"),  # type: ignore[arg-type]
        lambda: ucformat.materialize(place, new, verify="never"),  # type: ignore[arg-type]
        lambda: ucformat.estimate("convert", place, new, verify="no"),  # type: ignore[arg-type]
        lambda: ucformat.estimate("convert", place, new, weights="st"),  # type: ignore[arg-type]
        lambda: ucformat.convert(place, new, weights=True),  # type: ignore[arg-type]
        lambda: ucformat.convert(place, new, on="thread"),
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert not (tmp_path / "new").exists()
    assert tensor.read(verify=False).tobytes() == tensor.read(verify=True).tobytes()
    assert (
        tensor.plan(verify=False).bytes_unverified
        == tensor.plan(verify="never").bytes_unverified
        == tensor.nbytes
    )


def test_a_word_for_pytorch(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    ucformat.torch.save({"model": model}, tmp_path / "a")
    before = model.weight.detach().clone()
    calls: list[Callable[[], Any]] = [
        lambda: ucformat.torch.load({"model": model}, tmp_path / "a", verify="full"),  # type: ignore[arg-type]
        lambda: ucformat.torch.load({"model": model}, tmp_path / "a", strict="yes"),  # type: ignore[arg-type]
        lambda: ucformat.torch.load_into(model, tmp_path / "a", verify="full"),  # type: ignore[arg-type]
        lambda: ucformat.torch.load_into(model, tmp_path / "a", dtype="bf16"),
        lambda: ucformat.torch.Reader(tmp_path / "a", verify="full"),  # type: ignore[arg-type]
        lambda: ucformat.torch.Manager(tmp_path / "m", form="zar"),  # type: ignore[arg-type]
        lambda: ucformat.torch.Manager(tmp_path / "m", replicas="last"),  # type: ignore[arg-type]
        lambda: ucformat.torch.save({"model": model}, b"x"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(UsageError):
            call()
    assert torch.equal(model.weight, before)


def test_a_keyword_that_does_not_exist(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    calls: dict[str, Callable[..., Any]] = {
        "save": partial(ucformat.torch.save, {"model": model}, tmp_path / "a"),
        "load": partial(ucformat.torch.load, {"model": model}, tmp_path / "a", "report"),
        "load_into": partial(ucformat.torch.load_into, model, tmp_path / "a"),
        "Manager.__init__": partial(ucformat.torch.Manager, tmp_path / "m"),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name}\(\) .* keyword argument 'odd'"):
            call(odd=True)
    with pytest.raises(TypeError, match="'step'"):
        ucformat.torch.Manager(tmp_path / "m", step=1)  # type: ignore[call-arg]
    assert not list(tmp_path.iterdir())


def test_a_keyword_that_no_job_has(tmp_path: Path) -> None:
    place, new = str(tmp_path / "a"), str(tmp_path / "new")
    calls: dict[str, Callable[..., Any]] = {
        "average": partial(ucformat.average, [place], new),
        "merge": partial(ucformat.merge, "slerp", [place], new),
        "materialize": partial(ucformat.materialize, place, new),
        "register": partial(ucformat.register, place, Catalog(str(tmp_path / "catalog.db"))),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword.* 'chunks'$"):
            call(chunks=1)
    with pytest.raises(TypeError, match=r"^plan_average\(\) got an unexpected.* 'wieghts'$"):
        plan_average([place], {"wieghts": [1]})
    with pytest.raises(UsageError, match="not exported with the option 'chunks'"):
        ucformat.export(place, new, "safetensors", chunks=1)


@pytest.mark.parametrize("place", [b"x", None, 3, ["a"]])
def test_what_is_no_place(place: Any, tmp_path: Path) -> None:
    source = universal(tmp_path / "a", {("w", "weight"): random_array((3,), "float32")})
    for call in (
        ucformat.open,
        lambda p: ucformat.convert(source, p),
        lambda p: ucformat.copy(source, p),
    ):
        with pytest.raises(UsageError, match="a place is a path or url, not"):
            call(place)
    with pytest.raises(UsageError):
        ucformat.verify(place)
    store = MemoryStore(f"a place {place!r}")
    assert ucformat.convert(source, store).url == store.url
