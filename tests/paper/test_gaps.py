"""Sixteen things that DeepSpeed's Universal Checkpointing cannot do or does wrongly, each of which goes well here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ucformat
from bench.paper import Opened
from bench.paper_model import LAYERS, Degrees, to_gpt_model
from tests.engines.deepspeed.megatron_deepspeed import FLAT, gpt, write
from tests.fakes import FakeSource, give_values, random_array, same
from tests.paper.files import rewrite
from tests.sources.suite import kept
from ucformat.checkpoint import Checkpoint
from ucformat.errors import AmbiguousLayout, StateMismatch
from ucformat.geometry.tensor import Key
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "hidden": 8,
    "heads": 2,
    "kv": 2,
    "inner": 6,
    "layers": 2,
    "vocab": 11,
    "seq": 5,
}
EVERYTHING: dict[str, Any] = {"match": "*", "place": ["replicate"]}
OTHER = {"self_attention": "att", "language_model": "net", "dense": "lin", "layers.": "blocks."}


def check(ck: Checkpoint, truth: dict[tuple[str, str], Any]) -> None:
    """All of the truth, by (state, name), bit for bit."""
    for (state, name), a in truth.items():
        assert same(ck[name, state].read(), a), (name, state)


def read_as(
    ck: Checkpoint, layout: ucformat.Layout, states: list[str] | None = None
) -> list[dict[tuple[str, str], Any]]:
    return [ck.plan(layout, rank, states).execute() for rank in range(layout.mesh.size)]


@pytest.mark.parametrize(("zero", "other"), [(1, 3), (2, 3), (3, 1), (3, 2)])
def test_h1_any_zero_stage_to_any_other(tmp_path: Path, zero: int, other: int) -> None:
    """DeepSpeed's loader of ZeRO 3 wants files that a conversion of ZeRO 1 does not have, and the other way round."""
    opened = Opened(tmp_path / "ckpt", Degrees(1, 1, 2, zero, 1))
    assert opened.cell(Degrees(1, 1, 3, other, 1)).wrong is None
    if zero == 3:  # ZeRO 3 stores no 16-bit weights: they are the masters, rounded
        weights = opened.ck.view(
            [
                {"keep": "*", "states": ["master"]},
                {"rename_states": {"master": "weight"}},
                {"cast": "*", "dtype": str(opened.ck.metadata.layout["weight_dtype"])},
            ]
        )
        for name in weights:
            rounded = opened.truth.arrays[name, "master"].astype(ml_dtypes.bfloat16)
            assert same(weights[name, "weight"].read(), rounded), name


class TestH2BuffersAndFrozenParametersAreRestored:
    """DeepSpeed fills what the optimizer holds, and leaves buffers and frozen parameters as the model was made."""

    @pytest.mark.parametrize(
        ("name", "what"), [("pp2-dp2-z1", "scale"), ("pp2-z1-bf16opt", "1.down")]
    )
    def test_of_real_checkpoints(self, name: str, what: str) -> None:
        made = kept("deepspeed", name)
        truth = {
            n: v
            for (s, n), v in made.truth.items()
            if s == "weight" and ("exp_avg", n) not in made.truth
        }
        assert any(what in n for n in truth)
        out = ucformat.convert(made.checkpoint, MemoryStore(f"h2-{name}"))
        (found,) = read_as(out, ucformat.Layout({"dp": 1}, [EVERYTHING]))
        for n, (_, shape, data) in truth.items():
            assert found[n, "weight"].shape == shape
            assert found[n, "weight"].tobytes() == data

    @pytest.mark.parametrize("zero", [1, 3])
    def test_of_every_stage_and_rank(self, tmp_path: Path, zero: int) -> None:
        model = gpt(**SMALL)
        frozen = tuple(n for n in model.names if "4h_to_h" in n)
        truth = write(tmp_path / "ckpt", replace(model, frozen=frozen), tp=2, dp=2, zero=zero)
        out = ucformat.convert(tmp_path / "ckpt", MemoryStore(f"h2-zero{zero}"))
        for found in read_as(out, ucformat.Layout({"dp": 3}, [EVERYTHING])):
            for n in frozen:
                assert same(found[n, "weight"], truth["weight", n])
                assert (n, "master") not in found


