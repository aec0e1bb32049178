"""Parameters of which no pattern speaks: what proves that they are replicas or cut, and that nothing else decides."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

import ucformat
from tests.engines import engine
from tests.engines.deepspeed.megatron_deepspeed import FLAT, Model, gpt, write
from tests.engines.deepspeed.test_megatron_deepspeed import SMALL, check, opened
from tests.patience import PATIENCE
from ucformat.cli.main import ucp
from ucformat.engines.deepspeed.inference import ModelSizes, as_its_weight
from ucformat.errors import AmbiguousLayout, IntegrityError, UsageError
from ucformat.geometry.tensor import Key
from ucformat.geometry.tp_sharding import concatenate, replicate

if TYPE_CHECKING:
    from pathlib import Path

POSITION = "language_model.embedding.position_embeddings.weight"
NORM = "language_model.encoder.final_layernorm.weight"
LAYER = "language_model.encoder.layers.0."
ARGS = {"max_position_embeddings": 5, "seq_length": 5, "hidden_size": 8, "padded_vocab_size": 16}

Arrays = dict[tuple[str, str], Any]


def unlisted(model: Model, *words: str) -> Model:
    """The same without the patterns that have one of these words."""
    info = {
        key: [p for p in value if not any(w in p for w in words)]
        if isinstance(value, list)
        else value
        for key, value in model.info.items()
    }
    return replace(model, info=info)


def filled(model: Model, values: dict[str, float]) -> Model:
    """The same at step 0: moments of zeros, and parameters of one value, where their names have one of these words."""
    arrays = {
        (name, state): np.full_like(
            a, next((v for word, v in values.items() if word in name and state == "master"), 0.0)
        )
        if state != "master" or any(word in name for word in values)
        else a
        for (name, state), a in model.arrays.items()
    }
    return replace(model, arrays=arrays)


def added(model: Model, name: str, cut: str, arrays: dict[str, Any]) -> Model:
    more = {(name, state): np.asarray(a, np.float32) for state, a in arrays.items()}
    return replace(model, arrays={**model.arrays, **more}, cuts={**model.cuts, name: cut})


def random(*shape: int, seed: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {state: rng.standard_normal(shape) for state in FLAT}


def proved(folder: Path, model: Model, **how: Any) -> None:
    truth = write(folder, model, **how)
    check(opened(folder), truth)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("tp", [2, 3])
def test_a_position_embedding_that_no_pattern_matches_is_a_replica(
    tmp_path: Path, zero: int, tp: int
) -> None:
    model = unlisted(gpt(hidden=12, heads=3, kv=3, inner=9, layers=1, vocab=17, seq=7), "position")
    truth = write(tmp_path / "x", model, tp=tp, dp=2, zero=zero)
    assert truth["master", POSITION].shape == (7, 12)
    check(opened(tmp_path / "x"), truth)


@pytest.mark.parametrize("swiglu", [False, True])
def test_in_a_pipeline_too(tmp_path: Path, swiglu: bool) -> None:
    model = unlisted(gpt(**SMALL, pipe=True, swiglu=swiglu), "position")
    proved(tmp_path / "x", model, tp=2, pp=2, dp=2)


def test_one_of_the_width_of_the_model(tmp_path: Path) -> None:
    """Neither dim tells: a square matrix that every rank has."""
    model = added(gpt(**SMALL), LAYER + "gate.weight", "replicate", random(8, 8))
    proved(tmp_path / "x", model, tp=2, dp=2)


class TestStepZero:
    """Moments of zeros, norms of ones, biases of zeros: equal on all ranks whatever they are."""

    START = {"layernorm.weight": 1.0, "bias": 0.0}  # noqa: RUF012

    @pytest.mark.parametrize(("zero", "dtype"), [(1, "bfloat16"), (2, "float32"), (3, "bfloat16")])
    def test_biases_go_with_their_weights(self, tmp_path: Path, zero: int, dtype: str) -> None:
        """Of `query_key_value.bias` no pattern speaks either; those of row-parallel layers are left out here."""
        model = unlisted(
            filled(gpt(**SMALL), self.START), "position", "dense.bias", "dense_4h_to_h.bias"
        )
        proved(tmp_path / "x", model, tp=2, dp=2, zero=zero, dtype=dtype)

    def test_a_norm_goes_with_the_other_norms(self, tmp_path: Path) -> None:
        model = unlisted(filled(gpt(**SMALL), self.START), "final_layernorm")
        proved(tmp_path / "x", model, tp=2)

    def test_a_norm_that_nothing_tells_of_is_a_doubt(self, tmp_path: Path) -> None:
        model = unlisted(filled(gpt(**SMALL), self.START), "layernorm")
        truth = write(tmp_path / "x", model, tp=2)
        with pytest.raises(AmbiguousLayout, match=r"final_layernorm\.weight"):
            opened(tmp_path / "x")
        check(opened(tmp_path / "x", cuts={"*layernorm*": "replicate"}), truth)
        write(tmp_path / "told", model, tp=2, args={"hidden_size": 8})
        check(opened(tmp_path / "told"), truth)

    @pytest.mark.parametrize(("cut", "shape"), [("replicate", (3, 8)), ("column", (6, 8))])
    def test_a_matrix_of_zeros(self, tmp_path: Path, cut: str, shape: tuple[int, ...]) -> None:
        name = LAYER + "adapter.up.weight"
        model = added(gpt(**SMALL), name, cut, dict.fromkeys(FLAT, np.zeros(shape)))
        truth = write(tmp_path / "x", model, tp=2)
        with pytest.raises(AmbiguousLayout) as caught:
            opened(tmp_path / "x")
        assert name in caught.value.message
        assert POSITION not in caught.value.message
        assert f"options={{'cuts': {{'{name}': 'replicate'}}}}" in str(caught.value.hint)
        check(
            opened(tmp_path / "x", cuts={"*adapter*": "replicate" if cut == "replicate" else 0}),
            truth,
        )

    @pytest.mark.parametrize(("cut", "shape"), [("replicate", (3, 8)), ("column", (6, 8))])
    def test_any_state_is_evidence(self, tmp_path: Path, cut: str, shape: tuple[int, ...]) -> None:
        name = LAYER + "adapter.up.weight"
        found = {
            "master": np.zeros(shape),
            "exp_avg": random(*shape)["master"],
            "exp_avg_sq": np.ones(shape),
        }
        model = added(gpt(**SMALL), name, cut, found)
        proved(tmp_path / "x", model, tp=2, dp=2)

    def test_rows_that_repeat_prove_nothing(self, tmp_path: Path) -> None:
        """As a state space model's `A_log` begins: every row is the same, so its parts are equal where it is cut."""
        name, rows = LAYER + "mixer.A_log", np.tile(np.arange(1.0, 9.0), (6, 1))
        model = added(
            gpt(**SMALL), name, "column", {**dict.fromkeys(FLAT, np.zeros((6, 8))), "master": rows}
        )
        write(tmp_path / "x", model, tp=2)
        with pytest.raises(AmbiguousLayout, match="A_log"):
            opened(tmp_path / "x")
        trained = {**random(6, 8), "master": rows}
        truth = write(tmp_path / "y", added(gpt(**SMALL), name, "column", trained), tp=2)
        check(opened(tmp_path / "y"), truth)


