"""Clients for the clouds: S3, Google, Azure or plain HTTP, through obstore.

Credentials come only from each cloud's standard chain: environment, profile files, workload
identity, instance metadata. A URL that contains a password or a signature is rejected, because URLs
are stored in manifests and logs.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ucformat.errors import PermissionDenied, UsageError
from ucformat.redacted import has_users, learn, learn_url
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from obstore.store import ObjectStore as Client

#: Cloud of each URL scheme.
SCHEMES = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "azure", "abfs", "abfss"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
}
# otherwise a password with a slash follows the colon
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(:\d*)?")
_SIGNED = re.compile(
    r"[?&;#](x-[a-z]+-|awsaccesskeyid=|googleaccessid=|[\w.-]*(token|secret|passw(or)?d|pwd|credential|signature|sig|key)=)",
    re.IGNORECASE,
)
#: The proxy for hosts that must not be reached; nothing ever listens at port 0.
BLOCKING_PROXY = "http://127.0.0.1:0"
_AMAZON = ("amazonaws.com", "amazonaws.com.cn", "api.aws")
_METADATA = ("169.254.0.0/16", "fd00:ec2::/32")  # of EC2 instances; not reached through proxies
_AWS_URLS = ("AWS_ENDPOINT_URL_STS", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_METADATA_ENDPOINT")
_SERVICE = re.compile(
    r"(AWS|AZURE|GOOGLE|HF|STORAGE)_\w*(ENDPOINT|REGION|ACCOUNT|BASE_URL|EMULATOR)"
)
_SAS = ("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN")
#: Settings of obstore for which boto3 has other ones, or none.
_NOT_BOTO = (
    *(
        "AWS_SERVER_SIDE_ENCRYPTION",
        "AWS_SSE_KMS_KEY_ID",
        "AWS_SSE_BUCKET_KEY_ENABLED",
        "AWS_SSE_CUSTOMER_KEY_BASE64",
    ),
    *("AWS_REQUEST_PAYER", "AWS_S3_EXPRESS", "AWS_CHECKSUM_ALGORITHM", "AWS_TOKEN"),
)
_TRUE = ("1", "true", "on", "yes", "y")
_BOTO_CONNECT, _BOTO_READ = 10, 30  # seconds, as below
# time-outs: to connect; between parts of a body; of a request
_CONNECT, _READ, _TOTAL = ("10s", "30s", "300s")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a store besides its URL; they contain no secrets."""

    # URL of an S3-compatible service; default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL
    endpoint: str = ""
    region: str = ""  # default: AWS_REGION, AWS_DEFAULT_REGION
    deadline: float = 180.0  # seconds after which a failing request is no longer retried
    retries: int = 10  # per request


@dataclass(frozen=True, slots=True)
class UrlParts:
    """The parts of a URL: `root` is its normal form, `bucket` the bucket, container or server, `prefix` the rest."""

    cloud: str
    root: str
    bucket: str
    prefix: str
    account: str = ""  # Azure storage account


def reject_secrets(url: str) -> None:
    """Reject a URL that may contain a secret, without repeating it."""
    learn_url(url)
    for part in url.split("::"):  # fsspec's chains
        scheme, _, rest = part.rpartition("://")
        user, _, host = rest.partition("/")[0].partition("?")[0].rpartition("@")
        if (
            ":" in user
            or (user and not has_users(scheme))
            or not _HOST.fullmatch(host)
            or _SIGNED.search(rest)
        ):
            raise _secret(scheme)


def _secret(scheme: str) -> UsageError:
    return UsageError(
        f"a {scheme}:// URL contains a password or a signature",
        hint=(
            "omit it: credentials come from the cloud's standard chain, and URLs are stored in "
            "manifests"
        ),
    )


