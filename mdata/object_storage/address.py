"""Addresses of objects: s3://bucket/key, gs://bucket/key, az://container/key, http(s)://host/path, hf://datasets/...

Only text is looked at here. An address never holds a secret, because it is written into manifests, journals and
messages: a URL with a password or a signed query is refused, and libraries find credentials by their own conventions.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass

from mdata.errors import UsageError

SCHEMES = ("s3", "gs", "az", "http", "https", "hf")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.S)
_HUB = re.compile(r"datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?", re.S)
_SIGNED = re.compile(r"[?&](sig|signature|x-(amz|goog)-[a-z-]+|[a-z-]*token|awsaccesskeyid|googleaccessid)=", re.I)
_SAME = {"s3a": "s3", "gcs": "gs", "azure": "az"}
_FETCHED_BY = {
    "abfs": "azcopy copy, or as az://container/path",
    "abfss": "azcopy copy, or as az://container/path",
    "r2": "rclone copy, or as s3:// with AWS_ENDPOINT_URL",
    "hdfs": "hdfs dfs -get",
}
_NAMES = "|".join((*SCHEMES, *_SAME, *_FETCHED_BY, "file"))
_SCHEME = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]+:/|(?:{_NAMES}):", re.I)  # what begins like an address


@dataclass(frozen=True, order=True)
class Address:
    """Where an object is.

    Attributes:
        scheme: one of `SCHEMES`.
        place: the bucket or container; of http the host with its port; of hf "owner/name" or "owner/name@revision".
        key: the path there, without a slash in front.
    """

    scheme: str
    place: str
    key: str

    def __str__(self) -> str:
        inside = f"datasets/{self.place}" if self.scheme == "hf" else self.place
        return f"{self.scheme}://{inside}/{self.key}"

    def __fspath__(self) -> str:
        """As text, for what prints paths; no file system opens it."""
        return str(self)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rstrip("/").rpartition("/")[2]

    def resolve(self) -> Address:
        """An address has one form; the method is that of `Path`."""
        return self

    def with_key(self, key: str) -> Address:
        """Another object at the same place."""
        return Address(self.scheme, self.place, key)


def is_address(name: object) -> bool:
    """Whether a text is an address or URL of any scheme, and not a path."""
    return _ADDRESS.fullmatch(str(name)) is not None


def address_of(path: str | os.PathLike[str]) -> str | None:
    """The address that a path was made from (`Path` turns // into /), or that a text with too few slashes is meant to
    be; None: it is a path. A slash at the end, which makes it a folder, stays.
    """
    text = str(path)
    if not _SCHEME.match(text) or os.path.exists(text):  # noqa: PTH110 - fast, for many corpora
        return None
    scheme, _, rest = text.partition(":")
    rest = posixpath.normpath(rest.lstrip("/")) + "/" * text.endswith("/") if rest.strip("/") else ""
    return f"{scheme}://{'/' * (scheme.lower() == 'file')}{rest}"


def neither(text: str | os.PathLike[str], address: str) -> UsageError:
    """The error for a text that begins like an address and has too few slashes."""
    return UsageError(f"{text} is neither a path nor an address", fix=f"write {address}")


def refuse_address(path: str | os.PathLike[str]) -> None:
    """Refuse an address where files have to be on a disk.

    Raises:
        UsageError: the path begins with a scheme.
    """
    if address := address_of(path):
        if ":/" not in str(path):
            raise neither(path, address)
        raise UsageError(
            f"{address} is in object storage, but only a corpus on a disk can be read here",
            fix=f"copy the corpus first: mdata fetch {address} --output FOLDER",
        )


def refuse_output_address(path: str | os.PathLike[str]) -> None:
    """Refuse an address, or one with a slash too few, as the name of something that is written to a disk only.

    Raises:
        UsageError: the path begins with a scheme.
    """
    if _SCHEME.match(text := str(path)):
        raise UsageError(
            f"{address_of(path) or text} begins like an address in object storage, but this is written to a disk",
            fix="give a path; to upload the result, use the storage's own tool",
        )


def scheme_of(text: str) -> str:
    """The scheme of an address in the form of `SCHEMES`, also of one that is not among them."""
    scheme = text.partition("://")[0].lower()
    return _SAME.get(scheme, scheme)


def parse_address(text: str) -> Address:
    """The address that a text is.

    Raises:
        UsageError: another scheme, no bucket, or a URL that holds credentials.
    """
    match = _ADDRESS.fullmatch(text)
    assert match is not None, f"{text} is a path"
    scheme, rest = scheme_of(text), match[2]
    if scheme == "file":
        raise UsageError(f"{text} is a URL", expected="a path", fix=rest or "/")
    if scheme not in SCHEMES:
        how = _FETCHED_BY.get(scheme, "that storage's own tool")
        raise UsageError(
            f"mdata does not read {scheme}://",
            expected=f"a path, or one of {', '.join(f'{name}://' for name in SCHEMES)}",
            fix=f"copy it first, with {how}",
        )
    host = rest.partition("/")[0]
    if "@" in host or (scheme in ("http", "https") and ("?" in rest or "#" in rest)) or _SIGNED.search(rest):
        # The text is not repeated: it may hold a secret.
        raise UsageError(
            f"a {scheme}:// address has a user name, query or fragment",
            expected="a plain address, because addresses are written into manifests and messages",
            fix="give credentials as for the storage's own tools (docs/howto/storage.md)",
        )
    if scheme == "hf":
        return _of_hub(text, rest)
    place, _, key = rest.partition("/")
    if not place:
        raise UsageError(f"{text} has no bucket", expected=f"{scheme}://BUCKET/KEY")
    return Address(scheme, place, key)


def _of_hub(text: str, rest: str) -> Address:
    match = _HUB.fullmatch(rest)
    if match is None:
        raise UsageError(f"{text} is not in a dataset repository", expected="hf://datasets/OWNER/NAME[@REVISION]/PATH")
    place = match[1] + (f"@{match[2]}" if match[2] else "")
    return Address("hf", place, match[3] or "")
