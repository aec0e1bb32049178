"""Deleted checkpoints are thinned to what others need: these stay bit for bit, whenever it is stopped."""

from __future__ import annotations

import random
import shutil
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import ucformat
from tests.fakes import random_array
from tests.jobs.forks import Forks
from tests.jobs.test_bases import is_read, model, put, root, source
from ucformat.catalog.catalog import Catalog
from ucformat.catalog.retention import load_policy
from ucformat.catalog.stamp import make_stamp
from ucformat.errors import Conflict, NotFound, PermissionDenied, TensorNotFound
from ucformat.format.commit import begin
from ucformat.geometry.tensor import Key
from ucformat.jobs import remnants
from ucformat.jobs.dependents import dependents_at, need_base
from ucformat.jobs.gc import collect
from ucformat.jobs.register import reindex
from ucformat.jobs.thin import keep_tensors
from ucformat.storage.url import open_store
from ucformat.torch.manager.steps import list_steps

if TYPE_CHECKING:
    from pathlib import Path

    from tests.jobs.test_bases import Arrays
    from ucformat.checkpoint import Checkpoint

__all__ = ["root"]

NOW = timedelta(0)
MOMENTS = {
    ("frozen", s): random_array((40, 30), "float64", n)
    for n, s in enumerate(("exp_avg", "exp_avg_sq"))
}


def family(root: str) -> dict[str, tuple[Checkpoint, Arrays]]:
    """A whole checkpoint, and four that need parts of it: referenced, patched, both, and a patch of a patch."""
    arrays = {
        "step-00000001": model() | MOMENTS,
        "step-00000002": model("lora", "count", seed=1),
        "step-00000003": model("lora", "count", seed=2),
        "step-00000004": model("lora", "count", seed=3),
    }
    arrays["step-00000003"]["lora", "weight"] = model()["lora", "weight"].copy()
    arrays["step-00000003"]["lora", "weight"][0, 0] += 1
    arrays["step-00000004"]["lora", "weight"] = arrays["step-00000003"]["lora", "weight"].copy()
    arrays["step-00000004"]["lora", "weight"][1, 1] += 1
    one, two, three, four = arrays
    out = {one: put(f"{root}/{one}", arrays[one])}
    out[two] = put(f"{root}/{two}", arrays[two], out[one])
    out[three] = ucformat.patch(out[one], source(arrays[three]), f"{root}/{three}")
    out[four] = ucformat.patch(out[three], source(arrays[four]), f"{root}/{four}")
    return {name: (out[name], arrays[name]) for name in arrays}


def recorded(catalog: Catalog, root: str) -> dict[str, tuple[Checkpoint, Arrays]]:
    made = family(root)
    for ck, _ in made.values():
        catalog.record(ck.manifest, ck.url)
    return made


def thinned(catalog: Catalog, *refs: str) -> tuple[str, ...]:
    catalog.delete(*refs, grace=NOW, thin_needed=True)
    done = collect(catalog, thin=True, apply=True)
    assert done.failures == ()
    return done.thinned


@pytest.mark.front("local")
def test_only_what_others_need_is_left(root: str, catalog: Catalog) -> None:
    made = recorded(catalog, root)
    (a, whole), (b, _), (c, _), (d, _) = made.values()
    with pytest.raises(PermissionDenied, match=f"needed by {b.id}"):
        catalog.delete(a.id)
    with pytest.raises(Conflict, match=f"needed by {b.id}"):
        ucformat.thin(a.url, "exp_avg*")
    catalog.delete(a.id, grace=NOW, thin_needed=True)
    # without the option, nothing is touched; and nothing before it is applied
    assert collect(catalog, apply=True).purged == ()
    [shown] = collect(catalog, thin=True).thin
    assert (shown.row.id, shown.left < shown.stored) == (a.id, True)
    assert is_read(a, whole)
    catalog.restore(a.id)
    assert thinned(catalog, a.id) == (a.id,)

    left = ucformat.open(a.url)
    assert (left.id, left.manifest.is_remnant) == (a.id, True)
    assert set(left.tensors) == set(whole) - set(MOMENTS)
    assert all(left[key].read().tobytes() == whole[key].tobytes() for key in left.tensors)
    assert "others need the rest" in str(left.dropped["exp_avg"])
    with pytest.raises(TensorNotFound, match="dropped by thin"):
        left["frozen", "exp_avg"]
    for ck, arrays in (*made.values(),)[1:]:
        assert is_read(ck, arrays)
        assert ucformat.verify(ck.url)
    assert ucformat.verify(a.url)

    # it is none of the run
    assert [s.id for s in list_steps(root).steps] == [d.id, c.id, b.id]
    entry = catalog.get(a.id)
    assert (entry.state, entry.nbytes) == ("thinned", left.manifest.tensors.nbytes)
    with pytest.raises(PermissionDenied, match="that is thinned cannot be restored"):
        catalog.restore(a.id)
    with pytest.raises(NotFound, match="opened by its path"):
        open_from(catalog, a.id)
    assert reindex(root, catalog).failures == ()
    assert collect(catalog, thin=True).thin == ()

    # less and less
    for ck in (d, c):
        ucformat.compact(ck.url)  # with bases as they are now
    assert collect(catalog, thin=True, apply=True).thinned == (a.id,)
    assert set(ucformat.open(a.url).tensors) == {("frozen", "weight"), ("none", "weight")}
    for ck, arrays in (*made.values(),)[1:]:
        assert is_read(ck, arrays)


