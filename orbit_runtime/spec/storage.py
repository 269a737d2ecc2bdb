"""`spec.storage`: where runs are kept. Reading and writing is in the package `storage`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, Block, ObjectName, Rule, Uri, uri_rule

STORES = ("s3", "gs", "az")
"""Schemes of object stores."""
STORAGE_SCHEMES = ("file", *STORES)


class Storage(Block):
    """Where the run folder is stored."""

    uri: Annotated[Uri, DISPLAY] = "runs"
    """The run is stored in `<uri>/<metadata.name>`: a path (relative to the current folder), `file:///…` or
    `s3://bucket/prefix`."""

    credentials_secret_name: Annotated[ObjectName | None, DISPLAY, Field(examples=["orbit-store"])] = None
    """On a cluster: the Secret whose keys become the store's environment variables; alternatively, set
    `serviceAccountName`."""
    service_account_name: Annotated[ObjectName | None, DISPLAY, Field(examples=["orbit-runs"])] = None
    """On a cluster: the service account that the store recognises (workload identity); alternatively, set
    `credentialsSecretName`."""
    deletion_policy: Annotated[Literal["Retain", "Delete"], DISPLAY] = "Retain"
    """On a cluster: what happens to the run folder when the object is deleted."""

    rules = (
        uri_rule(STORAGE_SCHEMES),
        Rule(
            "serviceAccountName",
            "!has(self.credentialsSecretName) || !has(self.serviceAccountName)",
            "the store is opened with a secret or as a service account, not both",
            "remove one of them",
            server="remove serviceAccountName or credentialsSecretName",
        ),
    )
