"""Megatron's checkpoints of every layout, distributed and classic, against the tensors of the run itself."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ucformat
from tests.sources.suite import DATA, SourceSuite, kept
from ucformat.checkpoint import Checkpoint, open_checkpoint
from ucformat.engines.megatron.classic import NameResolver
from ucformat.engines.megatron.folder import MegatronArguments
from ucformat.engines.megatron.source import Megatron
from ucformat.errors import (
    AmbiguousLayout,
    IntegrityError,
    MissingData,
    NotFound,
    UcformatError,
    UnsupportedError,
    UsageError,
)
from ucformat.storage.local import LocalStore
from ucformat.testing.sources import Sample, read_whole

if TYPE_CHECKING:
    from pathlib import Path

NAMES = (
    *(
        "tp2-tied",
        "pp2-bf16-tied",
        "tp2-pp2-flat",
        "tp2-dp2-full",
        "tp2-dp2-flat",
        "ep2-moe",
        "ep2-dp2-flat",
        "vpp2",
    ),
)
WORD, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def groups_of(truth: Any) -> list[list[str]]:
    """The parameters by Megatron's rule: without weight decay what is a vector or a bias, experts in a third group."""
    trained = {n for s, n in truth if s == "exp_avg"}
    shape = {n: v[1] for (s, n), v in truth.items() if s == "weight"}
    plain = {n for n in trained if len(shape[n]) == 1 or n.endswith(".bias")}
    experts = {n for n in trained if ".experts." in n}
    return [sorted(trained - plain - experts), sorted(plain), sorted(experts)]


def sample_of(name: str, kind: str) -> Sample:
    made = kept("megatron", name)
    truth = dict(made.truth)
    if (
        "full" in name or "flat" in name or name == "vpp2"
    ):  # the distributed optimizer has one step for each group
        truth = {k: v for k, v in truth.items() if k[0] != "step"}
    tied = "tied" in name
    ck = open_checkpoint(made.folder / kind)
    found = [sorted(g["params"]) for g in ck.metadata.groups]
    assert found == [g for g in groups_of(truth) if g][: len(found)], found
    return Sample(
        folder=made.folder,
        place=kind,
        kind="megatron",
        truth=truth,
        aliases={HEAD: WORD} if tied else {},
        groups=[list(g["params"]) for g in ck.metadata.groups],
        step=2,
    )


class TestMegatron(SourceSuite):
    most_read = 6.0
    cyclic = True

    most_requests = 600  # all items of a rank are in two files

    def damageable(self, copy: Sample) -> list[Path]:
        """Of some all files, of most two, for all are read alike."""
        files = super().damageable(copy)
        return files if ("weight.padding", HEAD) in copy.truth and len(files) == 4 else files[:2]

    @pytest.fixture(params=[f"{name}/{kind}" for name in NAMES for kind in ("sharded", "classic")])
    def sample(self, request: pytest.FixtureRequest) -> Sample:
        return sample_of(*request.param.split("/"))


def place(name: str, kind: str = "sharded") -> Path:
    return DATA / "megatron" / name / kind


def opened(path: Path, **options: Any) -> Checkpoint:
    return Checkpoint(Megatron(**options).open(LocalStore(path)))


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(name: str, kind: str) -> Path:
        shutil.copytree(place(name, kind), tmp_path / "copy")
        return tmp_path / "copy"

    return copy