class TestArguments:
    """What the checkpoint's own arguments tell goes before the bytes."""

    def test_of_a_table_of_zeros(self, tmp_path: Path) -> None:
        model = unlisted(filled(gpt(**SMALL), {"position": 0.0}), "position")
        truth = write(tmp_path / "x", model, tp=2, args=ARGS)
        check(opened(tmp_path / "x"), truth)
        model.cuts[POSITION] = "column"
        wide = {
            k: np.zeros((10, 8), np.float32) if k[0] == POSITION else a
            for k, a in model.arrays.items()
        }
        told = {**ARGS, "max_position_embeddings": 10}
        truth = write(tmp_path / "cut", replace(model, arrays=wide), tp=2, args=told)
        check(opened(tmp_path / "cut"), truth)

    def test_where_no_other_parameter_is_called_replicated(self, tmp_path: Path) -> None:
        model = gpt(**SMALL)
        model.info["tp_replicated_parameter_patterns"] = []
        write(tmp_path / "x", model, tp=2, args=ARGS)
        with pytest.raises(AmbiguousLayout) as caught:
            opened(tmp_path / "x")
        assert "layernorm" not in caught.value.message
        assert "position" not in caught.value.message
        assert "dense.bias" in caught.value.message

    def test_copies_that_came_apart_are_not_joined(self, tmp_path: Path) -> None:
        model = unlisted(gpt(**SMALL), "position")
        model.cuts[POSITION] = "mean"
        write(tmp_path / "x", model, tp=2, args=ARGS)
        with pytest.raises(AmbiguousLayout, match="position_embeddings") as caught:
            opened(tmp_path / "x")
        assert f"'{POSITION}': 'mean'" in str(caught.value.hint)

    def test_a_row_parallel_matrix_that_was_forgotten(self, tmp_path: Path) -> None:
        model = unlisted(gpt(**SMALL), "self_attention.dense.weight")
        truth = write(tmp_path / "x", model, tp=2, args=ARGS)
        with pytest.raises(AmbiguousLayout, match=r"self_attention\.dense\.weight") as caught:
            opened(tmp_path / "x")
        assert "dense_4h_to_h" not in caught.value.message
        check(opened(tmp_path / "x", cuts={"*.self_attention.dense.weight": 1}), truth)

    @pytest.mark.parametrize(
        ("name", "shape", "whole"),
        [
            (POSITION, (5, 8), True),
            ("transformer.wpe.weight", (5, 8), True),
            ("x.word_embeddings.weight", (8, 8), False),
            ("x.word_embeddings.weight", (16, 8), True),
            ("x.word_embeddings.weight", (4, 8), None),
            ("embedding.tokentype_embeddings.weight", (2, 8), None),
            ("h.0.ln_1.weight", (8,), True),
            ("h.0.ln_1.weight", (4,), False),
            ("h.0.q_layernorm.weight", (8,), None),
            ("h.0.mlp.weight", (5, 8), None),
            ("h.0.mlp.bias", (8,), None),
        ],
    )
    def test_sizes_by_name(self, name: str, shape: tuple[int, ...], whole: bool | None) -> None:
        assert ModelSizes.of({"args": ARGS}).whole(name, (shape, shape)) is whole


