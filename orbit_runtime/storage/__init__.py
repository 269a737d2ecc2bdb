"""Storage of a run: one interface to local folders and object stores, bundles proven by a manifest, one writer.

The protocol, on which every reader and writer of a run folder relies:

1. **Put is atomic, nothing else is assumed.** An object is whole or absent. No append, no rename, no conditional
   update; create-only puts are honoured.
2. **Parts first, manifest last.** A bundle (checkpoint, adapter) consists of the parts listed in its
`manifest.json`, with the size and SHA-256 of every piece. Without a manifest there is no bundle; a reader trusts
manifests only and verifies each piece.
3. **One writer.** An execution takes the next number by a create-only put under `executions/`, keeps a heartbeat
and, on a local folder, an flock. Before each manifest it checks whether a higher number exists, and stops if so.
Part names contain the number, so two executions never mix their parts.
4. **A lost reply is not a failure.** Each call is retried with back-off until a deadline. If a retried create-only
put is answered "exists", the existing object is compared with the one being written.

Belongs here: bytes by key, and who may write them. Does not belong here: the meaning of the bytes (`loop`), or torch.
"""

from orbit_runtime.storage.bundles import (
    Bundle,
    CheckpointParts,
    Content,
    Manifest,
    Part,
    StoredFiles,
    list_bundles,
    newest_readable,
    part_key,
    prune_bundles,
    read_bundle,
    read_manifest,
    restate_bundle,
    standing_content,
    standing_parts,
    withdraw_bundle,
    write_bundle,
    write_parts,
)
from orbit_runtime.storage.execution import Execution, claim_execution, newest_execution
from orbit_runtime.storage.opening import open_store
from orbit_runtime.storage.run_files import compact_rows, read_run_file
from orbit_runtime.storage.store import AlreadyExists, CorruptBundle, NotFound, Store

__all__ = [
    "AlreadyExists",
    "Bundle",
    "CheckpointParts",
    "Content",
    "CorruptBundle",
    "Execution",
    "Manifest",
    "NotFound",
    "Part",
    "Store",
    "StoredFiles",
    "claim_execution",
    "compact_rows",
    "list_bundles",
    "newest_execution",
    "newest_readable",
    "open_store",
    "part_key",
    "prune_bundles",
    "read_bundle",
    "read_manifest",
    "read_run_file",
    "restate_bundle",
    "standing_content",
    "standing_parts",
    "withdraw_bundle",
    "write_bundle",
    "write_parts",
]
