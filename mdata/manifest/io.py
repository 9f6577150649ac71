"""Manifests on disk. What `load_manifest` returns is complete, of a known version, and matches its id and checksum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from mdata.errors import DamageError, UsageError, explain_os_error, os_errors_named
from mdata.manifest.ids import M, checksum, manifest_id, sealed, text_of
from mdata.manifest.types import FORMAT, VERSION, CorpusManifest, Manifest
from mdata.util import atomic_io
from mdata.util.canonical_json import refuse_floats
from mdata.util.regular_files import regular_file


def save_manifest(manifest: M, path: Path) -> M:
    """Fill in id and checksum and write the file in one piece; returns what was written.

    Raises:
        ResourceError, UsageError: a file operation failed; an older file is unchanged.
    """
    from mdata.object_storage.address import refuse_output_address

    refuse_output_address(path)
    manifest = sealed(manifest)
    with os_errors_named(f"writing {path}"):
        atomic_io.atomic_write(path, text_of(manifest))
    return manifest


def stage_manifest(manifest: M, path: Path) -> M:
    """`save_manifest`, but the file keeps its temporary name until the files that it describes are renamed."""
    manifest = sealed(manifest)
    with os_errors_named(f"writing {path}"):
        atomic_io.write_partial(path, text_of(manifest))
    return manifest


def load_manifest(path: Path) -> Manifest:
    """Read a manifest and check format, version, fields, checksum and id.

    Raises:
        UsageError: no such file, not a manifest, or one of a later version.
        DamageError: truncated, altered, or with an unknown field; names the JSON path.
    """
    try:
        text = regular_file(path).read_bytes()
    except OSError as error:
        from mdata.object_storage.address import refuse_address

        refuse_address(path)
        raise explain_os_error(error, "reading a manifest") from error
    return parse_manifest(text, str(path))


def parse_manifest(text: bytes, name: str) -> Manifest:
    """What `load_manifest` does with the text; `name` is for messages."""
    return _sound(text) or _checked(text, name)


def _sound(text: bytes) -> Manifest | None:
    """Parse a valid manifest in a third of the time and memory; None: let `_checked` decide.

    Without floats msgspec's sorted text is the canonical one, or else the checksum differs.
    """
    try:
        manifest: Manifest = msgspec.json.decode(text, type=Manifest)
        made_by = manifest.provenance if isinstance(manifest, CorpusManifest) else None
        refuse_floats([manifest.notes, made_by.options if made_by else {}])
        emptied = msgspec.structs.replace(manifest, checksum="")
        computed = blake3(msgspec.json.encode(emptied, order="sorted")).hexdigest()
        is_sound = computed == manifest.checksum and manifest_id(manifest) == manifest.id
    except (TypeError, ValueError, RecursionError):
        return None
    return manifest if is_sound else None


def _checked(text: bytes, name: str) -> Manifest:
    """Parse step by step, with a reason for every fault."""
    value = _json_object(text, name)
    if value.get("format") != FORMAT:
        format_text = json.dumps(value.get("format"))
        raise UsageError(f"{name} is not a manifest", found=f"format {format_text}", expected=f'format "{FORMAT}"')
    if value.get("version") != VERSION:
        raise UsageError(
            f"{name}: this mdata cannot read its version",
            found=f"version {json.dumps(value.get('version'))}",
            expected=f"version {VERSION}",
            fix="use the mdata that wrote it, or write it again",
        )
    try:
        manifest: Manifest = msgspec.convert(value, Manifest)
    except ValueError as error:  # its own ValidationError, or invalid text
        raise DamageError(f"{name}: {error}", fix=_WRITE_AGAIN) from error
    _check(manifest, name)
    return manifest


_WRITE_AGAIN = "restore the file, or write it again"


def _json_object(text: bytes, name: str) -> dict[str, Any]:
    if not text.lstrip().startswith(b"{"):
        raise UsageError(f"{name} is not a manifest", found="no JSON object", expected=f'"format": "{FORMAT}"')
    try:
        value = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{name}: truncated, or not JSON", found=str(error), fix=_WRITE_AGAIN) from error
    assert isinstance(value, dict), "text that starts with a brace parsed to something else"
    return value


def _check(manifest: Manifest, name: str) -> None:
    """Refuse a manifest whose checksum or id does not match its content."""
    try:
        hashes = {"$.checksum": checksum(manifest), "$.id": manifest_id(manifest)}
    except (TypeError, ValueError, RecursionError) as error:
        # An error of mdata has several lines.
        reason = "; ".join(line.strip() for line in str(error).splitlines())
        raise DamageError(f"{name}: {reason}", fix=_WRITE_AGAIN) from error
    for place, computed in hashes.items():
        stored = getattr(manifest, place.removeprefix("$."))
        if stored != computed:
            raise DamageError(
                f"{name}: the content is not what was written, at `{place}`",
                found=stored,
                expected=computed,
                fix=_WRITE_AGAIN,
            )
