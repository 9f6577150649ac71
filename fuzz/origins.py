"""The reader of sidecars with origins: an `Origins`, UsageError or DamageError, whatever the bytes.

The first byte chooses: the file as it comes, or a header with the step of the second byte and runs of three numbers
made from the rest, mostly small and rising, so that the checks behind the header are reached. What is read says of a
run's first document where it came from, and of that place the same document.
"""

from __future__ import annotations

import numpy as np

from fuzz.harness import scratch
from fuzz.index_reader import number
from fuzz.record_lines import check_message
from mdata.corpus.origins import HEADER_BYTES, MAGIC, VERSION, open_origins
from mdata.errors import DamageError, UsageError

FARTHEST = 1 << 62  # of documents asked for; a corpus has fewer


def check(data: bytes) -> None:
    """One sidecar."""
    content = built(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    path = scratch() / "x.origins"
    path.write_bytes(content)
    try:
        origins = open_origins(path)
    except (UsageError, DamageError) as error:
        check_message(str(error))
        return
    step = np.array([VERSION, origins.step], "<i8").tobytes()
    assert MAGIC + step + np.asarray(origins.runs, "<i8").tobytes() == content
    assert len(content) >= HEADER_BYTES and origins.step >= 1
    for first, file, row in origins.runs[:20].tolist():
        assert origins.of_document(first) == (file, row)
        assert first in origins.documents_of(file, row)
        assert origins.of_document(min(first + 1, FARTHEST))[1] >= 1 or first >= FARTHEST
        for asked in (row + origins.step, row + 1, 1):
            for document in origins.documents_of(file, min(asked, (1 << 63) - 1)):
                assert document >= 0 and origins.of_document(document) == (file, asked)


def built(data: bytes) -> bytes:
    """A file that is the right size for its runs, documents mostly rising."""
    values = iter(data)
    step, document, runs = next(values, 1), 0, []
    while len(runs) < 40 and (ahead := next(values, None)) is not None:
        file, row = number(values, 31), number(values, 63)
        document = number(values, 63) if ahead == 255 else document + ahead * bool(runs)
        runs.append((document, file, row))
    return MAGIC + np.array([VERSION, step, *np.ravel(runs)], "<i8").tobytes()
