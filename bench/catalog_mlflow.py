"""MLflow beside `bench/catalog.py`: run by an interpreter that has MLflow, on as many runs and logged models.

usage: catalog_mlflow.py FOLDER; reads the checkpoints as a line of JSON, then one question a line,
and answers each with seconds and the names of what was found.

MLflow makes its own SQLite database and the experiment; the rows of runs and models are inserted in
bulk, each just as its client writes it, which would take hours: parameters as text, each metric of
a run in both of its tables. What it finds is compared with what ucformat finds.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The columns that are filled, of each table.
TABLES = {
    "runs": "run_uuid, name, source_type, source_name, entry_point_name, user_id, status, start_time, end_time,"
    " source_version, lifecycle_stage, artifact_uri, experiment_id",
    "params": "run_uuid, key, value",
    "tags": "run_uuid, key, value",
    "metrics": "run_uuid, key, value, timestamp, step, is_nan",
    "latest_metrics": "run_uuid, key, value, timestamp, step, is_nan",
    "logged_models": "model_id, experiment_id, name, artifact_location, creation_timestamp_ms,"
    " last_updated_timestamp_ms, status, lifecycle_stage, source_run_id",
    "logged_model_params": "model_id, experiment_id, param_key, param_value",
    "logged_model_tags": "model_id, experiment_id, tag_key, tag_value",
    "logged_model_metrics": "model_id, metric_name, metric_timestamp_ms, metric_step, metric_value, experiment_id,"
    " run_id",
}
READY = 2  # the status of a logged model


def main() -> None:
    logging.disable(logging.INFO)
    folder = Path(sys.argv[1])
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("bench", artifact_location=f"{folder}/artifacts")
    begun = time.perf_counter()
    fill(folder, int(experiment), json.loads(sys.stdin.readline()))
    print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        begun = time.perf_counter()
        found = ask(client, experiment, **question)
        print(json.dumps({"seconds": time.perf_counter() - begun, "found": found}), flush=True)


def ask(
    client: MlflowClient, experiment: str, *, what: str, where: str, by: str, limit: int
) -> list[str]:
    """The names of what is found, in order."""
    if what == "search_runs":
        runs = client.search_runs([experiment], where, order_by=[f"{by} ASC"], max_results=limit)
        return [r.info.run_name for r in runs]
    order = [{"field_name": by, "ascending": True}]
    models = client.search_logged_models([experiment], where, order_by=order, max_results=limit)
    return [m.name for m in models]


def fill(folder: Path, experiment: int, checkpoints: list[dict[str, Any]]) -> None:
    """Insert a run and a logged model for each checkpoint."""
    rows: dict[str, list[tuple[Any, ...]]] = {t: [] for t in TABLES}
    for one in checkpoints:
        run, model = uuid.uuid4().hex, f"m-{uuid.uuid4().hex}"
        name, step, now = one["name"], one["step"], one["created"]
        place = f"{folder}/artifacts/{run}/artifacts"
        rows["runs"].append(
            (
                run,
                name,
                "UNKNOWN",
                "",
                "",
                "bench",
                "FINISHED",
                now,
                now,
                "",
                "active",
                place,
                experiment,
            )
        )
        rows["logged_models"].append(
            (model, experiment, name, place, now, now, READY, "active", run)
        )
        for key, value in one["params"].items():
            rows["params"].append((run, key, value))
            rows["logged_model_params"].append((model, experiment, key, value))
        for key, value in {"mlflow.runName": name, **one["tags"]}.items():
            rows["tags"].append((run, key, value))
        for key, value in one["tags"].items():
            rows["logged_model_tags"].append((model, experiment, key, value))
        for key, value in one["metrics"].items():
            rows["metrics"].append((run, key, value, now, step, False))
            rows["latest_metrics"].append((run, key, value, now, step, False))
            rows["logged_model_metrics"].append((model, key, now, step, value, experiment, run))
    with sqlite3.connect(folder / "mlflow.db") as connection:
        for table, columns in TABLES.items():
            _insert(connection, table, columns, rows[table])


def _insert(
    connection: sqlite3.Connection, table: str, columns: str, rows: Iterable[tuple[Any, ...]]
) -> None:
    marks = ", ".join("?" for _ in columns.split(","))
    connection.executemany(f"insert into {table} ({columns}) values ({marks})", rows)  # noqa: S608 - constants


if __name__ == "__main__":
    main()
