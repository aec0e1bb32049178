"""What of a state and a checkpoint fits, and all that does not, at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.packed import write_packed
from ucformat.errors import StateMismatch, UsageError
from ucformat.geometry.tensor import Key
from ucformat.reading.dtypes import numpy_dtype
from ucformat.storage.memory import MemoryStore
from ucformat.torch import save
from ucformat.torch.loading.match import (
    Problems,
    asked_tensors,
    labels_of,
    match,
    raise_for,
    stored_names,
)
from ucformat.torch.state.local import local_of

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.checkpoint import Checkpoint
    from ucformat.torch.state.local import LocalShard

NO_TIES: dict[str, Any] = {"aliases": {}, "groups": ()}
count = iter(range(10**6))


def stored(
    *what: tuple[str, str, str], shape: tuple[int, ...] = (2, 3), **facts: Any
) -> Checkpoint:
    """A checkpoint with tensors of these names, states and dtypes."""
    arrays = {(n, s): np.zeros(shape, numpy_dtype(d)) for n, s, d in what}
    return write_packed(
        MemoryStore(f"match-{next(count)}"), arrays, ranks=1, **{**NO_TIES, **facts}
    )


def wanted(
    name: str, state: str = "weight", dtype: torch.dtype = torch.float32, *shape: int
) -> LocalShard:
    return local_of(name, state, torch.zeros(shape or (2, 3), dtype=dtype))


def matched(
    targets: list[LocalShard],
    ck: Checkpoint,
    aliases: dict[str, str] | None = None,
    *,
    cast: bool = False,
    rename: Any = None,
) -> tuple[dict[Key, tuple[Key, str]], Problems]:
    names = stored_names(ck, rename)
    found, problems, meant = match(targets, aliases or {}, ck, names, cast=cast)
    lacking = asked_tensors(ck, meant, targets).unexpected(len(ck.tensors))
    problems = replace(problems, unexpected=tuple(labels_of(compress(ck.tensors, lacking), names)))
    return {m.target.key: (m.stored.key, m.stored.dtype) for m in found}, problems


def test_all_problems_are_found_at_once() -> None:
    ck = stored(
        *(("same", s, "float32") for s in ("weight", "exp_avg")),
        ("shape", "weight", "float32"), ("dtype", "weight", "bfloat16"), ("more", "weight", "float32"),
    )  # fmt: skip
    targets = [
        wanted("same"), wanted("same", "exp_avg"), wanted("same", "exp_avg_sq"),
        wanted("shape", "weight", torch.float32, 3, 2), wanted("dtype"), wanted("absent"),
    ]  # fmt: skip
    found, problems = matched(targets, ck)
    assert found == {Key("same", s): (Key("same", s), "float32") for s in ("weight", "exp_avg")}
    assert problems == Problems(
        missing=("same (exp_avg_sq)", "absent (weight)"),
        unexpected=("more (weight)",),
        shapes=("shape (weight) is [3, 2], in the checkpoint [2, 3]",),
        dtypes=("dtype (weight) is float32, in the checkpoint bfloat16 (weight)",),
    )
    with pytest.raises(StateMismatch, match="nothing was changed") as caught:
        raise_for(problems, "report", "/there")
    for line in (
        "missing: same (exp_avg_sq)",
        "missing: absent (weight)",
        "different shape: shape",
        "different dtype: dtype",
    ):
        assert line in caught.value.message
    assert "unexpected" not in caught.value.message
    for word in ("strict=False", "cast=True", "rename="):
        assert word in (caught.value.hint or "")


@pytest.mark.parametrize("strict", ["report", True, False])
def test_what_is_only_in_the_checkpoint_is_an_error_where_that_is_asked_for(strict: Any) -> None:
    problems = Problems(unexpected=("more (weight)",))
    if strict is True:
        with pytest.raises(StateMismatch, match=r"unexpected: more \(weight\)"):
            raise_for(problems, strict, "/there")
    else:
        raise_for(problems, strict, "/there")


def test_nothing_is_an_error_where_what_fits_is_loaded() -> None:
    raise_for(Problems(("a",), ("b",), ("c",), ("d",), ("e",)), False, "/there")
    raise_for(Problems(), True, "/there")


def test_a_long_list_is_cut() -> None:
    with pytest.raises(StateMismatch, match="and 60 more") as caught:
        raise_for(Problems(missing=tuple(f"w{n}" for n in range(100))), "report", "/there")
    assert "w39" in caught.value.message
    assert "w40" not in caught.value.message


def test_problems_of_several_are_told_once() -> None:
    both = Problems(missing=("a",), others=("x",)) | Problems(missing=("a", "b"), dtypes=("d",))
    assert both == Problems(missing=("a", "b"), dtypes=("d",), others=("x",))
    assert both.lines(unexpected=True) == ["missing: a", "missing: b", "different dtype: d", "x"]


BOTH = [("w", "weight", "bfloat16"), ("w", "master", "float32")]


@pytest.mark.parametrize(
    ("stores", "state", "dtype", "expected"),
    [
        (BOTH, "weight", torch.float32, ("master", "float32")),
        (BOTH, "weight", torch.bfloat16, ("weight", "bfloat16")),
        (BOTH, "master", torch.float32, ("master", "float32")),
        (BOTH, "weight", torch.float16, None),
        (BOTH[:1], "weight", torch.float32, None),
        (BOTH[:1], "weight", torch.bfloat16, ("weight", "bfloat16")),
        (BOTH[:1], "master", torch.float32, None),
        (BOTH[1:], "weight", torch.float32, ("master", "float32")),
        (BOTH[1:], "weight", torch.bfloat16, None),
        ([("w", "weight", "float32")], "master", torch.float32, ("weight", "float32")),
        (
            [("w", "weight", "float32"), ("w", "master", "float32")],
            "weight",
            torch.float32,
            ("master", "float32"),
        ),
    ],
)
def test_float32_takes_the_master_and_other_dtypes_the_weight(
    stores: list[tuple[str, str, str]],
    state: str,
    dtype: torch.dtype,
    expected: tuple[str, str] | None,
) -> None:
    found, problems = matched([wanted("w", state, dtype)], stored(*stores))
    if expected is None:
        assert not found
        assert len(problems.dtypes) == 1
    else:
        assert found == {Key("w", state): (Key("w", expected[0]), expected[1])}
        assert problems == Problems()


@pytest.mark.parametrize(
    ("stores", "state", "dtype", "expected"),
    [
        (BOTH, "weight", torch.float16, ("weight", "bfloat16")),
        (BOTH[1:], "weight", torch.bfloat16, ("master", "float32")),
        (BOTH[:1], "weight", torch.float32, ("weight", "bfloat16")),
        (BOTH[:1], "master", torch.float32, ("weight", "bfloat16")),
        (BOTH, "master", torch.float64, ("master", "float32")),
    ],
)
def test_casts_are_made_where_they_are_asked_for(
    stores: list[tuple[str, str, str]], state: str, dtype: torch.dtype, expected: tuple[str, str]
) -> None:
    found, problems = matched([wanted("w", state, dtype)], stored(*stores), cast=True)
    assert found == {Key("w", state): (Key("w", expected[0]), expected[1])}
    assert problems == Problems()


def test_a_cast_does_not_make_shapes_fit() -> None:
    found, problems = matched([wanted("w", "weight", torch.float16, 6)], stored(*BOTH), cast=True)
    assert not found
    assert len(problems.shapes) == 1
    assert not problems.dtypes


def test_unexpected_is_what_of_the_kinds_that_are_wanted_is_left() -> None:
    """Weights alone may be loaded of a checkpoint with an optimizer, and that is no surprise."""
    ck = stored(*((n, s, "float32") for n in ("a", "b") for s in ("weight", "master", "exp_avg")))
    assert matched([wanted("a")], ck)[1].unexpected == ("b (weight)", "b (master)")
    assert matched([wanted("a", "exp_avg")], ck)[1].unexpected == ("b (exp_avg)",)
    both = matched([wanted("a"), wanted("a", "exp_avg")], ck)[1].unexpected
    assert both == ("b (weight)", "b (master)", "b (exp_avg)")
    assert matched([], ck)[1] == Problems()


def test_renamed_by_a_function() -> None:
    ck = stored(
        ("model.a", "weight", "float32"),
        ("model.a", "exp_avg", "float32"),
        ("model.b", "weight", "float32"),
    )
    found, problems = matched(
        [wanted("a"), wanted("a", "exp_avg")], ck, rename=lambda n: n.removeprefix("model.")
    )
    assert found == {Key("a", s): (Key("model.a", s), "float32") for s in ("weight", "exp_avg")}
    assert problems.unexpected == ("b (weight)",)  # as the state would call it


def test_renamed_by_regular_expressions_of_whole_names() -> None:
    names = stored_names(
        stored(
            *(
                (n, "weight", "float32")
                for n in ("layers.0.up", "layers.10.up", "x.layers.0.up", "head")
            )
        ),
        {
            r"layers\.(\d+)\.(.*)": r"h.\1.mlp.\2",
            r"layers.*": "never: the first that matches",
            "hea": "no",
        },
    )
    assert names == {
        "h.0.mlp.up": "layers.0.up",
        "h.10.mlp.up": "layers.10.up",
        "x.layers.0.up": "x.layers.0.up",
        "head": "head",
    }


def test_a_rename_that_makes_two_names_one_is_an_error() -> None:
    ck = stored(("a", "weight", "float32"), ("b", "weight", "float32"))
    for rename in ({".": "x"}, lambda _: "x"):
        with pytest.raises(UsageError, match=r"`rename` maps both 'a' and 'b' to 'x'"):
            stored_names(ck, rename)


def test_a_name_that_is_given_to_another_tensor_is_taken_from_the_one_that_has_it() -> None:
    ck = stored(*((n, "weight", "float32") for n in ("a", "b", "c")))
    assert stored_names(ck, {"a": "b"}) == {"b": "a", "c": "c"}
    found, problems = matched([wanted("b"), wanted("c")], ck, rename={"a": "b"})
    assert found == {
        Key(n, "weight"): (Key(s, "weight"), "float32") for n, s in (("b", "a"), ("c", "c"))
    }
    assert problems.unexpected == ("b (weight)",)


def test_tied_names_may_become_one_and_are_renamed_too() -> None:
    ck = stored(("embed", "weight", "float32"), aliases={"head": "embed"})
    assert stored_names(ck, None) == {"embed": "embed", "head": "embed"}
    assert stored_names(ck, lambda _: "x") == {"x": "embed"}
    assert stored_names(ck, {"head": "lm_head"}) == {"embed": "embed", "lm_head": "embed"}
    found, problems = matched([wanted("head")], ck)
    assert found == {Key("head", "weight"): (Key("embed", "weight"), "float32")}
    assert problems == Problems()


def saved(folder: Path, state: dict[str, Any]) -> Checkpoint:
    import ucformat

    save(state, folder, form="zarr")
    return ucformat.open(folder)


def test_tied_here_and_stored_apart(tmp_path: Path) -> None:
    """It is an error only where what is stored differs: by its digests, or without them where it is held."""
    equal = saved(tmp_path / "equal", {"embed": torch.ones(2, 3), "head": torch.ones(2, 3)})
    differ = saved(tmp_path / "differ", {"embed": torch.ones(2, 3), "head": torch.zeros(2, 3)})
    tied = {"head": "embed"}
    assert matched([wanted("embed")], equal, tied)[1] == Problems()
    found, problems = matched([wanted("embed")], differ, tied)
    assert Key("embed", "weight") in found
    assert problems.others == (
        "tied here: head is embed, but the checkpoint has two tensors, which differ",
    )  # fmt: skip
    assert problems.unexpected == ()
    for values, lines in (((1, 1), 0), ((1, 2), 1)):  # packed: without digests
        arrays = {
            (n, "weight"): np.full((2, 3), v, np.float32)
            for n, v in zip(("embed", "head"), values, strict=True)
        }
        packed = write_packed(MemoryStore(f"tied-{lines}"), arrays)
        assert len(matched([wanted("embed")], packed, tied)[1].others) == lines


def test_tied_here_and_stored_once_under_either_name() -> None:
    for name in ("embed", "head"):
        ck = stored((name, "weight", "float32"), (name, "exp_avg", "float32"))
        found, problems = matched(
            [wanted("embed"), wanted("embed", "exp_avg")], ck, {"head": "embed"}
        )
        assert found == {Key("embed", s): (Key(name, s), "float32") for s in ("weight", "exp_avg")}
        assert problems == Problems()


def test_apart_here_and_stored_once() -> None:
    ck = stored(("embed", "weight", "float32"), aliases={"head": "embed"})
    found, problems = matched([wanted("embed"), wanted("head")], ck)
    assert {t.name: s.name for t, (s, _) in found.items()} == {"embed": "embed", "head": "embed"}
    assert problems == Problems()
