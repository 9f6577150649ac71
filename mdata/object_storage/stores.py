"""Connections to storage, by obstore, and its errors as ours.

Credentials are found as each storage's own tools find them: environment, profile files, and the machine's role. obstore
reads all but AWS profiles, which are read here. What a library says is never repeated as it is, since it may quote a
signed URL or a header; kind, status and the server's error code are.
"""

from __future__ import annotations

import configparser
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mdata.errors import MdataError, ResourceError, UsageError, install_command
from mdata.object_storage.address import Address
from mdata.object_storage.origin_guard import NO_CONNECTION, REFUSED, guard_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

TIMEOUT_S = 30
RETRIES = 6
FIRST_WAIT_S = 0.1
_TOOLS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or a role; AWS_SKIP_SIGNATURE=true "
    "for public buckets",
    "gs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or a managed identity",
    "hf": "HF_TOKEN, or hf auth login",
}
# A library's words for: nobody told who we are, and the machine has no role either.
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|metadata\.google|MissingSecretAccessKey|MissingAccessKeyId|[Mm]issing account", re.S
)
# Settings of a profile whose keys come from elsewhere.
_INDIRECT = frozenset({"sso_session", "sso_start_url", "credential_process", "role_arn"})
# Redirects that the guard refused, those of a PUT, which obstore does not follow, and those without a target.
_REDIRECT = re.compile(rf"\b{REFUSED} <|\b30[1-8] [A-Z][a-z]+|redirect without LOCATION")
_UNUSABLE = MappingProxyType(
    {
        "InvalidPathError": "no object can have this key",
        "NotSupportedError": "the storage cannot do this",
        "ValueError": "no object can have this key",  # such as one with . or .. among its parts
    }
)
_NO_ANSWER = MappingProxyType(
    {"Connect": "no connection", "Timeout": "no answer in time", "Interrupted": "a broken connection"}
)
_AZURE_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_SECRETS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")


def open_store(address: Address) -> ObjectStore:
    """A connection to the place of an address. It may be used by several threads.

    To make one takes certificates, a connection and often credentials from a server, so that calls with the same
    settings get the same one.

    Raises:
        UsageError: obstore is not installed, or what is configured is wrong.
    """
    try:
        import obstore.store  # noqa: F401
    except ImportError:
        raise UsageError(
            f"{address} is in object storage, which needs the library obstore", fix=install_command("objects")
        ) from None
    place = f"{address.scheme}://{address.place}"
    with named_errors(address):
        if address.scheme in ("http", "https"):
            return _connected(place, {}, {"allow_http": address.scheme == "http"})
        if address.scheme == "hf":
            from mdata.object_storage.hub import hub_options, hub_url

            return _connected(hub_url(address), {}, hub_options())
        config = aws_config(os.environ) if address.scheme == "s3" else {}
        options: dict[str, Any] = {"proxy_url": guard_of(place, os.environ).url}
        endpoints = (config.get("endpoint", ""), *(os.environ.get(name, "") for name in _AZURE_ENDPOINTS))
        if any(endpoint.startswith("http://") for endpoint in endpoints) or "EMULATOR" in " ".join(os.environ):
            options["allow_http"] = True
        if address.scheme == "gs" or "credential_provider" in config:  # other keys may be in a file that it reads
            return _made(place, config, options)
        return _connected(place, config, options)


def _connected(url: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> ObjectStore:
    """A store, made once for these settings. obstore reads more of them, such as keys, from the environment."""
    waits = (TIMEOUT_S, RETRIES, FIRST_WAIT_S)
    # A fork does not have the threads of its parent's stores.
    return _kept(url, json.dumps([config, options]), waits, tuple(sorted(os.environ.items())), os.getpid())


@lru_cache(maxsize=16)
def _kept(url: str, settings: str, *_: object) -> ObjectStore:
    return _made(url, *json.loads(settings))


def _made(url: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> ObjectStore:
    from obstore.store import HTTPStore, from_url

    make: Any = HTTPStore.from_url if url.startswith("http") else from_url
    store: ObjectStore = make(
        url,
        **config,
        client_options={
            "timeout": timedelta(seconds=TIMEOUT_S),
            "connect_timeout": timedelta(seconds=5),
            **options,
        },
        retry_config={
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=60),
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_WAIT_S),
                "max_backoff": timedelta(seconds=150 * FIRST_WAIT_S),
                "base": 2,
            },
        },
    )
    return store


