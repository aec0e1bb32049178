"""`ucp catalog`: which one it is and who says so, whether or not it can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import ucformat
from tests.catalog.test_migrations import next_release
from tests.cli.conftest import object_of
from ucformat.migrations import HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

KEYS = ["url", "from", "state", "revision", "checkpoints", "runs", "aliases", "role"]


def test_what_is_in_it(run: Run, catalog: Path) -> None:
    found = object_of(run("catalog", "info", "--json").stdout)
    assert list(found) == KEYS
    assert found == {
        "url": f"sqlite:///{catalog}",
        "from": "env",
        "state": "ready",
        "revision": HEAD,
        "checkpoints": {
            "committed": 4,
            "deleted": 0,
            "thinned": 0,
            "purging": 0,
            "purged": 0,
            "replaced": 0,
        },
        "runs": 2,
        "aliases": 0,
        "role": None,
    }
    lines = run("catalog", "info").stdout.splitlines()
    assert lines[0] == f"sqlite:///{catalog}"
    assert "  set by    the variable UCP_CATALOG" in lines
    assert "  committed 4" in lines
    assert run("catalog", "info", "-q").stdout == f"sqlite:///{catalog}\n"


def test_who_says_which(
    run: Run, catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source(*options: Any) -> tuple[str, str]:
        found = object_of(run("catalog", "info", "--json", *options).stdout)
        return found["from"], found["url"]

    user = tmp_path / "config.toml"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ucformat.settings._user_file", lambda: user if user.exists() else None)
    assert source("--catalog", tmp_path / "x.db")[0] == "flag"
    assert source()[0] == "env"
    monkeypatch.delenv("UCP_CATALOG")
    monkeypatch.setattr("ucformat.settings.user_data_path", lambda _: tmp_path / "data")
    assert source() == ("default", str(tmp_path / "data" / "catalog.db"))
    user.write_text(f'catalog = "{tmp_path}/user.db"')
    assert source() == ("user", f"{tmp_path}/user.db")
    (tmp_path / "ucformat.toml").write_text(f'catalog = "{tmp_path}/project.db"')
    assert source() == ("project", f"{tmp_path}/project.db")
    assert not (tmp_path / "project.db").exists()  # asking does not make one


def test_one_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/x"
    result = run("catalog", "info", "--json", "--catalog", url, code=1)
    assert object_of(result.stdout) | {"from": 0} == dict.fromkeys(KEYS) | {
        "url": "postgresql://me:***@127.0.0.1:1/x",
        "from": 0,
        "state": "unreachable",
    }
    assert "secret" not in result.output
    assert object_of(run("catalog", "info", "--json", "--catalog", "none").stdout)["state"] == "off"
    assert run("catalog", "info", "--catalog", "none").stdout.startswith(
        "the catalog is switched off\n"
    )
    assert (
        object_of(run("catalog", "info", "--json", "--catalog", tmp_path / "x").stdout)["state"]
        == "not created yet"
    )


def test_an_older_one_is_upgraded_when_asked(run: Run, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    ucformat.Catalog(url).close()
    with next_release(tmp_path / "scripts"):
        result = run("catalog", "info", "--json", "--catalog", url, code=7)
        assert object_of(result.stdout)["state"] == "older"
        run("ls", "--catalog", url, code=7)
        revision = "toy"
        found = {"url": url, "upgraded": True, "revision": revision}
        assert object_of(run("catalog", "upgrade", "--json", "--catalog", url).stdout) == found
        assert object_of(run("catalog", "upgrade", "--json", "--catalog", url).stdout) == found | {
            "upgraded": False
        }
        assert (
            run("catalog", "upgrade", "--catalog", url).stdout
            == f"{url}: already at revision {revision}\n"
        )
        assert run("catalog", "upgrade", "-q", "--catalog", url).stdout == f"{revision}\n"
        assert "switched off" in run("catalog", "upgrade", "--catalog", "none", code=6).stderr


def test_a_newer_one_is_only_read(run: Run, catalog: Path) -> None:
    with ucformat.Catalog(str(catalog)) as opened, opened.database.writing() as c:
        c.exec_driver_sql("update ucformat_version set version_num = '9999'")
    found = object_of(run("catalog", "info", "--json").stdout)
    assert (found["state"], found["revision"], found["runs"]) == ("newer", "9999", 2)
    assert "newer" in run("tag", "run7@1000", "x", code=7).stderr
    assert run("ls", "-q", "-n", 1).stdout


@pytest.mark.parametrize("asked", ["ls", "gc", "catalog info", "convert missing there"])
def test_a_file_that_others_may_write_to_stops_commands_before_they_begin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UCP_CATALOG")
    file = tmp_path / "ucformat.toml"
    file.write_text(f'catalog = "{tmp_path}/project.db"')
    file.chmod(0o666)
    failed = run(*asked.split(), code=6)
    assert f"{file} sets 'catalog', and is not trusted" in failed.stderr
    assert "chmod go-w" in failed.stderr
    assert not failed.stdout
    monkeypatch.setenv("UCP_CATALOG", "none")
    assert "is not trusted" not in run("convert", "missing", "there", code=3).stderr