def test_hyper_parameters_objects_and_layout() -> None:
    for kind in ("sharded", "classic"):
        ck = opened(place("tp2-pp2-flat", kind))
        assert [(g["wd_mult"], g["step"]) for g in ck.metadata.groups] == [(1.0, 2.0), (0.0, 2.0)]
        assert ck.objects["args"]["num_query_groups"] == 2
        assert ck.objects["args"]["params_dtype"] == {"$dtype": "bfloat16"}
        assert ck.objects["opt_param_scheduler"]["lr_decay_style"] == "cosine"
        assert ck.objects["checkpoint_version"] == 3.0
        assert (ck.metadata.layout["tp"], ck.metadata.layout["pp"], ck.metadata.layout["ep"]) == (
            2,
            2,
            1,
        )
        assert ck.metadata.engine["name"] == "megatron-core"
    rng = opened(place("tp2-pp2-flat")).objects["rng_state"]
    assert sorted(rng) == ["0.0", "0.1", "1.0", "1.1"]
    ranks = opened(place("tp2-pp2-flat", "classic")).objects["ranks"]
    assert ranks["tp1.pp1.ep0"]["rng_state"][0]["random_rng_state"] == [3, [1, 1], None]


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_are_one_checkpoint(name: str) -> None:
    one, two = (opened(place(name, kind)) for kind in ("sharded", "classic"))
    assert read_whole(one) == read_whole(two)
    assert dict(one.aliases) == dict(two.aliases)
    assert [sorted(g["params"]) for g in one.metadata.groups] == [
        sorted(g["params"]) for g in two.metadata.groups
    ]


def test_one_iteration_opens_by_itself() -> None:
    whole = read_whole(opened(place("tp2-tied")))
    assert read_whole(open_checkpoint(place("tp2-tied") / "iter_0000002")) == whole
    assert read_whole(open_checkpoint(place("tp2-tied", "classic") / "iter_0000002")) == whole


def test_stacked_as_stored() -> None:
    ck, each = opened(place("pp2-bf16-tied"), stacked=True), opened(place("pp2-bf16-tied"))
    found = ck["decoder.layers.mlp.linear_fc1.weight", "exp_avg"].read()
    for i in range(2):
        assert np.array_equal(
            found[i], each[f"decoder.layers.{i}.mlp.linear_fc1.weight", "exp_avg"].read()
        )
    with pytest.raises(AmbiguousLayout, match="no stacked form"):
        opened(place("tp2-pp2-flat"), stacked=True)
    assert "decoder.layers.mlp.linear_fc1.weight" in opened(
        place("tp2-pp2-flat"), stacked=True, optimizer=False
    )


@pytest.mark.parametrize("kind", ["sharded", "classic"])
def test_options(kind: str) -> None:
    ck = ucformat.open(place("tp2-dp2-full", kind), options={"vocab_size": 17, "optimizer": False})
    assert ck[WORD].shape[0] == 17
    assert ck[WORD, "weight.padding"].shape[0] == 15
    assert {k.state for k in ck.tensors} == {"weight", "weight.padding"}
    assert not ck.metadata.groups or kind == "sharded"


def test_a_layer_is_read_without_the_others() -> None:
    ck = opened(place("vpp2"))
    tensor = ck["decoder.layers.2.self_attention.linear_qkv.weight"]
    assert tensor.plan().bytes_read <= tensor.nbytes + 4096


