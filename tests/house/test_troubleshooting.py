"""The messages of docs/troubleshooting.md are those that users get: each is provoked, and compared."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

import ucformat
from ucformat.errors import UcformatError
from ucformat.testing import checkpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucformat.checkpoint import Checkpoint

ROOT = Path(__file__).parents[2]
MESSAGES = dict(
    re.findall(
        r"^### (.*?)\n\n```text\n(.*?)\n```$",
        (ROOT / "docs" / "troubleshooting.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)
TROUBLES: dict[str, Callable[[], object]] = {}


class Settings:
    """A class of a user's program, in a pickle."""


def trouble(heading: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register what leads to the message below a heading; it runs in an empty folder."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        TROUBLES[heading] = function
        return function

    return register


def source() -> Checkpoint:
    arrays = {
        ("model.embed.weight", "weight"): np.arange(32, dtype="float32").reshape(8, 4),
        ("model.embed.weight", "exp_avg"): np.zeros((8, 4), "float32"),
        ("model.norm.weight", "weight"): np.ones(6, "float32"),
    }
    return checkpoint_of(Path.cwd() / "arrays", arrays)


def universal() -> Checkpoint:
    return ucformat.convert(source(), "universal")


def layout(match: str) -> ucformat.Layout:
    return ucformat.Layout(mesh={"tp": 4}, rules=[{"match": match, "place": ["replicate"]}])


@trouble("The path does not exist")
def nowhere() -> None:
    ucformat.open("global_step10")


@trouble("No checkpoint in the catalog under this name")
def unknown_reference() -> None:
    ucformat.open("run7@3000")


def logs() -> None:
    Path("logs").mkdir()
    Path("logs/x.txt").write_text("step 1")


@trouble("The folder holds nothing that is known")
def nothing_known() -> None:
    logs()
    ucformat.open("logs")


@trouble("The folder of a run instead of a checkpoint")
def folder_of_a_run() -> None:
    checkpoint = source()
    for step in (1000, 2000):
        ucformat.convert(checkpoint, f"run7/{step}")
    ucformat.open("run7")


@trouble("Nothing was committed")
def uncommitted() -> None:
    universal()
    shutil.copytree("universal", "broken")
    Path("broken/manifest.json").unlink()
    ucformat.open("broken")


def shard() -> None:
    Path("hf").mkdir()
    save_file({"a": np.ones(3)}, "hf/model-00001-of-00002.safetensors")


@trouble("A part of a checkpoint")
def part() -> None:
    shard()
    ucformat.open("hf/model-00001-of-00002.safetensors")


@trouble("A shard is missing")
def missing_shard() -> None:
    shard()
    ucformat.open("hf")


@trouble("DCP's files without their description")
def undescribed() -> None:
    Path("dcp").mkdir()
    Path("dcp/__0_0.distcp").write_bytes(bytes(100))
    ucformat.open("dcp")


@trouble("Pointers of Git LFS")
def pointers() -> None:
    Path("lfs").mkdir()
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10\n"
    Path("lfs/model.safetensors").write_text(text)
    ucformat.open("lfs")


@trouble("A truncated file")
def truncated() -> None:
    save_file({"a": np.ones(300)}, "m.safetensors")
    with Path("m.safetensors").open("r+b") as file:
        file.truncate(200)
    ucformat.open("m.safetensors")


@trouble("A pickle names a class")
def pickled_class() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    torch.save({"model": {"w": torch.ones(3)}, "args": Settings()}, "x.pt")
    ucformat.open("x.pt")


@trouble("No such tensor")
def no_tensor() -> None:
    universal()["model.embed.weigth"]


@trouble("No such state")
def no_state() -> None:
    universal()["model.norm.weight", "exp_avg"]


@trouble("A damaged chunk")
def damaged() -> None:
    universal()
    (chunk,) = Path("universal").glob("data/*/weight/model.embed.weight/c/0/0")
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    ucformat.open("universal")["model.embed.weight"][...]


@trouble("Files that a virtual checkpoint needs")
def moved_files() -> None:
    Path("source").mkdir()
    save_file({"a": np.ones(300)}, "source/m.safetensors")
    ucformat.convert("source/m.safetensors", "virtual", virtual=True)
    Path("source").rename("elsewhere")
    ucformat.open("virtual")["a"][...]


@trouble("No rule matches a tensor")
def no_rule() -> None:
    universal().plan(layout("*.embed.weight"), rank=0)


@trouble("There is no such rank")
def no_rank() -> None:
    universal().plan(layout("*"), rank=4)


@trouble("A checkpoint is already there")
def already_there() -> None:
    checkpoint = source()
    for _ in range(2):
        ucformat.convert(checkpoint, "universal")


@trouble("The destination of an export is not empty")
def not_empty() -> None:
    logs()
    ucformat.export(source(), "logs", "safetensors")


def load_a_layer_of_3_into(state: Callable[[], dict[str, object]]) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'ucformat[torch]'")
    import ucformat.torch

    ucformat.torch.save({"model": torch.nn.Linear(3, 2)}, "s/1", step=1)
    ucformat.torch.load(state(), "s/1")


@trouble("Shapes differ")
def other_shapes() -> None:
    def state() -> dict[str, object]:
        from torch.nn import Linear

        return {"model": Linear(4, 2)}

    load_a_layer_of_3_into(state)


@trouble("Names differ")
def other_names() -> None:
    def state() -> dict[str, object]:
        from torch.nn import Linear, Sequential

        return {"model": Sequential(Linear(3, 2))}

    load_a_layer_of_3_into(state)


@trouble("The optimizer is not in the checkpoint")
def no_optimizer() -> None:
    def state() -> dict[str, object]:
        from torch.nn import Linear
        from torch.optim import AdamW

        model = Linear(3, 2)
        return {"model": model, "optimizer": AdamW(model.parameters())}

    load_a_layer_of_3_into(state)


@trouble("An extra is missing")
def no_extra() -> None:
    from unittest.mock import patch

    Path("zarr").mkdir()
    array = {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [4],
        "dtype": "<f4",
        "compressor": {"id": "zlib", "level": 1},
        "fill_value": 0,
        "order": "C",
        "filters": None,
    }
    Path("zarr/.zarray").write_text(json.dumps(array))
    Path("zarr/0").write_bytes(zlib.compress(bytes(16)))
    with patch.dict("sys.modules", {"tensorstore": None}):
        checkpoint = ucformat.open("zarr")
        checkpoint[checkpoint.names()[0]][...]


def as_pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split("…")))


@pytest.mark.parametrize("heading", MESSAGES)
def test_a_message_is_the_one_that_users_get(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UCP_CATALOG", "none")
    with pytest.raises(UcformatError) as caught:
        TROUBLES[heading]()
    message = str(caught.value).replace(str(tmp_path), "/runs")
    assert re.fullmatch(as_pattern(MESSAGES[heading]), message, re.DOTALL), message


def test_every_trouble_is_on_the_page() -> None:
    assert list(TROUBLES) == list(MESSAGES)
