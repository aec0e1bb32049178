"""From the paths of a training state to names and states: every spelling means the same, and nothing is guessed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucformat.errors import UsageError
from ucformat.geometry.tensor import Key
from ucformat.reading.state_names import dotted, key_of_dotted, name_state, optimizer_roots

PARAMS = ("embed.weight", "layers.0.up.bias", "layers.10.up.bias", "head")
STATES = ("exp_avg", "exp_avg_sq", "step")


def paths_of(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all leaves of nested dictionaries."""
    if not isinstance(state, dict):
        return [path]
    return [p for k, v in state.items() for p in paths_of(v, (*path, k))]


def named(state: dict[str, Any]) -> dict[tuple[Any, ...], tuple[str, str]]:
    """Names and states of all that is marked as a tensor by None."""
    paths = paths_of(state)
    tensors = [p for p in paths if not any(str(part).startswith("param_groups") for part in p)]
    return {
        p: tuple(key)  # type: ignore[misc]
        for p, key in name_state(dict.fromkeys(tensors), optimizer_roots(paths)).keys.items()
    }


def keys_of(state: dict[str, Any]) -> set[tuple[str, str]]:
    found = named(state)
    assert len(set(found.values())) == len(found)
    return set(found.values())


def model(params: tuple[str, ...] = PARAMS) -> dict[str, Any]:
    return dict.fromkeys(params)


def nested(params: tuple[str, ...] = PARAMS, states: tuple[str, ...] = STATES) -> dict[str, Any]:
    return {"state": {p: dict.fromkeys(states) for p in params}, "param_groups": [0]}


def flat(params: tuple[str, ...] = PARAMS, states: tuple[str, ...] = STATES) -> dict[str, Any]:
    """As `StateDictOptions(flatten_optimizer_state_dict=True)` gives it."""
    return {f"state.{p}.{s}": None for p in params for s in states} | {
        f"param_groups.{p}.lr": 0.1 for p in params
    }


EXPECTED = {(p, s) for p in PARAMS for s in ("weight", *STATES)}


def flattened(state: dict[str, Any]) -> dict[str, Any]:
    """A whole state dict with one level, as `flatten_state_dict` of a program may give it."""
    return {dotted(p): None for p in paths_of(state)}


@pytest.mark.parametrize("optim", [nested(), flat()], ids=["nested", "flat"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda m, o: {"model": m, "optim": o},
        lambda m, o: {"optimizer": o, "module": m},
        lambda m, o: {"app": {"model": m, "optimizer": o}},
        lambda m, o: {"weights": m, "anything": {"deeper": o}},
        lambda m, o: {**m, "optimizer": o},
        lambda m, o: {"state": m, "optimizer": o},
        lambda m, o: {"0": m, "1": o},
    ],
    ids=["model", "module", "app", "others", "top", "state", "numbers"],
)
def test_every_spelling_of_a_model_and_its_optimizer(wrap: Any, optim: dict[str, Any]) -> None:
    assert keys_of(wrap(model(), optim)) == EXPECTED


def test_an_optimizer_beside_its_model_at_the_top() -> None:
    assert keys_of({"model": model(), **flat()}) == EXPECTED
    assert keys_of({"model": model(), **nested()}) == EXPECTED


def test_several_optimizers_of_one_model() -> None:
    state = {
        "model": model(),
        "adam": nested(PARAMS[:2]),
        "sgd": nested(PARAMS[2:], ("momentum_buffer",)),
    }
    expected = {(p, s) for p in PARAMS[:2] for s in STATES} | {
        (p, "momentum_buffer") for p in PARAMS[2:]
    }
    assert keys_of(state) == expected | {(p, "weight") for p in PARAMS}


def test_a_module_called_state_is_a_module() -> None:
    params = ("state.weight", "state.state.bias", "encoder.state.weight")
    for optim in (nested(params), flat(params)):
        assert keys_of({"model": model(params), "optim": optim}) == {
            (p, s) for p in params for s in ("weight", *STATES)
        }
    assert keys_of({"model": model(params)}) == {(p, "weight") for p in params}
    assert keys_of({"state": {"state": {"weight": None}}}) == {("weight", "weight")}