def open_from(catalog: Catalog, ref: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCP_CATALOG", str(catalog.url))
        ucformat.open(ref[:12])


def test_it_goes_when_nothing_needs_it(catalog: Catalog, tmp_path: Path) -> None:
    (a, _), (b, _), (c, _), (d, arrays) = recorded(catalog, str(tmp_path)).values()
    assert thinned(catalog, a.id) == (a.id,)
    ucformat.compact(d.url)
    catalog.delete(b.id, c.id, grace=NOW)
    assert set(collect(catalog, apply=True).purged) == {b.id, c.id}
    assert collect(catalog, apply=True).purged == (a.id,)
    assert catalog.get(a.id).state == "purged"
    assert not (tmp_path / "step-00000001").exists()
    assert is_read(d, arrays)


def test_another_catalog_removes_it_later(catalog: Catalog, other: Catalog, tmp_path: Path) -> None:
    (a, _), *others = recorded(catalog, str(tmp_path)).values()
    assert thinned(catalog, a.id) == (a.id,)
    assert reindex(tmp_path, other).failures == ()
    assert [other.get(ck.id).state for ck, _ in others] == ["committed"] * 3
    entry = other.get(a.id)
    assert entry.state == "thinned"
    assert entry.purge_after is not None
    assert entry.purge_after > make_stamp().now
    assert [w.row.id for w in collect(other, thin=True, apply=True).plan.wait] == [a.id]


def test_one_that_is_based_on_others_is_thinned_too(catalog: Catalog, tmp_path: Path) -> None:
    (a, _), *_, (d, arrays) = recorded(catalog, str(tmp_path)).values()
    big = model("frozen", "lora", seed=5)
    e = put(tmp_path / "5", big, a)
    f_arrays = {**model("frozen", seed=5), ("lora", "weight"): big["lora", "weight"]}
    f = put(tmp_path / "6", f_arrays, e)
    for ck in (e, f):
        catalog.record(ck.manifest, ck.url)
    catalog.delete(e.id, grace=NOW, thin_needed=True)
    before = sum(i.size for i in open_store(e.url).list("data"))
    assert collect(catalog, thin=True, apply=True).thinned == (e.id,)
    left = ucformat.open(e.url)
    assert set(left.tensors) == {("frozen", "weight"), ("lora", "weight")}
    assert not left.manifest.bases
    assert e.id not in dependents_at(open_store(a.url), a.id)
    assert sum(i.size for i in open_store(e.url).list("data")) < before
    assert is_read(f, f_arrays)
    assert is_read(d, arrays)


def test_what_is_not_known_stays_whole(catalog: Catalog, tmp_path: Path) -> None:
    (a, whole), (b, _), *_ = recorded(catalog, str(tmp_path)).values()
    catalog.delete(a.id, grace=NOW, thin_needed=True)

    def why() -> str:
        found = collect(catalog, thin=True, apply=True)
        assert (found.thin, found.thinned, is_read(a, whole)) == ((), (), True)
        return found.whole[a.id]

    # one that begins: its record is there, and it is not
    need_base((a.url, frozenset({a.manifest.attempt})), a.id, "f" * 32, str(tmp_path / "new"))
    assert "or not yet" in why()
    (tmp_path / "step-00000001/needed-by" / f"{'f' * 32}.json").write_text("{")
    assert f"needed by {'f' * 32}" in why()
    (tmp_path / "step-00000001/needed-by" / f"{'f' * 32}.json").unlink()
    # one that is written anew
    begin(open_store(b.url), {"a": 1}, overwrite=True, keeps=b.id, needs=("../step-00000001",))
    assert "may need more" in why()
    shutil.rmtree(tmp_path / "step-00000002" / "attempts")
    shutil.move(tmp_path / "step-00000002", tmp_path / "elsewhere")
    assert "or not yet" in why()
    shutil.move(tmp_path / "elsewhere", tmp_path / "step-00000002")
    ucformat.convert(a, tmp_path / "virtual", virtual=True)
    assert "all of" in why()


def test_a_virtual_one_stays_as_it_is(catalog: Catalog, tmp_path: Path) -> None:
    there = put(tmp_path / "there", model() | MOMENTS)
    a = ucformat.convert(there, tmp_path / "run" / "a", virtual=True)
    arrays = model("lora", seed=1)
    b = put(tmp_path / "run" / "b", arrays, a)
    for ck in (a, b):
        catalog.record(ck.manifest, ck.url)
    catalog.delete(a.id, grace=NOW, thin_needed=True)
    found = collect(catalog, thin=True, apply=True)
    assert (found.thin, found.failures) == ((), ())
    assert f"{a.url} is virtual" in found.whole[a.id]
    assert is_read(a, model() | MOMENTS)
    assert is_read(b, arrays)


def test_one_of_two_gives_up(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a, whole), *_ = recorded(catalog, str(tmp_path)).values()
    catalog.delete(a.id, grace=NOW, thin_needed=True)
    new = tmp_path / "new"
    more_needed = model() | MOMENTS  # of which nobody needed the moments when it was planned

    def begun_before(*args: object, **more: object) -> object:
        put(new, more_needed, a)
        return keep_tensors(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(remnants, "keep_tensors", begun_before)
    done = collect(catalog, thin=True, apply=True)
    assert "others need more of" in done.failures[0]
    assert catalog.get(a.id).state == "deleted"
    assert is_read(a, whole)
    assert is_read(str(new), more_needed)
    (tmp_path / "step-00000001/needed-by" / f"{ucformat.open(new).id}.json").unlink()
    shutil.rmtree(new)

    def begun_after(source: Checkpoint, *args: object, **more: object) -> object:
        check = more["check_needed"]

        def check_and_begin() -> None:
            check()  # type: ignore[operator]
            with pytest.raises(Conflict, match="is being replaced"):
                put(new, more_needed, a)

        return keep_tensors(source, *args, **{**more, "check_needed": check_and_begin})  # type: ignore[arg-type]

    monkeypatch.setattr(remnants, "keep_tensors", begun_after)
    assert collect(catalog, thin=True, apply=True).thinned == (a.id,)


def test_a_policy_deletes_what_only_others_keep(catalog: Catalog, tmp_path: Path) -> None:
    (a, _), (b, _), (c, _), (d, _) = recorded(catalog, str(tmp_path)).values()
    catalog.tag(b.id, "keep")
    policy = load_policy({"version": 1, "keep": {"last": 1}, "grace": "0s"})
    assert catalog.retain(policy).delete == ()
    plan = catalog.retain(policy, thin_needed=True)
    assert {row.id for row in plan.delete} == {a.id, c.id}
    catalog.retain(policy, apply=plan.id, thin_needed=True)
    assert a.id in collect(catalog, thin=True, apply=True).thinned
    assert {catalog.get(i).state for i in (b.id, d.id)} == {"committed"}


THIN = """
import sys
from ucformat.catalog.catalog import Catalog
from ucformat.jobs.gc import collect
import ucformat.jobs.remnants

def work(url):
    with Catalog(url) as catalog:
        done = collect(catalog, thin=True, apply=True)
        return ",".join((*done.thinned, *done.failures)) or "-"
"""


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_killed_at_any_instant_others_are_whole(tmp_path: Path) -> None:
    with Catalog(str(tmp_path / "kept.db")) as catalog:
        made = recorded(catalog, str(tmp_path / "run"))
        (a, _), *others = made.values()
        catalog.delete(a.id, grace=NOW, thin_needed=True)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    seen = set()
    with Forks(THIN) as forks:
        for n in range(24):
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(tmp_path / "kept", tmp_path / "run")
            for old in tmp_path.glob("now.db*"):
                old.unlink()
            shutil.copy(tmp_path / "kept.db", tmp_path / "now.db")
            url = str(tmp_path / "now.db")
            if n == 0:
                forks.run(url)
                whole = forks.seconds
            else:
                forks.run(url, kill_after=random.uniform(0, whole))
            assert all(is_read(ck, arrays) for ck, arrays in others)
            with Catalog(url) as catalog:
                seen.add(catalog.get(a.id).state)
                done = collect(catalog, thin=True, apply=True)
                assert not done.failures
                assert catalog.get(a.id).state == "thinned"
            assert ucformat.open(a.url).manifest.is_remnant
            assert Key("frozen", "exp_avg") not in ucformat.open(a.url).tensors
            assert all(is_read(ck, arrays) for ck, arrays in others)
    assert len(seen) > 1
