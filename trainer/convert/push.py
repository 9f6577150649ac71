"""Uploads a converted folder to the Hugging Face hub, with huggingface_hub, which is imported when it is used.

The repository is created as private; an existing public one is refused unless --public is given. After an interruption,
files that the hub already has are not sent again. conversion.json, which names a folder of this machine, is not
uploaded. HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH and HF_HOME mean what they mean to `hf`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from mdata import MdataError, ResourceError, UsageError
from trainer.convert.convert import RESULT

_REPOSITORY = re.compile(r"hf://([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/?")
_REFUSED = {401: "invalid token", 403: "no write permission", 404: "no such user, organization or repository"}


def repository_of(address: str) -> str:
    """ "owner/name" of hf://owner/name.

    Raises:
        UsageError: it is something else.
    """
    if (match := _REPOSITORY.fullmatch(address)) is None or match[1].startswith("datasets/"):
        raise UsageError(f"--push {address} is not a model on the hub", expected="hf://OWNER/NAME")
    return match[1]


def check_push(address: str, *, public: bool) -> None:
    """Check before a long conversion whether the upload would be refused.

    Raises:
        UsageError: no huggingface_hub, no token, or a repository that is public. ResourceError: the hub fails.
    """
    repository = repository_of(address)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UsageError("--push needs huggingface_hub", fix="pip install huggingface_hub")
    from huggingface_hub.errors import RepositoryNotFoundError

    with _errors_named(address):
        _hub().whoami()
        try:
            info = _hub().model_info(repository)
        except RepositoryNotFoundError:
            return
    if not info.private and not public:
        raise UsageError(
            f"{address} is public", expected="a private repository", fix="add --public, or choose another name"
        )


def push(folder: Path, address: str, *, public: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """Upload a converted folder; returns the repository and its commit.

    Raises:
        UsageError: the hub refuses it. ResourceError: the hub fails; the same command continues.
    """
    repository = repository_of(address)
    with _errors_named(address):
        _hub().create_repo(repository, private=not public, exist_ok=True)
        tell(f"uploading {folder} to {address}")
        commit = _hub().upload_folder(
            repo_id=repository, folder_path=folder, ignore_patterns=[RESULT], commit_message="mtrain convert"
        )
    return {"repository": address, "commit": commit.oid}


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextmanager
def _errors_named(address: str) -> Iterator[None]:
    """Turn errors of the hub and the network into ours, without the content of requests."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    # The error of its library for HTTP, which differs by version, and OSError.
    of_library = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (RuntimeError, *of_library)
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise UsageError(f"{address}: no Hugging Face token found", fix="set HF_TOKEN, or run hf auth login") from error
    except HFValidationError as error:
        raise UsageError(f"{address} is not a valid repository name", found=str(error)) from error
    except OfflineModeIsEnabled as error:
        raise UsageError(f"{address}: HF_HUB_OFFLINE is set", fix="unset it to upload") from error
    # For files that threads send it raises RuntimeError from what happened.
    except failures as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if isinstance(cause, HfHubHTTPError):
            raise _answered(address, cause.response.status_code) from None
        raise _failed(address, type(cause or error).__name__) from None


def _answered(address: str, status: int) -> MdataError:
    if status not in _REFUSED:
        return _failed(address, f"status {status}")
    return UsageError(
        f"{address}: rejected by the hub",
        found=f"status {status}: {_REFUSED[status]}",
        fix="check the name, and HF_TOKEN or hf auth login",
    )


def _failed(address: str, found: str) -> ResourceError:
    return ResourceError(
        f"{address}: a request to the hub failed", found=found, fix="run the same command again; it continues"
    )