@pytest.mark.parametrize("zero", [1, 3])
def test_h3_each_group_keeps_its_hyper_parameters(tmp_path: Path, zero: int) -> None:
    """DeepSpeed gives all groups of ZeRO 3 those of the first, so that norms and biases decay."""
    model = gpt(**SMALL)
    write(tmp_path / "ckpt", model, dp=2, zero=zero)
    out = ucformat.convert(tmp_path / "ckpt", MemoryStore(f"h3-{zero}"))
    decay = {n: g.options["weight_decay"] for g in out.manifest.groups for n in g.params}
    assert decay == {n: 0.01 if model.arrays[n, "master"].ndim > 1 else 0.0 for n in model.names}


def test_h4_groups_that_differ_between_stages_are_joined_by_what_they_are(tmp_path: Path) -> None:
    """DeepSpeed takes the groups of one rank, and matches them by position; a stage may have other ones."""
    model = gpt(
        **{**SMALL, "layers": 1}, pipe=True, untied=True
    )  # a stage each: embedding, layer, final norm, head
    truth = write(tmp_path / "ckpt", model, pp=4, dp=2)

    def no_decay(value: dict[str, Any], name: str) -> None:
        (group,) = value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        group["weight_decay"] = 0.0

    rewrite(tmp_path / "ckpt", "*mp_rank_02_optim_states.pt", no_decay)  # which has vectors alone
    ck = ucformat.open(tmp_path / "ckpt")
    check(ck, truth)
    assert [g["weight_decay"] for g in ck.metadata.groups] == [0.01, 0.0]
    for group, wide in zip(ck.metadata.groups, (True, False), strict=True):
        assert set(group["params"]) == {
            n for n in model.names if (model.arrays[n, "master"].ndim > 1) == wide
        }


