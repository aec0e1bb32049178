"""Redaction: secrets that this process knows do not appear in errors, log records or the output of `ucp`.

A secret is known if it was registered (`learn`), or is in a variable of the environment that is
named like a secret or contains a url with one. It is found literally and as quoted in urls, JSON,
Python and base64. Messages of libraries may contain other secrets, which `redacted` recognises by
their syntax.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from logging import LogRecord

_MIN_LENGTH = 6  # characters of a secret: shorter values occur in unrelated text
_WORD = re.compile(r"[a-z]+|\d{1,8}")  # too common to be treated as secrets
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
_USER = re.compile(r"(\w://)[^\s@\"'<>]*@")  # a password may have slashes in it
_ALMOST = re.compile(r"(^\w[\w+.-]*:/{0,2})([^\s:/@]*):\S*@")
_SCHEME = re.compile(r"\b(Bearer|Basic|Token|AWS4-HMAC-SHA256)\s+[^\s'\",;]+", re.IGNORECASE)
_NAMED = re.compile(
    r"([\w-]*(?:token|secret|passw(?:or)?d|passwd|api[_-]?key|access[_-]?key|credential|signature|authorization|sig|key)"
    r"[\w-]*[\"']?\s*[:=]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&)}\]]+)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    r".*(TOKEN|SECRET|PASS(WORD|WD|PHRASE)|API_?KEY|ACCESS_?KEY|ACCOUNT_?KEY|SAS_?KEY)(?![A-Z])(?!.*_(ID|FILE|PATH|UR[IL])$).*",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(\w[\w+.-]*)://([^\s/?#@]*)@")
_USERS = {  # schemes in which the part before an @ is the name of a user or container, not a token
    *(
        "postgres",
        "postgresql",
        "mysql",
        "sqlite",
        "sftp",
        "ssh",
        "ftp",
        "ftps",
        "smb",
        "hdfs",
        "webhdfs",
    ),
    *("az", "azure", "abfs", "abfss"),
}
_PARAMETER = re.compile(
    r"(?:^|[?&;#])[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|pwd|credential|signature|authorization|sig|key)=([^\s&;#'\"]+)",
    re.IGNORECASE,
)

_OPTION = re.compile(r"token|secret|pass|key|credential|signature|sig$|auth|cookie", re.IGNORECASE)
_LONG = 32  # characters of a word in a key file that is treated as a key

_scanned: dict[Any, Any] = {}  # the environment when it was last searched
_known: dict[str, None] = {}  # all spellings of the secrets
_learned: set[str] = set()


def learn(*secrets: str) -> None:
    """Register secrets; words and texts of fewer than six characters are ignored, since they occur everywhere."""
    for secret in secrets:
        if secret not in _learned and len(secret) >= _MIN_LENGTH:
            _learned.add(secret)
            if not _WORD.fullmatch(secret):
                _known.update(dict.fromkeys(_spellings(secret)))


def learn_url(text: str) -> None:
    """Register the secrets of a url: its password, a token in place of a user, and parameters named like secrets."""
    from urllib.parse import unquote, unquote_plus

    for scheme, user in _USERINFO.findall(text):
        name, colon, password = user.partition(":")
        word = password if colon else "" if has_users(scheme) else name
        learn(word, unquote(word))
    for value in _PARAMETER.findall(text):
        learn(value, unquote_plus(value))


def has_users(scheme: str) -> bool:
    """Whether `scheme://name@host` names a user; elsewhere, as in `hf://`, it may be a token."""
    return scheme.partition("+")[0].lower() in _USERS


def hide(text: str) -> str:
    """Replace the registered secrets in a text by `…`."""
    _learn_environment()
    return _any_of(tuple(_known)).sub("…", text) if _known else text


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """A message of a library without known and possible secrets."""
    _learn_environment()
    for secret in sorted(
        {s for s in (*secrets, *_learned) if len(s) >= _MIN_LENGTH}, key=len, reverse=True
    ):
        text = text.replace(secret, "…")
    text = _SCHEME.sub(r"\1 …", hide(text))
    text = _NAMED.sub(r"\1…", text)
    return _USER.sub(r"\1…@", _QUERY.sub("?…", text))


def shown_url(text: str) -> str:
    """A url, or an invalid one, without possible secrets."""
    if "://" in text or _ALMOST.match(text):
        text = _QUERY.sub("?…", _ALMOST.sub(r"\1\2:***@", text))
    return hide(text)


def scrub(error: BaseException) -> None:
    """Hide registered secrets in an error of a library and in its causes: in arguments and in attributes."""
    seen, todo = set[int](), [error]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        current.args = tuple(hide(a) if isinstance(a, str) else a for a in current.args)
        for name, value in list(vars(current).items()):
            # psycopg's errors hold all parameters of a connection
            if hide(repr(value)) != repr(value):
                setattr(current, name, hide(value) if isinstance(value, str) else None)
        todo += [e for e in (current.__cause__, current.__context__) if e is not None]


def named_secrets(options: Any, name: str = "") -> Iterator[str]:
    """The texts in a file system's options that are named like secrets."""
    if isinstance(options, dict):
        for key, value in options.items():
            yield from named_secrets(value, f"{name}.{key}" if _OPTION.search(name) else str(key))
    elif isinstance(options, list | tuple | set):
        match list(options):
            case [str() as header, str() as value]:
                yield from named_secrets(value, header)
                return
        for value in options:
            yield from named_secrets(value, name)
    elif _OPTION.search(name):
        yield from secrets_in(options)