class TestRanksThatWereSeededAlike:
    """Equal parts are no proof of replicas where the parts of all parameters are equal."""

    def alike(self, info: bool, tmp_path: Path) -> None:
        arrays: Arrays = {("net.a.weight", s): np.tile(a, (2, 1)) for s, a in random(3, 8).items()}
        arrays |= {("net.b.weight", s): np.tile(a, (2, 1)) for s, a in random(4, 8, seed=6).items()}
        arrays |= {("net.c.weight", s): a for s, a in random(8, seed=7).items()}
        cuts = {"net.a.weight": "column", "net.b.weight": "column", "net.c.weight": "replicate"}
        told = {
            "tp_replicated_parameter_patterns": ["net.c.weight"],
            "universal_checkpoint_version": 0.2,
        }
        model = Model({k: np.asarray(a, np.float32) for k, a in arrays.items()}, cuts, info=told)
        write(tmp_path / "x", model, tp=2, info=info)

    @pytest.mark.parametrize("info", [True, False])
    def test_it_is_a_doubt(self, tmp_path: Path, info: bool) -> None:
        self.alike(info, tmp_path)
        with pytest.raises(AmbiguousLayout, match=r"net\.a\.weight"):
            opened(tmp_path / "x")
        found = opened(
            tmp_path / "x", cuts={"net.[ab].*": 0, "/net\\.[ab].*/": 0, "net.c*": "replicate"}
        )
        shapes = {
            i.name: i.shape for i in found.metadata.tensor_list.tensors if i.state == "master"
        }
        assert shapes == {"net.a.weight": (6, 8), "net.b.weight": (8, 8), "net.c.weight": (8,)}


class TestCuts:
    def test_a_word_that_is_none(self, tmp_path: Path) -> None:
        write(tmp_path / "x", gpt(**SMALL), tp=2)
        with pytest.raises(UsageError, match="'sideways', given for 'x'"):
            opened(tmp_path / "x", cuts={"x": "sideways"})

    def test_they_go_before_a_layout_and_what_the_checkpoint_says(self, tmp_path: Path) -> None:
        write(tmp_path / "x", gpt(**SMALL), tp=2)
        layout = ucformat.Layout(
            {"tp": 2}, [{"match": "*position*", "place": [{"shard": 1, "over": "tp"}]}]
        )
        for options, shape in (
            (({"layout": layout}), (5, 16)),
            ({"layout": layout, "cuts": {POSITION: 0}}, (10, 8)),
        ):
            found = {
                i.name: i.shape
                for i in opened(tmp_path / "x", **options).metadata.tensor_list.tensors
            }
            assert found[POSITION] == shape

    def test_of_halves_and_means(self, tmp_path: Path) -> None:
        model = gpt(**SMALL, swiglu=True)
        model.info["parameter_with_2_sub_params_cat_dim_0"] = []
        truth = write(tmp_path / "x", model, tp=2)
        check(opened(tmp_path / "x", cuts={"*dense_h_to_4h*": "halves"}), truth)
        key = Key(POSITION, "master")
        assert key in opened(tmp_path / "x", cuts={"*position*": "mean"}).metadata.means

    def test_on_the_command_line(self, tmp_path: Path) -> None:
        name = LAYER + "adapter.up.weight"
        write(
            tmp_path / "x",
            added(gpt(**SMALL), name, "replicate", dict.fromkeys(FLAT, np.zeros((3, 8)))),
            tp=2,
        )
        run = CliRunner().invoke
        command = ["show", str(tmp_path / "x"), "-t", "*adapter*", "-s", "master", "--json"]
        assert run(ucp, command).exit_code != 0
        done = run(ucp, [*command, "--source", f"cuts=*adapter*=replicate,{POSITION}=0"])
        assert done.exit_code == 0, done.output
        assert [t["shape"] for t in json.loads(done.stdout)["tensors"]] == [[3, 8]]
        for text in ("cuts=", "cuts=x", "cuts==0", "cuts=x=,y=0"):
            assert run(ucp, [*command, "--source", text]).exit_code == 2


