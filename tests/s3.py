"""A real HTTP endpoint that speaks S3: the one that `UCP_TEST_S3_ENDPOINT` names, or moto's server in a process of its
own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

__all__ = ["CANARY", "ENVIRONMENT", "Bucket", "serving", "set_environment"]

#: Looks like nothing else, so that tests can look for it where it must not be.
CANARY = "canary/Zq7+SecretThatNobodyMaySee"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIAUCFORMATTESTS",
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def set_environment(patch: pytest.MonkeyPatch) -> None:
    """Have keys in the environment: those that are there, for a real endpoint."""
    for name, value in ENVIRONMENT.items():
        if name not in os.environ or "UCP_TEST_S3_ENDPOINT" not in os.environ:
            patch.setenv(name, value)


@dataclass(frozen=True)
class Bucket:
    """A bucket of an endpoint; `client` is boto3's."""

    endpoint: str
    name: str
    client: Any

    def place(self, name: str = "") -> str:
        """A url in which nothing lies yet."""
        return f"s3://{self.name}/{name or uuid.uuid4().hex}"

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of the objects that there are, as boto3 sees them."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [found["Key"] for page in pages for found in page.get("Contents", ())]


@contextmanager
def serving(part: int | None = None) -> Iterator[Bucket]:
    """A fresh bucket; the environment must have a key that the endpoint takes (moto takes any).

    `part` is the least that moto takes for a part of an upload; 5 MiB unless told otherwise, as of
    S3.
    """
    given = os.environ.get("UCP_TEST_S3_ENDPOINT")
    process = None
    endpoint = given or ""
    if not given:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-P", str(Path(__file__).with_name("s3_server.py")), str(port)]
        environment = {
            **os.environ,
            **({} if part is None else {"S3_UPLOAD_PART_MIN_SIZE": str(part)}),
        }
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        endpoint = f"http://127.0.0.1:{port}"
    try:
        yield _bucket(endpoint, process)
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def _bucket(endpoint: str, server: subprocess.Popen[bytes] | None) -> Bucket:
    import boto3
    from botocore.exceptions import EndpointConnectionError

    client = boto3.client("s3", endpoint_url=endpoint)
    name = f"ucf-{uuid.uuid4().hex[:20]}"

    def made() -> bool:
        try:
            client.create_bucket(Bucket=name)
        except EndpointConnectionError:
            if server is None or server.poll() is not None:
                raise
            return False
        return True

    wait_until(made)
    return Bucket(endpoint, name, client)
