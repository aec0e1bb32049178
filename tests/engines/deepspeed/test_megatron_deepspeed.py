"""Checkpoints in Megatron-DeepSpeed's layout, of every mesh of the Universal Checkpointing paper's table and others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.engines.deepspeed.megatron_deepspeed import FLAT, PAPER_SOURCES, Model, gpt, write
from tests.sources.suite import SourceSuite
from ucformat.engines.deepspeed.source import DeepSpeed
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    LayoutError,
    MissingData,
    UcformatError,
    UnsupportedError,
)
from ucformat.geometry.tensor import Key
from ucformat.storage.local import LocalStore
from ucformat.storage.memory import MemoryStore
from ucformat.testing.reading import read_tensor
from ucformat.testing.sources import Sample

if TYPE_CHECKING:
    from pathlib import Path

    from ucformat.sources.base import OpenSource

SMALL: dict[str, Any] = {
    "hidden": 8,
    "heads": 2,
    "kv": 2,
    "inner": 6,
    "layers": 2,
    "vocab": 11,
    "seq": 5,
}


def opened(folder: Path, **options: Any) -> OpenSource:
    return DeepSpeed(**options).open(LocalStore(folder))


def check(source: OpenSource, truth: dict[tuple[str, str], Any]) -> None:
    """All of the truth is there, and nothing else but `step`."""
    infos = {(i.state, i.name): i for i in source.metadata.tensor_list.tensors if i.state != "step"}
    assert infos.keys() == truth.keys()
    for key, a in truth.items():
        assert infos[key].shape == a.shape, key
        assert read_tensor(source, infos[key]) == a.tobytes(), key


@pytest.mark.parametrize(("tp", "pp", "dp", "zero", "sp"), PAPER_SOURCES)
def test_every_source_of_the_papers_table(
    tmp_path: Path, tp: int, pp: int, dp: int, zero: int, sp: int
) -> None:
    model = gpt(**SMALL, pipe=pp > 1)
    truth = write(tmp_path / "ckpt", model, tp=tp, pp=pp, dp=dp, zero=zero, sp=sp)
    source = opened(tmp_path / "ckpt")
    check(source, truth)
    facts = source.metadata
    degrees = {"zero": zero, "dp": dp * sp} | {k: n for k, n in (("tp", tp), ("pp", pp)) if n > 1}
    assert {k: v for k, v in facts.layout.items() if k != "weight_dtype"} == degrees
    assert facts.step == 3
    assert [len(g["params"]) for g in facts.groups] == [10, 18]
    assert {n for g in facts.groups for n in g["params"]} == set(model.names)
    if tp > 1:
        assert facts.objects["rank"]["tp1" if pp == 1 else "pp0.tp1"]["client_state"] == {
            "tokens": 101
        }


@pytest.mark.parametrize("pipe", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_variants(tmp_path: Path, pipe: bool, swiglu: bool, untied: bool, zero: int) -> None:
    if pipe and zero > 1:
        return
    model = gpt(**SMALL, pipe=pipe, swiglu=swiglu, untied=untied)
    truth = write(
        tmp_path / "ckpt", model, tp=2, pp=2 if pipe else 1, dp=3, zero=zero, groups=1 + swiglu
    )
    check(opened(tmp_path / "ckpt"), truth)


@pytest.mark.parametrize(("zero", "pipe"), [(1, False), (1, True), (3, False)])
def test_frozen_parameters(tmp_path: Path, zero: int, pipe: bool) -> None:
    model = gpt(**SMALL, pipe=pipe)
    frozen = tuple(n for n in model.names if "4h_to_h" in n)
    truth = write(
        tmp_path / "ckpt", replace(model, frozen=frozen), tp=2, pp=1 + pipe, dp=2, zero=zero
    )
    check(opened(tmp_path / "ckpt"), truth)
    assert ("weight", frozen[0]) in truth
    assert ("master", frozen[0]) not in truth


class TestWithoutInfo:
    """Files that do not say how they are cut."""

    @pytest.mark.parametrize(("zero", "pp", "swiglu"), [(1, 1, False), (1, 2, True), (3, 1, True)])
    def test_a_known_family_is_read_by_its_names(
        self, tmp_path: Path, zero: int, pp: int, swiglu: bool
    ) -> None:
        model = gpt(**SMALL, pipe=pp > 1, swiglu=swiglu)
        write(tmp_path / "ckpt", model, tp=2, pp=pp, dp=2, zero=zero, info=False)
        told = write(tmp_path / "told", model, tp=2, pp=pp, dp=2, zero=zero)
        source = opened(tmp_path / "ckpt")
        for (state, name), a in told.items():
            if not state.endswith(".padding"):
                info = next(
                    i for i in source.metadata.tensor_list.tensors if i.key == Key(name, state)
                )
                spare = told.get((f"{state}.padding", name))  # nothing says which rows are padding
                whole = a if spare is None else np.concatenate([a, spare])
                assert read_tensor(source, info) == whole.tobytes(), name

    def renamed(self, swap: dict[str, str]) -> Model:
        model = gpt(**SMALL)

        def new(name: str) -> str:
            for a, b in swap.items():
                name = name.replace(a, b)
            return name

        return replace(
            model,
            arrays={(new(n), s): a for (n, s), a in model.arrays.items()},
            cuts={new(n): c for n, c in model.cuts.items()},
            vocabulary=tuple(map(new, model.vocabulary)),
        )

    OTHER = {"self_attention": "att", "language_model": "net", "dense": "lin", "layers.": "blocks."}  # noqa: RUF012

    def test_an_unknown_family_is_an_error_that_lists_what_is_unclear(self, tmp_path: Path) -> None:
        write(tmp_path / "ckpt", self.renamed(self.OTHER), tp=2, dp=2, info=False)
        with pytest.raises(AmbiguousLayout) as caught:
            opened(tmp_path / "ckpt")
        assert "net.encoder.blocks.0.att.lin.weight" in str(caught.value.message)
        assert "layernorm" not in str(caught.value.message)  # replicas by their bytes
        assert "shard: 0, over: tp or shard: 1, over: tp" in str(caught.value.message)
        assert "mesh: {tp: 2}" in str(caught.value.hint)

    def test_the_hint_is_a_layout_that_resolves_it(self, tmp_path: Path) -> None:
        import yaml

        model = self.renamed(self.OTHER)
        truth = write(tmp_path / "ckpt", model, tp=2, dp=2, info=False, divisible=1)
        with pytest.raises(AmbiguousLayout) as caught:
            opened(tmp_path / "ckpt")
        document = yaml.safe_load(str(caught.value.hint).split(":\n", 1)[1])
        for rule in document["rules"]:
            rule["place"] = [
                {"shard": 0 if model.cuts[rule["match"]] == "column" else 1, "over": "tp"}
            ]
        layout = ucformat.Layout.parse(document)
        source = opened(tmp_path / "ckpt", layout=layout)
        vocabulary = model.vocabulary[0]
        for (state, name), a in truth.items():
            if name != vocabulary:
                info = next(
                    i for i in source.metadata.tensor_list.tensors if i.key == Key(name, state)
                )
                assert read_tensor(source, info) == a.tobytes(), name

    def test_the_size_of_a_padded_vocabulary_can_be_given(self, tmp_path: Path) -> None:
        model = gpt(**SMALL)
        truth = write(tmp_path / "ckpt", model, tp=2, dp=2, info=False)
        rule = {"match": "*word_embeddings*", "place": [{"shard": 0, "over": "tp", "pad_to": 8}]}
        layout = ucformat.Layout({"tp": 2}, [rule])
        check(opened(tmp_path / "ckpt", layout=layout, vocab=11), truth)
        with pytest.raises(LayoutError, match="its size without padding is unknown"):
            opened(tmp_path / "ckpt", layout=layout)

    def test_a_layout_of_another_degree_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "ckpt", gpt(**SMALL), tp=2, info=False)
        with pytest.raises(LayoutError, match="for 4 coordinates"):
            opened(
                tmp_path / "ckpt",
                layout=ucformat.Layout({"tp": 4}, [{"match": "*", "place": ["replicate"]}]),
            )
        with pytest.raises(UcformatError, match="no preset 'gpt9'"):
            opened(tmp_path / "ckpt", layout="gpt9")


def test_what_the_files_say_can_be_overridden(tmp_path: Path) -> None:
    model = gpt(**SMALL)
    row = "language_model.encoder.layers.0.self_attention.dense.weight"
    model.info["parameter_with_row_parallelism_patterns"] = []
    truth = write(tmp_path / "ckpt", model, tp=2)
    found = next(
        i
        for i in opened(tmp_path / "ckpt").metadata.tensor_list.tensors
        if i.key == Key(row, "weight")
    )
    assert found.shape == (16, 4)  # joined along dim 0, as DeepSpeed would
    check(opened(tmp_path / "ckpt", layout="megatron-deepspeed"), truth)


def averaged(tmp_path: Path) -> tuple[Model, str]:
    """A checkpoint of two tensor-parallel ranks, whose position embeddings are to be averaged; the name of these."""
    model = gpt(**SMALL)
    name = "language_model.embedding.position_embeddings.weight"
    model.cuts[name] = "mean"
    model.info["parameter_to_average_patterns"] = [name]
    model.info["tp_replicated_parameter_patterns"].remove(name)
    write(tmp_path / "ckpt", model, tp=2, dp=2)
    return model, name


def test_averaged_parameters_are_kept_as_their_contributions(tmp_path: Path) -> None:
    model, name = averaged(tmp_path)
    source = opened(tmp_path / "ckpt")
    for state in FLAT:
        key = Key(name, state)
        info = next(i for i in source.metadata.tensor_list.tensors if i.key == key)
        assert info.shape == (5, 8)
        parts = source.metadata.means[key]
        assert parts == (Key(name, f"{state}.partial0"), Key(name, f"{state}.partial1"))
        for t, part in enumerate(parts):
            data = read_tensor(_as(source, part), replace(info, state=part.state))
            assert data == (model.arrays[name, state] + np.float32(t)).tobytes()
            assert part not in {i.key for i in source.metadata.tensor_list.tensors}
        with pytest.raises(UnsupportedError, match="mean of 2 values"):
            source.extents(key)
    assert Key(name, "step") not in source.metadata.means


def test_averaged_parameters_are_read_as_their_mean(tmp_path: Path) -> None:
    model, name = averaged(tmp_path)
    ck = ucformat.open(tmp_path / "ckpt")
    assert not [key for key in ck.tensors if "partial" in key.state]
    for state in FLAT:
        value = model.arrays[name, state]
        assert (ck[name, state].read() == (value + (value + np.float32(1))) / np.float32(2)).all()
    out = ucformat.convert(ck, MemoryStore("averaged"))
    assert {s["values"] for s in out.objects["spread"][name].values()} == {2}
    with pytest.raises(UnsupportedError, match="computed"):
        ucformat.convert(ck, tmp_path / "virtual", virtual=True)


def _as(source: OpenSource, key: Key) -> OpenSource:
    assert list(source.extents(key))
    return source


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write(tmp_path / "ckpt", gpt(**SMALL, pipe=True), tp=2, pp=2, dp=2)
        return tmp_path / "ckpt"

    def read_all(self, folder: Path) -> None:
        source = opened(folder)
        for info in source.metadata.tensor_list.tensors:
            list(source.extents(info.key))

    def test_it_reads(self, folder: Path) -> None:
        self.read_all(folder)

    def test_each_missing_file_is_named(self, folder: Path) -> None:
        for path in sorted((folder / "global_step3").iterdir()):
            path.rename(folder / "aside")
            with pytest.raises(MissingData, match=path.name):
                self.read_all(folder)
            (folder / "aside").rename(path)

    def test_all_missing_files_are_named(self, folder: Path) -> None:
        for rank in (1, 2):
            (folder / "global_step3" / f"mp_rank_0{rank}_model_states.pt").unlink()
        with pytest.raises(MissingData, match=r"mp_rank_01_.*mp_rank_02_"):
            opened(folder)

    def test_a_last_rank_that_is_gone_altogether(self, folder: Path) -> None:
        for path in (folder / "global_step3").glob("*mp_rank_03*"):
            path.unlink()
        with pytest.raises(MissingData, match="mp_rank_03_model_states"):
            opened(folder)

    def test_replicas_over_tensor_parallel_ranks_must_agree(self, tmp_path: Path) -> None:
        model = gpt(**SMALL, pipe=True)
        name = "2.input_layernorm.weight"
        model.cuts[name] = "mean"  # but the files say that it is replicated
        write(tmp_path / "x", model, tp=2, pp=2, dp=2)
        source = opened(tmp_path / "x")
        for state in ("weight", "exp_avg"):
            with pytest.raises(IntegrityError, match=name) as caught:
                list(source.extents(Key(name, state)))
            assert caught.value.message.count("global_step3/") == 2

    def test_replicas_over_pipeline_stages_must_agree(self, folder: Path, tmp_path: Path) -> None:
        other = gpt(**SMALL, pipe=True, seed=9)
        write(tmp_path / "other", other, tp=2, pp=2, dp=2)
        for path in (tmp_path / "other" / "global_step3").glob("*zero*mp_rank_02*"):
            path.rename(folder / "global_step3" / path.name)
        source = opened(folder)
        key = Key("tied_modules.embed.word_embeddings.weight", "exp_avg")
        with pytest.raises(IntegrityError, match=r"mp_rank_00(.|\n)*mp_rank_02"):
            list(source.extents(key))
        position = Key("tied_modules.embed.position_embeddings.weight", "exp_avg")
        list(
            source.extents(position)
        )  # of a pipeline's replicated ones but the vocabulary the first stage's counts

    def test_an_unlisted_replica_is_not_joined(self, tmp_path: Path) -> None:
        model = gpt(**SMALL)
        model.info["tp_replicated_parameter_patterns"] = []
        write(tmp_path / "x", model, tp=2)
        with pytest.raises(AmbiguousLayout, match=r"input_layernorm\.weight"):
            opened(tmp_path / "x")


class TestSuite(SourceSuite):
    @pytest.fixture(
        params=[(2, 2, 2, 1, True), (2, 1, 2, 2, False), (2, 1, 2, 3, False), (1, 2, 1, 1, True)]
    )
    def sample(self, request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
        tp, pp, dp, zero, pipe = request.param
        small = {**SMALL, "layers": 1}
        model = gpt(**small, pipe=pipe, swiglu=True)
        truth = write(tmp_path / "ckpt", model, tp=tp, pp=pp, dp=dp, zero=zero, groups=1)
        found = {(s, n): (str(a.dtype), a.shape, a.tobytes()) for (s, n), a in truth.items()}
        steps = frozenset(("step", n) for n in model.names)
        return Sample(
            tmp_path / "ckpt", ".", "deepspeed", found, groups=[model.names], step=3, extra=steps
        )


def test_a_stage_without_layers_is_of_the_family_of_the_others(tmp_path: Path) -> None:
    model = gpt(**{**SMALL, "layers": 1}, pipe=True, untied=True)
    model.layers.update({n: 3 for n in model.names if n.startswith("3.")})
    write(tmp_path / "ckpt", model, tp=2, pp=4, info=False)
    shapes = {
        i.name: i.shape
        for i in opened(tmp_path / "ckpt").metadata.tensor_list.tensors
        if i.state == "weight"
    }
    assert shapes["3.weight"] == (8,)
    assert shapes["4.lm_head.weight"] == (16, 8)
