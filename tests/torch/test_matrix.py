"""Save under any layout, load under any other: full state and next losses, judged from the live engines."""

from __future__ import annotations

import fcntl
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.torch.running import run
from tests.torch.specs import (
    FORMS,
    LAYOUTS,
    RECIPES,
    SPELLINGS,
    Load,
    Source,
    all_loads,
    chosen_loads,
    same_arithmetic,
    tolerance,
)
from tests.torch.verdict import Truth, checkpoint_differences, differences, read_losses, relative

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from pathlib import Path

WORLDS = sorted({world for world, _ in LAYOUTS.values()})
BEFORE, AFTER = 3, 3  # steps before the save, and after it
#: So that the small tensors of these models have many chunks, and several shards each.
SMALL = {"chunk_bytes": 2048, "shard_bytes": 16384}
#: What a checkpoint might lose, by recipe; each loss must show in the next steps.
FORGOTTEN = {
    "odd": ("exp_avg", "exp_avg_sq", "step", "drift", "scheduler", "lr", "batch"),
    "frozen": ("momentum_buffer", "drift", "scheduler", "lr", "batch"),
    "bf16": ("momentum_buffer", "batch"),
}


@dataclass(frozen=True)
class Made:
    """Where the jobs of some sources and loads leave what they make."""

    folder: Path

    def source(self, source: Source, what: str) -> str:
        return str(self.folder / "saved" / str(source) / what)

    def load(self, load: Load, what: str) -> str:
        return str(self.folder / "loaded" / str(load) / what)

    def sources(
        self,
        sources: Iterable[Source],
        *,
        background: Collection[int],
        forgetting: bool = False,
        worlds: Iterable[int] = WORLDS,
    ) -> None:
        """Train and save those of some worlds, and do those that forget, unless it was done.

        In the worlds of `background` one of the forms is saved in the background while training
        goes on.
        """
        for world in worlds:
            chosen = sorted({s for s in sources if s.world == world})
            more = self.forgetting() if world == 1 and forgetting else []
            self.once(
                "save", world, [*(self.source_job(s, world in background) for s in chosen), *more]
            )

    def loads(self, loads: Iterable[Load], like: Load) -> None:
        """Load those of the worlds of one of them, from and to, and train on, unless it was done."""
        jobs = [
            self.load_job(x)
            for x in loads
            if (x.source.world, x.world) == (like.source.world, like.world)
        ]
        self.once(f"load-from-{like.source.world}", like.world, jobs)

    def source_job(self, source: Source, background: bool) -> dict[str, Any]:
        forms = (*FORMS, "dcp") if source == REFERENCE else FORMS
        at = {
            what: self.source(source, what)
            for what in ("start", "truth", "before", "after", *forms)
        }
        saves: list[dict[str, Any]] = [
            {
                "save": at[form],
                "form": form,
                "spelling": source.spelling(form),
                **(SMALL if form == "zarr" else {}),
            }
            for form in forms
        ]
        waits = []
        if background:
            later = saves.pop(list(LAYOUTS).index(source.layout) % 2)
            saves.append({"async_save": later.pop("save"), **later})
            waits = [{"wait": True}]
        return {
            **RECIPES[source.recipe],
            "layout": LAYOUTS[source.layout][1],
            "actions": [
                *(
                    {"truth": at["start"]},
                    {"train": BEFORE},
                    {"losses": at["before"]},
                    {"truth": at["truth"]},
                ),
                *saves,
                *({"train": AFTER}, {"losses": at["after"]}, *waits),
            ],
        }

    def load_job(self, load: Load) -> dict[str, Any]:
        """Another seed than the source's, so that what is not loaded is wrong."""
        recipe = RECIPES[load.source.recipe]
        options = {"form": "dcp"} if load.form == "dcp" else {"spelling": load.spelling}
        return {
            **recipe,
            "model": {**recipe["model"], "seed": 1},
            "layout": LAYOUTS[load.layout][1],
            "actions": [
                {"load": self.source(load.source, load.form), **options},
                *(
                    {"truth": self.load(load, "truth")},
                    {"train": AFTER},
                    {"losses": self.load(load, "after")},
                ),
            ],
        }

    def forgotten(self, recipe: str, part: str) -> str:
        return str(self.folder / "forgotten" / f"{recipe}-{part or 'nothing'}")

    def forgetting(self) -> list[dict[str, Any]]:
        """Trainings that save nothing, and lose a part of their state where others save."""
        jobs = []
        for recipe, parts in FORGOTTEN.items():
            for part in ("", *parts):
                forget = [{"forget": part}] if part else []
                last = {"losses": self.forgotten(recipe, part)}
                jobs.append(
                    {
                        **RECIPES[recipe],
                        "actions": [{"train": BEFORE}, *forget, {"train": AFTER}, last],
                    }
                )
        return jobs

    def once(self, what: str, world: int, jobs: list[dict[str, Any]]) -> None:
        """Do the jobs in one run of `world` ranks; of test processes that share the folder one does, others wait."""
        if not jobs:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        done, failed = (self.folder / f"{what}-{world}.{end}" for end in ("done", "failed"))
        with (self.folder / f"{what}-{world}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if failed.exists():
                pytest.fail(failed.read_text())
            if not done.exists():
                try:
                    run(world, jobs, self.folder / what)
                except AssertionError as error:
                    failed.write_text(str(error))
                    raise
                done.touch()

    def check_load(self, load: Load) -> None:
        """The full state is the source's, and so are the next losses."""
        truth = Truth.read(self.load(load, "truth"))
        assert differences(truth, Truth.read(self.source(load.source, "truth"))) == []
        losses, expected = (
            read_losses(self.load(load, "after")),
            read_losses(self.source(load.source, "after")),
        )
        assert len(losses) == AFTER
        if same_arithmetic(load):
            assert losses == expected
        else:
            assert relative(losses, expected) <= tolerance(load.source.recipe)


@pytest.fixture(scope="session")
def made(common: Path) -> Callable[[str], Made]:
    """`made(name)`: a folder of that name that all test processes of this session see."""
    return lambda name: Made(common / "torch-matrix" / name)


CHOSEN = chosen_loads()
SOURCES = sorted({load.source for load in CHOSEN})
#: Saved and loaded through `torch.distributed.checkpoint` too.
REFERENCE = Source("fsdp2-2", "tied")
REFERENCE_LOADS = [Load(REFERENCE, "dcp", layout) for layout in ("fsdp2-2", "ddp-2", "tp-2")]


#: The first tier has layouts of one rank and of two.
FEW = 2


def _tiers(cases: Iterable[Load | Source]) -> list[Any]:
    def ranks(case: Load | Source) -> int:
        return max(case.world, case.source.world) if isinstance(case, Load) else case.world

    return [
        pytest.param(c, id=str(c), marks=() if ranks(c) <= FEW else pytest.mark.matrix)
        for c in cases
    ]


@pytest.fixture(scope="session")
def chosen(made: Callable[[str], Made]) -> Made:
    """Where the chosen sources save, once `saved` was called."""
    return made("chosen")


def saved(m: Made, sources: Iterable[Source]) -> None:
    """Have these sources saved, with all the chosen ones of as many ranks."""
    worlds = sorted({s.world for s in sources})
    m.sources(SOURCES, background=(2,), forgetting=True, worlds=worlds)


def test_the_choice_has_every_layout_form_and_recipe_on_both_sides() -> None:
    assert {(x.source.layout, x.form) for x in CHOSEN} == {(a, f) for a in LAYOUTS for f in FORMS}
    assert {(x.layout, x.form) for x in CHOSEN} == {(a, f) for a in LAYOUTS for f in FORMS}
    assert {(x.source.recipe, x.form) for x in CHOSEN} == {(r, f) for r in RECIPES for f in FORMS}
    assert {x.layout for x in CHOSEN if x.source.layout == x.layout} == set(LAYOUTS)
    assert any(same_arithmetic(x) for x in CHOSEN if x.source.layout != x.layout)
    assert {(x.source.spelling(x.form), x.form) for x in CHOSEN} == {
        (s, f) for s in SPELLINGS for f in FORMS
    }
    assert {(x.spelling, x.form) for x in CHOSEN} == {(s, f) for s in SPELLINGS for f in FORMS}
    for recipe in RECIPES:
        mine = [x for x in CHOSEN if x.source.recipe == recipe and x.source.layout != x.layout]
        assert len({x.source.layout for x in mine}) >= 2
        assert len({x.layout for x in mine}) >= 4


@pytest.mark.front("odd")
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_layouts_begin_with_the_same_and_compute_alike(chosen: Made, recipe: str) -> None:
    first, *others = (s for s in SOURCES if s.recipe == recipe)
    assert others
    saved(chosen, [first, *others])
    for source in others:
        start = Truth.read(chosen.source(source, "start"))
        assert differences(start, Truth.read(chosen.source(first, "start"))) == []
        losses, expected = (read_losses(chosen.source(s, "before")) for s in (source, first))
        assert relative(losses, expected) <= tolerance(recipe)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("source", _tiers(SOURCES))
def test_what_is_saved_is_what_was_held(chosen: Made, source: Source, form: str) -> None:
    saved(chosen, [source])
    truth = Truth.read(chosen.source(source, "truth"))
    assert ("weight", "layers.0.scratch") not in truth.tensors
    assert checkpoint_differences(ucformat.open(chosen.source(source, form)), truth) == []


@pytest.mark.parametrize("load", _tiers(CHOSEN))
def test_a_loaded_training_is_the_saved_one_and_goes_on_alike(chosen: Made, load: Load) -> None:
    saved(chosen, [load.source])
    chosen.loads([*CHOSEN, *REFERENCE_LOADS], load)
    chosen.check_load(load)


@pytest.mark.parametrize("load", _tiers(REFERENCE_LOADS))
def test_the_harness_agrees_with_another_library(chosen: Made, load: Load) -> None:
    """Through `torch.distributed.checkpoint` alone, all is as it should be: the harness itself is right."""
    saved(chosen, [load.source])
    chosen.loads([*CHOSEN, *REFERENCE_LOADS], load)
    chosen.check_load(load)


def test_what_is_forgotten_shows(chosen: Made) -> None:
    """A part of the state that is lost moves the next losses by more than the tolerance for unlike layouts.

    And saving changes nothing: a training that never saved has the losses of one that did.
    """
    alone = [s for s in SOURCES if s.layout == "fsdp2-1" and s.recipe in FORGOTTEN]
    assert alone
    saved(chosen, alone)
    for recipe, parts in FORGOTTEN.items():
        expected = read_losses(chosen.forgotten(recipe, ""))
        moved = {
            part: relative(read_losses(chosen.forgotten(recipe, part)), expected) for part in parts
        }
        assert {part: value for part, value in moved.items() if value <= tolerance(recipe)} == {}
    for source in alone:
        losses = [
            loss
            for what in ("before", "after")
            for loss in read_losses(chosen.source(source, what))
        ]
        assert losses == read_losses(chosen.forgotten(source.recipe, ""))


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_layout_and_form_into_every_layout(
    made: Callable[[str], Made], recipe: str, layout: str
) -> None:
    m, loads = made(f"all-{recipe}"), all_loads(recipe)
    m.sources({x.source for x in loads}, background=WORLDS)
    mine = [x for x in loads if x.layout == layout]
    m.once(f"load-into-{layout}", LAYOUTS[layout][0], [m.load_job(x) for x in mine])
    assert len(mine) == len(LAYOUTS) * len(FORMS)
    for load in mine:
        m.check_load(load)
        shutil.rmtree(m.load(load, ""))


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_every_layout_saves_is_what_it_held(made: Callable[[str], Made], recipe: str) -> None:
    m = made(f"all-{recipe}")
    sources = [Source(layout, recipe) for layout in LAYOUTS]
    m.sources(sources, background=WORLDS)
    for source in sources:
        truth = Truth.read(m.source(source, "truth"))
        for form in FORMS:
            assert checkpoint_differences(ucformat.open(m.source(source, form)), truth) == []