def test_a_tracker_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    with pytest.raises(NotFound, match="iter_0000007"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("nonsense")
    with pytest.raises(UsageError, match="names no iteration"):
        open_checkpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    for i in (3, 5):
        shutil.copytree(place("tp2-tied", "classic") / "iter_0000002", tmp_path / f"iter_000000{i}")
    with pytest.raises(UsageError, match="several iterations"):
        open_checkpoint(tmp_path)


def test_files_that_name_something_are_short(tmp_path: Path) -> None:
    """What is longer than any that Megatron writes is not parsed."""
    tracker, config = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "metadata.json"
    tracker.write_text("7".ljust(64))
    with pytest.raises(NotFound, match="iter_0000007"):
        open_checkpoint(tmp_path)
    tracker.write_text("7".ljust(65))
    with pytest.raises(UsageError, match="names no iteration"):
        open_checkpoint(tmp_path)
    config.write_text('{"sharded_backend": "zarr"}'.ljust(4096))
    with pytest.raises(UnsupportedError, match="'zarr'"):
        open_checkpoint(tmp_path)
    config.write_text('{"sharded_backend": "zarr"}'.ljust(4097))
    with pytest.raises(UsageError, match="names no iteration"):
        open_checkpoint(tmp_path)


def test_an_output_layer_that_is_said_to_be_untied_is_no_alias(copied: Any) -> None:
    folder = copied("pp2-bf16-tied", "classic")
    rewrite(
        folder, lambda state, _: setattr(state["args"], "untie_embeddings_and_output_weights", True)
    )
    assert opened(folder, optimizer=False).aliases == {}
    rewrite(folder, lambda state, _: state["model"].pop(WORD, None))
    assert HEAD in opened(folder, optimizer=False)
    rewrite(
        folder, lambda state, _: setattr(state["args"], "untie_embeddings_and_output_weights", None)
    )
    assert HEAD in opened(folder, optimizer=False)


@pytest.mark.parametrize("change", ["values", "shape", "nothing"])
def test_an_output_layer_is_the_embedding_if_it_is_equal(copied: Any, change: str) -> None:

    folder = copied("pp2-bf16-tied", "classic")

    def changed(state: Any, *, said: bool) -> None:
        state["args"].untie_embeddings_and_output_weights = False if said else None
        if (head := state["model"].get(HEAD)) is not None:
            state["model"][HEAD] = {
                "values": head + 1,
                "shape": head[:, :-1].clone(),
                "nothing": head,
            }[change]

    rewrite(folder, lambda state, _: changed(state, said=False))
    ck = opened(folder, optimizer=False)
    assert ck.aliases == ({HEAD: WORD} if change == "nothing" else {})
    assert HEAD in ck
    if change != "nothing":
        rewrite(
            folder,
            lambda state, _: state["args"].__dict__.update(
                untie_embeddings_and_output_weights=False
            ),
        )
        with pytest.raises(IntegrityError, match=f"{HEAD} should be a copy of {WORD}, but differs"):
            opened(folder, optimizer=False)


def test_another_backend_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(
        json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
    )
    with pytest.raises(UnsupportedError, match="'zarr'"):
        open_checkpoint(tmp_path)


def test_ranks_that_are_missing_or_too_many(copied: Any) -> None:
    folder = copied("tp2-pp2-flat", "classic") / "iter_0000002"
    (folder / "mp_rank_01_000").rename(folder / "mp_rank_02_000")
    with pytest.raises(IntegrityError, match="mp_rank_02_000"):
        open_checkpoint(folder.parent)
    shutil.rmtree(folder / "mp_rank_02_000")
    with pytest.raises(MissingData, match="tp 1 pp 0 ep 0"):
        open_checkpoint(folder.parent)


def test_the_distributed_optimizers_file_must_be_there(copied: Any) -> None:
    folder = copied("tp2-dp2-flat", "classic")
    (folder / "iter_0000002" / "mp_rank_01" / "distrib_optim.pt").unlink()
    with pytest.raises(MissingData, match=r"distrib_optim\.pt"):
        open_checkpoint(folder)
    assert WORD in opened(folder, optimizer=False)


def test_replicas_that_differ_are_both_named(copied: Any) -> None:
    import torch

    folder = copied("tp2-tied", "classic")
    path = folder / "iter_0000002" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(state, path)
    ck = open_checkpoint(folder)
    with pytest.raises(IntegrityError, match=r"mp_rank_00/.* and .*mp_rank_01/"):
        ck["decoder.final_layernorm.weight"].read()


def rewrite(folder: Path, change: Any) -> None:
    """The files of all ranks, changed."""
    import torch

    for path in sorted(folder.rglob("model_optim_rng.pt")):
        state = torch.load(path, weights_only=False)
        change(state, int(path.parent.name.split("_")[2]))
        torch.save(state, path)


def test_a_parameter_of_another_name_must_be_told(copied: Any) -> None:
    import torch

    folder = copied("tp2-tied", "classic")
    rewrite(
        folder,
        lambda s, t: s["model"].update(
            {"adapter.lora": torch.full((2, 3), float(t)), "same": torch.arange(3)}
        ),
    )
    with pytest.raises(AmbiguousLayout, match=r"adapter\.lora \(parts of \[2, 3\]\)") as found:
        opened(folder, optimizer=False)
    assert "layout" in str(found.value)
    rules: list[Any] = [
        {"match": "adapter.lora", "place": [{"shard": 1, "over": "tp"}]},
        {"match": "*", "place": ["replicate"]},
    ]
    ck = opened(folder, optimizer=False, layout=ucformat.Layout({"tp": 2}, rules[:1]))
    assert ck["adapter.lora"].read().tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert ck["same"].read().tolist() == [0, 1, 2]


def test_old_names_are_nested_and_known(copied: Any) -> None:
    """Megatron-LM's of before Megatron-Core; version 0 has all queries of a rank before its keys."""
    import torch

    folder = copied("tp2-tied", "classic")

    def change(state: dict[str, Any], t: int) -> None:
        layers = {
            "layers.0.attention.query_key_value.weight": torch.arange(6.0).reshape(6, 1) + 10 * t,
            "layers.0.mlp.dense_h_to_4h.weight": torch.ones(4, 1) * t,
            "layers.0.mlp.dense_4h_to_h.weight": torch.ones(1, 4) * t,
            "layers.0.input_layernorm.weight": torch.ones(1),
        }
        word = {"word_embeddings": {"weight": torch.arange(2.0).reshape(2, 1) + 2 * t}}
        state["model"] = {"language_model": {"embedding": word, "encoder": layers}}
        state["checkpoint_version"] = 0
        state["args"] = None

    rewrite(folder, change)
    ck = opened(folder, optimizer=False)
    at = "language_model.encoder.layers.0."
    assert ck["language_model.embedding.word_embeddings.weight"].read().ravel().tolist() == [
        0,
        1,
        2,
        3,
    ]
    qkv = ck[at + "attention.query_key_value.weight"].read().ravel().tolist()
    assert qkv == [0, 1, 10, 11, 2, 3, 12, 13, 4, 5, 14, 15]
    assert ck[at + "mlp.dense_4h_to_h.weight"].shape == (1, 8)
    assert ck[at + "mlp.dense_h_to_4h.weight"].shape == (8, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer", [3]),
        ("optimizer", {"optimizer": {"param_groups": [{"wd_mult": []}]}}),
        ("optimizer", {"optimizer": {"param_groups": 3, "state": {0: 1}}}),
        ("model", {}),
        ("model", {"decoder.layers.0.x": {"y": 3}, "decoder": [1]}),
        ("args", {"tensor_model_parallel_size": -4}),
        ("args", {"tensor_model_parallel_size": 1 << 62}),
        ("args", 7),
        ("iteration", "x"),
        ("checkpoint_version", "x"),
    ],
)
def test_values_of_other_kinds_are_errors_of_ours(copied: Any, key: str, value: Any) -> None:
    folder = copied("tp2-dp2-flat", "classic")
    rewrite(folder, lambda s, _: s.update({key: value}))
    with suppress(UcformatError):
        read_whole(open_checkpoint(folder))