def test_a_bias_has_the_rows_of_its_weight() -> None:
    weights = {
        "a.weight": concatenate(((3, 8), (2, 8)), 0),
        "b.weight": concatenate(((4, 3), (4, 2)), 1),
    }
    assert as_its_weight("a.bias", ((3,), (2,)), weights) == concatenate(((3,), (2,)), 0).because(
        "the rows of its weight"
    )
    row = as_its_weight("b.bias", ((4,), (4,)), weights)
    assert row is not None
    assert row.regions == replicate(((4,), (4,))).regions
    assert as_its_weight("b.bias", ((8,), (8,)), weights) is None
    assert as_its_weight("c.bias", ((4,), (4,)), weights) is None


#: Folders that DeepSpeed's converter makes: name -> what is written, and how.
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": ({}, {"zero": 1}),
    "zero3": ({}, {"zero": 3}),
    "pipeline": ({"pipe": True}, {"pp": 2}),
    "start": ({}, {"zero": 1, "dtype": "float32"}),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Arrays]]:
    """Universal folders that DeepSpeed's own converter made, in which it has joined the position embedding."""
    root = tmp_path_factory.mktemp("universal")
    truths = {}
    for name, (kinds, how) in SOURCES.items():
        model = unlisted(gpt(**SMALL, **kinds), "position")
        if name == "start":
            model = unlisted(filled(model, TestStepZero.START), "dense.bias")
        truths[name] = write(root / name, model, tp=2, dp=2, nested=False, **how)
    script = (
        "import sys; from argparse import Namespace; from deepspeed.checkpoint.ds_to_universal import main\n"
        "for name in sys.argv[2:]:\n"
        "    main(Namespace(input_folder=f'{sys.argv[1]}/{name}/global_step3', num_extract_workers=1,\n"
        "        output_folder=f'{sys.argv[1]}/{name}-u/global_step3', num_merge_workers=1, keep_temp_folder=False,\n"
        "        strict=True, inject_missing_state=False))\n"
    )
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
    }
    environment.pop("PYTHONPATH", None)
    command = [str(engine("deepspeed")), "-c", script, str(root), *SOURCES]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return root, truths


class TestUniversal:
    @pytest.mark.parametrize("name", list(SOURCES))
    def test_what_was_joined_unasked_is_taken_apart(
        self, converted: tuple[Path, dict[str, Arrays]], name: str
    ) -> None:
        import torch

        root, truths = converted
        (atom,) = (root / f"{name}-u" / "global_step3" / "zero").glob(
            "*position_embeddings.weight/fp32.pt"
        )
        assert torch.load(atom, weights_only=True)["param"].shape == (10, 8)
        found = opened(root / f"{name}-u")
        gone = {"weight", "weight.padding"} if name == "pipeline" else set()
        truth = {key: a for key, a in truths[name].items() if key[0] not in gone}
        spare = [
            key
            for key in truth
            if key[0] in ("master.padding", "exp_avg.padding", "exp_avg_sq.padding")
        ]
        check(
            found, {key: a for key, a in truth.items() if key not in spare}
        )  # the converter cuts it off

    def test_parts_that_differ_are_an_error(
        self, converted: tuple[Path, dict[str, Arrays]], tmp_path: Path
    ) -> None:
        import shutil

        import torch

        copy = shutil.copytree(converted[0] / "zero1-u", tmp_path / "copy")
        path = copy / "global_step3" / "zero" / POSITION / "exp_avg.pt"
        value = torch.load(path, weights_only=True)
        value["param"][7, 3] += 1
        torch.save(value, path)
        source = opened(copy)
        list(source.extents(Key(POSITION, "master")))
        with pytest.raises(IntegrityError, match=r"exp_avg.* parts of the tensor-parallel ranks"):
            list(source.extents(Key(POSITION, "exp_avg")))

    def test_cuts_are_heeded(self, converted: tuple[Path, dict[str, Arrays]]) -> None:
        found = opened(converted[0] / "zero1-u", cuts={POSITION: 0}).metadata.tensor_list.tensors
        assert {i.shape for i in found if i.name == POSITION and i.state != "step"} == {(10, 8)}
