"""Event files that real writers have written: what checkpoints get of them, and what is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tensorboardX import SummaryWriter

import ucformat
from tests.catalog.manifests import manifest
from tests.trackers.conftest import metric, of_run
from ucformat.errors import IntegrityError, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def write(folder: Path, values: Mapping[str, Mapping[int, float]], **options: Any) -> None:
    with SummaryWriter(str(folder), **options) as writer:
        for tag, by_step in values.items():
            for step, value in by_step.items():
                writer.add_scalar(tag, value, step)


def test_values_at_the_step_or_before(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(
        tmp_path / "runs/run7",
        {"loss": {50: 5.0, 100: 4.0, 200: float("nan"), 300: 2.0}, "val/loss": {150: 9.0}},
    )
    imported = ucformat.import_runs("tensorboard", str(tmp_path / "runs"), catalog)
    assert metric(catalog, "loss") == {
        100: 4.0,
        200: pytest.approx(float("nan"), nan_ok=True),
        300: 2.0,
    }
    assert metric(catalog, "val/loss") == {100: None, 200: 9.0, 300: 9.0}
    assert [dict(c.earlier) for c in imported.checkpoints] == [
        {},
        {"val/loss": 150},
        {"val/loss": 150},
    ]
    assert metric(catalog, "loss", "run8") == {100: None, 200: None, 300: None}


def test_a_second_import_changes_nothing(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    # another suffix than that of the file with the hyperparameters, which would be the same
    with SummaryWriter(str(tmp_path / "run7"), filename_suffix=".s") as writer:
        writer.add_scalar("loss", 1.5, 100)
        writer.add_hparams({"lr": 0.5, "name": "x"}, {"final": 1.0}, name=".", global_step=300)
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog, dry_run=True).changed == 3
    assert metric(catalog, "loss") == dict.fromkeys((100, 200, 300))
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog).changed == 3
    events = catalog.events(limit=1000)
    again = ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert (again.changed, len(again.checkpoints)) == (0, 3)
    assert catalog.events(limit=1000) == events
    assert of_run(catalog)[100].config["tensorboard"] == {
        "run_id": "run7",
        "run_name": "run7",
        "params": {"lr": 0.5, "name": "x"},
    }
    assert len(catalog.find("config.tensorboard.params.lr < 1")) == 3


def test_what_the_user_recorded_is_kept(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    catalog.metric("run7@200", {"loss": 7.0})
    # 0.1 was recorded in double precision, and is the same in single precision
    write(tmp_path / "run7", {"loss": {100: 1.0, 200: 2.0}, "recorded": {200: 0.1, 300: 0.2}})
    imported = ucformat.import_runs("tensorboard", str(tmp_path), catalog, metrics=["loss", "rec*"])
    assert [c.kept for c in imported.checkpoints] == [(), ("metric.loss",), ("metric.recorded",)]
    assert metric(catalog, "loss") == {100: 1.0, 200: 7.0, 300: 2.0}
    assert metric(catalog, "recorded") == {100: 0.1, 200: 0.1, 300: 0.1}
    ucformat.import_runs("tensorboard", str(tmp_path), catalog, metrics=["loss"], replace=True)
    assert metric(catalog, "loss") == {100: 1.0, 200: 2.0, 300: 2.0}
    assert metric(catalog, "recorded")[300] == 0.1


def test_a_training_that_was_set_back(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(tmp_path / "run7", {"loss": {100: 1.0, 195: 2.0, 295: 3.0}}, filename_suffix=".a")
    write(tmp_path / "run7", {"loss": {200: 4.0, 290: 5.0}}, filename_suffix=".b")
    with pytest.raises(UsageError, match="that of step 295, which was logged before") as failure:
        ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert "--rewound" in str(failure.value.hint)
    assert metric(catalog, "loss") == dict.fromkeys((100, 200, 300))
    ucformat.import_runs("tensorboard", str(tmp_path), catalog, rewound="drop")
    assert metric(catalog, "loss") == {100: 1.0, 200: 4.0, 300: 5.0}
    ucformat.import_runs("tensorboard", str(tmp_path), catalog, rewound="keep", replace=True)
    assert metric(catalog, "loss")[300] == 3.0


def test_a_writer_that_says_from_where_it_goes_on(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    write(
        tmp_path / "run7", {"loss": {100: 1.0, 295: 3.0}, "old": {295: 1.0}}, filename_suffix=".a"
    )
    write(tmp_path / "run7", {"loss": {290: 5.0}}, filename_suffix=".b", purge_step=200)
    ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert metric(catalog, "loss") == {100: 1.0, 200: 1.0, 300: 5.0}
    assert metric(catalog, "old") == dict.fromkeys((100, 200, 300))


def test_a_text_that_is_nested_too_deep_is_no_reference(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    with SummaryWriter(str(tmp_path / "run7")) as writer:
        writer.add_text("ucformat/checkpoint", "[" * 100_000, 100)
        writer.add_scalar("loss", 1.0, 100)
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog).changed == 3


def test_only_whole_ids_are_references(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    known = catalog.get("run7@200").id
    with SummaryWriter(str(tmp_path / "a")) as writer:
        for id_ in ("", "launch:zz", "run8@latest", known[:8], "/nowhere/run8/100", "\0", known):
            writer.add_text("ucformat/checkpoint", json.dumps({"id": id_}), 200)
    imported = ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert imported.left_out == {"references to checkpoints that the catalog does not have": 6}
    assert not imported.unmatched


def test_what_belongs_to_no_checkpoint_is_not_read(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    for suffix in (".a", ".b"):
        writer = SummaryWriter(str(tmp_path / "gone"), filename_suffix=suffix)
        writer.add_text("ucformat/checkpoint", json.dumps({"id": "absent"}), 200)
        writer.add_scalar("loss", 1.0, 100)
        time.sleep(0.01)
        writer.add_scalar("loss", 1.0, 200)
        if suffix == ".a":
            first = writer
    first.add_scalar("loss", 1.0, 300)
    first.close()
    writer.close()
    write(tmp_path / "run7", {"loss": {100: 1.0}})
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog).changed == 3


def test_a_checkpoint_that_is_deleted_is_refused(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(tmp_path / "a", {"loss": {100: 1.0}})
    ids = [e.id for e in of_run(catalog).values()]
    for number in range(len(ids)):
        catalog.delete(ids[number])
        with pytest.raises(NotFound, match=f"{ids[number]}' is deleted"):
            ucformat.import_runs("tensorboard", str(tmp_path), catalog, runs={"a": ids[number]})


def test_a_pattern_that_fits_nothing(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(tmp_path / "run7", {"loss": {100: 1.0}})
    with pytest.raises(NotFound, match="no metric 'los' of these runs") as failure:
        ucformat.import_runs("tensorboard", str(tmp_path), catalog, metrics=["loss", "los"])
    assert failure.value.hint == "it has loss"
    assert metric(catalog, "loss")[100] is None


def test_what_no_catalog_stores_as_it_is_does_not_change_again(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    with SummaryWriter(str(tmp_path / "run7")) as writer:
        writer.add_hparams({"note": "a\0b"}, {}, name=".")
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog).changed == 3
    assert ucformat.import_runs("tensorboard", str(tmp_path), catalog).changed == 0


def test_the_configuration_of_the_training_is_kept(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    own = {"tensorboard": {"logdir": "x"}}
    catalog.record(manifest(50, "own", 100, config=own), "/nowhere/own/100")
    for name in ("own", "run7", "other"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_hparams({"name": name}, {}, name=".")

    def import_(run: str, ref: str) -> ucformat.ImportedRuns:
        return ucformat.import_runs(
            "tensorboard", str(tmp_path), catalog, runs={run: ref}, replace=True
        )

    assert import_("own", "own").checkpoints[0].kept == ("config.tensorboard",)
    assert catalog.get("own@100").config == own
    assert import_("run7", "run7").changed == 3
    assert import_("other", "run7").changed == 3  # which another import wrote


def test_two_writers_at_once_are_not_one_run(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    writers = [SummaryWriter(str(tmp_path / "run7"), filename_suffix=f".{r}") for r in range(2)]
    for step in (100, 200):
        for rank, writer in enumerate(writers):
            writer.add_scalar("loss", float(rank), step)
            time.sleep(0.01)
    for writer in writers:
        writer.close()
    with pytest.raises(UsageError, match="at the same time"):
        ucformat.import_runs("tensorboard", str(tmp_path), catalog)


def test_folders_within_folders_are_runs_of_their_own(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    write(tmp_path / "logs/run7", {"loss": {100: 1.0}}, filename_suffix=".a")
    with SummaryWriter(str(tmp_path / "logs/run7"), filename_suffix=".b") as writer:
        writer.add_scalars("both", {"train": 1.0}, 100)
        writer.add_hparams({"lr": 0.5}, {}, name="1764320.5")
    imported = ucformat.import_runs("tensorboard", str(tmp_path / "logs"), catalog)
    assert set(imported.unmatched) == {"run7/both/train", "run7/1764320.5"}
    assert all("has no run" in reason for reason in imported.unmatched.values())
    # whoever knows that they are of one run says so
    pairs = {"run7": "run7", "run7/1764320.5": "run7"}
    ucformat.import_runs("tensorboard", str(tmp_path / "logs"), catalog, runs=pairs)
    assert of_run(catalog)[100].config["tensorboard"]["params"] == {"lr": 0.5}
    assert metric(catalog, "loss")[100] == 1.0


def test_values_that_are_no_numbers_are_counted(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    with SummaryWriter(str(tmp_path / "run7")) as writer:
        writer.add_histogram("weights", np.arange(9.0), 100)
        writer.add_histogram("biases", np.arange(3.0), 100)
        writer.add_scalar("loss", 1.0, 100)
    left_out = ucformat.import_runs("tensorboard", str(tmp_path), catalog).left_out
    assert left_out == {"images, histograms and other values that are no numbers": 2}


def test_a_file_that_is_cut_off_or_damaged(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(tmp_path / "run7", {"loss": {100: 1.0, 200: 2.0, 300: 3.0}})
    [file] = (tmp_path / "run7").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-3])
    imported = ucformat.import_runs("tensorboard", str(tmp_path), catalog, dry_run=True)
    assert dict(imported.checkpoints[2].earlier) == {"loss": 200}
    assert imported.left_out == {"unfinished records at the ends of event files": 1}
    for at in (0, 9, len(data) - 20, len(data) - 1):
        broken = bytearray(data)
        broken[at] ^= 1
        file.write_bytes(broken)
        with pytest.raises(IntegrityError, match=f"{file.name} is damaged at byte"):
            ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    length = struct.pack("<Q", 1 << 40)
    from ucformat.trackers.events import _masked

    file.write_bytes(data + length + struct.pack("<I", _masked(length)))
    with pytest.raises(IntegrityError, match="a record has 1,099,511,627,776 bytes"):
        ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert metric(catalog, "loss") == dict.fromkeys((100, 200, 300))


def test_which_checkpoints_a_run_belongs_to(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    write(tmp_path / "exp1", {"loss": {100: 1.0, 300: 3.0}})

    def import_(**options: Any) -> ucformat.ImportedRuns:
        return ucformat.import_runs("tensorboard", str(tmp_path), catalog, **options)

    assert import_().unmatched == {
        "exp1": "the catalog has no run 'exp1', and no checkpoint was logged to it"
    }
    with pytest.raises(NotFound, match="no run 'exp2'"):
        import_(runs={"exp2": "run7"})
    with pytest.raises(NotFound):
        import_(runs={"exp1": "run9"})
    import_(runs={"exp1": "run8@200"})  # the path to it
    assert metric(catalog, "loss", "run8") == {100: 1.0, 200: 1.0, 300: None}
    # a folder is a run by its own name, too
    import_b = ucformat.import_runs(
        "tensorboard", str(tmp_path / "exp1"), catalog, runs={"exp1": "run7"}
    )
    assert [c.name for c in import_b.checkpoints] == ["run7@100", "run7@200", "run7@300"]
    with pytest.raises(NotFound, match="no event files"):
        ucformat.import_runs("tensorboard", str(tmp_path / "absent"), catalog)


def test_two_runs_for_one_checkpoint_are_ambiguous(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    write(tmp_path / "a", {"loss": {100: 1.0}})
    write(tmp_path / "run7", {"loss": {100: 2.0}})
    with pytest.raises(UsageError, match="belongs to two runs of TensorBoard: run7, and a"):
        ucformat.import_runs(
            "tensorboard", str(tmp_path), catalog, runs={"run7": None, "a": "run7@100"}
        )
    write(tmp_path / "lr=1", {"loss": {100: 2.0}})
    with pytest.raises(UsageError) as failure:
        ucformat.import_runs(
            "tensorboard", str(tmp_path), catalog, runs={"lr=1": "run7@100", "a": "run7@200"}
        )
    assert "choose one: --run lr=1=;" in str(failure.value.hint)
    assert metric(catalog, "loss")[100] is None


def test_lines_that_do_not_continue_each_other(tmp_path: Path, catalog: ucformat.Catalog) -> None:
    catalog.record(manifest(99, "run7", 100), "/elsewhere/run7/100")
    write(tmp_path / "run7", {"loss": {100: 1.0}})
    with pytest.raises(UsageError, match="2 lines") as failure:
        ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    assert "--run run7=REF" in str(failure.value.hint)
    imported = ucformat.import_runs(
        "tensorboard", str(tmp_path), catalog, runs={"run7": "folder:/nowhere/run7@latest"}
    )
    assert [c.name for c in imported.checkpoints] == ["run7@100", "run7@200", "run7@300"]


def test_writers_of_pytorch_and_the_reader_of_tensorboard_agree(
    tmp_path: Path, catalog: ucformat.Catalog
) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    program = """
import sys, json, warnings
warnings.simplefilter("ignore")
from torch.utils.tensorboard import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
with SummaryWriter(sys.argv[1]) as writer:
    for step in range(0, 301, 50):
        writer.add_scalar("old", 1 / (step + 3), step)
        writer.add_scalar("new", 1 / (step + 3), step, new_style=True)
        writer.add_scalar("double", 1 / (step + 3), step, new_style=True, double_precision=True)
    writer.add_hparams({"lr": 0.5, "flag": True, "name": "x"}, {"final": 2.0}, run_name=".")
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0}).Reload()
print(json.dumps({e.step: e.value for e in events.Scalars("old")}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run7")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = {int(step): value for step, value in json.loads(done.stdout.splitlines()[-1]).items()}
    ucformat.import_runs("tensorboard", str(tmp_path), catalog)
    steps = (100, 200, 300)
    assert metric(catalog, "old") == {step: theirs[step] for step in steps}
    assert metric(catalog, "new") == metric(catalog, "old")
    assert metric(catalog, "double") == {step: 1 / (step + 3) for step in steps}
    params = of_run(catalog)[100].config["tensorboard"]["params"]
    assert params == {"lr": 0.5, "flag": True, "name": "x"}
