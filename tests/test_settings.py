"""Settings: who wins, what is refused, and that a path in a file means the same wherever one stands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucformat.errors import UsageError
from ucformat.settings import load_settings, using


@pytest.fixture(autouse=True)
def nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings at all, in a folder `here/below`."""
    monkeypatch.delenv("UCP_CATALOG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")


def project(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "here" / "ucformat.toml"
    file.write_text(text)
    return file


def user(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config" / "ucformat" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_by_default_the_catalog_is_a_file_of_the_user(tmp_path: Path) -> None:
    assert load_settings().catalog_url() == str(tmp_path / "data" / "ucformat" / "catalog.db")


def test_each_source_wins_over_those_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user(tmp_path, "catalog = 'sqlite:////user'")
    assert load_settings().catalog == "sqlite:////user"
    project(tmp_path, "catalog = 'sqlite:////project'")
    assert load_settings().catalog == "sqlite:////project"
    monkeypatch.setenv("UCP_CATALOG", "sqlite:////env")
    assert load_settings().catalog == "sqlite:////env"
    with using(catalog="sqlite:////using"):
        assert load_settings().catalog == "sqlite:////using"
        with using(catalog=None):
            assert load_settings(catalog=None).catalog == "sqlite:////using"
        assert load_settings(catalog="sqlite:////given").catalog == "sqlite:////given"
    assert load_settings().catalog == "sqlite:////env"
    monkeypatch.setenv("UCP_CATALOG", "")  # as good as none
    assert load_settings().catalog == "sqlite:////project"


def test_what_is_given_ends_with_its_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), using(catalog="none"):
        raise ZeroDivisionError
    assert load_settings().catalog == ""


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
def test_the_catalog_can_be_switched_off(tmp_path: Path, word: str) -> None:
    assert load_settings(catalog=word).catalog_url() is None
    user(tmp_path, f"catalog = '{word}'")
    assert load_settings().catalog_url() is None


def test_the_nearest_file_of_a_project_is_read(tmp_path: Path) -> None:
    project(tmp_path, "catalog = 'sqlite:////far'")
    (tmp_path / "here" / "below" / "ucformat.toml").write_text("catalog = 'sqlite:////near'")
    assert load_settings().catalog == "sqlite:////near"


def test_a_path_in_a_file_is_relative_to_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, "catalog = 'kept/catalog.db'")
    assert load_settings().catalog_url() == str(tmp_path / "here" / "kept" / "catalog.db")
    monkeypatch.chdir(tmp_path / "here")
    assert load_settings().catalog_url() == str(tmp_path / "here" / "kept" / "catalog.db")
    project(tmp_path, "catalog = '~/catalog.db'")
    assert load_settings().catalog_url() == str(Path.home() / "catalog.db")
    project(tmp_path, "catalog = '/abs/catalog.db'")
    assert load_settings().catalog_url() == "/abs/catalog.db"


@pytest.mark.parametrize(
    "text",
    [
        "catalog = ",
        "= 'x'",
        "catalog = 'a'\ncatalog = 'b'",
        "catalogue = 'x'",
        "catalog = 5",
        "catalog = ['x']",
        "[catalog]\nurl = 'x'",
        "[more]",
    ],
)
@pytest.mark.parametrize("write", [project, user])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, text: str, write: object) -> None:
    project(tmp_path, "catalog = 'good'")
    user(tmp_path, "catalog = 'good'")
    file = write(tmp_path, text)  # type: ignore[operator]
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert str(file) in caught.value.message
    others = {str(tmp_path / "here" / "ucformat.toml"), str(tmp_path / "config" / "ucformat" / "config.toml")} - {
        str(file)
    }
    assert not any(other in str(caught.value) for other in others)


def test_an_unknown_key_is_told_what_there_is(tmp_path: Path) -> None:
    project(tmp_path, "catalogue = 'x'")
    with pytest.raises(UsageError, match="'catalogue'") as caught:
        load_settings()
    assert "catalog" in str(caught.value.hint)
    project(tmp_path, "")
    with pytest.raises(UsageError, match="nothing"):
        load_settings(nothing="x")


def test_a_file_that_is_not_text_or_not_to_be_read_is_named(tmp_path: Path) -> None:
    file = project(tmp_path, "")
    file.write_bytes(b"catalog = '\xff'")
    with pytest.raises(UsageError, match=str(file)):
        load_settings()
    file.write_text("catalog = 'x'")
    if os.geteuid() != 0:  # root reads everything
        file.chmod(0)
        with pytest.raises(UsageError, match=str(file)):
            load_settings()


def test_a_folder_that_was_removed_has_no_file_of_a_project(tmp_path: Path) -> None:
    Path.cwd().rmdir()
    assert load_settings(catalog="x").catalog_url() == "x"


@pytest.mark.parametrize(
    ("key", "text"),
    [("requests", "0"), ("requests", "1.5"), ("deadline", "nan"), ("deadline", "-1"), ("in_flight", "x")],
)
def test_a_number_that_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch, key: str, text: str) -> None:
    monkeypatch.setenv(f"UCP_{key.upper()}", text)
    with pytest.raises(UsageError, match=f"the setting {key} cannot be used"):
        load_settings()
    monkeypatch.setenv(f"UCP_{key.upper()}", "7")
    assert getattr(load_settings(), key) == 7


def test_places_are_a_list_or_text_with_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path, 'roots = ["/a", "/b"]')
    assert load_settings().roots == ("/a", "/b")
    monkeypatch.setenv("UCP_ROOTS", "/c,/d")
    assert load_settings().roots == ("/c", "/d")
    project(tmp_path, "roots = [1]")
    with pytest.raises(UsageError, match="roots"):
        load_settings()
