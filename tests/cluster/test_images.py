"""The product's own Dockerfile, built on a local base and run on the node: what is inside, how big, as whom."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cluster.bed.cluster import Cluster
from cluster.bed.images import TARGETS, build_product_image
from cluster.restricted_job import build_job, build_namespace, read_logs, wait_for_end

from orbit_runtime import __version__

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
LARGEST_OPERATOR = 150_000_000
"""Bytes above its base, unpacked."""


def added_bytes(archive: Path, num_base_layers: int = 1) -> int:
    """What the image adds to its base; the local base is one layer."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        layers = json.load(manifest)[0]["Layers"]
        return sum(tar.getmember(_target(tar, layer)).size for layer in layers[num_base_layers:])


def read_config(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        config = tar.extractfile(_target(tar, json.load(manifest)[0]["Config"]))
        assert config is not None
        return dict(json.load(config))


def _target(tar: tarfile.TarFile, name: str) -> str:
    """A layer may be a link to another file of the archive."""
    member = tar.getmember(name)
    return str(Path(name).parent / member.linkname) if member.issym() else name


@pytest.mark.parametrize("target", TARGETS)
def test_each_image_says_what_it_is(target: str) -> None:
    _, archive = build_product_image(target)
    config = read_config(archive)["config"]
    labels = config["Labels"]
    assert config["User"] == "65532:65532"
    told = {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()}
    assert (told["title"], told["version"], told["licenses"]) == (f"orbit-{target}", __version__, "Apache-2.0")
    assert re.fullmatch("[0-9a-f]{40}", told["revision"])


def test_the_operators_image_is_small() -> None:
    _, archive = build_product_image("operator")
    assert added_bytes(archive) <= LARGEST_OPERATOR


@pytest.mark.parametrize(("user", "group"), [(65532, 65532), (1002700000, 0)])
@pytest.mark.parametrize("target", TARGETS)
def test_each_image_passes_its_smoke_test_in_a_restricted_pod(
    cluster: Cluster, target: str, user: int, group: int
) -> None:
    """As its own user, and as one that a platform such as OpenShift chooses. Heavy packages are mounted: the runtime's
    kernels are compiled with Triton's wheel of these tests, by the image's own gcc."""
    name, archive = build_product_image(target)
    cluster.import_image(archive)
    namespace = f"smoke-{target}-{user}"
    cluster.apply(build_namespace(namespace))
    container = {"image": name, "command": ["/opt/orbit/smoke.sh", target]}
    cluster.apply(build_job(namespace, "smoke", container, user=user, group=group))
    ended = wait_for_end(cluster, namespace, "smoke", 600)
    said = read_logs(cluster, namespace, "smoke")
    assert ended["exitCode"] == 0, said
    assert "is well" in said
    assert target == "operator" or "ptxas a tile" in said
