"""MLflow's runs, read by its own client from a server, an SQLite file or a folder."""

from __future__ import annotations

import math
import sqlite3
import sys
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from sqlalchemy import URL

from ucformat.errors import NotFound, UcformatError, UnsupportedError, first_names
from ucformat.jobs.logged import ID_TAG
from ucformat.redacted import learn_url, redacted, shown_url
from ucformat.storage.url import split_url
from ucformat.trackers.content import Point, TrackedContent, TrackedRun, TrackedRuns, param_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_PAGE = 1000  # runs of an answer
_SYSTEM = "system/"  # its own samples of the machine, whose steps are not those of the training
_MOST_NAMED = 10


def mlflow_runs(
    url: str, experiments: Sequence[str] = (), wanted: Callable[[str], bool] = bool
) -> TrackedRuns:
    """List the runs of MLflow.

    Args:
        url: of a server, `sqlite:///FILE`, or the folder of a file store.
        experiments: their names (default: all that are not deleted).
        wanted: whether a metric is; others are named, and have no values (default: all are).
    """
    learn_url(url)
    uri = _checked(url)
    try:
        from mlflow import MlflowClient
        from mlflow.entities import ViewType
    except ImportError:
        raise UnsupportedError(
            "mlflow is not installed", hint="pip install 'ucformat[mlflow]'"
        ) from None
    with _telling(), _never_changing(url):
        client = MlflowClient(uri)
        by_name = {e.name: e.experiment_id for e in _paged(client.search_experiments)}
        if absent := sorted(set(experiments) - by_name.keys()):
            raise NotFound(
                f"{shown_url(url)} has no experiment {absent[0]!r}",
                hint=f"it has {first_names(sorted(by_name), _MOST_NAMED)}",
            )
        ids = [by_name[name] for name in experiments] if experiments else list(by_name.values())
        search = partial(client.search_runs, ids, run_view_type=ViewType.ALL, max_results=_PAGE)
        all_runs = list(_paged(search)) if ids else []
        references = _references(client, ids)
    left_out = Counter("deleted runs" for run in all_runs if run.info.lifecycle_stage != "active")
    runs = [
        TrackedRun(
            run.info.run_id,
            run.info.run_name or run.info.run_id,
            partial(frozenset, references.get(run.info.run_id, ())),
            partial(_read, client, run, wanted),
        )
        for run in all_runs
        if run.info.lifecycle_stage == "active"
    ]
    return TrackedRuns(runs, dict(left_out))


def _checked(url: str) -> str:
    """The url for the client, which would create a database or a folder that does not exist."""
    scheme, path = split_url(url)
    if scheme in ("http", "https"):
        return url
    if scheme == "sqlite":
        # the client migrates an older database; with its slashes the name would be taken for a
        # path whose folders are to be created
        name = f"file:{quote(str(_database(url)), safe='')}"
        read_only = URL.create("sqlite", database=name, query={"mode": "ro", "uri": "true"})
        return read_only.render_as_string()
    if scheme in ("", "file"):
        # the client creates a folder for deleted experiments where there is none
        if next(Path(path).glob("*/meta.yaml"), None) is None:
            hint = f"sqlite:///{path}" if Path(path).is_file() else "give the folder `mlruns`"
            raise NotFound(f"{url} is no folder of MLflow", hint=hint)
        return Path(path).absolute().as_uri()
    raise UnsupportedError(
        f"runs of MLflow are not read from {shown_url(url)}",
        hint="give the url of its server (`mlflow server --backend-store-uri URL` starts one), "
        "sqlite:///FILE, or the folder of a file store",
    )


def _database(url: str) -> Path:
    file = Path(url.partition("sqlite:///")[2]).absolute()
    wrong = NotFound(f"{url} is no database of MLflow", hint="give sqlite:///FILE")
    if not file.is_file():
        raise wrong
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("select name from sqlite_master")}
    except sqlite3.DatabaseError as error:
        raise wrong from error
    if not tables >= {"experiments", "runs", "metrics"}:
        raise wrong
    return file


@contextmanager
def _never_changing(url: str) -> Iterator[None]:
    """Say what to do if the client cannot read a database before it has changed it."""
    try:
        yield
    except UcformatError:
        raise
    except Exception as error:
        if "attempt to write a readonly database" not in str(error):
            raise
        raise UnsupportedError(
            f"{url} is of an older MLflow, or lacks its experiment `Default`, and is only read here",
            hint=f"`mlflow db upgrade {url}` upgrades it, `mlflow server --backend-store-uri {url}` "
            "adds the experiment; keep a copy",
        ) from None


@contextmanager
def _telling() -> Iterator[None]:
    """Raise errors of the client, and of the libraries below it, as ours, without secrets."""
    try:
        yield
    except UcformatError:
        raise
    except Exception as error:  # noqa: BLE001 - of any library below the client
        raise UcformatError(f"MLflow: {redacted(str(error))}") from None


def _paged(search: Any, **arguments: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(page_token=token, **arguments)
        yield from page
        token = page.token
        if not token:
            return


def _references(client: Any, experiments: Sequence[str]) -> Mapping[str, set[str]]:
    """The ids of the checkpoints that were logged to runs, by the run."""
    ids: dict[str, set[str]] = defaultdict(set)
    for experiment in experiments:
        for model in _paged(partial(client.search_logged_models, [experiment])):
            if model.source_run_id and (id_ := model.tags.get(ID_TAG)):
                ids[model.source_run_id].add(id_)
    return ids


def _read(client: Any, run: Any, wanted: Callable[[str], bool]) -> TrackedContent:
    metrics, ignored = dict[str, list[Point]](), Counter[str]()
    with _telling():
        for name in sorted(run.data.metrics):
            if name.startswith(_SYSTEM):
                ignored["metrics of the system"] += 1
                continue
            # each is a request
            history = client.get_metric_history(run.info.run_id, name) if wanted(name) else ()
            # as MLflow chooses the last value, the greatest of those of one time and step
            history = sorted(history, key=lambda m: (m.timestamp, m.step, _order(m.value)))
            metrics[name] = [(m.step, _number(m.value)) for m in history]
    params = {name: param_value(text) for name, text in run.data.params.items()}
    return TrackedContent(params, metrics, ignored=dict(ignored))


def _order(value: float) -> tuple[bool, float]:
    return (not math.isnan(value), value)


def _number(value: float) -> float:
    """A value; databases keep the greatest finite number in the place of an infinite one."""
    return math.copysign(math.inf, value) if abs(value) == sys.float_info.max else float(value)
