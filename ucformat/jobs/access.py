"""How a place is reached: which endpoint, which region, and where the credentials come from; never what they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ucformat.settings import load_settings
from ucformat.storage.clouds import SCHEMES, Options, keys_in_environment, s3_terms
from ucformat.storage.url import split_url

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Access", "access_to"]

_WEB = ("AWS_WEB_IDENTITY_TOKEN_FILE",)
_CONTAINER = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
_GOOGLE = ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_KEY")
_AZURE = (
    *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN"),
    *("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"),
)


@dataclass(frozen=True, slots=True)
class Access:
    """What is used to reach a place: None where it has no such thing, or nobody says."""

    endpoint: str | None = None
    region: str | None = None
    credentials: str | None = None


def access_to(url: str) -> Access:
    """How the store of a url is reached, as `clouds.connect` does it."""
    cloud = SCHEMES.get(split_url(url)[0])
    if cloud == "s3":
        return _of_s3()
    if cloud == "gs":
        return Access(credentials=_named(_GOOGLE) or "the standard chain of Google")
    if cloud == "az":
        return Access(credentials=_named(_AZURE) or "the standard chain of Azure")
    return Access(credentials="none" if cloud == "http" else None)


def _of_s3() -> Access:
    settings = load_settings()
    endpoint, region, session = s3_terms(Options(settings.endpoint, settings.region))
    return Access(_shown(endpoint) if endpoint else "Amazon's", region, _credentials(session))


def _credentials(session: Any) -> str:
    if keys_in_environment():
        return "environment (AWS_ACCESS_KEY_ID)"
    found = None if session is None else session.get_credentials()
    if found is not None:
        return f"chain ({found.method}, profile {session.profile_name})"
    return _named((*_WEB, *_CONTAINER)) or "none"


def _named(variables: Sequence[str]) -> str | None:
    found = next((name for name in variables if os.environ.get(name)), None)
    return None if found is None else f"environment ({found})"


def _shown(endpoint: str) -> str:
    """A url without a password or a query."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
