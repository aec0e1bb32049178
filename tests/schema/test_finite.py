"""Documents are JSON: what is not a finite number is spelled out, and read back."""

from __future__ import annotations

import json
import math

import pytest

import ucformat
from tests.fakes import FakeSource
from ucformat.errors import IntegrityError
from ucformat.format.digest import bytes_digest, with_own_digest
from ucformat.format.structure import manifest_bytes, parse_manifest
from ucformat.schema.manifest import GroupDoc, Manifest
from ucformat.schema.tensors import TensorTable
from ucformat.storage.memory import MemoryStore

NAN, INF = math.nan, math.inf


def strict(data: bytes) -> object:
    """As a reader that knows no bare NaN has it."""
    return json.loads(data, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def manifest() -> Manifest:
    return Manifest(
        id="0" * 32,
        attempt="a" * 20,
        created="2026-01-01T00:00:00Z",  # type: ignore[arg-type]
        metrics={"loss": NAN, "best": -INF, "step": 2.0},
        config={"clip": [INF, 1.0]},
        layout={"x": {"y": INF}},
        groups=(GroupDoc(params=("a",), options={"lr": -INF, "betas": (0.5, NAN)}),),
        tensors=TensorTable.of(()),
    )


def test_a_manifest_is_json_and_read_back() -> None:
    data = manifest_bytes(manifest())
    plain = strict(data)
    assert isinstance(plain, dict)
    assert plain["metrics"] == {"loss": {"$float": "nan"}, "best": {"$float": "-inf"}, "step": 2.0}
    assert plain["groups"][0]["options"] == {
        "lr": {"$float": "-inf"},
        "betas": [0.5, {"$float": "nan"}],
    }
    found = parse_manifest(data, "here")
    assert math.isnan(found.metrics["loss"])
    assert (found.metrics["best"], found.metrics["step"]) == (-INF, 2.0)
    assert (found.config, found.layout) == (
        {"clip": [{"$float": "inf"}, 1.0]},
        {"x": {"y": {"$float": "inf"}}},
    )
    assert manifest_bytes(found) == data


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_bare_word_is_refused(word: bytes) -> None:
    for whole in (b'{"$float": "-inf"}', b'"NaN or Infinity"'):
        data = (
            manifest()
            .model_copy(update={"groups": (), "run": "NaN or Infinity"})
            .model_dump_json(exclude={"digest"})
            .encode()
        )
        data = data.replace(b'{"$float":"-inf"}', b'{"$float": "-inf"}')
        assert parse_manifest(with_own_digest(data), "here").run == "NaN or Infinity"
        with pytest.raises(IntegrityError, match="not a ucformat manifest"):
            parse_manifest(with_own_digest(data.replace(whole, word)), "here")


def test_objects_are_json() -> None:
    store = MemoryStore("finite-source")
    source = FakeSource.write(store, {}, objects={"best": NAN})
    made = ucformat.convert(ucformat.checkpoint.Checkpoint(source), MemoryStore("finite"))
    doc = made.manifest.objects
    assert doc is not None
    assert strict(made.store.read(doc.path)) == made.objects == {"best": {"$float": "nan"}}


def test_objects_with_a_bare_word_are_refused() -> None:
    store = MemoryStore("bare")
    made = ucformat.convert(
        ucformat.checkpoint.Checkpoint(
            FakeSource.write(MemoryStore("bare-source"), {}, objects={"best": NAN})
        ),
        store,
    )
    data = b'{"best": NaN}'
    doc = made.manifest.objects
    assert doc is not None
    changed = doc.model_copy(update={"nbytes": len(data), "digest": bytes_digest(data)})
    for key, content in (
        (doc.path, data),
        ("manifest.json", manifest_bytes(made.manifest.model_copy(update={"objects": changed}))),
    ):
        with store.create(key) as out:
            out.write(content)
    with pytest.raises(IntegrityError, match="not JSON"):
        _ = ucformat.open(store).objects
