"""Settings: who wins, what is refused, and that a path in a file means the same wherever one stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucformat.errors import UnsafeError, UsageError
from ucformat.settings import _opened, allow_root, allowed_roots, load_settings, using

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings at all, in a folder `here/below`."""
    for name in [
        n for n in os.environ if n.startswith("UCP_")
    ]:  # as the endpoint of tests that need one
        monkeypatch.delenv(name)
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


def test_each_source_wins_over_those_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_path_in_a_file_is_relative_to_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    others = {
        str(tmp_path / "here" / "ucformat.toml"),
        str(tmp_path / "config" / "ucformat" / "config.toml"),
    } - {str(file)}
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
    [
        ("requests", "0"),
        ("requests", "1.5"),
        ("deadline", "nan"),
        ("deadline", "-1"),
        ("in_flight", "x"),
        ("cache_bytes", "0"),
    ],
)
def test_a_number_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str
) -> None:
    monkeypatch.setenv(f"UCP_{key.upper()}", text)
    with pytest.raises(UsageError, match=f"the setting {key} is invalid"):
        load_settings()
    monkeypatch.setenv(f"UCP_{key.upper()}", "7")
    assert getattr(load_settings(), key) == 7


def test_places_are_a_list_or_text_with_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user(tmp_path, 'roots = ["/a", "/b"]')
    assert load_settings().roots == ("/a", "/b")
    monkeypatch.setenv("UCP_ROOTS", "/c,/d")
    assert load_settings().roots == ("/c", "/d")
    user(tmp_path, "roots = [1]")
    with pytest.raises(UsageError, match="roots"):
        load_settings()