@pytest.mark.parametrize("change", [{3: 0}, {"deep": {3: 0}}])
def test_a_tensor_whose_name_is_no_text_is_refused(copied: Any, change: Any) -> None:
    folder = copied("tp2-tied", "classic")
    rewrite(folder, lambda s, _: s["model"].update(change))
    with pytest.raises(IntegrityError, match="has a tensor whose name is not a string"):
        opened(folder, optimizer=False)


@pytest.mark.parametrize(
    "value",
    [
        3,
        [None],
        {"buckets_coalesced": True, 0: 3},
        {"buckets_coalesced": True, 0: {(1, 2): {"param": 1}}},
    ],
)
def test_a_distributed_optimizer_of_other_kinds(copied: Any, value: Any) -> None:
    import torch

    folder = copied("tp2-dp2-flat", "classic")
    torch.save(value, folder / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    with suppress(UcformatError):
        read_whole(open_checkpoint(folder))


@pytest.mark.parametrize(
    "common",
    [
        {"optimizer": 3},
        {"optimizer": {0: {"optimizer": 3}}},
        {"optimizer": {"param_groups": [{"wd_mult": {}}]}},
        {"args": [1]},
    ],
)
def test_a_common_file_of_other_kinds(copied: Any, common: Any) -> None:
    import torch

    folder = copied("tp2-tied", "sharded")
    torch.save(common, folder / "iter_0000002" / "common.pt")
    with suppress(UcformatError):
        ck = open_checkpoint(folder)
        read_whole(ck)
        assert json.dumps([list(ck.metadata.groups), dict(ck.objects)])


def test_flat_buckets_of_another_order_are_refused(copied: Any) -> None:
    """The fp32 copies do not round to the weights: two equally long parameters have changed places."""
    import torch

    folder = copied("tp2-dp2-flat", "classic")
    path = folder / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt"
    state = torch.load(path, weights_only=False)
    (tensors,) = state[0].values()
    for key in ("param", "exp_avg", "exp_avg_sq"):
        tensors[key] = tensors[key].flip(0)
    torch.save(state, path)
    with pytest.raises(AmbiguousLayout, match="cannot be named"):
        open_checkpoint(folder)


def test_flat_buckets_of_a_dtype_that_is_not_read_are_refused_alone(copied: Any) -> None:
    import torch

    folder = copied("tp2-dp2-flat", "sharded")
    path = folder / "iter_0000002" / ".metadata"
    meta = pickle.loads(path.read_bytes())  # noqa: S301 - a file of the repository
    for fqn, entry in meta.state_dict_metadata.items():
        if fqn.endswith(".exp_avg"):
            entry.properties.dtype = torch.quint8
    path.write_bytes(pickle.dumps(meta))
    ck, good = opened(folder), opened(place("tp2-dp2-flat"))
    refused = {key for key in good.tensors if key.state == "exp_avg"}
    assert refused
    assert dict(ck.metadata.unreadable).keys() == refused
    assert all("quint8" in reason for reason in ck.metadata.unreadable.values())
    rest = {key for key in good.tensors if key.state not in ("exp_avg", "exp_avg.padding")}
    assert ck.tensors.keys() == rest


def test_flat_ranges_of_chunks(tmp_path: Path) -> None:
    """The format fully_sharded_model_space: ranges of each tensor-parallel rank's flattened chunk."""
    import torch

    from tests.engines.megatron.files import write_dist

    whole = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    key = "decoder.layers.self_attention.linear_qkv.weight"
    ranges = [
        ((i, t, 0, a), whole[i, 2 * t : 2 * t + 2].reshape(-1)[a:b].reshape(1, 1, 1, -1))
        for i in range(2)
        for t in range(2)
        for a, b in ((0, 4), (4, 6))
    ]
    chunks = [((i, 0, 0), whole[i : i + 1]) for i in range(2)]
    state = f"chained_0.optimizer.state.fp32_param.{key}"
    folder = write_dist(
        tmp_path / "ck",
        {key: ((2, 4, 3), chunks), state: ((2, 2, 1, 6), ranges)},
        flat={state: (2, 4, 3)},
        common={"args": {"transformer_impl": "transformer_engine"}},
    )
    ck = open_checkpoint(folder)
    for i in range(2):
        name = f"decoder.layers.{i}.self_attention.linear_qkv.weight"
        assert np.array_equal(ck[name, "master"].read(), whole[i].numpy())
        assert np.array_equal(ck[name, "master"][1:3, 1:].copy(), whole[i, 1:3, 1:].numpy())


def test_keys_with_numbers_and_halves_apart(tmp_path: Path) -> None:
    """`non_homogeneous_layers` and `singleton_local_shards`."""
    import torch

    from tests.engines.megatron.files import write_dist

    at = "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight"
    w, v = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12).reshape(2, 3)
    norm = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    entries: Any = {
        at + "_v": ((2, 3), [((0, 0), v)]),
        at + "_w": ((2, 3), [((0, 0), w)]),
        norm: ((3,), [((0,), torch.ones(3))]),
    }
    ck = open_checkpoint(
        write_dist(tmp_path / "ck", entries, common={"args": {"transformer_impl": "local"}})
    )
    assert np.array_equal(
        ck["decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"].read(),
        torch.cat([w, v]).numpy(),
    )
    assert list(ck) == [
        "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
    ]


