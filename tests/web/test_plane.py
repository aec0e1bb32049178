"""What readers of arrays, and programs that ask for tensors and parts of ranks, get from the data plane."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pytest
import safetensors
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import ucformat
from tests.exporters.sources import opened, universal
from tests.fakes import random_array, same
from tests.packed import write_packed
from tests.web.serving import Client, bearer, damaged, serving, token
from tests.zarr_store.test_store import arrays_of, packed, view, zarr_form, zero3
from ucformat.catalog.as_json import entry_data
from ucformat.errors import UsageError
from ucformat.format.arrays import array_folders
from ucformat.reading.rank import plan_data
from ucformat.storage.local import LocalStore
from ucformat.web.events import Listeners
from ucformat.web.library import Library
from ucformat.web.plane import endpoints_of, plane_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ucformat.catalog.catalog import Catalog
    from ucformat.checkpoint import Checkpoint
    from ucformat.geometry.tensor import Key

DATA = Path(__file__).parents[1] / "data"
#: Foreign checkpoints of twelve kinds.
FOREIGN = (
    "bytecheckpoint/fsdp/ckpt",
    "dcp/fsdp1-frozen/ckpt",
    "dcp/hsdp-flat/ckpt",
    "deepspeed/ep2-dp4-z2/ckpt",
    "deepspeed/tp2-dp2-z3/ckpt",
    "deepspeed/pp2-z0/ckpt",
    "deepspeed/universal-z2/ckpt",
    "huggingface/trainer_bf16/ckpt",
    "megatron/tp2-pp2-flat/classic",
    "orbax/ocdbt_zarr3",
    "orbax/zarr2_raw",
    "torch_checkpointing/fsdp2-tp/ckpt",
)
#: An installation of zarrita by npm: `bash tests/engines/install_zarrita.sh`.
ZARRITA = Path(os.environ.get("UCFORMAT_ZARRITA", Path(__file__).parents[2] / ".engines/zarrita"))
ZARRITA_DTYPES = (
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "bool",
)


def increment(folder: Path) -> Checkpoint:
    """A checkpoint whose tensors are partly in its base."""
    arrays = {(f"t{n}", "weight"): random_array((50, 70), "float32", n) for n in range(4)}
    base = universal(folder / "base", arrays)
    changed = arrays | {("t1", "weight"): random_array((50, 70), "float32", 9)}
    return ucformat.convert(opened(changed), folder / "next", base=base)


def foreign(name: str) -> Callable[[Path], Checkpoint]:
    return lambda _: ucformat.open(DATA / name)


KINDS: dict[str, Callable[[Path], Checkpoint]] = {
    f.__name__: f for f in (zarr_form, packed, view, zero3, increment)
} | {name: foreign(name) for name in FOREIGN}


def by_zarr(url: str, ck: Checkpoint) -> Mapping[Key, Any]:
    group = zarr.open_group(url, mode="r")
    return {key: group[folder][...] for key, folder in array_folders(ck.tensors).items()}  # type: ignore[index]


def by_tensorstore(url: str, ck: Checkpoint) -> Mapping[Key, Any]:
    def read(folder: str) -> Any:
        base, _, path = url.partition("/v1")
        kvstore = {"driver": "http", "base_url": base, "path": f"/v1{path}/{folder}/"}
        return tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()

    # dtypes of the others are ours (docs/spec/format.md)
    return {
        key: read(folder)
        for key, folder in array_folders(ck.tensors).items()
        if not isinstance(json.loads(document(ck, folder))["data_type"], dict)
    }


def document(ck: Checkpoint, folder: str) -> bytes:
    value = ck.zarr_store().find(f"{folder}/zarr.json")
    assert isinstance(value, bytes)
    return value


def by_zarrita(url: str, ck: Checkpoint) -> Mapping[Key, Any]:
    if shutil.which("node") is None or not (ZARRITA / "node_modules/zarrita").is_dir():
        pytest.skip(
            "zarrita is not here: apt-get install nodejs npm; bash tests/engines/install_zarrita.sh"
        )
    folders = {
        key: folder
        for key, folder in array_folders(ck.tensors).items()
        # it decodes percent signs in paths once more at each step
        if ck.tensors[key].dtype in ZARRITA_DTYPES and ck.tensors[key].size and "%" not in folder
    }
    program = Path(__file__).with_name("zarrita.mjs")
    answer = subprocess.run(
        ["node", str(program), str(ZARRITA), url, *folders.values()],
        check=False,
        capture_output=True,
        timeout=200,
    )
    assert not answer.returncode, answer.stderr.decode()[-2000:]
    out, at = {}, 0
    for key in folders:
        info = ck.tensors[key]
        data = answer.stdout[at : at + info.nbytes]
        at += info.nbytes
        out[key] = np.frombuffer(data, ck[key].dtype).reshape(info.shape)
    assert at == len(answer.stdout)
    return out


@pytest.mark.front("zarr-view", "zarr-zero3", "tensorstore-increment", "tensorstore-packed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", ["zarr", "tensorstore", "zarrita"])
def test_readers_of_arrays_read_every_tensor(tmp_path: Path, kind: str, reader: str) -> None:
    ck = KINDS[kind](tmp_path)
    read = {"zarr": by_zarr, "tensorstore": by_tensorstore, "zarrita": by_zarrita}[reader]
    with serving(places={"m": ck}) as ask:
        arrays = read(f"{ask.url}/v1/m/zarr", ck)
        assert arrays
        for key, array in arrays.items():
            assert same(np.asarray(array), ck[key].read()), key
        if reader == "zarr":
            listed = arrays_of(zarr.open_group(f"{ask.url}/v1/m/zarr", mode="r"))
            assert listed.keys() == ck.tensors.keys()


def test_keys_of_arrays(tmp_path: Path) -> None:
    ck = zarr_form(tmp_path)
    store = ck.zarr_store()
    with serving(places={"m": ck}) as ask:
        for key in ("zarr.json", "weight/zarr.json", "weight/rows/zarr.json", "weight/rows/c/0/0"):
            whole = ask(f"/v1/m/zarr/{key}")
            head = ask(f"/v1/m/zarr/{key}", "HEAD")
            assert (whole.status, head.status, head.body) == (200, 200, b"")
            assert (
                len(whole.body)
                == int(head.headers["content-length"])
                == asyncio.run(store.getsize(key))
            )
            assert head.headers["etag"] == whole.headers["etag"]
            part = ask(f"/v1/m/zarr/{key}", Range="bytes=3-9")
            assert (part.status, part.body) == (206, whole.body[3:10])
            assert ask(f"/v1/m/zarr/{key}", If_None_Match=whole.headers["etag"]).status == 304
            kind = "application/json" if key.endswith("json") else "application/octet-stream"
            assert whole.headers["content-type"] == kind
        for key in (
            "weight/rows/c/9/0",
            "weight/rows/.zarray",
            "none/zarr.json",
            "weight/rows/c/00/0",
            "..%2f",
        ):
            assert ask(f"/v1/m/zarr/{key}").status == 404, key


def test_names_that_clients_encode_in_two_ways(tmp_path: Path) -> None:
    """A client that sends percent signs as they are never gets the tensor of a client that encodes them."""
    arrays = {
        (name, "weight"): random_array((3, 4), "float32", n)
        for n, name in enumerate(("a/b", "a%2Fb", "c d"))
    }
    with serving(places={"m": opened(arrays)}) as ask:
        for folder in ("c%20d", "c%2520d"):
            chunk = ask(f"/v1/m/zarr/weight/{folder}/c/0/0")
            assert chunk.body == arrays["c d", "weight"].tobytes()
        assert ask("/v1/m/zarr/weight/a%2Fb/c/0/0").body == arrays["a/b", "weight"].tobytes()
        ambiguous = ask("/v1/m/zarr/weight/a%252Fb/c/0/0")
        assert (ambiguous.status, b"either of two" in ambiguous.body) == (400, True)


def test_names_are_shown_as_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    with serving(places={"m": opened({(name, "weight"): np.ones(3, "f4")})}) as ask:
        assert b"<script>" not in ask("/v1/m/zarr/weight/").body
        missing = ask(f"/v1/m/tensor/{quote(name)}%0d%0aset-cookie:x=1")
        assert missing.status == 404
        assert "set-cookie" not in missing.headers


TENSORS = {
    ("a/b %c.é", "weight"): random_array((11, 7, 3), "float32", 1),
    ("half", "weight"): random_array((40, 30), "bfloat16", 2),
    ("eighth", "exp_avg"): random_array((40, 30), "float8_e4m3fn", 3),
    ("scalar", "weight"): random_array((), "int64", 4),
    ("nothing", "weight"): random_array((3, 0), "float32", 5),
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    ck = write_packed(LocalStore(tmp_path_factory.mktemp("t")), TENSORS, block_bytes=256)
    with serving(places={"m": ck}) as ask:
        yield ask


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_slices(tensors: Client, data: st.DataObject) -> None:
    name, state = data.draw(st.sampled_from(sorted(TENSORS)))
    array = TENSORS[name, state]
    at = tuple(data.draw(parts_of(n)) for n in array.shape)
    path = f"/v1/m/tensor/{quote(name, safe='')}?state={state}&slice={quote(text_of(at))}"
    expected = array[at]
    raw = tensors(f"{path}&format=raw")
    assert (raw.status, raw.body) == (200, expected.tobytes())
    file = tensors(path)
    loaded = np.load(io.BytesIO(file.body), allow_pickle=False)
    assert file.headers["x-ucformat-dtype"] == str(array.dtype)
    assert (loaded.shape, loaded.tobytes()) == (expected.shape, expected.tobytes())
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(file.body) - 1)] * 2)))
    part = tensors(path, Range=f"bytes={first}-{last}")
    assert part.body == file.body[first : last + 1]


def parts_of(n: int) -> st.SearchStrategy[int | slice]:
    """Parts of an index of a dim, without steps."""
    slices = st.slices(n).filter(lambda s: s.step in (None, 1))
    return st.one_of(st.integers(-n, n - 1), slices) if n else slices


def text_of(at: tuple[int | slice, ...]) -> str:
    def edge(n: int | None) -> str:
        return "" if n is None else str(n)

    parts = [f"{edge(s.start)}:{edge(s.stop)}" if isinstance(s, slice) else str(s) for s in at]
    return ",".join(parts) or "..."


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("slice=::2", 422),
        ("slice=99", 400),
        ("slice=x", 400),
        ("slice=0,0,0,0", 400),
        ("format=csv", 400),
        ("stat=weight", 400),
        ("state=weight&state=master", 400),
        ("state=master", 404),
    ],
)
def test_what_is_no_slice(tensors: Client, query: str, status: int) -> None:
    answer = tensors(f"/v1/m/tensor/half?{query}")
    assert answer.status == status
    assert json.loads(answer.body)["error"]


LAYOUT = {
    "version": 1,
    "mesh": {"dp": 3, "tp": 2},
    "rules": [
        {"match": "*", "states": ["weight"], "place": [{"shard": 0, "over": "tp"}]},
        {"match": "*", "place": [{"flat": "all", "over": "dp"}]},
    ],
}


def sent(ask: Client, path: str, **body: Any) -> Any:
    return ask(path, "POST", json.dumps(body).encode(), content_type="application/json")


@pytest.mark.parametrize(
    "view",
    [
        [],
        [
            {"rename": "t0", "to": "x"},
            {"rename": "t1", "to": "t0"},
            {"rename": "x", "to": "t1"},
            {"transpose": "t3"},
        ],
    ],
    ids=["stored", "view"],
)
@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_part_is_what_a_plan_reads(tmp_path: Path, rank: int, view: list[dict[str, Any]]) -> None:
    layout = {**LAYOUT, "view": view} if view else LAYOUT
    arrays = {
        (f"t{n}", state): random_array((7 + n, 5), "float32", 10 * n + len(state))
        for n in range(4)
        for state in ("weight", "exp_avg")
    }
    ck = universal(tmp_path / "u", arrays)
    plan = ck.plan(ucformat.Layout.parse(layout), rank)
    with serving(places={"m": ck}) as ask:
        told = sent(ask, "/v1/m/plan", layout=layout, rank=rank)
        assert json.loads(told.body) == json.loads(json.dumps(plan_data(plan)))
        part = sent(ask, "/v1/m/part", layout=layout, rank=rank)
        assert part.status == 200, part.body
    (tmp_path / "part.safetensors").write_bytes(part.body)
    with safetensors.safe_open(tmp_path / "part.safetensors", "numpy") as file:
        buffers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        placed = json.loads(file.metadata()["tensors"])
    read = plan.execute()
    assert {f"{state}/{name}" for name, state in (b.key for b in plan.buffers)} == buffers.keys()
    for name, state in read:
        if f"{state}/{name}" in buffers:
            assert same(buffers[f"{state}/{name}"], read[name, state])
    for tensor in placed:
        buffer = buffers[tensor["buffer"]]
        if "offset" in tensor:
            buffer = buffer[tensor["offset"] : tensor["offset"] + tensor["size"]]
        assert same(buffer, read[tensor["name"], tensor["state"]])


@pytest.mark.parametrize(
    "body",
    [
        {"layout": LAYOUT},
        {"layout": LAYOUT, "rank": 6},
        {"layout": LAYOUT, "rank": True},
        {"layout": "/etc/passwd", "rank": 0},
        {"layout": LAYOUT | {"mesh": {"dp": 1 << 30, "tp": 2}}, "rank": 0},
        {"layout": LAYOUT, "rank": 0, "states": ["none"]},
        {"layout": LAYOUT, "rank": 0, "verify": "never"},
        {"layout": {"version": 1}, "rank": 0},
    ],
)
def test_what_is_no_plan(tensors: Client, body: Any) -> None:
    for path in ("/v1/m/plan", "/v1/m/part"):
        assert sent(tensors, path, **body).status == 400


def test_a_plan_of_too_many_boxes(tensors: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [{"match": "*", "place": []}]
    layout = {"version": 1, "mesh": {"dp": 1}, "rules": rules}
    assert sent(tensors, "/v1/m/plan", layout=layout, rank=0).status == 200
    monkeypatch.setattr("ucformat.web.plane.MOST_BOXES", 2)
    for path in ("/v1/m/plan", "/v1/m/part"):
        answer = sent(tensors, path, layout=layout, rank=0)
        assert answer.status == 422
        assert "more than 2 boxes" in json.loads(answer.body)["error"]


def test_a_page_of_a_stranger_cannot_send_a_plan(tensors: Client) -> None:
    body = json.dumps({"layout": LAYOUT, "rank": 0}).encode()
    assert tensors("/v1/m/plan", "POST", body, content_type="text/plain").status == 400
    assert tensors("/v1/m/plan").status == 405


def recorded(folder: Path, catalog: Catalog, run: str, step: int = 1) -> Checkpoint:
    arrays = {("w", "weight"): random_array((4, 6), "float32", step)}
    ck = universal(folder / f"{run}-{step}", arrays, step=step)
    catalog.record(ck.manifest, ck.url, run=run)
    return ck


def test_a_catalog_through_tokens(tmp_path: Path) -> None:
    """What a token does not see is not there, whatever the filter; references are those of the catalog."""
    with ucformat.Catalog(str(tmp_path / "c.db")) as catalog:
        ours = [recorded(tmp_path, catalog, "a", step) for step in (1, 2, 3)]
        theirs = recorded(tmp_path, catalog, "b")
        with serving(catalog, tokens=[token("t", "run = 'a'")]) as server:
            assert server("/v1/checkpoints").status == 401

            def ask(path: str) -> Any:
                answer = server(path, **bearer("t"))
                return answer.status, json.loads(answer.body)

            status, listed = ask("/v1/checkpoints?where=" + quote("step > 1") + "&sort=-step")
            assert (status, listed["next"]) == (200, None)
            assert listed["checkpoints"] == [
                entry_data(catalog.get(ck.id))
                | {"urls": [], "launch": None, "family": None, "continues": {}}
                for ck in ours[:0:-1]
            ]
            assert ask("/v1/checkpoints?sort=-metric.none")[0] == 200
            assert ask("/v1/checkpoints?sort=metric")[1]["hint"] == "such as metric.val_loss"
            assert ask("/v1/checkpoints?limit=2&sort=step")[1]["next"] == 2
            assert len(ask("/v1/checkpoints?limit=2&offset=2&sort=step")[1]["checkpoints"]) == 1
            for injected in ("step = 1) or (step != 9", "step = 1) or (step != 9 --", "'", "id ="):
                assert ask(f"/v1/checkpoints?where={quote(injected)}")[0] == 400
            assert (
                ask("/v1/checkpoints?where=" + quote("run = 'b' or step > 0"))[1]["checkpoints"][0][
                    "run"
                ]
                == "a"
            )
            for ref in ("a@latest", "a@3", ours[2].id, ours[2].id[:8]):
                status, told = ask(f"/v1/{ref}")
                assert (status, told["id"], told["catalog"]["step"]) == (200, ours[2].id, 3)
            for ref in (
                "b@latest",
                theirs.id,
                quote(theirs.url, safe=""),
                "..",
                "a@9",
                "alias:none",
                theirs.id[:8],
                f"folder:{quote(str(tmp_path), safe='')}@latest",
                "launch:abcd@latest",
                "alias:",
            ):
                status, told = ask(f"/v1/{ref}")
                assert (status, told["hint"]) == (404, None), ref


def test_chunks_are_listed_if_they_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucformat.web.plane._MAX_CHUNKS", 3)
    arrays = {("few", "weight"): np.zeros((3, 2), "i1"), ("many", "weight"): np.ones(1 << 20, "f4")}
    arrays |= {(f"other{n}", "weight"): np.zeros(1, "i1") for n in range(4)}
    ck = ucformat.convert(opened(arrays), tmp_path / "u", chunk_bytes=1 << 19, shard_bytes=1 << 20)
    with serving(places={"m": ck}) as ask:
        for path, names in {"": 2, "/weight": 7, "/weight/many": 2, "/weight/few/c": 1}.items():
            listed = ask(f"/v1/m/zarr{path}/")
            assert listed.body.count(b"<li>") == names, path
        refused = ask("/v1/m/zarr/weight/many/c/")
        assert (refused.status, b"3 chunks" in refused.body) == (422, True)
        assert ask("/v1/m/zarr/weight/many/c/3").status == 200


def test_reserved_names(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="checkpoints"),
        serving(places={"checkpoints": zarr_form(tmp_path)}),
    ):
        pass


def test_the_document_has_every_route(tensors: Client) -> None:
    document = json.loads(tensors("/v1/openapi.json").body)
    library = Library(None)
    listeners = Listeners(library)
    endpoints = endpoints_of(library, listeners)
    assert len(plane_routes(library, listeners)) == len(endpoints)
    assert {(path, method) for path, item in document["paths"].items() for method in item} == {
        (e.path.replace(":path", ""), e.method.lower()) for e in endpoints
    }
    for endpoint in endpoints:
        assert endpoint.in_path <= {p.name for p in endpoint.parameters}


def test_damage_never_looks_whole(tmp_path: Path) -> None:
    with serving(places={"m": damaged(tmp_path / "u")}) as ask:
        assert ask("/v1/m/zarr/weight/w/c/0/0").status == 200
        assert ask("/v1/m/zarr/weight/w/c/6/0").status == 500
        assert ask("/v1/m/tensor/w?slice=0:768").status == 200
        with pytest.raises(http.client.IncompleteRead):
            ask("/v1/m/tensor/w")
