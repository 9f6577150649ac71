"""The JSON Schema of a manifest, which ships as mdata/manifest/schema.json; a test holds the two together.

python scripts/manifest_schema.py > mdata/manifest/schema.json
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mdata.manifest.types import Manifest


def schema_text() -> str:
    """What the structs give, as JSON Schema 2020-12."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mdata manifest, version 1"}
    schema = msgspec.json.schema(Manifest)
    for definition in schema["$defs"].values():
        if "description" in definition:  # a docstring, whose indentation Python 3.13 removes
            definition["description"] = inspect.cleandoc(definition["description"])
    return json.dumps({**head, **schema}, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
