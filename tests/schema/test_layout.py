"""The layout file: its schema, its errors, and the files in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ucformat.errors import LayoutError, NotFound, UpgradeNeeded
from ucformat.geometry.layout import Layout
from ucformat.geometry.placement import Flat, Mesh, Owner, Partial, Replicate, Rule, Shard, Stage
from ucformat.geometry.tensor import Key, TensorInfo, TensorList
from ucformat.schema.layout import json_schema

DOCS = Path(__file__).parents[2] / "docs"


def test_the_published_schema_is_current() -> None:
    """Else write it anew: json.dumps(json_schema(), indent=2)."""
    published = (DOCS / "schemas" / "layout-v1.json").read_text()
    assert json.loads(published) == json_schema()


def document(**change: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "mesh": {"dp": 2, "tp": 2},
        "rules": [{"match": "*", "place": ["replicate"]}],
        **change,
    }


def rule(*place: Any, **more: Any) -> dict[str, Any]:
    return document(
        rules=[{"match": "*", "place": ["replicate"]}, {"match": "*", "place": list(place), **more}]
    )


@pytest.mark.parametrize(
    ("spelled", "placement"),
    [
        ("replicate", Replicate()),
        ({"shard": -1, "over": "tp"}, Shard(-1, "tp")),
        ({"shard": 0, "over": ["dp", "tp"], "sizes": [1, 0, 2, 3]}, Shard(0, ("dp", "tp"), sizes=(1, 0, 2, 3))),
        ({"shard": 0, "over": "tp", "parts": [4, [1, 2]]}, Shard(0, "tp", parts=(4, (1, 2)))),
        ({"shard": 0, "over": "tp", "pad_to": 8}, Shard(0, "tp", pad_to=8)),
        ({"flat": "optimizer", "over": "dp"}, Flat("dp")),
        (
            {"flat": "/(a).*/", "over": "dp", "order": "reverse", "cut": "before_join", "tensor_align": 2,
             "group_pad": 3, "total_align": 4, "max_elements": 5},
            Flat("dp", "/(a).*/", "reverse", "before_join", 2, 3, 4, 5),
        ),
        ({"stage": -1, "over": "dp"}, Stage("dp", -1)),
        ({"owner": 3}, Owner(3)),
        ({"owner": 1, "over": "dp"}, Owner(1, "dp")),
        ({"partial": "mean"}, Partial("mean")),
    ],
)  # fmt: skip
def test_every_spelling_lowers_and_lifts(spelled: Any, placement: Any) -> None:
    layout = Layout.parse(rule(spelled))
    assert layout.rules[1].place == (placement,)
    assert layout.dump()["rules"][1]["place"] == [spelled]
    assert layout == Layout({"dp": 2, "tp": 2}, [Rule("*"), Rule("*", (placement,))])


def test_the_whole_document_survives() -> None:
    given = document(
        meshes=[
            {"name": "x", "axes": [{"pp": 2}, {"dp": 2}], "ranks": [3, 2, 1, 0]},
            {"name": "y", "axes": [{"ep": 4}]},
        ],
        stages=[{"match": ["/l(.*)/", "*"], "states": ["m*"], "mesh": "y", "place": ["replicate"]}],
        renames=[{"from": "a(.*)", "to": r"\1"}],
    )
    del given["mesh"]
    layout = Layout.parse(given)
    assert layout.dump() == given
    assert layout.meshes == {"x": Mesh({"pp": 2, "dp": 2}, [3, 2, 1, 0]), "y": Mesh({"ep": 4})}
    assert layout.rename("abc") == "bc"
    assert "x (pp=2, dp=2), y (ep=4): 1 + 1 + 0 rules" in repr(layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "1"}, "version: Input should be 1"),
        ({"rules": []}, "rules: there must be at least one"),
        ({"mesh": {"dp": 0}}, r"mesh\.axes\.dp: Input should be greater than or equal to 1"),
        ({"mesh": {"dp": True}}, "mesh.axes.dp: Input should be a valid integer"),
        ({"mesh": None}, "either mesh or meshes"),
        ({"meshes": {"x": {"dp": 4}}}, "either mesh or meshes"),
        ({"mesh": {"axes": [{"dp": 2}, {"dp": 2}]}}, "names an axis twice: dp, dp"),
        (
            {"mesh": {"axes": [{"dp": 2, "tp": 2}]}},
            r"mesh\.ordered\.axes\[0\]: Dictionary should have at most 1 item",
        ),
        ({"optimizer": []}, "optimizer: Extra inputs are not permitted"),
        ({"rules": [{"match": "*"}]}, r"rules\[0\]\.place: Field required"),
        (
            {"rules": [{"match": "/(/", "place": []}]},
            r"rules\[0\] \(match '/\(/'\): '\(' is not a regular expression",
        ),
        ({"renames": [{"from": "a"}]}, r"renames\[0\]\.to: Field required"),
    ],
)
def test_a_document_that_is_no_layout(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(document(**change))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"shard": 0}, r"rules\[1\]\.place\[0\]\.shard\.over: Field required"),
        ({"shard": 0, "over": "tp", "pad": 2}, r"rules\[1\]\.place\[0\]\.shard\.pad: Extra inputs"),
        (
            {"over": "tp"},
            r"rules\[1\]\.place\[0\]: a placement is replicate, or a mapping with one of the keys shard",
        ),
        (3, r"rules\[1\]\.place\[0\]: a placement is replicate"),
        ("replicated", r"rules\[1\]\.place\[0\]\.replicate: Input should be 'replicate'"),
        (
            {"flat": "optimizer", "over": "dp", "cut": "x"},
            r"rules\[1\]\.place\[0\]\.flat\.cut: Input should be",
        ),
        ({"flat": "units", "over": "dp"}, r"rules\[1\] \(match '\*'\): unknown group 'units'"),
        ({"stage": [0, 1], "over": "dp"}, r"rules\[1\] \(match '\*'\) gives the first layers"),
        (
            {"shard": 0, "over": "pp"},
            r"rules\[1\] \(match '\*'\) names the axis 'pp', which is not in the mesh",
        ),
    ],
)
def test_a_faulty_rule_is_named(place: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(rule(place))


def test_a_newer_version_needs_an_upgrade() -> None:
    with pytest.raises(UpgradeNeeded, match="the layout is of version 2"):
        Layout.parse(document(version=2, surprise=1))


@pytest.mark.parametrize("what", [None, [], "layout"])
def test_what_is_no_mapping(what: Any) -> None:
    with pytest.raises(LayoutError, match="not a layout"):
        Layout.parse(what)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "version: 1\nmesh: {dp: 2\nrules: [", r"a\.yaml, line 3"),
        (
            "a.yaml",
            "version: 1\nmesh:\n  dp: 2\n  dp: 4\n",
            r"a\.yaml, line 4: 'dp' is given twice",
        ),
        (
            "a.yaml",
            "x: !!python/object/apply:os.getcwd []",
            r"a\.yaml, line 1: could not determine a constructor",
        ),
        ("a.yaml", "? [a]\n: 1", r"a\.yaml, line 1: found unhashable key"),
        ("a.json", '{"version": 1,\n]', r"a\.json is not JSON: .*line 2"),
        ("a.yaml", "\x00", "a.yaml"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(LayoutError, match=message):
        Layout.load(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no layout file"):
        Layout.load(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(LayoutError, match="not UTF-8"):
        Layout.load(tmp_path / "a.yaml")


def test_json_and_yaml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document()))
    (tmp_path / "a.yaml").write_text(
        "version: 1\nmesh: {dp: 2, tp: 2}\nrules: [{match: '*', place: [replicate]}]\n"
    )
    assert Layout.load(tmp_path / "a.json") == Layout.load(tmp_path / "a.yaml")


STATES = ("weight", "master", "exp_avg", "exp_avg_sq", "step")


def llama(layers: int = 32) -> dict[str, tuple[int, ...]]:
    attention = {"q_proj": (64, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 64)}
    mlp = {"gate_proj": (172, 64), "up_proj": (172, 64), "down_proj": (64, 172)}
    block = {
        **{f"self_attn.{n}.weight": s for n, s in attention.items()},
        **{f"mlp.{n}.weight": s for n, s in mlp.items()},
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
    }
    return {
        "model.embed_tokens.weight": (1000, 64),
        **{f"model.layers.{i}.{n}": s for i in range(layers) for n, s in block.items()},
        "model.norm.weight": (64,),
        "lm_head.weight": (1000, 64),
    }


def mixtral(layers: int = 2) -> dict[str, tuple[int, ...]]:
    block = {
        "self_attention.linear_qkv.weight": (96, 64),
        "self_attention.linear_proj.weight": (64, 64),
        "mlp.router.weight": (8, 64),
        "mlp.experts.linear_fc1.weight": (8, 2 * 32, 64),
        "mlp.experts.linear_fc2.weight": (8, 64, 32),
    }
    return {
        "embedding.word_embeddings.weight": (1000, 64),
        **{f"decoder.layers.{i}.{n}": s for i in range(layers) for n, s in block.items()},
        "output_layer.weight": (1000, 64),
    }


@pytest.mark.parametrize("path", sorted((DOCS / "layouts").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_files_in_the_docs_load_bind_and_cover(path: Path) -> None:
    megatron = "megatron" in path.stem
    shapes, states = (mixtral(), STATES[:-1]) if megatron else (llama(), STATES)
    infos = [
        TensorInfo(n, s, "float32", () if s == "step" else shape)
        for n, shape in shapes.items()
        for s in states
    ]
    layout = Layout.load(path)
    bound = layout.bind(TensorList(tuple(infos), {n: int("norm" in n) for n in shapes}))
    bound.prove()
    assert Layout.parse(layout.dump()) == layout
    for rank in range(bound.ranks):
        assert all(bound.local(key, rank) is not None for key in bound.keys(rank))


def test_zero_1_of_the_docs_on_one_rank() -> None:
    """Rank 5 is pp=1, dp=0, tp=1: layers 8 to 15, the first half of the optimizer's buffer."""
    shapes = llama()
    infos = [TensorInfo(n, s, "float32", shape) for n, shape in shapes.items() for s in STATES[:-1]]
    layout = Layout.load(DOCS / "layouts" / "llama-tp-pp-zero1.yaml")
    bound = layout.bind(TensorList(tuple(infos), dict.fromkeys(shapes, 0)))
    assert {k.name.split(".")[2] for k in bound.keys(5)} == {str(i) for i in range(8, 16)}
    layer = 2 * 64 * 64 + 2 * 16 * 64 + 3 * 172 * 64  # cut by tp
    assert bound.buffers(5)["flat:0", "master"].size == 8 * (layer // 2 + 2 * 64) // 2
    local = bound.local(Key("model.layers.8.mlp.down_proj.weight", "weight"), 5)
    assert local is not None
    assert local.shape == (64, 86)


def test_the_file_shown_in_the_docs_is_a_layout(tmp_path: Path) -> None:
    text = (DOCS / "layout.md").read_text()
    shown = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "shown.yaml").write_text(shown)
    assert Layout.load(tmp_path / "shown.yaml").mesh == Mesh({"pp": 2, "dp": 4, "tp": 2})