def test_states_of_several_parts_and_names_with_dots_and_digits() -> None:
    params = ("a", "a.0", "a.0.1", "a.b", "0.weight")
    states = ("exp_avg", "row.factor")
    assert keys_of({"model": model(params), "optim": flat(params, states)}) == {
        (p, s) for p in params for s in ("weight", *states)
    }


def test_factored_moments_nested_in_a_state() -> None:
    optim = {"state": {"w": {"factors": {"row": None, "col": None}}}, "param_groups": [0]}
    assert keys_of({"model": {"w": None}, "optim": optim}) == {
        ("w", "weight"),
        ("w", "factors.row"),
        ("w", "factors.col"),
    }


def test_numbers_name_no_parameters() -> None:
    """`optimizer.state_dict()` of plain torch: its numbers depend on the order of the program's parameters."""
    optim = {"state": {0: {"exp_avg": None}, 1: {"exp_avg": None}}, "param_groups": [0]}
    found = named({"model": {"a": None, "b": None}, "optim": optim})
    assert found["optim", "state", 0, "exp_avg"] == ("optim.state.0.exp_avg", "weight")
    assert found["optim", "state", 1, "exp_avg"] == ("optim.state.1.exp_avg", "weight")
    assert found["model", "a"] == ("a", "weight")
    for name in ("a", "0"):  # not even where the model has such a name
        found = named(
            {"model": {name: None}, "optim": {"state.0.exp_avg": None, "param_groups.0.lr": 1}}
        )
        assert found["optim", "state.0.exp_avg"] == ("optim.state.0.exp_avg", "weight")
        found = named(
            {
                "model": {name: None},
                "optim": {"state": {"0": {"exp_avg": None}}, "param_groups": [1]},
            }
        )
        assert found["optim", "state", "0", "exp_avg"] == ("optim.state.0.exp_avg", "weight")
        assert found["model", name] == (name, "weight")


def test_only_an_optimizer() -> None:
    for optim in (nested(), flat()):
        assert keys_of({"optim": optim}) == {(p, s) for p in PARAMS for s in STATES}
        assert keys_of(optim) == {(p, s) for p in PARAMS for s in STATES}


def test_only_a_model() -> None:
    for state in (model(), {"model": model()}, {"anything": {"below": model()}}):
        assert keys_of(state) == {(p, "weight") for p in PARAMS}


def test_the_model_is_the_one_that_the_optimizer_trains() -> None:
    state = {"actor": model(), "critic": model(("value.weight",)), "optim": nested()}
    assert keys_of(state) == EXPECTED | {("critic.value.weight", "weight")}
    state = {"model": model(("other",)), "net": model(), "optim": nested(PARAMS[:1])}
    assert named(state)["net", "head"] == ("head", "weight")
    assert named(state)["model", "other"] == ("model.other", "weight")


@pytest.mark.parametrize("optim", [nested(), flat()], ids=["nested", "flat"])
def test_of_two_that_fit_the_one_called_model_is_the_model(optim: dict[str, Any]) -> None:
    found = named({"ema": model(), "model": model(), "optim": optim})
    assert found["model", "head"] == ("head", "weight")
    assert found["ema", "head"] == ("ema.head", "weight")


def test_of_two_that_fit_the_one_with_the_shapes_of_the_states_is_the_model() -> None:
    tensors: dict[tuple[Any, ...], tuple[int, ...] | None] = {
        ("actor", "w"): (2, 3),
        ("critic", "w"): (4, 3),
        ("optim", "state", "w", "exp_avg"): (4, 3),
        ("optim", "state", "w", "step"): (),
    }
    found = name_state(tensors, [("optim",)]).keys
    assert found["critic", "w"] == ("w", "weight")
    assert found["actor", "w"] == ("actor.w", "weight")
    assert found["optim", "state", "w", "exp_avg"] == ("w", "exp_avg")


def test_a_model_that_lacks_a_parameter_of_the_optimizer_is_not_its_owner() -> None:
    paths = [("actor", "w"), ("critic", "v"), ("optim", "state", "w", "exp_avg")]
    owners: dict[tuple[Any, ...], tuple[Any, ...]] = {("optim",): ("critic",)}
    with pytest.raises(UsageError, match=r"critic does not hold all parameters .* optim names"):
        name_state(dict.fromkeys(paths), [("optim",)], owners)


