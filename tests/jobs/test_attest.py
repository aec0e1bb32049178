"""What is known of a checkpoint, in the formats of other tools, which validate it."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from openlineage.client import event_v2
from openlineage.client.generated.base import RunFacet
from openlineage.client.serde import Serde

import ucformat
import ucformat.torch
from tests.fakes import FakeSource, random_array
from tests.keys import write_keys
from ucformat.checkpoint import Checkpoint
from ucformat.errors import UnsupportedError, UsageError
from ucformat.storage.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]},
    "data": {"dataset": "c4", "data_path": ["/data/a", "/data/b"]},
    "seed": None,
}


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """One of which the catalog knows a metric and a tag, and what it was made from."""
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    arrays = {("w", "weight"): random_array((6, 5), "bfloat16", 1)}
    facts: dict[str, Any] = {
        "groups": ({"params": ["w"], "lr": float("inf")},),
        "aliases": {"tied": "w"},
        "step": 7,
    }
    source = Checkpoint(FakeSource.write(MemoryStore("attested"), arrays, **facts))
    ucformat.convert(source, tmp_path / "a b", run="run7", config=CONFIG, metrics={"loss": 2.5})
    ucformat.convert(tmp_path / "a b", tmp_path / "child", run="run8")
    with ucformat.Catalog() as catalog:
        catalog.metric(str(tmp_path / "child"), {"bleu": float("nan")})
        catalog.tag(str(tmp_path / "child"), "released")
    return tmp_path / "a b", tmp_path / "child"


def validated_bom(place: Path) -> dict[str, Any]:
    bom = ucformat.attest(place)
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom))
    assert error is None, error
    component: dict[str, Any] = bom["metadata"]["component"]
    return component


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {p["name"].removeprefix("ucformat:"): p["value"] for p in component["properties"]}


class TestCycloneDX:
    def test_what_a_checkpoint_knows(self, checkpoints: tuple[Path, Path]) -> None:
        model = validated_bom(checkpoints[0])
        assert (model["type"], model["name"]) == ("machine-learning-model", "run7@7")
        card = model["modelCard"]
        assert [d["name"] for d in card["modelParameters"]["datasets"]] == [
            *("c4", "/data/a", "/data/b")
        ]
        assert card["quantitativeAnalysis"]["performanceMetrics"] == [
            {"type": "loss", "value": "2.5"}
        ]
        known = properties(model)
        assert known["config:optimizer.lr"] == "0.0003"
        assert known["config:optimizer.betas"] == "[0.9, 0.95]"
        assert known["tensors:weight:bfloat16"] == "1"
        assert known["bytes"] == "60"
        assert "group:0:lr.$float" in known
        assert "%20" in model["externalReferences"][0]["url"]

    def test_its_hash_is_that_of_the_manifest(self, checkpoints: tuple[Path, Path]) -> None:
        place = checkpoints[0]
        model = validated_bom(place)
        assert model["hashes"] == [{"alg": "SHA-256", "content": sha256(place / "manifest.json")}]
        for file in model["components"]:
            assert file["hashes"][0]["content"] == sha256(place / file["name"])

    def test_what_the_catalog_knows(self, checkpoints: tuple[Path, Path]) -> None:
        parent, child = checkpoints
        model = validated_bom(child)
        assert model["tags"] == ["released"]
        measured = model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
        assert {"type": "bleu", "value": "NaN"} in measured
        nearest, *others = model["pedigree"]["ancestors"]
        assert nearest["version"] == ucformat.open(parent).id
        assert [properties(a)["distance"] for a in (nearest, *others)] == ["1", "2"]

    def test_without_a_catalog(
        self, checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCP_CATALOG", "none")
        (ancestor,) = validated_bom(checkpoints[1])["pedigree"]["ancestors"]
        assert ancestor["version"] == ucformat.open(checkpoints[0]).id

    def test_a_signature_is_referred_to(
        self, checkpoints: tuple[Path, Path], tmp_path: Path
    ) -> None:
        ucformat.sign(checkpoints[1], key=write_keys(tmp_path, "alice").private)
        references = validated_bom(checkpoints[1])["externalReferences"]
        assert [r["type"] for r in references] == ["distribution", "digital-signature"]

    def test_foreign_ones(self) -> None:
        arrays = {("w", "weight"): random_array((2, 2), "float32", 1)}
        ck = Checkpoint(FakeSource.write(MemoryStore("foreign-attested"), arrays))
        bom = ucformat.attest(ck)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
        assert "hashes" not in bom["metadata"]["component"]
        with pytest.raises(UnsupportedError, match="does not say when it was written"):
            ucformat.attest(ck, "openlineage")


#: The client's classes, generated from the official schemas, by the module of each.
FACETS = {
    "DatasetVersionDatasetFacet": "dataset_version_dataset",
    "OutputStatisticsOutputDatasetFacet": "output_statistics_output_dataset",
    "ProcessingEngineRunFacet": "processing_engine_run",
}


def facet(document: dict[str, Any]) -> Any:
    members = {k: v for k, v in document.items() if not k.startswith("_")}
    kind = document["_schemaURL"].rpartition("/")[2]
    if kind == "RunFacet":
        return RunFacet(producer=document["_producer"]).with_additional_properties(**members)
    module = importlib.import_module(f"openlineage.client.generated.{FACETS[kind]}")
    return getattr(module, kind)(producer=document["_producer"], **members)


def dataset(kind: type[Any], document: dict[str, Any]) -> Any:
    return kind(
        **{
            name: {k: facet(f) for k, f in value.items()} if isinstance(value, dict) else value
            for name, value in document.items()
        }
    )


@pytest.mark.parametrize("launched", [False, True])
def test_openlineage(checkpoints: tuple[Path, Path], tmp_path: Path, launched: bool) -> None:
    """Its client makes the same event, and so the official schemas do."""
    place = checkpoints[1]
    if launched:
        place = tmp_path / "trained"
        with ucformat.torch.Manager(tmp_path / "runs", every=1, keep={"last": 1}) as manager:
            manager.save(1, {"model": torch.nn.Linear(2, 2)})
            (place,) = (tmp_path / "runs").glob("*1")
    event = ucformat.attest(place, "openlineage")
    run, job = event["run"], event["job"]
    made = event_v2.RunEvent(
        eventTime=event["eventTime"],
        run=event_v2.Run(run["runId"], {k: facet(f) for k, f in run["facets"].items()}),
        job=event_v2.Job(job["namespace"], job["name"]),
        eventType=event_v2.RunState[event["eventType"]],
        producer=event["producer"],
        inputs=[dataset(event_v2.InputDataset, d) for d in event["inputs"]],
        outputs=[dataset(event_v2.OutputDataset, d) for d in event["outputs"]],
    )
    theirs = Serde.to_dict(made)
    assert theirs["schemaURL"] == event["schemaURL"]
    for ours, client in zip(
        (*event["inputs"], *event["outputs"]),
        (*theirs["inputs"], *theirs["outputs"]),
        strict=True,
    ):
        assert ours == {key: value for key, value in client.items() if value}
    assert run["facets"]["processing_engine"] == theirs["run"]["facets"]["processing_engine"]
    assert event["eventType"] == ("OTHER" if launched else "COMPLETE")


def in_a_process(code: str, folder: Path) -> str:
    """The last line that a program prints; trackers start threads and services, and change the logging."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


