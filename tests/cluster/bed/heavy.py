"""The heavy packages of these tests' own environment, which each node gives to every container, read-only.

Torch and its libraries are gigabytes: an image with them inside would take longer to import than all tests take. On a
GPU node the container toolkit puts the driver's libraries into containers in the same way: no pod asks for them.
"""

from __future__ import annotations

import json
import sysconfig
from typing import Any

from cluster.bed.processes import run
from cluster.bed.programs import find_program

MOUNT_PATH = "/opt/heavy"
"""Where an image that was built with HEAVY=mounted looks; to others it means nothing."""


def build_container_spec() -> dict[str, Any]:
    """containerd's own default, and one mount more."""
    spec = dict(json.loads(run(find_program("ctr"), "oci", "spec")))
    source = sysconfig.get_path("purelib")
    options = ["rbind", "ro", "nosuid", "nodev"]
    spec["mounts"].append({"destination": MOUNT_PATH, "type": "bind", "source": source, "options": options})
    return spec
