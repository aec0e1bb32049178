"""What inputs must have in common, where weights come from, what is recorded, and that it may run anywhere."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import ucformat
from tests.fakes import same
from tests.jobs.combine.reference import saved, source
from tests.jobs.forks import Forks
from tests.zero_files import FLAT, write_zero3
from ucformat.errors import (
    ChecksumError,
    Conflict,
    LayoutError,
    NotFinished,
    NotFound,
    UcformatError,
    UsageError,
)
from ucformat.jobs.combine.job import Combination, CombineJob
from ucformat.jobs.combine.methods import Average, Ties
from ucformat.jobs.shards import WriteOptions
from ucformat.jobs.tasks import run_batch
from ucformat.settings import using
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint

SIZES: dict[str, Any] = {"chunk_bytes": 512, "shard_bytes": 4096}


def tensors(seed: int = 0, rows: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((rows, 33)).astype(np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "n": np.arange(5),
    }


def digests(ck: Checkpoint) -> dict[str, str | None]:
    return {t.name: t.digest for t in ck.manifest.tensors}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[ucformat.Catalog]:
    with using(catalog=str(tmp_path / "catalog.db")), ucformat.Catalog() as found:
        yield found


def foreign(folder: Path, seed: int) -> Path:
    """A ZeRO-3 folder, whose checksums cover parts of several tensors."""
    rng = np.random.default_rng(seed)
    arrays = {
        (n, s): rng.random(shape, np.float32)
        for n, shape in (("a", (90, 40)), ("c", (70,)))
        for s in FLAT
    }
    return write_zero3(folder, arrays, 3) / "global_step5"


METHODS: dict[str, dict[str, Any]] = {
    "average": {},
    "ties": {"density": 0.3},
    "dare": {"density": 0.5, "seed": 1},
    "slerp": {},
}


def combine(method: str, sources: list[Any], target: Any, **options: Any) -> Checkpoint:
    if method == "average":
        return ucformat.average(sources, target, **options)
    if method == "slerp":
        return ucformat.merge(method, sources[:2], target, **options)
    return ucformat.merge(method, sources[1:], target, base=sources[0], **options)


@pytest.mark.parametrize("method", METHODS)
def test_parts_of_foreign_sources_make_the_same(method: str, tmp_path: Path) -> None:
    """In any order, and some of them twice; with the records of one input's checksums kept apart from the other's."""
    sources = [foreign(tmp_path / f"src{n}", n) for n in range(3)]
    options = METHODS[method] | SIZES
    whole = combine(method, sources, tmp_path / "whole", **options, workers=1)
    order = [0, 1, 2, 1]
    random.Random(method).shuffle(order)
    for index in order:
        with pytest.raises(NotFinished):
            combine(method, sources, tmp_path / "parts", **options, on=f"part:{index}/3")
    made = combine(method, sources, tmp_path / "parts", **options, on="commit")
    assert digests(made) == digests(whole)
    for ck in (made, whole):
        assert ck.manifest.verified is not None
        assert (ck.manifest.verified.default, ck.manifest.verified.but) == (True, ())
    other = combine(method, sources, tmp_path / "other", **METHODS[method], chunk_bytes=2048)
    assert all(same(other[n][...], whole[n][...]) for n in whole.names())
    ucformat.verify(made).raise_if_damaged()


@pytest.mark.parametrize("method", ["average", "ties"])
def test_another_process_makes_the_same_job(method: str, tmp_path: Path) -> None:
    opened = [ucformat.open(saved(tmp_path / f"m{n}", tensors(n))) for n in range(3)]
    formula: Any = (
        Average(weights=(1, 2, 3))
        if method == "average"
        else Ties(weights=(1, 1), scale=1, density=0.3)
    )
    job = CombineJob(
        Combination(opened, formula, None, ("b",), "float64"),
        MemoryStore("none"),
        "0" * 20,
        WriteOptions(**SIZES),
    )
    spec = {**job.spec(), "store": str(tmp_path / "dst")}
    record = json.loads(run_batch(json.dumps(spec), list(range(job.count))))
    whole = {one for task in range(job.count) for one in [job.run(task)[0].digests]}
    assert {task["digests"] for task in record["tasks"]} == whole
    (tmp_path / "m1" / "manifest.json").touch()
    with pytest.raises(Conflict, match="other files"):
        run_batch(json.dumps({**spec, "run": "again"}), [0])


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    sources = [foreign(tmp_path / f"src{n}", n) for n in range(2)]
    file = next(sources[1].glob("*optim_states.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match=f"src1.*{file.name}"):
        ucformat.average(sources, tmp_path / "dst", **SIZES, states=FLAT)
    with pytest.raises(NotFound):
        ucformat.open(tmp_path / "dst")
    ucformat.average(sources, tmp_path / "dst", **SIZES, states=FLAT, verify=False)


WORK = """
import ucformat
ucformat.merge, ucformat.average
import ucformat.jobs.combine.combining, ucformat.jobs.combine.combining
def work(method, a, b, c, dst):
    if method == "average":
        made = ucformat.average([a, b, c], dst, chunk_bytes=2048, shard_bytes=1 << 15)
    else:
        made = ucformat.merge("ties", [b, c], dst, base=a, chunk_bytes=2048, shard_bytes=1 << 15)
    return made.manifest.id
