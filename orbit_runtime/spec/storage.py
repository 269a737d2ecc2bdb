"""`spec.storage`: where runs are kept. Reading and writing is in the package `storage`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from orbit_runtime.spec.block import DISPLAY, Block, Contradiction, Uri, check_scheme


class Storage(Block):
    """Where the run folder goes."""

    uri: Annotated[Uri, DISPLAY] = "runs"
    """The run is kept in `<uri>/<metadata.name>`: a path (from the current folder), `file:///…` or `s3://bucket/prefix`."""

    def contradictions(self) -> Iterator[Contradiction]:
        yield from check_scheme("uri", self.uri, ("file", "s3", "gs", "az"))