def test_hostile_metadata_is_an_error_of_ours(tmp_path: Path) -> None:
    """Any value of `.metadata`'s mcore_data, and any byte of it changed: an error of ours, or tensors."""
    import torch

    from tests.engines.megatron.files import write_dist

    key = "optimizer.state.exp_avg.w"
    entries: Any = {
        "w": ((4,), [((0,), torch.ones(4))]),
        key: ((1, 4), [((0, 0), torch.ones(1, 4))]),
    }
    shapes: list[Any] = [(4, 1), (3,), (-1,), ("x",), (1 << 60, 4), ()]
    for i, shape in enumerate(shapes):
        with pytest.raises(UcformatError):
            read_whole(open_checkpoint(write_dist(tmp_path / str(i), entries, flat={key: shape})))
    path = write_dist(tmp_path / "good", entries, flat={key: (4,)}) / ".metadata"
    data, rng = path.read_bytes(), random.Random(3)
    for _ in range(60):
        hurt = bytearray(data)
        hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
        path.write_bytes(hurt)
        with suppress(UcformatError):
            read_whole(open_checkpoint(path.parent))


class TestEvidence:
    """A name is no proof against the bytes of the parts."""

    def test_a_plain_layer_called_as_a_row_parallel_one(self, copied: Any) -> None:
        """BERT's pooler and the layer before its vocabulary are on every rank."""
        import torch

        folder = copied("tp2-tied", "classic")
        dense = torch.arange(6.0).reshape(2, 3)
        names = ("pooler.dense.weight", "lm_head.dense.weight")
        rewrite(folder, lambda s, _: s["model"].update(dict.fromkeys(names, dense)))
        ck = opened(folder, optimizer=False)
        for name in names:
            assert ck[name].read().tolist() == dense.tolist()

    def test_equal_parts_of_what_a_name_calls_cut_are_a_doubt(self, copied: Any) -> None:
        import torch

        folder = copied("tp2-tied", "classic")
        name, part = "x.mlp.linear_fc2.weight", torch.arange(6.0).reshape(2, 3)
        rewrite(folder, lambda s, _: s["model"].update({name: part}))
        with pytest.raises(
            AmbiguousLayout, match=r"x\.mlp\.linear_fc2\.weight \(parts of \[2, 3\]\)"
        ) as found:
            opened(folder, optimizer=False)
        assert f"options={{'cuts': {{'{name}': '0'}}}}" in str(found.value.hint)
        assert (
            opened(folder, optimizer=False, cuts={"x.*": "replicate"})[name].read().tolist()
            == part.tolist()
        )
        assert opened(folder, optimizer=False, cuts={"x.*": 1})[name].shape == (2, 6)
        rewrite(folder, lambda s, t: s["model"].update({name: part + t}))
        assert opened(folder, optimizer=False)[name].shape == (2, 6)
        rewrite(
            folder, lambda s, _: s["model"].update({name: torch.zeros(2, 3)})
        )  # zeros contradict nothing
        assert opened(folder, optimizer=False)[name].shape == (2, 6)

    def test_keys_and_values_that_several_ranks_hold(self) -> None:
        shapes = {"a.linear_qkv.weight": ((4, 3), (4, 3))}
        assert NameResolver(shapes, 3, [], 2).decide(lambda _: "different")[
            "a.linear_qkv.weight"
        ].shape == (8, 3)
        with pytest.raises(AmbiguousLayout, match="linear_qkv"):
            NameResolver(shapes, 3, [], 1).decide(lambda _: "different")

    @pytest.mark.parametrize(
        ("args", "rows"),
        [
            ({"vocab_size": 17, "padded_vocab_size": 32}, 17),
            ({"vocab_size": 17, "padded_vocab_size": 64}, 32),
            ({"vocab_size": 17}, 32),
            (
                {
                    "vocab_size": 17,
                    "make_vocab_size_divisible_by": 16,
                    "tensor_model_parallel_size": 2,
                },
                17,
            ),
            ({"vocab_size": 17, "make_vocab_size_divisible_by": 16}, 17),
            ({"vocab_size": 15, "make_vocab_size_divisible_by": 16}, 32),
        ],
    )
    def test_rows_beyond_the_vocabulary_are_padding_where_that_is_told(
        self, args: dict[str, int], rows: int
    ) -> None:
        assert (
            MegatronArguments.of(args, None, "file").rows("embedding.word_embeddings.weight", 32)
            == rows
        )
