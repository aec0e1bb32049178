"""FSDP1 and ZeroRedundancyOptimizer: saved and loaded live, under their own layout and any other, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import ucformat
from tests.torch import fsdp1_program
from tests.torch.fsdp1_program import BEFORE, RECIPES, make, train
from tests.torch.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy as np

RANKS = Ranks("tests.torch.fsdp1_program")
FSDP1 = [
    f"{strategy}-{views}"
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for views in ("orig", "flat")
]
HYBRID = ["HYBRID_SHARD-orig", "_HYBRID_SHARD_ZERO2-flat"]
KINDS = [*FSDP1, "fsdp2", "zero", "one"]
FEW = ["FULL_SHARD-orig", "FULL_SHARD-flat", "zero", "fsdp2", "one"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks compute: sums of several threads round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def held(recipe: str) -> dict[tuple[str, str], np.ndarray]:
    """What a training of one process has, by state and name."""
    state = make("one", recipe)
    train(state, BEFORE)
    model, optimizer = state["model"], state["optimizer"]
    out: dict[tuple[str, str], Any] = {}
    for key, tensor in model.state_dict().items():
        out["weight", key.replace("_checkpoint_wrapped_module.", "")] = tensor
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            out[name, key.replace("_checkpoint_wrapped_module.", "")] = value
    return {key: tensor.detach().numpy().copy() for key, tensor in out.items()}


def check(place: Path, recipe: str) -> None:
    """A checkpoint has what one process has, under the same names."""
    ck, expected = ucformat.open(place), held(recipe)
    aliases = {alias for _, alias in expected} & set(ck.aliases)
    assert aliases == ({"head.weight"} if RECIPES[recipe].get("tied") else set())
    assert {(k.state, k.name) for k in ck.tensors} == {
        key for key in expected if key[1] not in aliases
    }
    for state, name in expected:
        found = ck[ck.aliases.get(name, name), state][...]
        assert found.tobytes() == expected[state, name].tobytes(), (state, name)
    groups = [group.params for group in ck.manifest.groups]
    assert all(name.startswith("layers.0.") for name in groups[0])
    assert {name for group in groups for name in group} == {
        name for state, name in expected if state in ("exp_avg", "momentum_buffer")
    }
    assert [group.options["lr"] for group in ck.manifest.groups] == [1e-2, 3e-3]


def losses(recipe: str) -> list[float]:
    return fsdp1_program.after("one", recipe)


def kinds_of(recipe: str, kinds: Iterable[str]) -> list[str]:
    """FSDP2 does not know that parameters are tied; and the flat parameters of FSDP1 train all, or nothing."""
    left_out = {"tied": ("fsdp2",), "momentum": ("zero",)}.get(recipe, ())
    return [kind for kind in kinds if kind not in left_out]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_kind_saves_what_one_process_has_and_loads_what_each_has_saved(
    tmp_path: Path, recipe: str
) -> None:
    kinds, expected = kinds_of(recipe, KINDS if recipe == "plain" else FEW), losses(recipe)
    written = RANKS.run("writes", 2, tmp_path, kinds=kinds, recipes=[recipe])
    assert written[0] == written[1]
    assert written[0] == {f"{kind}-{recipe}": expected for kind in kinds}
    for kind in kinds:
        check(tmp_path / f"{kind}-{recipe}", recipe)
    sources = kinds_of(recipe, FEW)
    read = RANKS.run("reads", 2, tmp_path, sources=sources, kinds=kinds, recipes=[recipe])
    assert len(read[0]) == len(sources) * len(kinds)
    assert {key: values for key, values in read[0].items() if values != expected} == {}
    alone = RANKS.run("reads", 1, tmp_path, sources=kinds, kinds=["one"], recipes=[recipe])
    assert {key: values for key, values in alone[0].items() if values != expected} == {}


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["plain", "tied"])
def test_hybrid_and_other_numbers_of_ranks(tmp_path: Path, recipe: str) -> None:
    """HYBRID_SHARD: 2 x 2 ranks; then 2, 3 and 1 ranks go on, and the reverse."""
    expected = losses(recipe)
    kinds = kinds_of(recipe, [*HYBRID, "FULL_SHARD-orig", "FULL_SHARD-flat", "zero"])
    written = RANKS.run("writes", 4, tmp_path, kinds=kinds, recipes=[recipe])
    assert written[0] == {f"{kind}-{recipe}": expected for kind in kinds}
    for kind in kinds:
        check(tmp_path / f"{kind}-{recipe}", recipe)
    two = ["FULL_SHARD-orig", "FULL_SHARD-flat", "zero"]
    for world, targets in ((2, two), (3, two), (1, ["one"]), (4, kinds)):
        read = RANKS.run("reads", world, tmp_path, sources=kinds, kinds=targets, recipes=[recipe])
        for values in read[0].values():  # 3 ranks round the mean of equal gradients
            assert values == (pytest.approx(expected, rel=1e-6) if world == 3 else expected)
    three = RANKS.run("writes", 3, tmp_path / "three", kinds=two, recipes=[recipe])
    read = RANKS.run("reads", 4, tmp_path / "three", sources=two, kinds=kinds, recipes=[recipe])
    for key, values in read[0].items():
        source = next(kind for kind in two if key.startswith(kind))
        assert values == pytest.approx(three[0][f"{source}-{recipe}"], rel=1e-6)


@pytest.mark.front("packed")
@pytest.mark.parametrize("form", ["packed", "safetensors", "background"])
def test_in_each_form(tmp_path: Path, form: str) -> None:
    options: dict[str, Any] = {"background": True} if form == "background" else {"form": form}
    kinds = ["FULL_SHARD-orig", "FULL_SHARD-flat", "zero"]
    RANKS.run("writes", 2, tmp_path, kinds=kinds, recipes=["plain"], **options)
    for kind in kinds:
        check(tmp_path / f"{kind}-plain", "plain")


def test_what_is_refused(tmp_path: Path) -> None:
    first, second = RANKS.run("refusals", 2, tmp_path)
    assert first == second
    words = {
        "offload": "cpu_offload",
        "forward": "in the middle of a step",
        "summoned": "in the middle of a step",
        "summoned-flat": "in the middle of a step",
        "replaced": "embed.weight has been replaced",
        "strides": "has the strides",
        "tied": "is tied to a parameter in another unit",
        "inner-True": "in a flat parameter of FSDP1 that the state does not have",
        "inner-False": "in a flat parameter of FSDP1 that the state does not have",
        "hooks": r"model.0 (Hooked) makes its own state dict",
        "scales-True": "how FSDP1 cuts it is not known",
        "scales-False": "how FSDP1 cuts it is not known",
        "overlap": "overlap_with_ddp",
        "rows": "does not see which rows of flat parameters",
        "load_into": "load_into does not fill the flat parameters of FSDP1",
        "acting": "does more in a load than to fill its tensors",
    }
    assert first.keys() == words.keys()
    assert {what: said for what, said in first.items() if words[what] not in said} == {}


@pytest.mark.parametrize("kind", ["SHARD_GRAD_OP-orig", "SHARD_GRAD_OP-flat", "FULL_SHARD-flat"])
def test_a_forward_after_a_load_uses_what_was_loaded(tmp_path: Path, kind: str) -> None:
    for found, expected in RANKS.run("gathered", 2, tmp_path, kind=kind):
        assert found == expected


def test_mixed_precision(tmp_path: Path) -> None:
    for found, expected in RANKS.run("mixed", 2, tmp_path):
        assert found == expected


def test_modules_under_two_names(tmp_path: Path) -> None:
    RANKS.run("twice", 2, tmp_path)
    ck = ucformat.open(tmp_path / "ck")
    assert set(ck.names()) | set(ck.aliases) == {
        f"{name}.{which}"
        for name in ("inner.one", "inner.two", "one")
        for which in ("weight", "bias")
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_that_it_leaves_alone(tmp_path: Path, ranks: int) -> None:
    assert RANKS.run("ignored", ranks, tmp_path) == [{"certified": True}] * ranks


def test_parameters_without_states(tmp_path: Path) -> None:
    """A view keeps none; a flat parameter cannot have states of some of its parameters only."""
    assert RANKS.run("stateless", 2, tmp_path, kind="FULL_SHARD-orig") == ["", ""]
    for said in RANKS.run("stateless", 2, tmp_path / "flat", kind="FULL_SHARD-flat"):
        assert "and none of layers.0.gain, which FSDP1 has joined to one parameter" in said


@pytest.mark.parametrize("kind", ["FULL_SHARD-orig", "FULL_SHARD-flat", "zero"])
def test_states_by_the_saved_hyper_parameters(tmp_path: Path, kind: str) -> None:
    assert RANKS.run("amsgrad", 2, tmp_path, kind=kind) == [True, True]


def test_a_sharded_optimizer_gathers_what_was_loaded(tmp_path: Path) -> None:
    """It has been dealt to other ranks than those that saved; see PyTorch 65650."""
    assert RANKS.run("consolidated", 3, tmp_path)[0] == [float(BEFORE)]


def test_its_own_state_dicts_load_what_was_saved_live(tmp_path: Path) -> None:
    assert RANKS.run("state_dicts", 2, tmp_path) == [True, True]


def test_the_truth_is_not_that_of_the_ranks() -> None:
    """A training of one process needs no process group."""
    assert not torch.distributed.is_initialized()
    assert len(held("plain")) > 20
