"""Multipart uploads to S3 of which several processes put parts, through boto3: obstore has no call for a single part.

One process begins an upload, and tells its id to the others; when all parts are there it completes the upload. Nothing
is visible before, and an upload that is neither completed nor aborted stays invisible.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, PermissionDenied, UcformatError
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucformat.storage.base import Bytes
    from ucformat.storage.clouds import Place

__all__ = ["Multipart"]

_DENIED = {401, 403}


class Multipart:
    """Uploads to a bucket. Safe to use from several threads at once.

    Args:
        client: of boto3.
        place: the bucket and the prefix of all keys.
    """

    def __init__(self, client: Any, place: Place) -> None:
        self._client, self._place = client, place

    def begin(self, key: str) -> str:
        """Begin an upload, and return its id.

        Args:
            key: key of the object.
        """
        with self._mapping("write", key):
            return str(self._client.create_multipart_upload(**self._of(key))["UploadId"])

    def put(self, key: str, upload: str, number: int, data: Bytes) -> str:
        """Put a part, replacing any existing one, and return its ETag.

        Args:
            key: key of the object.
            upload: the id of the upload.
            number: of the part, from 0.
            data: at least 5 MiB, except of the last part.
        """
        with self._mapping("write", key):
            done = self._client.upload_part(**self._of(key), UploadId=upload, PartNumber=number + 1, Body=bytes(data))
            return str(done["ETag"])

    def complete(self, key: str, upload: str, etags: Sequence[str], nbytes: int) -> None:
        """Make the object visible.

        Args:
            key: key of the object, which nobody else writes.
            upload: the id of the upload.
            etags: of all parts, in order.
            nbytes: the size of the object.

        Raises:
            UcformatError: it was not completed, or the object has another size.
        """
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(etags, 1)]
        try:
            with self._mapping("write", key):
                done = {"MultipartUpload": {"Parts": parts}, "UploadId": upload}
                self._client.complete_multipart_upload(**self._of(key), **done)
        except UcformatError:
            if self._size(key) != nbytes:  # else only the answer was lost
                raise
        if (size := self._size(key)) != nbytes:
            raise UcformatError(f"{self._name(key)} has {size} bytes instead of {nbytes}", hint="save again")

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts.

        Args:
            key: key of the object.
            upload: the id of the upload.
        """
        with self._mapping("delete", key):
            self._client.abort_multipart_upload(**self._of(key), UploadId=upload)

    def _size(self, key: str) -> int | None:
        """The size of an object; None if there is none."""
        try:
            with self._mapping("read", key):
                return int(self._client.head_object(**self._of(key))["ContentLength"])
        except NotFound:
            return None

    def _of(self, key: str) -> dict[str, str]:
        prefix = self._place.prefix
        return {"Bucket": self._place.bucket, "Key": f"{prefix}/{check_key(key)}" if prefix else check_key(key)}

    def _name(self, key: str) -> str:
        return f"{self._place.root}/{key}"

    @contextmanager
    def _mapping(self, action: str, key: str) -> Iterator[None]:
        """Raise an error of boto3 as one of ucformat, without what an answer may reveal."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            found, status = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
            code, status = str(found.get("Code", "")), status.get("HTTPStatusCode")
            why = f"{code}: {found.get('Message', '')}"[:200]
        except BotoCoreError as error:
            code, status, why = "", None, type(error).__name__
        else:
            return
        failed = f"cannot {action} {self._name(key)}: {why}"
        if status == 404 and action == "read":
            failure: UcformatError = NotFound(f"{self._name(key)} does not exist")
        elif status in _DENIED:
            failure = PermissionDenied(failed, hint="check the credentials that boto3 finds, and their permissions")
        else:
            failure = UcformatError(failed, hint="`ucp doctor URL` reports what the storage supports")
        raise failure  # outside the blocks above, where the library's error would be its context
