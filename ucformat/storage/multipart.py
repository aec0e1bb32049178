"""Multipart uploads to S3 of which several processes put parts, through boto3: obstore has no call for a single part.

One process begins an upload, and tells its id to the others; when all parts are there it completes the upload. Nothing
is visible before, and an upload that is neither completed nor aborted stays invisible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucformat.errors import NotFound, PermissionDenied, UcformatError
from ucformat.storage.base import check_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucformat.storage.base import Bytes
    from ucformat.storage.clouds import Place

_DENIED = {401, 403}


class Multipart:
    """Uploads to a bucket. Safe to use from several threads at once."""

    def __init__(self, client: Any, place: Place) -> None:
        self._client, self._place = client, place

    def begin(self, key: str) -> str:
        """Begin an upload, and return its id."""
        return str(self._request("write", "create_multipart_upload", key)["UploadId"])

    def put(self, key: str, upload: str, number: int, data: Bytes) -> str:
        """Put a part, replacing any existing one, and return its ETag.

        Args:
            data: at least 5 MiB, except of the last part.
        """
        part = {"UploadId": upload, "PartNumber": number + 1, "Body": bytes(data)}
        return str(self._request("write", "upload_part", key, **part)["ETag"])

    def complete(self, key: str, upload: str, etags: Sequence[str], nbytes: int) -> None:
        """Make the object visible."""
        parts = {"Parts": [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(etags, 1)]}
        try:
            self._request("write", "complete_multipart_upload", key, UploadId=upload, MultipartUpload=parts)
        except UcformatError:
            if self._size(key) != nbytes:  # else only the answer was lost
                raise
        if (size := self._size(key)) != nbytes:
            raise UcformatError(f"{self._name(key)} has {size} bytes instead of {nbytes}", hint="save again")

    def abort(self, key: str, upload: str) -> None:
        """Discard an upload and its parts."""
        self._request("delete", "abort_multipart_upload", key, UploadId=upload)

    def _size(self, key: str) -> int | None:
        """The size of an object; None if there is none."""
        try:
            return int(self._request("read", "head_object", key)["ContentLength"])
        except NotFound:
            return None

    def _of(self, key: str) -> dict[str, str]:
        prefix = self._place.prefix
        return {"Bucket": self._place.bucket, "Key": f"{prefix}/{check_key(key)}" if prefix else check_key(key)}

    def _name(self, key: str) -> str:
        return f"{self._place.root}/{key}"

    def _request(self, action: str, call: str, key: str, **arguments: Any) -> Any:
        """The answer to a request; an error shows nothing of an answer but its code and message."""
        from botocore.exceptions import ClientError

        try:
            return getattr(self._client, call)(**self._of(key), **arguments)
        except ClientError as error:
            found, status = error.response.get("Error", {}), error.response["ResponseMetadata"].get("HTTPStatusCode")
            why = f"{found.get('Code', '')}: {found.get('Message', '')}"[:200]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - botocore raises many
            status, why = None, type(error).__name__
        if status == 404 and action == "read":
            raise NotFound(f"{self._name(key)} does not exist")
        failed = f"cannot {action} {self._name(key)}: {why}"
        if status in _DENIED:
            raise PermissionDenied(failed, hint="check the credentials that boto3 finds, and their permissions")
        raise UcformatError(failed, hint="`ucp doctor URL` reports what the storage supports")
