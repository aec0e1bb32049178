"""Exports of models with experts (`deepspeed.moe`): DeepSpeed's own files, and what its engine loads."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ucformat
from tests.engines import Made, make_deepspeed
from tests.engines.deepspeed.test_export import ADAM, contents, fake, form, globals_in
from tests.exporters.loading import Engines
from tests.fakes import FakeSource
from tests.sources.suite import kept
from ucformat.checkpoint import Checkpoint
from ucformat.engines.deepspeed import export_model as experts
from ucformat.errors import UcformatError, UnsupportedError
from ucformat.exporters.pickle import ALLOWED
from ucformat.jobs.export import export, plan_export
from ucformat.sources.pickle.file import TorchFile
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEPT = ("ep2-dp4-z1", "ep2-dp4-z2", "ep2-z0", "ep2-dp4-z0-bf16", "ep1-dp2-z1")
EXPERT = "moe.{}.deepspeed_moe.experts.deepspeed_experts.{}.{}"


@pytest.mark.parametrize("name", KEPT)
def test_files_are_as_deepspeeds_own(tmp_path: Path, name: str) -> None:
    folder = kept("deepspeed", name).checkpoint
    before = ucformat.open(folder)
    done = export(before, tmp_path, "deepspeed")
    after = ucformat.open(tmp_path)
    assert done.left_out == ()
    assert contents(after) == contents(before)
    assert dict(after.objects) == dict(before.objects)
    for fact in ("groups", "layout", "step"):
        assert getattr(after.metadata, fact) == getattr(before.metadata, fact), fact
    assert set(after.metadata.files) == set(before.metadata.files)
    for key in after.metadata.files:
        if key.endswith(".pt"):
            ours, theirs = (form(TorchFile(LocalStore(f), key).value) for f in (tmp_path, folder))
            assert ours == theirs, key
    assert globals_in(tmp_path) <= ALLOWED


#: Of all: two layers of four experts, the last with one that all tokens pass, and two optimizer
#: groups, or one.
SOURCES: dict[str, dict[str, Any]] = {
    f"z{zero}-ep{ep}-{dtype}": {
        "zero": zero,
        "ep": ep,
        "dtype": dtype,
        "layers": 2,
        "groups": 2 - zero % 2,
    }
    for zero, ep, dtype in product((0, 1, 2), (1, 2), ("fp32", "bf16"))
}
SMALL = 700  # elements: a rank has 2 · 2 · (2 · 15 · 12 + 15) in two layers, so its experts are several groups
#: Source, stage, ranks, expert-parallel ranks, whether by way of a universal checkpoint of ours,
#: and what is special.
Load = tuple[str, int, int, int, bool, str]
CHOSEN: list[Load] = [
    ("z0-ep2-fp32", 0, 2, 2, False, ""),
    ("z0-ep2-bf16", 0, 2, 2, True, ""),
    ("z1-ep2-bf16", 1, 2, 2, False, ""),
    ("z2-ep2-fp32", 2, 2, 2, True, ""),
    ("z1-ep1-fp32", 1, 2, 1, False, ""),
    ("z0-ep1-bf16", 2, 2, 2, False, ""),
    ("z1-ep2-fp32", 2, 2, 1, False, ""),
    ("z2-ep1-bf16", 1, 2, 2, True, ""),
    ("z2-ep2-bf16", 0, 2, 1, False, ""),
    ("z1-ep1-bf16", 0, 2, 2, True, ""),
    ("z0-ep2-bf16", 1, 2, 1, True, ""),
    ("z1-ep2-fp32", 1, 1, 1, False, ""),
    ("z2-ep2-bf16", 2, 2, 1, False, "small"),
    ("z1-ep1-fp32", 1, 2, 2, True, "small"),
]
LAYOUTS = (
    (1, 1, ""),
    (2, 1, ""),
    (2, 2, ""),
    (3, 1, ""),
    (4, 1, ""),
    (4, 2, ""),
    (4, 2, "data-first"),
    (4, 4, ""),
)
ALL: list[Load] = [
    (name, stage, world, ep, (i + i // len(LAYOUTS)) % 2 == 0, special)
    for i, (name, stage, (world, ep, special)) in enumerate(product(SOURCES, (0, 1, 2), LAYOUTS))
]


def label(load: Load) -> str:
    name, stage, world, ep, via, special = load
    return f"{name}-to-{stage}-ep{ep}-on-{world}{'-via' if via else ''}{f'-{special}' if special else ''}"


def spec_of(load: Load) -> dict[str, Any]:
    """The engine that loads an export."""
    name, stage, _, ep, _, special = load
    spec = {**SOURCES[name], "zero": stage, "ep": ep}
    more: dict[str, dict[str, Any]] = {
        "small": {"max_group": SMALL},
        "data-first": {"data_first": True},
    }
    return spec | more.get(special, {})


def options_of(load: Load) -> dict[str, Any]:
    name, stage, world, ep, _, special = load
    options: dict[str, Any] = {"stage": stage, "world": world, "ep": ep}
    if special == "data-first":
        options["config"] = {
            "bf16": {"enabled": name.endswith("bf16")},
            "use_data_before_expert_parallelism": True,
        }
    return options


def source_of(load: Load) -> str:
    return load[0] + ("-small" if load[5] == "small" else "")


def exported(load: Load, sources: Mapping[str, Made], folder: Path) -> dict[str, Any]:
    """Export a source; returns the spec of the engine that loads it."""
    ck = ucformat.open(sources[source_of(load)].checkpoint)
    if load[4]:
        ucformat.convert(ck, folder / "ours")
        ck = ucformat.open(folder / "ours")
    with pytest.MonkeyPatch.context() as patch:
        if load[5] == "small":
            patch.setattr(experts, "_MAX_GROUP", SMALL)
        export(ck, folder / "x", "deepspeed", **options_of(load))
    return {**spec_of(load), "load": str(folder / "x")}


def made(folder: Path, loads: list[Load]) -> Engines:
    specs = [{**spec, "name": name} for name, spec in SOURCES.items()]
    small = {one[0] for one in loads if one[5] == "small"}
    specs += [
        {**SOURCES[name], "name": f"{name}-small", "max_group": SMALL} for name in sorted(small)
    ]
    return Engines(
        folder,
        "deepspeed/moe_deepspeed.py",
        specs,
        {label(one): (one[2], partial(exported, one)) for one in loads},
    )


@pytest.fixture(scope="session")
def engines(common: Path) -> Engines:
    return made(common / "experts", CHOSEN)


@pytest.fixture(scope="session")
def all_engines(common: Path) -> Engines:
    return made(common / "all-experts", ALL)


def check(before: Made, after: Made) -> None:
    """Every tensor of an engine that has loaded an export equals that of the engine that trained, and so do groups."""
    wanted, found = before.truth, after.truth
    for (state, name), value in found.items():
        assert value == (wanted.get((state, name)) or wanted["weight", name]), (state, name)
    assert {key for key in wanted if key[0] != "master"} <= found.keys()

    def hypers(made: Made) -> list[dict[str, Any]]:
        unnamed = [
            {**group, "name": "moe"} if group.get("moe") else group for group in made.facts["hyper"]
        ]
        return [group for i, group in enumerate(unnamed) if group not in unnamed[:i]]

    assert hypers(after) == hypers(before)


def checked(engines: Engines, load: Load) -> None:
    before, after = engines.sources[source_of(load)], engines.on(load[2])[label(load)]
    check(before, after)
    assert all(g["name"] == f"ep_size_{load[3]}" for g in after.facts["hyper"] if g.get("moe"))
    if load[0].startswith(f"z{load[1]}-ep{load[3]}-") and load[2] == 2:
        assert after.facts["losses"] == before.facts["losses"]


@pytest.mark.parametrize("load", CHOSEN, ids=label)
def test_deepspeed_loads_what_was_saved(engines: Engines, load: Load) -> None:
    checked(engines, load)


@pytest.mark.matrix
@pytest.mark.parametrize("load", ALL, ids=label)
def test_every_source_to_every_engine(all_engines: Engines, load: Load) -> None:
    checked(all_engines, load)


def test_large_groups_are_several(engines: Engines) -> None:
    for source in ("z2-ep2-bf16-small", "z1-ep1-fp32-small"):
        assert sum(bool(g.get("moe")) for g in engines.sources[source].facts["hyper"]) > 2
    for load in (one for one in CHOSEN if one[5] == "small"):
        assert sum(bool(g.get("moe")) for g in engines.on(2)[label(load)].facts["hyper"]) > 2


def test_groups_that_deepspeed_did_not_make(engines: Engines, tmp_path: Path) -> None:
    """As of a program that trains all experts on each rank by a plain optimizer."""
    made = engines.sources["z2-ep1-fp32"]
    ck = ucformat.open(made.checkpoint)
    arrays = {(k.name, k.state): ck[k].read() for k in ck.tensors}
    rank = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in arrays))}
    half = len(ck.metadata.groups) // 2
    groups = [
        {**dense, "params": sorted([*dense["params"], *moe["params"]], key=rank.__getitem__)}
        for dense, moe in zip(ck.metadata.groups[:half], ck.metadata.groups[half:], strict=True)
    ]
    source = Checkpoint(
        FakeSource.write(MemoryStore("plain-moe"), arrays, step=3, groups=tuple(groups))
    )
    with pytest.raises(
        UcformatError, match="does not tell the number of expert-parallel ranks"
    ) as caught:
        export(source, tmp_path / "x", "deepspeed", stage=2, world=2)
    assert "--ep" in (caught.value.hint or "")
    specs = []
    for stage, ep in product((1, 2), (1, 2)):
        place = tmp_path / f"z{stage}-ep{ep}"
        client = {"client_state": {"iteration": 3}}
        source = Checkpoint(
            FakeSource.write(
                MemoryStore(place.name), arrays, step=3, groups=tuple(groups), objects=client
            )
        )
        export(source, place, "deepspeed", stage=stage, world=2, ep=ep)
        specs.append(
            {
                **SOURCES["z2-ep1-fp32"],
                "name": place.name,
                "zero": stage,
                "ep": ep,
                "load": str(place),
            }
        )
    for after in make_deepspeed(
        specs, 2, tmp_path / "engines", "deepspeed/moe_deepspeed.py"
    ).values():
        check(made, after)


def test_weights_alone_need_no_ranks(tmp_path: Path) -> None:
    source = moe(groups=[])
    export(source, tmp_path, "deepspeed", stage=1, world=4, weights_only=True)
    assert len(list(tmp_path.rglob("layer_1_expert_*_mp_rank_00_model_states.pt"))) == 4


def moe(layers: int = 2, number: int = 4, **facts: Any) -> Checkpoint:
    names = [
        EXPERT.format(i, e, w) for i in range(layers) for e in range(number) for w in ("up", "down")
    ]
    return fake({"embed": (3, 2), **dict.fromkeys(names, (2, 3))}, **facts)


REFUSED: dict[str, tuple[Checkpoint, dict[str, Any], str]] = {
    "stage 3": (moe(), {"stage": 3, "world": 2, "ep": 2}, "DeepSpeed does not train at stage 3"),
    "tensor parallelism": (moe(), {"stage": 1, "world": 4, "tp": 2, "ep": 2}, "tensor parallelism"),
    "fused": (moe(dtype="bfloat16"), {"stage": 0, "world": 2, "fused": True, "ep": 2}, "FusedAdam"),
    "no degree": (moe(), {"stage": 1, "world": 2}, "pass ep (--ep)"),
    "ranks": (
        moe(),
        {"stage": 1, "world": 3, "ep": 2},
        "3 ranks are not divided by 2 expert-parallel ones",
    ),
    "experts": (
        moe(number=3),
        {"stage": 1, "world": 2, "ep": 2},
        "the 3 experts of moe.0.deepspeed_moe",
    ),
    "degree": (moe(), {"stage": 1, "world": 2, "ep": 0}, "ep must be at least 1"),
    "gap": (
        fake({EXPERT.format(0, e, "up"): (2,) for e in (0, 2)}),
        {"stage": 1, "world": 1, "ep": 1},
        "some of the experts are not exported: moe.0.deepspeed_moe",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    source, options, message = REFUSED[case]
    with pytest.raises(UcformatError) as caught:
        plan_export(source, "deepspeed", **options)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_the_universal_format_has_no_experts() -> None:
    with pytest.raises(UnsupportedError, match=r"experts of deepspeed\.moe") as caught:
        plan_export(moe(), "deepspeed-universal", stage=1)
    assert caught.value.hint == "export to `deepspeed`"


dims = st.lists(st.integers(1, 4), max_size=2).map(tuple)


def labelled(names: list[str], degree: int) -> dict[str, Any]:
    return {**ADAM, "name": f"ep_size_{degree}", "moe": True, "params": names}


def written(
    names: list[str], shapes: Mapping[str, tuple[int, ...]], *groups: dict[str, Any]
) -> Checkpoint:
    arrays = {(n, s): np.ones(shapes[n], "float32") for n in names for s in ("weight", "exp_avg")}
    return Checkpoint(FakeSource.write(MemoryStore("labelled"), arrays, step=3, groups=groups))


def test_layers_of_different_degrees_are_refused() -> None:
    names = [EXPERT.format(i, e, "up") for i in range(2) for e in range(4)]
    shapes = dict.fromkeys(names, (2,))
    source = written(names, shapes, labelled(names[:4], 2), labelled(names[4:], 4))
    with pytest.raises(UnsupportedError, match=r"different numbers of ranks \(2, 4\)"):
        plan_export(source, "deepspeed", stage=1, world=4)


def test_an_order_that_is_not_the_modules_is_kept_or_refused(tmp_path: Path) -> None:
    by_weight = [
        EXPERT.format(0, e, w) for k in range(2) for w in ("down", "up") for e in (2 * k, 2 * k + 1)
    ]
    names = sorted(by_weight, key=lambda n: re.findall(r"\d+", n))
    source = written(names, dict.fromkeys(names, (2, 3)), labelled(by_weight, 2))
    export(source, tmp_path / "same", "deepspeed", stage=1, world=2, ep=2)
    assert ucformat.open(tmp_path / "same").metadata.groups[0]["params"] == by_weight
    with pytest.raises(UnsupportedError, match="in another order than the module") as caught:
        plan_export(source, "deepspeed", stage=1, world=2, ep=1)
    assert "--ep 2" in (caught.value.hint or "")


def test_ranks_that_would_train_different_experts_are_refused() -> None:
    names = [EXPERT.format(0, e, w) for e in range(4) for w in ("up", "down")]
    shapes = dict.fromkeys(names, (2, 3))
    trained = [
        n for n in names if n not in (names[1], names[5])
    ]  # "down" of the first of two on each rank
    source = written(names, shapes, labelled(trained, 2))
    for ep in (1, 2):
        assert plan_export(source, "deepspeed", stage=1, world=4, ep=ep).files
    with pytest.raises(UnsupportedError, match=r"expert-parallel rank 1 of 4 .*experts\.0\.down"):
        plan_export(source, "deepspeed", stage=1, world=4, ep=4)


@pytest.mark.matrix
@given(data=st.data())
def test_any_geometry_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    numbers = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=3))
    degrees = [d for d in (1, 2, 3, 4) if all(n % d == 0 for n in numbers)]
    shapes: dict[str, tuple[int, ...]] = {"embed": (3, 5)}
    of = {"embed": 0}
    for layer, number in enumerate(numbers):
        kinds = data.draw(
            st.lists(st.tuples(dims, st.integers(0, 2)), min_size=1, max_size=3)
        )  # 2: frozen
        for expert in range(number):
            for kind, (shape, group) in enumerate(kinds):
                name = EXPERT.format(layer, expert, f"w{kind}")
                shapes[name], of[name] = shape, group
        shapes[f"moe.{layer}.gate"], of[f"moe.{layer}.gate"] = (2, number), 1
    groups = [[n for n in shapes if of[n] == g] for g in (0, 1)]
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    source = fake(shapes, dtype=dtype, groups=groups)
    folder = tmp_path_factory.mktemp("geometry")

    def exported(
        before: Checkpoint, name: str, config: dict[str, Any], world: int, ep: int
    ) -> Checkpoint:
        export(
            before, folder / name, "deepspeed", config=config, world=world, ep=ep, buffers="none"
        )
        found = ucformat.open(folder / name)
        assert contents(found) == contents(source)
        return found

    def engine() -> tuple[dict[str, Any], int, int]:
        zero = {"stage": data.draw(st.sampled_from([1, 2]))}
        zero |= {
            name: data.draw(st.booleans())
            for name in ("round_robin_gradients", "parameter_alignment")
        }
        config = {"zero_optimization": zero, "bf16": {"enabled": dtype == "bfloat16"}}
        ep = data.draw(st.sampled_from(degrees))
        first = {"use_data_before_expert_parallelism": data.draw(st.booleans())}
        return config | first, ep * data.draw(st.integers(1, 3)), ep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_MAX_GROUP", data.draw(st.sampled_from([10, 60, 10**9])))
        last = engine()
        direct = exported(source, "direct", *last)
        twice = exported(exported(source, "first", *engine()), "second", *last)
    assert twice.metadata.groups == direct.metadata.groups