@pytest.fixture
def of_another(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file that of another user than this one (and root)."""

    def give_away(file: Path) -> None:
        if os.geteuid() == 0:
            os.chown(file, 54321, 54321, follow_symlinks=False)
        else:  # only root gives files away, but a user can be another one than the files' owner
            monkeypatch.setattr("os.geteuid", lambda: 54321)

    return give_away


SETTINGS = ["catalog = 'x.db'", "region = 'moon'", "requests = 1", "catalog = 'none'"]


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("write", [project, user])
def test_a_file_of_another_user_is_an_error_not_passed_over(
    tmp_path: Path,
    of_another: Callable[[Path], None],
    text: str,
    write: Callable[[Path, str], Path],
) -> None:
    user(tmp_path, "catalog = 'mine.db'\nregion = 'here'\nrequests = 2")
    file = write(tmp_path, text)
    load_settings()
    of_another(file)
    with pytest.raises(UnsafeError, match="belongs to the user") as caught:
        load_settings()
    key = text.partition(" ")[0]
    assert str(file) in caught.value.message
    assert repr(key) in caught.value.message
    assert f"UCP_TRUSTED={file}" in str(caught.value.hint)
    assert f"UCP_{key.upper()}" in str(caught.value.hint)
    with using(**{key: "7"}):  # which wins over it anyway
        assert str(getattr(load_settings(), key)) == "7"


def test_a_link_of_another_user_to_a_file_of_this_one_is_of_another(
    tmp_path: Path, of_another: Callable[[Path], None]
) -> None:
    (tmp_path / "elsewhere.toml").write_text("catalog = 'x.db'")  # would now mean here/x.db
    link = tmp_path / "here" / "ucformat.toml"
    link.symlink_to(tmp_path / "elsewhere.toml")
    assert load_settings().catalog_url() == str(tmp_path / "here" / "x.db")
    of_another(link)
    with pytest.raises(UnsafeError, match="belongs to"):
        load_settings()


def test_a_file_of_a_colleague_can_be_trusted(
    tmp_path: Path, of_another: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project(tmp_path, "catalog = 'team.db'")
    of_another(file)
    monkeypatch.setenv("UCP_TRUSTED", f"/other,{file}")
    assert load_settings().catalog_url() == str(tmp_path / "here" / "team.db")
    monkeypatch.delenv("UCP_TRUSTED")
    with pytest.raises(UnsafeError):
        load_settings()
    if os.geteuid() == 0:  # else the user's own file is of another one, too
        user(tmp_path, f"trusted = ['{file}']")
        assert load_settings().catalog_url() == str(tmp_path / "here" / "team.db")
    file.chmod(0o664)  # whom it belongs to is not who wrote it
    with pytest.raises(UnsafeError, match="may write to it"):
        load_settings()


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o620, 0o602])
@pytest.mark.parametrize("write", [project, user])
def test_a_file_that_others_may_write_to_does_not_count(
    tmp_path: Path, mode: int, write: Callable[[Path, str], Path]
) -> None:
    file = write(tmp_path, "catalog = 'x.db'")
    file.chmod(mode)
    with pytest.raises(UnsafeError, match="may write to it") as caught:
        load_settings()
    assert f"chmod go-w {file}" in str(caught.value.hint)
    assert load_settings(catalog="mine.db").catalog == "mine.db"
    file.chmod(0o644)
    assert load_settings().catalog_url() == str(file.parent / "x.db")


def test_keys_of_signers_are_relative_to_the_file(tmp_path: Path) -> None:
    file = user(tmp_path, "signers = ['keys/a.pub', 'sigstore:https://a.b,c']")
    assert load_settings().signers == (str(file.parent / "keys/a.pub"), "sigstore:https://a.b,c")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "'http://example.org'"),
        ("roots", "['/']"),
        ("cache", "'/tmp/elsewhere'"),
        ("cache_bytes", "1"),
        ("signers", "['/elsewhere/key.pub']"),
        ("trusted", "['/elsewhere/ucformat.toml']"),
        ("catalog", "'postgresql://me@example.org/all'"),
        ("catalog", "'postgresql+psycopg://me:word@example.org/all'"),
    ],
)
def test_a_project_cannot_say_where_secrets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    user(tmp_path, f"{key} = {value}")
    load_settings()
    user(tmp_path, "")
    file = project(tmp_path, f"{key} = {value}")
    with pytest.raises(UnsafeError, match="a project's file cannot") as caught:
        load_settings()
    assert str(file) in caught.value.message
    assert "word" not in str(caught.value)
    assert str(tmp_path / "config" / "ucformat" / "config.toml") in str(caught.value.hint)
    monkeypatch.setenv(f"UCP_{key.upper()}", "1")
    load_settings()


def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config" / "ucformat").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be read: not a regular file"):
        _opened(tmp_path / "pipe")
    file = project(tmp_path, "#" * (1 << 20) + "#")
    with pytest.raises(UsageError, match="cannot be read: not a regular file"):
        load_settings()
    assert file.is_file()


def test_registered_roots_are_of_this_user_alone_and_one_line_each(
    tmp_path: Path, of_another: Callable[[Path], None]
) -> None:
    before = os.umask(0o002)  # as where each user has a group
    try:
        allow_root("/data/run\n/")
    finally:
        os.umask(before)
    allow_root("/data/other")
    assert allowed_roots() == ("/data/run\n/", "/data/other")
    file = tmp_path / "data" / "ucformat" / "roots.jsonl"
    with file.open("ab") as out:
        out.write(b'\0\0\0"/data/th')  # of a line that was being written when the power failed
    allow_root("/data/third")
    assert allowed_roots() == ("/data/run\n/", "/data/other", "/data/third")
    of_another(file)
    with pytest.raises(UnsafeError, match="belongs to"):
        allowed_roots()


def test_the_folder_of_the_cache_is_relative_to_the_users_file(tmp_path: Path) -> None:
    user(tmp_path, "cache = 'copies'")
    assert load_settings().cache == str(tmp_path / "config" / "ucformat" / "copies")
    user(tmp_path, "cache = 'none'")
    assert load_settings().cache == "none"