class TestH5AnyOptimizer:
    """DeepSpeed knows `exp_avg` and `exp_avg_sq` by name; others' states are an error, or dropped."""

    @pytest.mark.parametrize("zero", [1, 3])
    @pytest.mark.parametrize(
        "names", [("momentum_buffer",), ("variance",), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")]
    )
    def test_states_of_other_names(self, tmp_path: Path, zero: int, names: tuple[str, ...]) -> None:
        truth = write(tmp_path / "ckpt", gpt(**SMALL), tp=2, dp=2, zero=zero)
        rewrite(
            tmp_path / "ckpt",
            "*optim_states.pt",
            lambda value, _: self.rename(value, [names, names]),
        )
        self.compare(tmp_path / "ckpt", truth, lambda _: names)

    @pytest.mark.parametrize("zero", [1, 3])
    def test_groups_of_two_optimizers(self, tmp_path: Path, zero: int) -> None:
        """Muon for matrices, Adam for vectors."""
        truth = write(tmp_path / "ckpt", gpt(**SMALL), tp=2, dp=2, zero=zero)
        names = [("momentum_buffer",), ("exp_avg", "exp_avg_sq")]
        rewrite(tmp_path / "ckpt", "*optim_states.pt", lambda value, _: self.rename(value, names))
        self.compare(tmp_path / "ckpt", truth, lambda a: names[a.ndim < 2])

    def rename(self, value: dict[str, Any], names: list[tuple[str, ...]]) -> None:
        state = value["optimizer_state_dict"]
        inner = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        for held, new in zip(inner["state"].values(), names, strict=True):
            old = [held.pop("exp_avg"), held.pop("exp_avg_sq")]
            held.update({n: old[i % 2].clone() for i, n in enumerate(new)})

    def compare(self, folder: Path, truth: dict[tuple[str, str], Any], names: Any) -> None:
        out = ucformat.convert(folder, MemoryStore(f"h5-{folder}"))
        for (state, name), a in truth.items():
            if state == "master":
                new = names(a)
                for i, found in enumerate(new):
                    assert same(out[name, found].read(), truth[FLAT[1 + i % 2], name])
                assert set(out.states(name)) - {"weight", "master", "step"} == {
                    *new, *(s for s in out.states(name) if s.endswith(".padding"))
                }  # fmt: skip

    def test_factored_states_have_shapes_of_their_own(self) -> None:
        """Adafactor's rows and columns."""
        shapes = {"weight": (6, 10), "row_var": (6, 1), "col_var": (1, 10), "step": ()}
        arrays = {
            ("w", s): random_array(shape, "float32", i)
            for i, (s, shape) in enumerate(shapes.items())
        }
        out = ucformat.convert(
            Checkpoint(FakeSource.write(MemoryStore("h5"), arrays)), MemoryStore("h5-factored")
        )
        cut = {"match": "*", "states": ["weight", "row_var"], "place": [{"shard": 0, "over": "tp"}]}
        one = read_as(out, ucformat.Layout({"tp": 2}, [cut, EVERYTHING]))[1]
        assert same(one["w", "row_var"], arrays["w", "row_var"][3:])
        assert same(one["w", "col_var"], arrays["w", "col_var"])


@pytest.mark.parametrize("zero", [1, 3])
def test_h6_weights_alone_without_the_optimizer(tmp_path: Path, zero: int) -> None:
    """DeepSpeed ignores `load_optimizer_states=False` for universal checkpoints of ZeRO 1 and 2."""
    model = gpt(**SMALL)
    truth = write(tmp_path / "ckpt", model, tp=2, dp=2, zero=zero)
    state = "weight" if zero == 1 else "master"
    ck = ucformat.open(tmp_path / "ckpt")
    plan = ck.plan(ucformat.Layout({"dp": 1}, [EVERYTHING]), 0, [state])
    assert plan.bytes_needed == sum(truth[state, n].nbytes for n in model.names)
    found = plan.execute()
    assert found.keys() == {(n, state) for n in model.names}
    assert all(same(a, truth[state, n]) for (n, _), a in found.items())
    out = ucformat.convert(ck, MemoryStore(f"h6-{zero}"), states=[state])
    assert {key.state for key in out.tensors} == {state}


@pytest.mark.parametrize("name", ["pp2-z1-bf16opt", "pp2-dp2-z1"])
def test_h7_global_state_of_the_optimizer_is_kept(name: str) -> None:
    """DeepSpeed's BF16_Optimizer loads none of it: clipping, loss scale."""
    out = ucformat.convert(kept("deepspeed", name).checkpoint, MemoryStore(f"h7-{name}"))
    assert out.objects["optimizer"]["clip_grad"] == 1.0
    if name == "pp2-dp2-z1":
        assert out.objects["optimizer"]["loss_scaler"]["$state"] == {
            "cur_scale": 1.0,
            "dynamic": False,
        }
        assert out.objects["optimizer"]["overflow"] is False


class TestH8WithoutInfoNothingIsGuessed:
    """DeepSpeed's `--inject_missing_state` joins every parameter along dim 0, replicas and row-parallel ones too."""

    def test_a_known_family_is_read_rightly(self, tmp_path: Path) -> None:
        write(tmp_path / "told", gpt(**SMALL), tp=2, dp=2)
        write(tmp_path / "ckpt", gpt(**SMALL), tp=2, dp=2, info=False)
        told, ck = ucformat.open(tmp_path / "told"), ucformat.open(tmp_path / "ckpt")
        for key in told.tensors:
            if not key.state.endswith(".padding") and "word_embeddings" not in key.name:
                assert same(ck[key.name, key.state].read(), told[key.name, key.state].read()), key

    def test_an_unknown_one_is_an_error_that_says_what_to_say(self, tmp_path: Path) -> None:
        model = gpt(**SMALL)

        def new(name: str) -> str:
            for a, b in OTHER.items():
                name = name.replace(a, b)
            return name

        other = replace(
            model,
            arrays={(new(n), s): a for (n, s), a in model.arrays.items()},
            cuts={new(n): c for n, c in model.cuts.items()},
            vocabulary=tuple(map(new, model.vocabulary)),
        )
        write(tmp_path / "ckpt", other, tp=2, info=False)
        with pytest.raises(AmbiguousLayout, match=r"att\.lin\.weight") as caught:
            ucformat.open(tmp_path / "ckpt")
        assert "mesh: {tp: 2}" in str(caught.value.hint)


def test_h9_vocabularies_of_several_sizes(tmp_path: Path) -> None:
    """DeepSpeed has one size for all: a larger table is truncated, a bias of one dim an error."""
    model = gpt(**{**SMALL, "vocab": 10})
    first = model.vocabulary[0]
    second, bias = "language_model.second_embed.weight", "language_model.second_embed.bias"
    for name, shape in ((second, (14, 8)), (bias, (14,))):
        model.cuts[name] = "column"
        model.arrays |= {(name, s): random_array(shape, "float32", i) for i, s in enumerate(FLAT)}
    exact = [f"^{re.escape(n)}$" for n in (first, second, bias)]
    model.info["vocabulary_parameter_patterns"] = (
        exact  # as AutoTP writes them, with the size of the first
    )
    truth = write(tmp_path / "ckpt", model, tp=2, dp=2, divisible=1, dtype="float32")
    ck = ucformat.open(tmp_path / "ckpt")
    assert [ck[n, "master"].shape for n in (first, second, bias)] == [(10, 8), (14, 8), (14,)]
    check(ck, truth)
    pads = [
        {"match": n, "place": [{"shard": 0, "over": "tp", "pad_to": 8}]}
        for n in (first, second, bias)
    ]
    last = read_as(
        ck, ucformat.Layout({"tp": 2}, [{**EVERYTHING, "states": ["step"]}, *pads, EVERYTHING])
    )[1]
    assert [last[n, "master"].shape for n in (first, second, bias)] == [(8, 8), (8, 8), (8,)]
    for n in (first, second, bias):
        rows = truth["master", n][8:]
        assert same(last[n, "master"][: len(rows)], rows)
        assert not last[n, "master"][len(rows) :].any()


def test_h10_a_mean_says_how_far_its_values_lay_apart(tmp_path: Path) -> None:
    """DeepSpeed averages weights and moments, and nobody learns what was lost."""
    model = gpt(**SMALL)
    name = "language_model.embedding.position_embeddings.weight"
    model.cuts[name] = "mean"
    model.info["parameter_to_average_patterns"] = [name]
    model.info["tp_replicated_parameter_patterns"].remove(name)
    write(tmp_path / "ckpt", model, tp=4 // 2, dp=2)
    out = ucformat.convert(tmp_path / "ckpt", MemoryStore("h10"))
    for state in FLAT:
        a, b = (model.arrays[name, state] + np.float32(t) for t in range(2))
        assert same(out[name, state].read(), (a + b) / np.float32(2))
        apart = float(np.abs(a.astype(float) - b).max())
        assert out.objects["spread"][name][state] == {"values": 2, "max_abs_difference": apart}


def test_h11_names_of_gptmodel_and_gptmodelpipe_both_ways(tmp_path: Path) -> None:
    """DeepSpeed needs equal names; users renamed by hand, and lost training."""
    small = {**SMALL, "layers": LAYERS}
    of_pipe = gpt(**small, pipe=True)
    truths = {
        pipe: write(tmp_path / str(pipe), gpt(**small, pipe=pipe), tp=2, pp=1 + pipe, dp=2)
        for pipe in (True, False)
    }
    names = {n: to_gpt_model(n) for n in of_pipe.names}
    for pipe, pairs in ((True, names), (False, {b: a for a, b in names.items()})):
        steps = [{"rename": f"/{re.escape(a)}/", "to": b} for a, b in pairs.items()]
        seen = ucformat.open(tmp_path / str(pipe)).view(steps)
        check(
            seen, {key: a for key, a in truths[not pipe].items() if not key[0].endswith(".padding")}
        )
        grouped = {n for g in seen.metadata.groups for n in g["params"]}
        assert grouped == set(pairs.values())


class TestH12WhatEachRankHasForItself:
    """DeepSpeed copies the source ranks' files; for other ranks there is no rule."""

    def test_every_ranks_values_are_kept_by_its_place(self, tmp_path: Path) -> None:
        write(tmp_path / "ckpt", gpt(**SMALL), tp=2, dp=2, zero=3)

        def own(value: dict[str, Any], name: str) -> None:
            value |= {
                "rng_state": torch.tensor(list(name.encode()), dtype=torch.uint8),
                "lr_scheduler": {"last": 3},
            }

        rewrite(tmp_path / "ckpt", "*model_states.pt", own)
        out = ucformat.convert(tmp_path / "ckpt", MemoryStore("h12"))
        assert out.objects["lr_scheduler"] == {"last": 3}
        assert out.objects["rank"].keys() == {"tp1", "tp0.dp1", "tp1.dp1"}
        states = [r["client_state"]["rng_state"] for r in out.objects["rank"].values()]
        assert len({str(s) for s in (out.objects["client_state"]["rng_state"], *states)}) == 4

    def test_for_other_ranks_there_is_a_rule_or_an_error(self, tmp_path: Path) -> None:
        """Two ranks' checkpoint, loaded by one."""
        from ucformat.torch import PerRank, load

        source = Checkpoint(
            FakeSource.write(MemoryStore("h12-two"), {("w", "weight"): np.ones(2, np.float32)})
        )
        give_values(
            ucformat.convert(source, tmp_path / "two").store,
            [{"loader": {"at": 3}}, {"loader": {"at": 4}}],
        )
        state: dict[str, Any] = {"loader": PerRank({"at": 0})}
        with pytest.raises(
            StateMismatch, match="has a value of each of 2 ranks, and is loaded by 1"
        ):
            load(state, tmp_path / "two")

        def merge(values: list[dict[str, int]], rank: int, ranks: int) -> dict[str, int]:
            return {"at": sum(v["at"] for v in values) + 100 * rank + 10 * ranks}

        state["loader"] = PerRank({"at": 0}, merge)
        load(state, tmp_path / "two")
        assert state["loader"].value == {"at": 17}


def test_h13_an_optimizer_on_nvme_is_read() -> None:
    """DeepSpeed skips the universal load without a word and copies swap files."""
    made = kept("deepspeed", "z3-nvme")
    ck = ucformat.open(made.checkpoint)
    for (state, tensor), (_, shape, data) in made.truth.items():
        if state == "weight":  # which ZeRO 3 does not save beside the fp32 copy
            continue
        values = ck[tensor, state].read()
        assert (values.shape, values.tobytes()) == (shape, data), (tensor, state)


@pytest.mark.parametrize("name", ["ep2-dp4-z1", "ep2-dp4-z2", "ep2-z0"])
def test_h14_experts_of_deepspeed_moe(name: str) -> None:
    """DeepSpeed's converter fails on them; here they are tensors like all others, for any number of ranks."""
    made = kept("deepspeed", name)
    out = ucformat.convert(made.checkpoint, MemoryStore(f"h14-{name}"))
    for (state, tensor), (_, shape, data) in made.truth.items():
        found = out[tensor, state].read()
        assert (found.shape, found.tobytes()) == (shape, data), (tensor, state)
    experts = {n for n in out if ".deepspeed_experts." in n}
    number = re.compile(r".*\.deepspeed_experts\.(\d+)\..*")
    assert {int(m[1]) for n in experts if (m := number.fullmatch(n))} == {0, 1, 2, 3}
    one_each = {"match": f"/{number.pattern}/", "place": [{"stage": [0, 1, 2, 3], "over": "ep"}]}
    for rank, held in enumerate(read_as(out, ucformat.Layout({"ep": 4}, [one_each, EVERYTHING]))):
        mine = {n for n in experts if f".deepspeed_experts.{rank}." in n}
        assert {n for n, _ in held} & experts == mine
        assert all(same(held[n, "weight"], out[n, "weight"].read()) for n in mine)


class TestH15Zero0AndDdp:
    """DeepSpeed converts neither: there are no slices of a flat buffer to convert."""

    def test_zero_0_becomes_zero_1(self) -> None:
        made = kept("deepspeed", "tp2-z0")
        out = ucformat.convert(made.checkpoint, MemoryStore("h15"))
        for (state, name), (_, shape, data) in made.truth.items():
            found = out[name, state].read()
            assert (found.shape, found.tobytes()) == (shape, data)
        flat = {
            "match": "*",
            "states": list(FLAT),
            "place": [{"flat": "optimizer", "over": "dp", "group_pad": 2}],
        }
        parts = read_as(
            out, ucformat.Layout({"dp": 3}, [EVERYTHING], data=[flat, EVERYTHING]), ["exp_avg"]
        )
        joined = np.concatenate([p["flat:0", "exp_avg"] for p in parts])
        right = np.concatenate(
            [out[n, "exp_avg"].read().reshape(-1) for n in out.metadata.groups[0]["params"]]
        )
        assert same(joined[: right.size], right)

    def test_ddp_becomes_zero_3(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ddp.pt"
        )
        ck = ucformat.open(tmp_path / "ddp.pt")
        flat = {"match": "*", "place": [{"flat": "optimizer", "over": "dp", "cut": "before_join"}]}
        parts = read_as(ck, ucformat.Layout({"dp": 2}, [flat]), ["exp_avg"])
        name, first = next(iter(model.named_parameters()))
        found = np.concatenate([p[name, "exp_avg"] for p in parts])[: first.numel()]
        assert same(found.reshape(3, 5), optimizer.state[first]["exp_avg"].numpy())


class TestH16SeveralDimsOfOneTensor:
    """The paper's Shard-Hy, of which DeepSpeed has no code: one dim of each parameter can be cut."""

    def test_as_a_source(self) -> None:
        """PyTorch's FSDP2 over tensor parallelism."""
        made = kept("dcp", "tp-strided")
        ck = ucformat.open(made.checkpoint)
        boxes = [e.box for e in ck.source.extents(Key("blocks.0.down.weight", "weight"))]
        assert {box.start for box in boxes} == {(0, 0), (0, 9), (5, 0), (5, 9)}
        out = ucformat.convert(ck, MemoryStore("h16-source"))
        for (state, name), (_, shape, data) in made.truth.items():
            assert (out[name, state].shape, out[name, state].read().tobytes()) == (shape, data)

    def test_as_a_target_and_back(self) -> None:
        a = random_array((7, 10), "float32")
        ck = Checkpoint(FakeSource.write(MemoryStore("h16"), {("w", "weight"): a}))
        rule = {
            "match": "w",
            "place": [{"pattern": "shard-Hy", "over": ["tp", "cp"], "dims": [0, 1]}],
        }
        layout = ucformat.Layout.parse({"version": 1, "mesh": {"tp": 3, "cp": 2}, "rules": [rule]})
        layout.bind(ck.metadata.tensor_list).prove()
        for rank, found in enumerate(read_as(ck, layout)):
            t, c = divmod(rank, 2)
            assert same(
                found["w", "weight"], np.ascontiguousarray(a[3 * t : 3 * t + 3, 5 * c : 5 * c + 5])
            )
