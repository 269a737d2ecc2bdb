"""Classifies failed calls to the store: whether to retry, and whose fault it is.

The text of a store's error may contain signatures and key ids, so only the facts extracted here reach a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from obstore.exceptions import AlreadyExistsError, InvalidPathError, PermissionDeniedError, UnauthenticatedError

FaultKind = Literal[
    "missing",
    "exists",
    "transient",
    "no-bucket",
    "bad-bucket",
    "refused",
    "no-credentials",
    "clock",
    "untrusted",
    "rejected",
    "full",
    "denied",
    "unusable",
    "impossible",
]

_CODES: dict[str, FaultKind] = {
    "NoSuchBucket": "no-bucket",
    "InvalidBucketName": "bad-bucket",
    "NoSuchKey": "missing",
    "AccessDenied": "refused",
    "InvalidAccessKeyId": "refused",
    "SignatureDoesNotMatch": "refused",
    "ExpiredToken": "refused",
    "InvalidToken": "refused",
    "XAdminUserNotFound": "refused",  # versitygw's word for an unknown access key, sent with a 404
    "RequestTimeTooSkewed": "clock",
    "RequestTimeout": "transient",  # a 400: the body came too slowly
    "IncompleteBody": "transient",
}
_ERRNOS: dict[int, FaultKind] = {
    1: "denied",  # EPERM: also what a filesystem without hard links answers to a create-only put
    6: "impossible",  # ENXIO
    13: "denied",
    18: "impossible",  # EXDEV
    19: "impossible",  # ENODEV
    20: "unusable",  # ENOTDIR: a file stands where a folder is needed
    21: "unusable",  # EISDIR
    22: "impossible",  # EINVAL
    27: "impossible",  # EFBIG: a limit of the file system or of `ulimit -f`
    28: "full",
    30: "denied",  # EROFS
    31: "impossible",  # EMLINK
    36: "impossible",  # ENAMETOOLONG
    38: "impossible",  # ENOSYS
    40: "impossible",  # ELOOP
    75: "impossible",  # EOVERFLOW
    84: "impossible",  # EILSEQ
    95: "impossible",  # EOPNOTSUPP
    122: "full",  # EDQUOT
}
_PASSING_STATUS = ("408", "409", "425", "429")
_CREDENTIAL_SOURCES = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "sts.amazonaws.com")


@dataclass(frozen=True, slots=True)
class Fault:
    """One failed call, reduced to facts that may be shown."""

    kind: FaultKind
    reason: str
    """A few words without addresses, keys or signatures, such as `503 SlowDown` or `Connection refused`."""


def read_fault(error: Exception) -> Fault:
    """Classify an error of obstore by what can be done about it. Unrecognised errors count as transient."""
    text = str(error)
    if isinstance(error, AlreadyExistsError):
        return Fault("exists", "already exists")
    code = _first(r"<Code>([A-Za-z0-9]{1,64})</Code>", text)
    status = _first(r"status code: (\d{3})", text)
    if any(source in text for source in _CREDENTIAL_SOURCES):
        return Fault("no-credentials", "no credentials were found")
    if code is not None and code in _CODES:
        return Fault(_CODES[code], code)
    if isinstance(error, FileNotFoundError):
        return Fault("missing", "not found")
    if isinstance(error, UnauthenticatedError) or status == "401" or (status == "403" and code is None):
        return Fault("refused", f"{status or 401} {code or 'not allowed'}")
    if isinstance(error, OSError) and error.errno is not None:
        return Fault(_ERRNOS.get(error.errno, "transient"), error.strerror or "the disk failed")
    errno = _first(r"\(os error (\d+)\)", text) or _first(r"code: (\d+),", text)
    if errno is not None and int(errno) in _ERRNOS:
        return Fault(_ERRNOS[int(errno)], _os_reason(text))
    if isinstance(error, PermissionDeniedError):
        return Fault("refused" if status else "denied", code or "permission denied")
    if isinstance(error, InvalidPathError):
        return Fault("unusable", "the store cannot hold this name")
    if status is not None:
        passing = status.startswith("5") and status != "501"
        kind: FaultKind = "transient" if passing or status in _PASSING_STATUS else "rejected"
        return Fault(kind, f"{status} {code}" if code else status)
    certificate = _first(r"InvalidCertificate\(\s*(\w+)", text)
    return Fault("transient", _os_reason(text)) if certificate is None else Fault("untrusted", certificate)


def _os_reason(text: str) -> str:
    message = _first(r'message: "([^"]{1,120})"', text) or _first(r"([A-Z][A-Za-z ]{3,60}) \(os error \d+\)", text)
    if message is not None:
        return message
    if "timed out" in text or "TimedOut" in text:
        return "timed out"
    return "the host name is not known" if "dns error" in text else "the request failed"


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
