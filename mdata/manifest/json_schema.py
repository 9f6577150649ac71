"""The JSON Schema of a manifest. `schema.json` beside this file is what ships; a test holds the two together.

python -m mdata.manifest.json_schema > mdata/manifest/schema.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from mdata.manifest.types import Manifest


def schema() -> dict[str, Any]:
    """The schema that the structs give (JSON Schema 2020-12)."""
    value = msgspec.json.schema(Manifest)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mdata manifest, version 1",
        **value,
    }


def schema_text() -> str:
    """The content of schema.json."""
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