def aws_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the AWS command line would use and obstore does not read: the profile, and the endpoint of S3 alone.

    Args:
        environment: AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE, AWS_CONFIG_FILE, AWS_ENDPOINT_URL_S3 and others.
    """
    config: dict[str, Any] = {}
    profile = environment.get("AWS_PROFILE", "default")
    home = Path(environment.get("HOME", "/"), ".aws")
    credentials = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"), profile)
    settings = _section(
        environment.get("AWS_CONFIG_FILE", home / "config"), profile if profile == "default" else f"profile {profile}"
    )
    merged = settings | credentials
    if "AWS_ACCESS_KEY_ID" not in environment:
        config |= {name.removeprefix("aws_"): merged[name] for name in _SECRETS if name in merged}
        if "access_key_id" not in config and merged.keys() & _INDIRECT:
            config["credential_provider"] = _by_boto3(profile)
    if "region" in merged and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & environment.keys():
        config["region"] = merged["region"]
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoint = next((environment[name] for name in names if environment.get(name)), merged.get("endpoint_url"))
    return config | ({"endpoint": endpoint} if endpoint else {})


def _section(path: str | Path, name: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read", found=type(error).__name__) from None
    return dict(parser[name]) if parser.has_section(name) else {}


def _by_boto3(profile: str) -> Any:
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UsageError(
            f"the AWS profile {profile} has a role, SSO or a credential process instead of keys",
            fix='pip install boto3, or eval "$(aws configure export-credentials --format env)"',
        ) from None
    return Boto3CredentialProvider(Session(profile_name=profile))


@contextmanager
def named_errors(address: Address) -> Iterator[None]:
    """Turn an error of obstore into one of ours that names the object; nothing of its text is repeated."""
    try:
        yield
    except MdataError:
        raise
    except storage_errors() as error:
        raise explained(error, address) from None


def storage_errors() -> tuple[type[Exception], ...]:
    """What obstore raises: its own errors, and Python's where they say the same (FileNotFoundError)."""
    from obstore.exceptions import BaseError

    return BaseError, OSError, ValueError


def broke_off(error: Exception) -> bool:
    """Whether an answer of the storage ended early, which obstore does not ask for again."""
    return re.search(r"\bkind: Interrupted\b", str(error)) is not None


def explained(error: Exception, address: Address, *, doing: str = "reading") -> MdataError:
    """One error of obstore as ours: usage where the user's address or credentials are the cause, else resource."""
    kind, text = type(error).__name__, str(error)
    code = re.search(r"<Code>([A-Za-z]+)</Code>", text)
    status = re.search(r"\b([45][0-9]{2}) [A-Z][a-z]+", text)
    answer = " ".join(part[1] for part in (status, code) if part) or None
    place = f"{address.scheme}://{address.place}"
    credentials = _TOOLS.get(address.scheme, "an address that needs none")
    no_answer = re.search(r"\bkind: (Connect|Timeout|Interrupted)\b", text)
    guarded = address.scheme in ("s3", "gs", "az")
    if guarded and (_REDIRECT.search(text) or (no_answer and no_answer[1] == "Connect")):
        guard = guard_of(place, os.environ)
        if guard.refused or _REDIRECT.search(text):
            return UsageError(
                f"{doing} {address}: the storage redirects to another host, which may not receive the credentials",
                found=guard.refused,
                expected=guard.origin,
                fix="check the endpoint and the region of the bucket",
            )
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return UsageError(f"{doing} {address}: there is no bucket {address.place}", found=answer, fix="check its name")
    if kind == "PreconditionError":
        return changed(address)
    if code and code[1] == "NoSuchUpload":  # completed, but its answer was lost; or removed by a lifecycle rule
        return ResourceError(f"{doing} {address}: the upload has ended", found=answer, fix="run again, which continues")
    if kind in ("NotFoundError", "FileNotFoundError"):
        return UsageError(f"{doing} {address}: nothing is there", found=answer, fix="check the address")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return UsageError(f"{doing} {address}: {place} refuses these credentials", found=answer, fix=credentials)
    if _NO_CREDENTIALS.search(text):
        return UsageError(f"{doing} {address}: no credentials for {place} were found", fix=credentials)
    if kind in _UNUSABLE:
        return UsageError(f"{doing} {address}: {_UNUSABLE[kind]}", fix="check the address")
    if no_answer or f"{NO_CONNECTION} <" in text:
        return ResourceError(
            f"{doing} {address}: the storage cannot be reached",
            found=_NO_ANSWER[no_answer[1] if no_answer else "Connect"],
            fix="check the endpoint and the network, and run again, which continues",
        )
    return ResourceError(
        f"{doing} {address}: the storage gives an unexpected answer",
        found=answer or kind,
        fix="run again, which continues; if the error persists, check the endpoint and the network",
    )


def changed(address: Address) -> UsageError:
    """An object is another one than when it was first looked at."""
    return UsageError(
        f"{address} changed while it was read",
        found="another version of the object",
        expected="the version that was found at the start",
        fix="wait until the program that writes it has finished, and run again",
    )
