"""From a url to a client of its cloud: S3, Google, Azure or plain HTTP, through obstore.

Credentials come from each cloud's standard chain and from nowhere else: environment, profile files, workload identity,
instance metadata. A url that holds a password or a signature is refused, because urls end up in manifests and logs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from ucformat.errors import UsageError
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

__all__ = [
    "SCHEMES",
    "Options",
    "Place",
    "boto_session",
    "connect",
    "keys_in_environment",
    "parse",
    "refuse_secrets",
    "s3_terms",
]

#: Scheme -> the cloud that it is of.
SCHEMES = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
}
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(:\d*)?")  # else what follows the colon is a password with a slash in it
_SIGNED = re.compile(r"[?&](x-[a-z]+-|awsaccesskeyid=|googleaccessid=|signature=|sig=|[a-z_]*token=)", re.IGNORECASE)
_CONNECT, _STALL, _WHOLE = "10s", "30s", "300s"  # to connect; between two parts of a body; for all of a request


@dataclass(frozen=True, slots=True)
class Options:
    """How a place is reached, besides its url; nothing secret."""

    endpoint: str = ""  # of a service that speaks S3; also AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL
    region: str = ""  # also AWS_REGION and AWS_DEFAULT_REGION
    deadline: float = 180.0  # seconds after which a request that keeps failing is given up
    retries: int = 10  # of one request


@dataclass(frozen=True, slots=True)
class Place:
    """A url taken apart: `root` is its normal spelling, `bucket` the bucket, container or server, `prefix` the rest."""

    cloud: str
    root: str
    bucket: str
    prefix: str
    account: str = ""  # of Azure


def refuse_secrets(url: str) -> None:
    """UsageError where a url of any scheme holds what may be secret, which is not repeated."""
    for part in url.split("::"):  # fsspec's chains
        scheme, _, rest = part.rpartition("://")
        user, _, host = rest.partition("/")[0].partition("?")[0].rpartition("@")
        if ":" in user or not _HOST.fullmatch(host) or _SIGNED.search(rest):
            raise _secret(scheme)


def _secret(scheme: str) -> UsageError:
    return UsageError(
        f"a {scheme}:// url holds a password or a signature",
        hint="leave it out, and let the cloud's standard chain find the credentials; urls are kept in manifests",
    )


def parse(url: str) -> Place:
    """Take a url apart.

    Raises:
        UsageError: it names no bucket, or holds what may be secret; that is not repeated in the message.
        Refused: its path leads out of the bucket.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    cloud = SCHEMES[scheme]
    refuse_secrets(url)
    bucket, _, path = rest.partition("/")
    account = ""
    if cloud == "az" and "@" in bucket and ":" not in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if "@" in bucket or (":" in bucket and cloud != "http") or ("?" in rest and cloud in ("http", "az")):
        raise _secret(scheme)
    if not bucket:
        raise UsageError(f"{url} names no bucket", hint=f"write {scheme}://BUCKET/PATH")
    prefix = "/".join(part for part in path.split("/") if part)
    if prefix:
        check_key(prefix)
    host = f"{bucket}@{rest.partition('/')[0].partition('@')[2]}" if account else bucket
    return Place(cloud, f"{scheme}://{host}" + (f"/{prefix}" if prefix else ""), bucket, prefix, account)


def connect(place: Place, options: Options) -> Client:
    """The client; nothing is sent yet. Each process makes its own: none lives through a fork."""
    from obstore import store

    common: dict[str, Any] = {
        "client_options": {"connect_timeout": _CONNECT, "read_timeout": _STALL, "timeout": _WHOLE},
        "retry_config": {"max_retries": options.retries, "retry_timeout": timedelta(seconds=options.deadline)},
    }
    prefix = place.prefix or None
    if place.cloud == "gs":
        return store.GCSStore(place.bucket, prefix=prefix, **common)
    if place.cloud == "az":
        account: dict[str, Any] = {"account_name": place.account} if place.account else {}
        return store.AzureStore(place.bucket, prefix=prefix, **account, **common)
    if place.cloud == "http":
        common["client_options"]["allow_http"] = place.root.startswith("http://")
        return store.HTTPStore.from_url(place.root, **common)
    endpoint, region, session = s3_terms(options)
    if endpoint:
        if "@" in endpoint:
            raise UsageError("the endpoint of S3 holds a password", hint="let the standard chain find credentials")
        common["endpoint"] = endpoint
        common["client_options"]["allow_http"] = endpoint.startswith("http://")
    if region:
        common["region"] = region
    if session is not None and session.get_credentials() is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        common["credential_provider"] = Boto3CredentialProvider(session)
    return store.S3Store(place.bucket, prefix=prefix, **common)


def s3_terms(options: Options) -> tuple[str, str | None, Any]:
    """The endpoint of S3 (nothing: Amazon's), the region, and boto3's session where the environment has no keys."""
    seen = os.environ.get
    endpoint = options.endpoint or seen("AWS_ENDPOINT_URL_S3") or seen("AWS_ENDPOINT_URL") or ""
    session = None if keys_in_environment() else boto_session()
    region = options.region or seen("AWS_REGION") or seen("AWS_DEFAULT_REGION")
    return (
        endpoint,
        region or (session.region_name if session else None) or ("us-east-1" if endpoint else None),
        session,
    )


def keys_in_environment() -> bool:
    """Whether the environment has a key of Amazon's."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))


@cache
def boto_session() -> Any:
    """What boto3 finds in profile files, single sign-on and the rest of the chain; None where it is not installed.

    obstore itself knows the environment, web identities, containers and instances.
    """
    try:
        import boto3
    except ImportError:
        return None
    return boto3.Session()