def secrets_in(options: Any) -> Iterator[str]:
    """All texts in a file system's options, at any depth: any of them may be a secret."""
    if isinstance(options, dict):
        options = list(options.values())
    if isinstance(options, list | tuple | set):
        for value in options:
            yield from secrets_in(value)
    elif isinstance(options, bytes):
        yield options.decode(errors="replace")
    elif isinstance(options, str):
        yield options
        yield from (word for word in options.split() if word != options)  # of a header: `Bearer …`


def hide_in_record(record: LogRecord) -> bool:
    """Hide registered secrets in a log record and its exception; a filter for loggers."""
    record.msg, record.args = hide(record.getMessage()), ()
    if record.exc_info and not record.exc_text:
        import traceback

        record.exc_text = hide("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    return True


class Hiding:
    """A text stream that hides registered secrets, and otherwise behaves like its inner stream."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner.inner if isinstance(inner, Hiding) else inner

    @property
    def inner(self) -> Any:
        """The inner stream."""
        return self._inner

    def write(self, text: str) -> int:
        """Write a text without secrets."""
        self._inner.write(hide(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several lines without secrets."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _learn_environment() -> None:
    # This runs for every error: comparing the dict behind `os.environ` is much faster than decoding
    # it.
    current = dict(getattr(os.environ, "_data", None) or os.environ)
    if current == _scanned:
        return
    for name, value in os.environ.items():
        if _VARIABLE.fullmatch(name):
            learn(value)
        if "KEY" in name.upper():  # the text of a key file
            learn(*(word for word in re.split(r"[\s\"']+|\\n", value) if len(word) >= _LONG))
        learn_url(value)
    _scanned.clear()
    _scanned.update(current)


@lru_cache(1)
def _any_of(spellings: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))


def _spellings(secret: str) -> Iterator[str]:
    """The forms in which a secret may be quoted."""
    import json
    from base64 import b64encode
    from urllib.parse import quote, quote_plus

    data = secret.encode(errors="surrogateescape")
    yield from (secret, quote(data), quote(data, safe=""), quote_plus(data))
    yield from (json.dumps(secret)[1:-1], repr(secret)[1:-1])
    for before in range(3):  # for each alignment in a longer text
        # only the characters that depend on no byte beside the secret
        begin, end = (-(-8 * before // 6)), (8 * (before + len(data))) // 6
        inside = b64encode(bytes(before) + data).decode()[begin:end]
        yield from (inside, inside.replace("+", "-").replace("/", "_"))