"""


@pytest.mark.front("average")
@pytest.mark.parametrize("method", ["average", "ties"])
def test_kill_9_at_any_instant(method: str, tmp_path: Path) -> None:
    sources = [saved(tmp_path / f"m{n}", tensors(n, 900)) for n in range(3)]
    chance, nothing = random.Random(method), 0
    with Forks(WORK) as forks:
        forks.run(method, *sources, tmp_path / "whole")
        seconds, whole = forks.seconds, digests(ucformat.open(tmp_path / "whole"))
        for round_ in range(8):
            target = tmp_path / f"dst{round_}"
            forks.run(method, *sources, target, kill_after=chance.uniform(0, seconds))
            try:
                ck = ucformat.open(target)
            except NotFound:
                nothing += 1
                forks.run(method, *sources, target)
                ck = ucformat.open(target)
            assert digests(ck) == whole
            ucformat.verify(ck).raise_if_damaged()
    assert nothing


# --- what is recorded


def test_the_lineage_has_the_weights(catalog: ucformat.Catalog, tmp_path: Path) -> None:
    places = [
        saved(tmp_path / "run7" / str(step), tensors(step), step=step) for step in (1000, 2000)
    ]
    ck = ucformat.average(places, tmp_path / "run7" / "mean", weights=[1, 3])
    assert [e.how for e in ck.manifest.lineage] == [
        {"method": "average", "weight": w} for w in (0.25, 0.75)
    ]
    assert {e.id for e in ck.manifest.lineage} == {ucformat.open(p).id for p in places}
    edges = catalog.lineage(ck.id, depth=1).edges
    assert [e.label for e in edges] == ["average (weight 0.25)", "average (weight 0.75)"]
    assert not any(e.depends for e in edges)
    assert (ck.manifest.step, ck.manifest.metrics) == (None, {})
    assert catalog.get("run7@latest").step == 2000
    merged = ucformat.merge(
        "dare", places[1:], tmp_path / "dare", base=places[0], density=0.5, seed=3
    )
    shared = {"method": "dare", "density": 0.5, "scale": 1.0, "seed": 3}
    assert [e.how for e in merged.manifest.lineage] == [
        {**shared, "role": "base"},
        {**shared, "weight": 1.0},
    ]
    assert {e.kind for e in merged.manifest.lineage} == {"merge"}


def test_what_is_no_tensor_is_that_of_the_first(tmp_path: Path) -> None:
    facts = [
        {"objects": {"step": n}, "step": n, "engine": {"name": "fake", "version": str(n)}}
        for n in range(2)
    ]
    ck = ucformat.average(
        [source(tensors(n), **facts[n]) for n in range(2)], tmp_path / "dst", metrics={"x": 1.5}
    )
    assert ck.objects["step"] == 0
    assert (ck.manifest.step, ck.manifest.metrics, ck.manifest.run) == (None, {"x": 1.5}, None)


# --- where weights come from


def test_weights_by_a_metric(catalog: ucformat.Catalog, tmp_path: Path) -> None:
    places = [saved(tmp_path / f"m{n}", tensors(n)) for n in range(3)]
    losses = [2.0, 1.5, 1.0]
    for place, loss in zip(places, losses, strict=True):
        catalog.metric(str(place), {"val_loss": loss})
    ck = ucformat.average(
        places, tmp_path / "dst", by="metric.val_loss", best="min", temperature=0.5
    )
    powers = np.exp(-np.array(losses) / 0.5)
    np.testing.assert_allclose(
        [e.how["weight"] for e in ck.manifest.lineage], powers / powers.sum(), rtol=1e-12
    )
    assert [e.how["val_loss"] for e in ck.manifest.lineage] == losses
    expected = np.average([tensors(n)["w"].astype(float) for n in range(3)], axis=0, weights=powers)
    np.testing.assert_array_max_ulp(ck["w"][...], expected.astype(np.float32), 1)
    opened = [ucformat.open(place) for place in places]
    more = ucformat.average(opened, tmp_path / "max", by="metric.val_loss", best="max")
    weights = [e.how["weight"] for e in more.manifest.lineage]
    assert weights == sorted(weights, reverse=True)

    with pytest.raises(UsageError, match=r"less or more of metric\.val_loss is better"):
        ucformat.average(places, tmp_path / "x", by="metric.val_loss")
    with pytest.raises(UsageError, match="has no metric accuracy"):
        ucformat.average(places, tmp_path / "x", by="metric.accuracy", best="max")
    for value in (float("nan"), float("inf")):
        catalog.metric(str(places[1]), {"val_loss": value})
        with pytest.raises(UsageError, match=r"m1.* has (the value|no) .*val_loss"):
            ucformat.average(places, tmp_path / "x", by="metric.val_loss", best="min")
    with using(catalog=None), pytest.raises(UcformatError):
        ucformat.average(
            [source(tensors(n)) for n in range(2)], tmp_path / "x", by="metric.val_loss", best="min"
        )


def test_a_range_of_steps(catalog: ucformat.Catalog, tmp_path: Path) -> None:
    values = {step: tensors(step) for step in (3000, 1000, 2000, 500)}
    for step, found in values.items():
        saved(tmp_path / "run7" / str(step), found, step=step)
    ck = ucformat.average("run7@1000..2999", tmp_path / "ema", ema=0.9)
    expected = 0.9 * values[1000]["w"].astype(float) + 0.1 * values[2000]["w"].astype(float)
    np.testing.assert_array_max_ulp(ck["w"][...], expected.astype(np.float32), 1)
    assert [e.how["step"] for e in ck.manifest.lineage] == [1000, 2000]
    assert [e.id for e in catalog.between("run7", 1000, 3000)] == [
        ucformat.open(f"run7@{s}").id for s in (1000, 2000, 3000)
    ]
    with pytest.raises(NotFound, match="no checkpoint of the steps 1 to 2"):
        ucformat.average("run7@1..2", tmp_path / "x")
    with pytest.raises(NotFound, match="no run 'run8'"):
        ucformat.average("run8@1..2", tmp_path / "x")
    with pytest.raises(UsageError, match="ends before"):
        ucformat.average("run7@2..1", tmp_path / "x")
    saved(tmp_path / "again" / "2000", tensors(9), step=2000, engine={"name": "fake"})
    ucformat.convert(source(tensors(8), step=2000), tmp_path / "run7" / "other")
    with pytest.raises(UsageError, match="run7@2000' matches several"):
        ucformat.average("run7@1000..2000", tmp_path / "x", ema=0.9)
    both = [tmp_path / "run7" / "2000", tmp_path / "again" / "2000"]
    with pytest.raises(UsageError, match="both of step 2000"):
        ucformat.average(both, tmp_path / "x", ema=0.9)
    with pytest.raises(UsageError, match="has no step"):
        ucformat.average([tmp_path / "ema", both[0]], tmp_path / "x", ema=0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "1 weights for 2"),
        ({"weights": [1, -1]}, "add up to 0"),
        ({"weights": [1, float("nan")]}, "not finite"),
        ({"ema": 1.0}, "from 0 to below 1"),
        ({"weights": [1, 1], "ema": 0.5}, "exclude each other"),
        ({"best": "min"}, "are those of a metric"),
        ({"by": "val_loss", "best": "min"}, "not a metric"),
        ({"by": "metric.", "best": "min"}, "no metric is named"),
        ({"by": "metric.a", "best": "min", "temperature": 0}, "above 0"),
        ({"weights": [2, -1], "states": ["weight", "exp_avg_sq"]}, "must not become negative"),
        ({"states": "exp_avg"}, "no tensors in the state exp_avg"),
        ({"cast": "int8"}, "no dtype of floating-point"),
        ({"take": "/(/"}, "not a regular expression"),
    ],
)
def test_options_of_an_average(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, LayoutError), match=message):
        ucformat.average([source(tensors(n)) for n in range(2)], MemoryStore("never"), **options)


def test_of_checkpoints_without_tensors_there_is_no_average() -> None:
    with pytest.raises(UsageError, match="has no tensors to combine"):
        ucformat.average([source({}), source({})], MemoryStore("never"))


@pytest.mark.parametrize(
    ("method", "count", "options", "message"),
    [
        ("slerp", 3, {}, "exactly two"),
        ("slerp", 2, {"t": 1.5}, "from 0 to 1"),
        ("slerp", 2, {"base": "b"}, "takes no base"),
        ("ties", 2, {}, "needs a base"),
        ("dare", 1, {"base": "b", "density": 0.5}, "needs a seed"),
        ("dare", 1, {"base": "b", "seed": 1}, "needs a density"),
        ("ties", 1, {"base": "b", "density": 0.0}, "density"),
        ("ties", 1, {"base": "b", "weights": [-1]}, "above 0"),
        ("ties", 1, {"base": "b", "states": ["exp_avg"]}, "only weights"),
        ("task-arithmetic", 1, {"base": "b", "scale": float("inf")}, "finite"),
        ("task-arithmetic", 1, {"base": "b", "seed": 3}, "takes no seed"),
        ("mean", 2, {}, "no method"),
    ],
)
def test_options_of_a_merge(method: str, count: int, options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        k: source(tensors(9)) if k == "base" else v for k, v in options.items()
    }
    with pytest.raises(UsageError, match=message):
        ucformat.merge(
            method, [source(tensors(n)) for n in range(count)], MemoryStore("never"), **given
        )


def test_one_input_is_no_average(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two checkpoints or more"):
        ucformat.average([source(tensors())], MemoryStore("never"))
    place = saved(tmp_path / "a", tensors())
    with pytest.raises(UsageError, match="given twice"):
        ucformat.average([place, ucformat.open(place)], MemoryStore("never"))


# --- what inputs must have in common


def test_what_differs_is_listed_and_may_be_taken(tmp_path: Path) -> None:
    one, two = tensors(1), tensors(2)
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "missing": ({k: v for k, v in two.items() if k != "b"}, r"lacks tensors of .*: b\n"),
        "more": (two | {"b2": two["b"]}, r"lacks tensors of .*: b2\n"),
        "shape": (two | {"b": np.zeros(8, np.float16)}, r"differ in shape: b \(7,\) and \(8,\)"),
        "dtype": (two | {"b": np.zeros(7, np.int16)}, "differ in dtype: b float16 and int16"),
        "counter": (two | {"n": np.arange(1, 6)}, r"n \(weight\) has the dtype int64, and differs"),
        "nan": (
            two | {"b": np.array([np.nan] * 7, np.float16)},
            r"b \(weight\) has values that are not finite",
        ),
    }
    for name, (other, message) in cases.items():
        with pytest.raises(UsageError, match=message) as raised:
            ucformat.average([source(one), source(other)], tmp_path / name)
        assert "take" in str(raised.value)
        ck = ucformat.average([source(one), source(other)], tmp_path / name, take=["b*", "n"])
        assert all(same(ck[n][...], one[n]) for n in ("b", "n"))
        assert same(ck["w"][...], ((one["w"].astype(float) + two["w"]) / 2).astype(np.float32))
        assert set(ck.names()) == set(one)


@pytest.mark.parametrize("method", ["task-arithmetic", "ties", "dare", "slerp"])
@pytest.mark.parametrize("bad", [0, 1])
def test_values_that_are_not_finite(method: str, bad: int, tmp_path: Path) -> None:
    found = [tensors(n) for n in range(2)]
    found[bad]["w"][3, 4] = np.inf if bad else np.nan
    options = {"ties": {"density": 0.2}, "dare": {"density": 1.0, "seed": 0}}.get(method, {})
    with pytest.raises(UsageError, match="not finite"):
        combine(method, list(map(source, found)), tmp_path / "dst", **options)


def test_a_result_that_does_not_fit(tmp_path: Path) -> None:
    found = [{"w": np.full(3, v, np.float16)} for v in (6e4, -6e4)]
    with pytest.raises(UsageError, match=r"the combined value .* does not fit float16"):
        ucformat.average(list(map(source, found)), tmp_path / "dst", weights=[3, -1])
    ck = ucformat.average(
        list(map(source, found)), tmp_path / "dst", weights=[3, -1], cast="float32"
    )
    assert float(ck["w"][0]) == pytest.approx(120000, rel=1e-3)


def test_names_and_states_that_no_tensor_has(tmp_path: Path) -> None:
    inputs = [source(tensors(1)), source(tensors(2))]
    with pytest.raises(UsageError, match="no tensor has a name like 'bb'"):
        ucformat.average(inputs, tmp_path / "x", take=["b", "bb"])
    with pytest.raises(UsageError, match="has no tensors in the state exp_avgs"):
        ucformat.average(inputs, tmp_path / "x", states=["weight", "exp_avgs"])


def test_float8_with_scales_is_not_combined(tmp_path: Path) -> None:
    """The mean of two products is not the product of two means."""
    one, two = ({"m.weight": np.full(3, v, ml_dtypes.float8_e4m3fn)} for v in (1, 2))
    assert (
        float(ucformat.average([source(one), source(two)], tmp_path / "plain")["m.weight"][0])
        == 1.5
    )
    for name in ("m.weight_scale_inv", "m.scale"):
        scaled = [source(found | {name: np.ones(1, np.float32)}) for found in (one, two)]
        with pytest.raises(
            UsageError, match=r"m\.weight \(weight\) has the dtype float8_e4m3fn, and differs"
        ):
            ucformat.average(scaled, tmp_path / "x")


def test_tied_tensors_must_agree(tmp_path: Path) -> None:
    one, two = {"e": np.ones(3)}, {"e": np.zeros(3)}
    tied = [source(found, aliases={"head": "e"}) for found in (one, two)]
    ck = ucformat.average(tied, tmp_path / "dst")
    assert same(ck["head"][...], np.full(3, 0.5))
    with pytest.raises(UsageError, match=r"tied in .*: head"):
        ucformat.average([tied[0], source(two)], tmp_path / "x")


@pytest.mark.parametrize("names", [("e", "head"), ("e", "head", "third")])
def test_tied_tensors_may_be_stored_under_any_of_their_names(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    values = [np.full((6, 4), value, np.float32) for value in (1, 2)]
    stored = (names[0], names[-1])
    inputs = [
        source({name: array}, aliases={n: name for n in names if n != name})
        for name, array in zip(stored, values, strict=True)
    ]
    for order in (inputs, inputs[::-1]):
        ck = ucformat.average(order, tmp_path / order[0].names()[0])
        assert dict(ck.aliases) == dict(order[0].aliases)
        assert (
            ck["e"][...].tobytes()
            == ck["head"][...].tobytes()
            == ((values[0] + values[1]) / 2).tobytes()
        )
    with pytest.raises(UsageError, match=r"tied in .*: .*other"):
        ucformat.average(
            [source({"e": values[0]}, aliases={"other": "e"}), inputs[0]], tmp_path / "x"
        )


def test_inputs_of_other_kinds_and_views(tmp_path: Path) -> None:
    """Masters of a DeepSpeed run, weights of another writer, and names of a view."""
    folder = foreign(tmp_path / "src", 1)
    zero = ucformat.open(folder)
    other = {n: np.full(zero[n].shape, 2.0, np.float32) for n in zero.names()}
    renamed = source({f"x.{n}": a for n, a in other.items()}).view(
        [{"rename": "/x\\.(.*)/", "to": "\\1"}]
    )
    ck = ucformat.average([zero, source(other), renamed], tmp_path / "dst", cast="bfloat16")
    for n in zero.names():
        expected = np.average([zero[n][...].astype(float), other[n], other[n]], axis=0)
        assert same(ck[n][...], expected.astype(ck[n].dtype))
