"""Offline runs of a real W&B."""

from __future__ import annotations

import math
import shutil
import struct
import zlib
from pathlib import Path

import pytest

import ucformat
from tests.catalog.manifests import manifest
from tests.trackers.conftest import metric, of_run
from tests.trackers.running import last_line_of
from ucformat.errors import IntegrityError, NotFound, UnsupportedError, UsageError

PROGRAM = Path(__file__).with_name("wandb_program.py")
REFERRED = manifest(1).id  # run7@200


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `wandb` of some runs."""
    pytest.importorskip("wandb", reason="needs W&B: pip install wandb")
    folder = tmp_path_factory.mktemp("wandb")
    last_line_of(folder, str(PROGRAM), REFERRED, WANDB_SILENT="true")
    return folder / "wandb"


def test_the_history_and_the_configuration(runs: Path, catalog: ucformat.Catalog) -> None:
    imported = ucformat.import_runs("wandb", str(runs), catalog, runs={"run7": None})
    loss = metric(catalog, "loss")
    assert (loss[100], loss[200]) == (0.01, 0.005)
    assert math.isnan(loss[300])
    assert metric(catalog, "up")[300] == math.inf
    assert metric(catalog, "nested.a") == {100: 100.0, 200: 200.0, 300: 200.0}
    assert metric(catalog, "long")[300] == 1.0
    config = of_run(catalog)[100].config["wandb"]
    assert config == {
        "run_id": "one",
        "run_name": "run7",
        "params": {"lr": 1e-3, "model": {"layers": 4}, "late": 2, "api_key": "(redacted)"},
    }
    assert imported.left_out == {"texts, media and other values that are no numbers": 7}
    assert ucformat.import_runs("wandb", str(runs), catalog, runs={"one": None}).changed == 0


def test_the_step_of_the_training_is_not_the_count_of_rows(
    runs: Path, catalog: ucformat.Catalog
) -> None:
    with pytest.raises(
        UsageError, match="100 as train/global_step in its row of step 0"
    ) as failure:
        ucformat.import_runs("wandb", str(runs), catalog, runs={"run8": None})
    assert "--step-key train/global_step" in str(failure.value.hint)
    imported = ucformat.import_runs(
        "wandb", str(runs), catalog, runs={"run8": None}, step_key="train/global_step"
    )
    assert metric(catalog, "train/loss", "run8") == {s: s / 7 for s in (100, 200, 300)}
    # what was resumed had another configuration
    assert of_run(catalog, "run8")[100].config["wandb"]["params"] == {"first": 200}
    assert imported.left_out == {"parameters that a run which continues it has changed": 1}


def test_references_that_were_logged(runs: Path, catalog: ucformat.Catalog) -> None:
    imported = ucformat.import_runs("wandb", str(runs), catalog, runs={"three": None})
    assert [c.id for c in imported.checkpoints] == [REFERRED]
    assert metric(catalog, "score") == {100: None, 200: 0.5, 300: None}


def test_what_is_cut_off_damaged_or_absent(
    runs: Path, tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    [file] = runs.glob("*/run-one.wandb")
    shutil.copytree(file.parent, tmp_path / "wandb" / file.parent.name)
    copy = tmp_path / "wandb" / file.parent.name / file.name
    data = file.read_bytes()

    def import_() -> ucformat.ImportedRuns:
        return ucformat.import_runs("wandb", str(tmp_path), catalog, dry_run=True)

    for cut in (len(data) - 3, len(data) // 2, 40_000):
        copy.write_bytes(data[:cut])
        assert import_().left_out["unfinished records at the ends of logs"] == 1
    for at in (0, 6, 9, 20, 40_000):
        broken = bytearray(data)
        broken[at] ^= 1
        copy.write_bytes(broken)
        with pytest.raises(IntegrityError, match=r"run-one\.wandb is damaged at byte"):
            import_()
    with pytest.raises(NotFound, match="no runs of W&B"):
        ucformat.import_runs("wandb", str(tmp_path / "none"), catalog)


def test_a_server_is_refused(catalog: ucformat.Catalog) -> None:
    with pytest.raises(UnsupportedError, match=r"not read from its server") as failure:
        ucformat.import_runs("wandb", "https://me:hunter22@api.wandb.ai/p", catalog)
    assert "hunter22" not in str(failure.value)


def field(number: int, *parts: bytes) -> bytes:
    """A field of bytes."""
    data = b"".join(parts)
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    tag = number << 3 | 2
    head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    return head + length + bytes([size]) + data


def history(step: int, **values: str) -> bytes:
    """A record of a row, whose values are JSON."""
    items = [field(1, field(1, name.encode()), field(16, v.encode())) for name, v in values.items()]
    return field(2, *items, field(2, b"\x08" + bytes([step])))


def write_log(folder: Path, time: str, *records: bytes, kinds: bytes = b"") -> None:
    """Write the log of an offline run, of whole records, or of parts of these `kinds`."""
    data = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    for record, kind in zip(records, kinds or b"\1" * len(records), strict=True):
        checksum = zlib.crc32(record, zlib.crc32(bytes([kind])))
        data += struct.pack("<IHB", checksum, len(record), kind) + record
    place = folder / f"offline-run-20261128_{time}-run7" / "run-run7.wandb"
    place.parent.mkdir(parents=True)
    place.write_bytes(data)


def test_a_run_that_was_resumed_counts_its_rows_again(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    write_log(tmp_path, "090000", history(0, loss="1"), history(100, loss="2"))
    write_log(tmp_path, "100000", history(0, loss="3"), history(120, loss="4"))
    with pytest.raises(UsageError, match="resumed at step 0 after step 100") as failure:
        ucformat.import_runs("wandb", str(tmp_path), catalog)
    assert "--step-key" in str(failure.value.hint)
    ucformat.import_runs("wandb", str(tmp_path), catalog, step_key="_step", rewound="drop")
    assert metric(catalog, "loss")[200] == 4.0


@pytest.mark.parametrize("step", ["NaN", "Infinity", '"x"', "true", "1.5", "1e400"])
def test_steps_that_are_none(tmp_path: Path, catalog: ucformat.Catalog, step: str) -> None:
    write_log(tmp_path, "090000", history(0, loss="1", at=step), history(1, loss="2", at="100"))
    imported = ucformat.import_runs("wandb", str(tmp_path), catalog, step_key="at")
    assert imported.left_out == {"rows of the history without at": 1}
    assert metric(catalog, "loss")[100] == 2.0


def test_an_integer_beyond_all_floats(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write_log(tmp_path, "090000", history(0, loss="1" + "0" * 400, other="1"))
    imported = ucformat.import_runs("wandb", str(tmp_path), catalog)
    assert imported.left_out == {"integers beyond all floating-point numbers": 1}


def test_a_record_of_too_many_parts(
    tmp_path: Path, catalog: ucformat.Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ucformat.trackers import wandb

    monkeypatch.setattr(wandb, "_MOST_PARTS", 8)
    write_log(tmp_path, "090000", *[b""] * 9, kinds=b"\2" + b"\3" * 7 + b"\4")
    with pytest.raises(
        IntegrityError, match=r"at byte 7: a record has more than 268,435,456 bytes"
    ):
        ucformat.import_runs("wandb", str(tmp_path), catalog)


def test_a_nested_value_of_the_configuration_is_removed_alone(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    names = [field(2, name.encode()) for name in ("opt", "lr")]
    config = field(1, field(1, b"opt"), field(16, b'{"lr": 1, "beta": 2}'))
    write_log(tmp_path, "090000", field(5, config), field(5, field(2, *names)))
    ucformat.import_runs("wandb", str(tmp_path), catalog)
    assert of_run(catalog)[100].config["wandb"]["params"] == {"opt": {"beta": 2}}
