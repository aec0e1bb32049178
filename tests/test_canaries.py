"""A canary in every place where a secret can be given, looked for in every place where it could come out."""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import fsspec
import pytest
from click.testing import CliRunner

import ucformat
from tests.jobs.conftest import universal
from ucformat.cli.main import ucp
from ucformat.errors import Conflict, TensorNotFound, UcformatError, UnsafeError, UsageError
from ucformat.settings import load_settings
from ucformat.storage.clouds import boto_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

C = "CANARY"  # stands for the secret in what follows

CATALOGS = [
    f"postgresql://me:{C}@127.0.0.1:1/db",
    f"postgres://me:{C}@127.0.0.1:1/db",
    f"postgresql+psycopg://me:{C}@127.0.0.1:1/db",
    f"postgresql://me@127.0.0.1:1/db?password={C}",
    f"postgresql://me@127.0.0.1:1/db?sslmode=require&sslpassword={C}",
    f"postgresql://127.0.0.1:1/db?user=me&password={C}",
    f"postgresql://me@127.0.0.1:1/db?options=-csearch_path%3D{C}",
    f"postgresql://me@127.0.0.1:1/db?nosuch={C}",
    f"postgresql://me@127.0.0.1:1/db?connect_timeout={C}&password={C}",
    f"postgresql://me:{C}@127.0.0.1:port/db",
    f"postgresql://me:{C}@127.0.0.1:1:1/db",
    f"postgresql://me:a@{C}@127.0.0.1:1/db",
    f"postgresql://me:a/{C}@127.0.0.1:1/db",
    f"postgresql://me:a@b/{C}@127.0.0.1:1/db",
    f"postgresql://me:a%40{C}@127.0.0.1:1/db",
    f"postgresql://me:{C}@[::1:1/db",
    f"postgresql:/me:{C}@127.0.0.1:1/db",
    f"postgresql:me:{C}@127.0.0.1:1/db",
    f"mysql://me:{C}@127.0.0.1:1/db",
    f"nonsense://me:{C}@127.0.0.1:1/db",
    f"https://me:{C}@127.0.0.1:1/db",
]

PLACES = [
    f"s3://AKIA:{C}@bucket/run",
    f"s3://{C}@bucket/run",
    f"s3://bucket/run?X-Amz-Security-Token={C}",
    f"s3://bucket/run?X-Amz-Signature={C}",
    f"gs://bucket/run?X-Goog-Signature={C}",
    f"az://container/run?sv=2024&sig={C}",
    f"abfss://me:{C}@account.dfs.core.windows.net/run",
    f"https://me:{C}@127.0.0.1:1/run",
    f"https://{C}@127.0.0.1:1/run",
    f"https://127.0.0.1:1/run?token={C}",
    f"https://127.0.0.1:1/run#access_token={C}",
    f"hf://{C}@datasets/org/repo",
    f"hf://org:{C}@repo/run",
    f"hf://datasets/org/repo?token={C}",
    f"github://org:{C}@main/run",
    f"sftp://me:{C}@127.0.0.1:1/run",
    f"ftp://me:{C}@127.0.0.1:1/run",
    f"ftp://me@127.0.0.1:1/run;password={C}",
    f"webhdfs://{C}:x@127.0.0.1:1/run?delegation_token={C}",
    f"nonsense://{C}@127.0.0.1/run",
    f"simplecache::https://127.0.0.1:1/run?sig={C}",
    f"zip://f::s3://AKIA:{C}@bucket/run.zip",
    f"postgresql://me:{C}@127.0.0.1:1/db",
]

