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
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ucformat.errors import PermissionDenied, UsageError
from ucformat.redacted import has_users, learn_url
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from obstore.store import ObjectStore as Client

__all__ = [
    "NOWHERE",
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
_SIGNED = re.compile(
    r"[?&;#](x-[a-z]+-|awsaccesskeyid=|googleaccessid=|[\w.-]*(token|secret|passw(or)?d|pwd|credential|signature|sig|key)=)",
    re.IGNORECASE,
)
#: The proxy of what is not to be reached; nothing ever listens at port 0.
NOWHERE = "http://127.0.0.1:0"
_AMAZON = ("amazonaws.com", "amazonaws.com.cn", "api.aws")
_METADATA = ("169.254.0.0/16", "fd00:ec2::/32")  # of Amazon's machines; no proxy leads there
_AWS_URLS = ("AWS_ENDPOINT_URL_STS", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_METADATA_ENDPOINT")
_SAS = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
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
    learn_url(url)
    for part in url.split("::"):  # fsspec's chains
        scheme, _, rest = part.rpartition("://")
        user, _, host = rest.partition("/")[0].partition("?")[0].rpartition("@")
        if ":" in user or (user and not has_users(scheme)) or not _HOST.fullmatch(host) or _SIGNED.search(rest):
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
        UnsafeError: its path leads out of the bucket.
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
        if any(os.environ.get(name) for name in _SAS):
            endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT", "")
            common["client_options"] |= _only_to([endpoint or "https://core.windows.net"], "core.windows.net")
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
    reached = [endpoint or _service("s3", region)]
    hosts: list[str] = [] if endpoint else [*_AMAZON]
    if session is not None and session.get_credentials() is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        common["credential_provider"] = Boto3CredentialProvider(session)
    elif not keys_in_environment():  # obstore itself asks for credentials, and elsewhere
        hosts += [*_AMAZON, *_METADATA]
        reached += [_service("sts", region), *filter(None, map(os.environ.get, _AWS_URLS))]
    common["client_options"] |= _only_to(reached, *hosts)
    return store.S3Store(place.bucket, prefix=prefix, **common)


def _service(name: str, region: str | None) -> str:
    """Where a service of Amazon's is."""
    china = ".cn" if region and region.startswith("cn-") else ""
    return f"https://{name}.{region or 'us-east-1'}.amazonaws.com{china}"


def _only_to(reached: Sequence[str], *hosts: str) -> dict[str, Any]:
    """Options by which a client is led to no other host by a redirect, with a token or a signature.

    obstore follows redirects, and takes only the header `Authorization` off on the way: not S3's session token, nor the
    signature in a url of Azure, which the next request names as its referrer. It cannot be told not to, and knows one
    proxy for all hosts. So all else is behind one that is not there; where one of the user's has to be used, that one.

    Args:
        reached: the urls that it has to reach.
        hosts: what else it may, with all that is below these.
    """
    proxies = getproxies()
    places = [(url.scheme, url.hostname) for url in map(urlsplit, reached) if url.hostname]
    if any((scheme in proxies or "all" in proxies) and not proxy_bypass(host) for scheme, host in places):
        return {}
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join([*hosts, *(host for _, host in places)])}


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
    try:
        session = boto3.Session()
        session.get_credentials()
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - botocore has many, and some repeat lines of the file
        name = type(error).__name__
    else:
        return session
    raise PermissionDenied(
        f"boto3 cannot make sense of what configures AWS here ({name})",
        hint="look at AWS_PROFILE and at the files of ~/.aws; `aws sts get-caller-identity` says more",
    )