def parse(url: str) -> UrlParts:
    """Parse the URL of an object store."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    cloud = SCHEMES[scheme]
    reject_secrets(url)
    bucket, _, path = rest.partition("/")
    account = ""
    if cloud == "az" and "@" in bucket and ":" not in bucket:
        bucket, _, host = bucket.partition("@")
        account = host.partition(".")[0]
    if (
        "@" in bucket
        or (":" in bucket and cloud != "http")
        or ("?" in rest and cloud in ("http", "az"))
    ):
        raise _secret(scheme)
    if not bucket:
        raise UsageError(f"{url} names no bucket", hint=f"write {scheme}://BUCKET/PATH")
    prefix = "/".join(part for part in path.split("/") if part)
    if prefix:
        check_key(prefix)
    host = f"{bucket}@{rest.partition('/')[0].partition('@')[2]}" if account else bucket
    return UrlParts(
        cloud, f"{scheme}://{host}" + (f"/{prefix}" if prefix else ""), bucket, prefix, account
    )


@dataclass(slots=True)
class Connection:
    """A client of a bucket with its connections, and the seconds of the shortest request it has made."""

    client: Client
    latency: float = math.inf


_KEPT = 16  # connections: a process uses few buckets
_connecting = threading.Lock()


def shared_connection(place: UrlParts, options: Options) -> Connection:
    """The connection to a bucket, the same for all stores of this process while its environment is the same.

    A client of its own reads the certificates of the system, which takes 25 ms, and opens its own
    connections, each with several round trips.
    """
    if place.cloud != "http":
        place = UrlParts(place.cloud, "", place.bucket, "", place.account)
    with _connecting:  # stores that are opened at once do not each connect
        return _connection(place, options, _environment(), os.getpid())


@lru_cache(_KEPT)
def _connection(
    place: UrlParts,
    options: Options,
    environment: bytes,  # noqa: ARG001 - obstore reads settings and credentials from it
    process: int,  # noqa: ARG001 - clients do not survive a fork
) -> Connection:
    return Connection(connect(place, options))


def _environment() -> bytes:
    """A digest of the environment, which shows no secret."""
    return hashlib.blake2b(repr(sorted(os.environ.items())).encode(), digest_size=16).digest()


def connect(place: UrlParts, options: Options) -> Client:
    """Create a client of a bucket, of plain HTTP of a root, without sending anything."""
    from obstore import store

    common: dict[str, Any] = {
        "client_options": {"connect_timeout": _CONNECT, "read_timeout": _READ, "timeout": _TOTAL},
        "retry_config": {
            "max_retries": options.retries,
            "retry_timeout": timedelta(seconds=options.deadline),
        },
    }
    if place.cloud == "gs":
        return store.GCSStore(place.bucket, **common)
    if place.cloud == "az":
        account: dict[str, Any] = {"account_name": place.account} if place.account else {}
        if any(os.environ.get(name) for name in _SAS):
            endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT", "")
            common["client_options"] |= _restrict_hosts(
                [endpoint or "https://core.windows.net"], "core.windows.net"
            )
        return store.AzureStore(place.bucket, **account, **common)
    if place.cloud == "http":
        common["client_options"]["allow_http"] = place.root.startswith("http://")
        common["client_options"] |= _bearer(place.root)
        return store.HTTPStore.from_url(place.root, **common)
    endpoint, region, session = s3_settings(options)
    if endpoint:
        if "@" in endpoint:
            raise UsageError(
                "the endpoint of S3 contains a password",
                hint="credentials come from the standard chain",
            )
        common["endpoint"] = endpoint
        common["client_options"]["allow_http"] = endpoint.startswith("http://")
    if region:
        common["region"] = region
    endpoints = [endpoint or _service("s3", region)]
    hosts: list[str] = [] if endpoint else [*_AMAZON]
    if session is not None and session.get_credentials() is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        common["credential_provider"] = Boto3CredentialProvider(session)
    elif not keys_in_environment():  # obstore requests credentials itself, from other hosts
        hosts += [*_AMAZON, *_METADATA]
        endpoints += [_service("sts", region), *filter(None, map(os.environ.get, _AWS_URLS))]
    common["client_options"] |= _restrict_hosts(endpoints, *hosts)
    return store.S3Store(place.bucket, **common)


def _bearer(root: str) -> dict[str, Any]:
    """Options that send the token in `UCP_TOKEN` to the server that it is for, and to no other.

    Raises:
        UsageError: it does not say for which server it is.
    """
    given = os.environ.get("UCP_TOKEN", "")
    if not given:
        return {}
    origin, equals, token = given.partition("=")
    for_server, asked = urlsplit(origin), urlsplit(root)
    if not (equals and token and for_server.scheme in ("http", "https") and for_server.netloc):
        raise UsageError(
            "UCP_TOKEN does not say for which server it is",
            hint="UCP_TOKEN=https://models.example.org=TOKEN",
        )
    learn(token)
    if (for_server.scheme, for_server.netloc.lower()) != (asked.scheme, asked.netloc.lower()):
        return {}
    headers = {"authorization": f"Bearer {token}"}
    return {"default_headers": headers, **_restrict_hosts([origin])}


def service(*parts: object) -> str:
    """A digest of what determines, besides a URL, which service and account a client accesses; shows no secret."""
    named = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if value and _SERVICE.match(name.upper())
    )
    return hashlib.blake2b(repr([*parts, *named]).encode(), digest_size=16).hexdigest()


def _service(name: str, region: str | None) -> str:
    """The endpoint of an AWS service in a region."""
    china = ".cn" if region and region.startswith("cn-") else ""
    return f"https://{name}.{region or 'us-east-1'}.amazonaws.com{china}"


def _restrict_hosts(endpoints: Sequence[str], *hosts: str) -> dict[str, Any]:
    """Options that prevent a client from following a redirect to another host with a token or a signature.

    obstore follows redirects and removes only the header `Authorization`: not S3's session token,
    nor the signature in an Azure URL, which the next request sends as its referrer. Redirects
    cannot be disabled, and only one proxy can be set for all hosts. So all other hosts are behind a
    proxy that does not exist; but a proxy that the user's environment requires takes precedence.
    """
    # imports http.client and email: for object stores alone
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    places = [(url.scheme, url.hostname) for url in map(urlsplit, endpoints) if url.hostname]
    if any(
        (scheme in proxies or "all" in proxies) and not proxy_bypass(host)
        for scheme, host in places
    ):
        return {}
    return {
        "proxy_url": BLOCKING_PROXY,
        "proxy_excludes": ",".join([*hosts, *(host for _, host in places)]),
    }


def s3_settings(options: Options) -> tuple[str, str | None, Any]:
    """The S3 endpoint (empty: Amazon's), the region, and a boto3 session if the environment contains no keys."""
    env = os.environ.get
    endpoint = options.endpoint or env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL") or ""
    session = None if keys_in_environment() else boto_session()
    region = options.region or env("AWS_REGION") or env("AWS_DEFAULT_REGION")
    return (
        endpoint,
        region or (session.region_name if session else None) or ("us-east-1" if endpoint else None),
        session,
    )


def boto_client(options: Options) -> Any:
    """A client of boto3 that reaches S3 as that of `connect` does.

    Returns:
        The client; None if there is no boto3, or it does not know a setting of obstore's, or finds
        no credentials.
    """
    endpoint, region, session = s3_settings(options)
    if any(os.environ.get(name) for name in _NOT_BOTO):
        return None
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError:
        return None
    session = session or boto3.Session()
    unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _TRUE
    if not unsigned and session.get_credentials() is None:
        return None
    virtual = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in _TRUE
    config = Config(
        connect_timeout=_BOTO_CONNECT,
        read_timeout=_BOTO_READ,
        retries={"total_max_attempts": options.retries + 1, "mode": "standard"},
        s3={"addressing_style": "virtual" if virtual else "path"},
        ignore_configured_endpoint_urls=True,
        request_checksum_calculation="when_required",  # other services than Amazon's may not know them
        response_checksum_validation="when_required",
        **({"signature_version": UNSIGNED} if unsigned else {}),
    )
    return session.client("s3", endpoint_url=endpoint or None, region_name=region, config=config)


def keys_in_environment() -> bool:
    """Whether the environment contains AWS access keys."""
    return bool(os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"))


@cache
def boto_session() -> Any:
    """A boto3 session with credentials from profile files, single sign-on and so on; None without boto3.

    obstore itself supports the environment, web identities, containers and instances.
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
    except Exception as error:  # noqa: BLE001 - botocore raises many, some with lines of the file
        name = type(error).__name__
    else:
        return session
    raise PermissionDenied(
        f"boto3 cannot load the AWS configuration ({name})",
        hint=(
            "check AWS_PROFILE and the files in ~/.aws; `aws sts get-caller-identity` shows details"
        ),
    )