#: Variables of the environment, and a place that is reached, or not, with what they say.
VARIABLES: list[tuple[dict[str, str], str]] = [
    ({"AWS_SECRET_ACCESS_KEY": C, "AWS_SESSION_TOKEN": f"t{C}"}, "s3://bucket/run"),
    ({"UCP_ENDPOINT": f"http://me:{C}@127.0.0.1:1"}, "s3://bucket/run"),
    ({"UCP_ENDPOINT": f"http://{C}@127.0.0.1:1"}, "s3://bucket/run"),
    ({"UCP_ENDPOINT": f"http://127.0.0.1:1/?token={C}"}, "s3://bucket/run"),
    ({"AWS_ENDPOINT_URL": f"http://me:{C}@127.0.0.1:1"}, "s3://bucket/run"),
    (
        {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": f"sv=1&sig={C}"},
        "az://container/run",
    ),
    (
        {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": f"{C}!"},
        "az://container/run",
    ),
    ({"GOOGLE_SERVICE_ACCOUNT_KEY": f'{{"private_key": "{C * 2}"}}'}, "gs://bucket/run"),
    ({"http_proxy": f"http://me:{C}@127.0.0.1:1", "no_proxy": ""}, "http://nowhere.invalid/run"),
    ({"HF_TOKEN": C, "HF_ENDPOINT": "http://127.0.0.1:1"}, "hf://datasets/org/repo"),
    ({"PGPASSWORD": C, "UCP_CATALOG": "postgresql://me@127.0.0.1:1/db"}, "nowhere"),
    ({"UCP_ROOTS": f"https://me:{C}@127.0.0.1:1/"}, "nowhere"),
]

#: What is run with a place, and a catalog; S is a checkpoint, N a folder that is not there, X the
#: place.
COMMANDS = [
    *(
        "show X",
        "verify X",
        "get X w",
        "plan X --rank 0",
        "convert X N",
        "convert S X",
        "copy S X",
        "copy X N",
    ),
    *(
        "register X",
        "register -r X",
        "materialize X",
        "doctor X",
        "doctor --read-only X",
        "show --json X",
        "X",
    ),
    *("show --bogus X", "show X X", "link X S", "note X text", "tag X new"),
]
OF_CATALOGS = [
    *(
        "ls",
        "ls --json",
        "catalog info",
        "catalog info --json",
        "catalog upgrade",
        "log",
        "gc",
        "delete run@1",
    ),
    *(
        "show S",
        "show run@1",
        "register S",
        "convert S N",
        "alias list",
        "lineage run@1",
        "reindex S",
        "tag run@1 new",
    ),
]

ACTS: list[Callable[[str, str, str], object]] = [
    lambda x, _s, _n: ucformat.open(x),
    lambda x, _s, n: ucformat.convert(x, n),
    lambda x, s, _n: ucformat.convert(s, x),
    lambda x, s, _n: ucformat.copy(s, x),
    lambda x, _s, _n: ucformat.verify(x),
    lambda x, _s, _n: _registered(x),
    lambda x, _s, _n: repr(ucformat.doctor(x)),
]


def _registered(place: str) -> object:
    with ucformat.Catalog() as catalog:
        return ucformat.register([place], catalog)


class Heard(logging.Handler):
    """What a program's own handler makes of what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [self.format(record), repr(record.msg), repr(record.args)]


class Watch:
    """All that could be seen, and the canary that must not be in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary = f"Zq7+{secrets.token_hex(8)}/x="
        self.texts: list[str] = []
        self.heard = Heard()
        self.source = str(folder / "source" / "1")
        self.names = 0

    def new(self) -> str:
        self.names += 1
        return str(self.folder / f"new{self.names}")

    def put(self, text: str) -> str:
        """A text with the canary in it, quoted where it is in a url and would end it."""
        secret = quote(self.canary, safe="") if "://" in text or ":/" in text else self.canary
        return text.replace(C, secret)

    def run(self, line: str, place: str = "", *options: str) -> None:
        words = {"S": self.source, "N": self.new(), "X": place}
        result = CliRunner().invoke(ucp, [words.get(w, w) for w in line.split()] + list(options))
        self.texts += [result.stdout, result.stderr]
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise AssertionError(f"{line}: nobody expected this") from result.exception

    def act(self, act: Callable[[], object]) -> None:
        try:
            self.texts.append(repr(act()))
        except UcformatError as error:
            self.error(error)

    def error(self, error: BaseException) -> None:
        self.texts.append("".join(traceback.format_exception(error)))
        todo, done = [error], set[int]()
        while todo:
            one = todo.pop()
            if id(one) not in done:
                done.add(id(one))
                self.texts += [str(one), repr(one), repr(one.args), repr(vars(one))]
                todo += [e for e in (one.__cause__, one.__context__) if e is not None]

    def check(self) -> None:
        plain = self.canary
        files = [
            f
            for f in self.folder.rglob("*")
            if f.is_file() and f.name not in ("config.toml", "credentials")
        ]
        texts = [*self.texts, *self.heard.texts]
        for file in files:
            with suppress(
                FileNotFoundError
            ):  # SQLite removes its own when the last connection is closed
                texts.append(file.read_bytes().decode("latin-1"))
        texts += [str(f) for f in self.folder.rglob("*")]
        for text in texts:
            for form in (plain, quote(plain, safe=""), quote(plain), plain[4:20]):
                assert form not in text, text[max(0, text.index(form) - 300) :][:600]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    universal(folder / "1")
    return folder


@pytest.fixture
def watch(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A canary of its own, which nothing that ran before made known."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith(
            ("AWS_", "UCP_", "PG", "AZURE_", "GOOGLE_", "HF_")
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("UCP_CATALOG", str(tmp_path / "catalog.db"))
    monkeypatch.setenv("UCP_DEADLINE", "0.2")
    monkeypatch.setenv("UCP_DEBUG", "1")
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUCFORMATTESTS")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing-to-see")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr("ucformat.storage.clouds.Options.__init__.__defaults__", ("", "", 0.2, 0))
    shutil.copytree(source, tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    found = Watch(tmp_path)
    logger = logging.getLogger("ucformat")
    logger.addHandler(found.heard)
    yield found
    logger.removeHandler(found.heard)


@pytest.mark.parametrize("url", CATALOGS)
def test_of_the_url_of_a_catalog(url: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    given = watch.put(url)
    for line in OF_CATALOGS:
        watch.run(line, "", "--catalog", given)
    watch.act(lambda: ucformat.Catalog(given))
    watch.check()
    monkeypatch.setenv("UCP_CATALOG", given)
    for line in ("ls", "catalog info", "show S", "register S"):
        watch.run(line)
    watch.act(ucformat.Catalog)
    watch.act(lambda: ucformat.open("run@1"))
    watch.act(lambda: ucformat.convert(watch.source, watch.new()))
    watch.texts.append(repr(load_settings()))
    watch.check()


@pytest.mark.parametrize("url", PLACES)
def test_of_the_url_of_a_place(url: str, watch: Watch) -> None:
    given = watch.put(url)
    for line in COMMANDS:
        watch.run(line, given)
    for act in ACTS:
        watch.act(partial(act, given, watch.source, watch.new()))
    watch.check()


@pytest.mark.parametrize(
    ("variables", "place"), VARIABLES, ids=[f"{min(v)}-{p}" for v, p in VARIABLES]
)
def test_of_the_environment(
    variables: dict[str, str], place: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, watch.put(value))
    for line in (*COMMANDS[:-5], *OF_CATALOGS[:6]):
        watch.run(line, place)
    for act in ACTS:
        watch.act(partial(act, place, watch.source, watch.new()))
    watch.check()


#: Files of settings, what they say, and what is run.
FILES = [
    ("config/ucformat/config.toml", f'catalog = "postgresql://me:{C}@127.0.0.1:1/db"', "ls"),
    (
        "config/ucformat/config.toml",
        f'catalog = "postgresql://me@127.0.0.1:1/db?password={C}',
        "ls",
    ),
    (
        "config/ucformat/config.toml",
        f'endpoint = "http://me:{C}@127.0.0.1:1"',
        "show s3://bucket/run",
    ),
    (
        "config/ucformat/config.toml",
        f'endpoint = "http://me:{C}@127.0.0.1:1"',
        "doctor s3://bucket/run",
    ),
    (
        "config/ucformat/config.toml",
        f'endpoint = ["http://me:{C}@127.0.0.1:1"]',
        "doctor s3://bucket/run",
    ),
    ("ucformat.toml", f'catalog = "postgresql://me:{C}@127.0.0.1:1/db"', "ls"),
    ("ucformat.toml", f'endpoint = "http://me:{C}@127.0.0.1:1"', "show s3://bucket/run"),
    (
        "credentials",
        f"[default]\naws_access_key_id = A\naws_secret_access_key {C}\n",
        "show s3://bucket/run",
    ),
    (
        "credentials",
        f"[default]\naws_access_key_id = A\naws_secret_access_key {C}\n",
        "doctor s3://bucket/run",
    ),
    (
        "credentials",
        f"[default]\naws_access_key_id = A\naws_secret_access_key = {C}\n",
        "doctor s3://bucket/run",
    ),
    ("config", f"[profile {C}\nx", "doctor s3://bucket/run"),
    (
        "fsspec/ftp.json",
        json.dumps({"ftp": {"username": "me", "password": C}}),
        "show ftp://127.0.0.1:1/run",
    ),
]


@pytest.mark.parametrize(("name", "text", "line"), FILES)
def test_of_files_of_settings(
    name: str, text: str, line: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(watch.folder / "config"))
    for variable in ("UCP_CATALOG", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_DATA_HOME", str(watch.folder))
    boto_session.cache_clear()
    monkeypatch.setattr("fsspec.config.conf", {})
    file = watch.folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(watch.put(text))
    if name.startswith("fsspec"):
        fsspec.config.set_conf_files(str(file.parent), fsspec.config.conf)
    for words in (line, f"{line} --json"):
        watch.run(words)
    watch.act(lambda: ucformat.open(line.rsplit(maxsplit=1)[-1]))
    watch.act(ucformat.Catalog)
    file.unlink()
    boto_session.cache_clear()
    watch.check()


def test_of_whatever_writes_to_the_streams_of_a_process(watch: Watch) -> None:
    code = (
        "import os, warnings; import ucformat.cli.commands.ls as ls; from ucformat.cli.main import main\n"
        "def fail(*_):\n"
        "    warnings.warn('it was ' + os.environ['SOME_TOKEN'])\n"
        "    print(os.environ['SOME_TOKEN'])\n"
        "    raise RuntimeError('with ' + os.environ['SOME_TOKEN']) from KeyError(os.environ['SOME_TOKEN'])\n"
        "ls.opened_catalog = fail; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "ls"],
        env={**os.environ, "SOME_TOKEN": watch.canary},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "RuntimeError: with …" in done.stderr
    assert "it was …" in done.stderr
    assert done.stdout == "…\n"
    watch.texts += [done.stdout, done.stderr]
    watch.check()


def _save_behind(watch: Watch, *places: str) -> None:
    """Save with a writer of its own; what it says, and what anybody sees of it, is looked at too."""
    import torch

    from ucformat.torch import async_save
    from ucformat.torch.saving import background

    for place in (*places, watch.new()):
        watch.act(
            lambda place=place: async_save({"w": torch.zeros(4)}, place, run="r", step=1).wait()  # type: ignore[misc]
        )
    (mine,) = background.writers.values()
    process = Path(f"/proc/{mine._process.pid}")
    watch.texts.append((process / "cmdline").read_text())
    own = {os.fsencode(f"{name}={value}") for name, value in os.environ.items()}
    assert {*(process / "environ").read_bytes().split(b"\0")} - own <= {
        b"",
        b"CUDA_VISIBLE_DEVICES=",
    }
    background._close_all()


def test_of_the_writers_of_async_save(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSSPEC_CONFIG_DIR", str(watch.folder / "fsspec"))
    for variables, _ in VARIABLES[:1] + VARIABLES[5:8]:
        for name, value in variables.items():
            monkeypatch.setenv(name, watch.put(value))
    monkeypatch.setenv("UCP_CATALOG", watch.put(CATALOGS[3]))
    file = watch.folder / "fsspec" / "ftp.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"ftp": {"username": "me", "password": watch.canary}}))
    fsspec.config.set_conf_files(str(file.parent), fsspec.config.conf)
    given = [watch.put(PLACES[i]) for i in (0, 2, 7, 9, 11, 15, 20)]
    _save_behind(
        watch,
        "s3://bucket/run",
        "az://container/run",
        "gs://bucket/run",
        "ftp://127.0.0.1:1/run",
        *given,
    )
    file.unlink()
    out, err = capfd.readouterr()
    assert "postgresql+psycopg://me@127.0.0.1:1/db" in err
    watch.texts += [out, err]
    watch.check()


def test_of_whatever_the_writer_of_async_save_writes_to_its_streams(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import os, sys, threading, warnings; import ucformat.torch.saving.worker as worker\n"
        "begin = worker._do\n"
        "def fail(*_):\n"
        "    raise RuntimeError('with ' + os.environ['SOME_TOKEN']) from KeyError(os.environ['SOME_TOKEN'])\n"
        "def do(*args):\n"
        "    warnings.warn('it was ' + os.environ['SOME_TOKEN'])\n"
        "    print(os.environ['SOME_TOKEN'], flush=True)\n"
        "    thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "    return begin(*args)\n"
        "worker._do = do\n"
    )
    monkeypatch.setattr("ucformat.torch.saving.background._MAIN", f"{code}worker.main()")
    monkeypatch.setenv("SOME_TOKEN", watch.canary)
    _save_behind(watch)
    out, err = capfd.readouterr()
    assert "RuntimeError: with …" in err
    assert "it was …" in err
    assert "…\n" in out
    watch.texts += [out, err]
    watch.check()


def test_of_what_is_logged_and_raised(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", watch.canary)
    log = logging.getLogger("ucformat")
    log.warning("it is %s", watch.canary)
    log.error("failed", exc_info=RuntimeError(watch.canary))
    for kind in (UcformatError, Conflict, UnsafeError, TensorNotFound, UsageError):
        error = kind(f"it is {watch.canary}", hint=f"not {watch.canary}")
        watch.error(error)
        watch.error(pickle.loads(pickle.dumps(error)))  # noqa: S301 - our own
    assert "it is …" in "".join(watch.heard.texts)
    watch.check()


def test_urls_without_secrets_stay_as_they_are(watch: Watch) -> None:
    url = "postgresql://training-team@127.0.0.1:1/runs?application_name=me&sslmode=require"
    with pytest.raises(UcformatError) as failure:
        ucformat.Catalog(url)
    assert url.replace("postgresql:", "postgresql+psycopg:") in str(failure.value)
    for place in ("sftp://someone@127.0.0.1:1/run@7", "https://127.0.0.1:1/a b/run@7"):
        watch.act(partial(ucformat.open, place))
        assert place in watch.texts[-1] or "needs the package" in str(watch.texts)
