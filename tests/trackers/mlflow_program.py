"""A training that logs to MLflow what has gone wrong in public: run as a program, with the uri of a store."""

import json
import sys

import mlflow

mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("exp")
ids = {}
with mlflow.start_run(run_name="run7") as run:
    ids["run7"] = run.info.run_id
    mlflow.log_params(
        {
            "lr": 0.0003,
            "bf16": True,
            "steps": 300,
            "long": "y" * 5000,
            "hub_token": "hf_abcdefghijklmnopqrstuv",
            "version": "007",
        }
    )
    client = mlflow.MlflowClient()
    for key, value, at, step in (
        ("loss", 1.0, 1, 100),
        ("loss", 2.0, 3, 100),  # logged later at the same step
        ("loss", 1.5, 2, 100),
        ("loss", float("nan"), 4, 200),
        ("loss", float("inf"), 5, 300),
        ("low", float("-inf"), 5, 300),
        ("accuracy", 0.5, 1, 50),
        ("tied", 1.0, 9, 100),
        ("tied", 3.0, 9, 100),  # at the same time: MLflow shows the greatest
        ("tied", 2.0, 9, 100),
        ("system/cpu", 99.0, 1, 1),
    ):
        client.log_metric(run.info.run_id, key, value, timestamp=at, step=step)
    with mlflow.start_run(run_name="run8", nested=True) as child:
        ids["child"] = child.info.run_id
        mlflow.log_metric("loss", 8.0, step=100)
with mlflow.start_run(run_name="gone") as run:
    ids["gone"] = run.info.run_id
mlflow.delete_run(ids["gone"])
mlflow.set_experiment("second")
for _ in range(2):
    with mlflow.start_run(run_name="twice") as run:
        ids["twice"] = run.info.run_id
        mlflow.log_metric("loss", 1.0, step=100)
with mlflow.start_run(run_name="referring") as run:
    ids["referring"] = run.info.run_id
    mlflow.log_metric("score", 0.25, step=200)
    mlflow.create_external_model(
        "a", source_run_id=run.info.run_id, tags={"ucformat.id": sys.argv[2]}
    )
    mlflow.create_external_model("b", source_run_id=run.info.run_id, tags={"ucformat.id": "gone"})
sys.stdout.write(json.dumps(ids))
