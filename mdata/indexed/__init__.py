"""Reading and writing .bin/.idx pairs, the token files that Megatron reads.

`format` knows the bytes (docs/formats.md, "Indexed dataset"), `writer` streams a pair into place, `reader`
maps one after checking it. Hashes and identity are the manifest's business.
"""

from typing import TYPE_CHECKING

from mdata.lazy import attach

if TYPE_CHECKING:
    from mdata.indexed.format import smallest_dtype
    from mdata.indexed.reader import IndexedReader
    from mdata.indexed.writer import IndexedWriter, ShardFacts, WriterState

attach(
    __name__,
    {
        "mdata.indexed.format": "smallest_dtype",
        "mdata.indexed.reader": "IndexedReader",
        "mdata.indexed.writer": "IndexedWriter ShardFacts WriterState",
    },
)

__all__ = ["IndexedReader", "IndexedWriter", "ShardFacts", "WriterState", "smallest_dtype"]