def test_where_nothing_tells_nothing_is_guessed() -> None:
    """Of several that may be the model none is: every name is its whole path."""
    for state in (
        {"actor": model(), "critic": model()},
        {"actor": model(), "critic": model(), "optim": nested()},
        {"model": model(), "net": model()},
        {"gan": {"model": model()}, "other": {"model": model()}},
    ):
        assert keys_of(state) >= {(dotted(p), "weight") for p in paths_of(state) if p[-1] == "head"}


def test_what_lies_beside_the_model_keeps_its_path() -> None:
    found = named({"model": model(), "optim": nested(), "extra": {"mean": None}, "top": None})
    assert found["extra", "mean"] == ("extra.mean", "weight")
    assert found["top",] == ("top", "weight")


@given(
    st.lists(
        st.text("ab.0", min_size=1, max_size=6).filter(lambda p: not p.isdigit()), unique=True
    ),
    st.lists(st.sampled_from("sx"), unique=True),
)
def test_distinct_paths_have_distinct_names(params: list[str], states: list[str]) -> None:
    """Whatever the parameters are called; where names nest, the longest that is known is meant."""
    found = named({"model": dict.fromkeys(params), "optim": nested(tuple(params), tuple(states))})
    expected: dict[tuple[Any, ...], tuple[str, str]] = {("model", p): (p, "weight") for p in params}
    expected |= {("optim", "state", p, s): (p, s) for p in params for s in states}
    assert found == expected


def test_what_only_looks_like_a_flat_state_is_none() -> None:
    optim = flat(("w",)) | {
        "prefix.w.exp_avg": None,
        "state.w.exp_avg_sq": {"row": None},
        "state.step": None,
    }
    assert keys_of({"model": {"w": None}, "optim": optim}) == {
        *(("w", s) for s in ("weight", "exp_avg", "step")),
        *(
            (f"optim.{n}", "weight")
            for n in ("prefix.w.exp_avg", "state.w.exp_avg_sq.row", "state.step")
        ),
    }


def test_optimizer_roots() -> None:
    paths = [
        ("a", "optim", "param_groups"),
        ("b", "param_groups.w.lr"),
        ("param_groups.x", "y"),
        ("c", "groups"),
    ]
    assert optimizer_roots(paths) == {("a", "optim"), ("b",), ()}
    assert optimizer_roots([("model", "w")]) == set()


STORED = {
    "w": {"weight", "exp_avg"},
    "model.w": {"weight"},
    "layers.0.w": {"weight", "step"},
    "state.b": {"weight", "exp_avg"},
}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("w", ("w", "weight")),
        ("model.w", ("model.w", "weight")),  # as it is stored, before any prefix is taken off
        ("module.w", ("w", "weight")),
        ("app.model.w", ("w", "weight")),
        ("model.layers.0.w", ("layers.0.w", "weight")),
        ("model.state.b", ("state.b", "weight")),
        ("state.b", ("state.b", "weight")),
        ("optim.state.w.exp_avg", ("w", "exp_avg")),
        ("state.w.exp_avg", ("w", "exp_avg")),
        ("app.optimizer.state.layers.0.w.step", ("layers.0.w", "step")),
        ("optim.state.state.b.exp_avg", ("state.b", "exp_avg")),
        ("state.state.b.exp_avg", ("state.b", "exp_avg")),
        ("train.state.optim.state.w.exp_avg", ("w", "exp_avg")),
    ],
)
def test_a_flattened_path_means_a_stored_tensor(text: str, key: tuple[str, str]) -> None:
    assert key_of_dotted(text, STORED) == Key(*key)


@pytest.mark.parametrize(
    "text",
    [
        "v",
        "model.v",
        "encoder.w",
        "a.b.model.w",
        "optim.state.v.exp_avg",
        "optim.exp_avg.w",
        "state.",
        "",
        ".",
    ],
)
def test_a_flattened_path_that_means_none(text: str) -> None:
    assert key_of_dotted(text, STORED) is None
