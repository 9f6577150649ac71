"""Dataset repositories of the Hugging Face hub as addresses: where their files are, and which there are.

Files are read by ordinary requests of ranges; only the list of files is an interface of the hub itself (the tree of a
revision, in pages). HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH and HF_HOME mean what they mean to `hf`. Nothing is read there
unless an address names it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from mdata.errors import ResourceError, UsageError
from mdata.object_storage.address import Address
from mdata.object_storage.origin_guard import authority

_TIMEOUT_S = 30
_MOST_PAGES = 10_000  # of at most 1,000 files
_PAGE_BYTES = 64 << 20
# The revision to which the hub converts data sets of any format, as CONFIG/SPLIT/0000.parquet; huggingface_hub's short
# name of it is @~parquet.
_CONVERTED = "refs/convert/parquet"
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')


def hub_url(address: Address) -> str:
    """Where the files of a repository's revision are."""
    name, revision = _repository(address)
    return f"{_endpoint()}/datasets/{name}/resolve/{quote(revision, safe='')}"


def hub_options() -> dict[str, Any]:
    """Options of an HTTP client: the token, if there is one."""
    token = _token()
    options: dict[str, Any] = {"allow_http": _endpoint().startswith("http://")}
    return options | ({"default_headers": {"authorization": f"Bearer {token}"}} if token else {})


def hub_files(address: Address) -> list[str]:
    """The path of every file below an address, in the order of the hub.

    Raises:
        UsageError: no such repository, revision or folder, or no access. ResourceError: the hub does not answer.
    """
    name, revision = _repository(address)
    folder = address.key.strip("/")
    url = f"{_endpoint()}/api/datasets/{name}/tree/{quote(revision, safe='')}/{quote(folder)}?recursive=true"
    paths: list[str] = []
    pages: set[str] = set()
    following: str | None = url.replace("/?", "?")
    while following:
        if following in pages or len(pages) == _MOST_PAGES:
            raise ResourceError(
                f"listing {address}: the list does not end",
                found=f"a repeated page, or more than {_MOST_PAGES:,} pages",
                fix="check HF_ENDPOINT, or name a part of the repository",
            )
        pages.add(following)
        entries, following = _page(following, address)
        try:
            paths += [entry["path"] for entry in entries if entry["type"] == "file"]
        except (TypeError, KeyError):
            raise _not_a_list(address) from None
    return paths


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows redirects on the hub itself (a renamed repository); others are errors, since the token goes along."""

    def redirect_request(self, request: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        same = _origin(answer[-1]) == _origin(request.full_url)
        return super().redirect_request(request, *answer) if same else None


def _page(url: str, address: Address) -> tuple[Any, str | None]:
    """One page of the list, and where the next one is: on the hub itself, since the token goes along."""
    if not url.startswith(f"{_endpoint()}/"):
        raise ResourceError(f"listing {address}: the next page of the list is on another host", fix="check HF_ENDPOINT")
    token = _token()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.build_opener(_SameOrigin).open(request, timeout=_TIMEOUT_S) as answer:
            following = _NEXT.search(answer.headers.get("Link") or "")
            page = answer.read(_PAGE_BYTES + 1)
            if len(page) > _PAGE_BYTES:
                raise _not_a_list(address)
            return json.loads(page), following[1] if following else None
    except urllib.error.HTTPError as error:
        if error.code in (301, 302, 303, 307, 308):
            raise UsageError(
                f"listing {address}: the hub redirects to another host, which may not receive the token",
                found=f"{error.code} to {_origin(urljoin(url, error.headers.get('Location') or ''))}",
                expected=_origin(url),
                fix="check HF_ENDPOINT",
            ) from None
        if error.code in (401, 403, 404):
            raise UsageError(
                f"listing {address}: no such dataset, revision or folder, or no access to it",
                found=str(error.code),
                fix="check the address; private and gated datasets need HF_TOKEN, or hf auth login",
            ) from None
        raise ResourceError(
            f"listing {address}: the hub returned an error", found=str(error.code), fix="run again"
        ) from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise ResourceError(f"listing {address}: {type(error).__name__}", fix="run again; check HF_ENDPOINT") from None


def _not_a_list(address: Address) -> ResourceError:
    return ResourceError(
        f"listing {address}: the hub's answer is not a list of files", fix="check HF_ENDPOINT, and run again"
    )


def _origin(url: str) -> str:
    """Scheme, host and port; the rest of a URL may hold a secret."""
    return f"{urlsplit(url).scheme}://{authority(url)}"


def _repository(address: Address) -> tuple[str, str]:
    name, _, revision = address.place.partition("@")
    return name, _CONVERTED if revision == "~parquet" else revision or "main"


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _token() -> str | None:
    if token := os.environ.get("HF_TOKEN"):
        return token
    path = Path(os.environ.get("HF_TOKEN_PATH", Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "token")))
    try:
        path = path.expanduser()
    except RuntimeError:  # no home folder, as of a container's user whom /etc/passwd does not name
        return None
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
