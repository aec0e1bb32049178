"""What libraries say of a failure, without the secrets that some repeat: tokens, passwords, signed urls."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["redacted", "secrets_in"]

_SHORTEST = 6  # letters of a value that is taken for a secret: shorter ones are words that stand everywhere
_QUERY = re.compile(r"\?[^\s'\"<>)]*")
_USER = re.compile(r"(\w://)[^\s@\"'<>]*@")  # a password may have slashes in it
_SCHEME = re.compile(r"\b(Bearer|Basic|Token|AWS4-HMAC-SHA256)\s+[^\s'\",;]+", re.IGNORECASE)
_NAMED = re.compile(
    r"([\w-]*(?:token|secret|passw(?:or)?d|passwd|api[_-]?key|access[_-]?key|credential|signature|authorization|sig|key)"
    r"[\w-]*[\"']?\s*[:=]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&)}\]]+)",
    re.IGNORECASE,
)


def secrets_in(options: Any) -> Iterator[str]:
    """The texts in a file system's options, however deep: any of them may be a secret."""
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


def redacted(text: str, secrets: Iterator[str] | tuple[str, ...] = ()) -> str:
    """A message without what is or may be a secret.

    Args:
        text: what a library said.
        secrets: what must not be in it; besides, queries of urls, user names in them, and values that are named as
            secrets are left out.
    """
    for secret in sorted({s for s in secrets if len(s) >= _SHORTEST}, key=len, reverse=True):
        text = text.replace(secret, "…")
    text = _SCHEME.sub(r"\1 …", text)
    text = _NAMED.sub(r"\1…", text)
    return _USER.sub(r"\1…@", _QUERY.sub("?…", text))