class TestTrackers:
    def test_wandb(self, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
        pytest.importorskip("wandb", reason="needs W&B: pip install wandb")
        with pytest.raises(UsageError, match="no run of W&B is active"):
            ucformat.log_reference(checkpoints[0], "wandb")
        code = f"""
import json, wandb, ucformat
logged = []
with wandb.init(mode="offline", dir=".") as run:
    run.log_artifact, log = lambda artifact: (logged.append(artifact), log(artifact)), run.log_artifact
    name = ucformat.log_reference({str(checkpoints[0])!r}, "wandb")
(artifact,) = logged
refs = {{path: entry.ref for path, entry in artifact.manifest.entries.items()}}
print(json.dumps([name, artifact.type, dict(artifact.metadata), refs]))
"""
        name, kind, metadata, refs = json.loads(in_a_process(code, tmp_path))
        assert (name, kind) == ("run7-7", "model")
        assert metadata["ucformat.id"] == ucformat.open(checkpoints[0]).id
        assert refs["ucformat.json"] is None  # the one file that is stored
        assert refs["checkpoint/manifest.json"] == f"{checkpoints[0].as_uri()}/manifest.json"

    def test_mlflow(self, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
        pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
        code = f"""
import json, mlflow, os, ucformat
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
mlflow.set_tracking_uri("file:./mlruns")
with mlflow.start_run() as run:
    model = mlflow.get_logged_model(ucformat.log_reference({str(checkpoints[0])!r}, "mlflow"))
print(json.dumps([model.name, model.source_run_id == run.info.run_id, dict(model.tags)]))
"""
        name, of_the_run, tags = json.loads(in_a_process(code, tmp_path))
        assert (name, of_the_run) == ("run7@7", True)
        assert tags["ucformat.url"] == str(checkpoints[0])
        assert len(tags["ucformat.manifest_sha256"]) == 64
