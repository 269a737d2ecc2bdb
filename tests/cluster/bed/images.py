"""Images of the bed, built here because none can be counted on to be pulled; each is kept by the digest of its recipe.

Belongs here: the pause image and the local base. Does not belong here: the product's Dockerfile.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from cluster.bed.node import PAUSE_IMAGE
from cluster.bed.processes import run
from cluster.bed.programs import find_program

PAUSE_SOURCE = """
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int number) { exit(0); }
static void reap(int number) { while (waitpid(-1, NULL, WNOHANG) > 0) {} }
int main(void) {
    signal(SIGINT, end); signal(SIGTERM, end); signal(SIGCHLD, reap);
    for (;;) pause();
}
"""


def images_folder() -> Path:
    """Archives of earlier runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache, "orbit-rl", "images")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def build_pause_image() -> Path:
    """The process that holds a pod's namespaces: ten lines of C."""
    archive = images_folder() / f"pause-{hashlib.sha256(PAUSE_SOURCE.encode()).hexdigest()[:12]}.tar"
    if not archive.exists():
        with tempfile.TemporaryDirectory(dir=images_folder()) as name:
            folder = Path(name)
            (folder / "pause.c").write_text(PAUSE_SOURCE)
            run("gcc", "-Os", "-static", "-o", folder / "pause", folder / "pause.c")
            (folder / "Containerfile").write_text('FROM scratch\nADD pause /pause\nUSER 65535\nENTRYPOINT ["/pause"]\n')
            build_image(folder, PAUSE_IMAGE)
            save_image(PAUSE_IMAGE, archive)
    return archive


def build_image(context: Path, name: str, *options: str) -> None:
    """Builds a folder with its Containerfile, or the file that the options name."""
    buildah("bud", "--isolation", "chroot", "--layers", "--tag", name, *options, str(context))


def save_image(name: str, archive: Path) -> None:
    """Whole or not at all."""
    staging = archive.with_suffix(".part")
    staging.unlink(missing_ok=True)
    buildah("push", name, f"docker-archive:{staging}:{name}")
    staging.rename(archive)


def buildah(*words: str) -> str:
    """Its storage is kept in the cache folder; what runs while it builds is in a chroot, not in a container."""
    storage = images_folder() / "buildah"
    roots = ["--root", storage, "--runroot", "/run/orbit-buildah", "--storage-driver", "overlay"]
    return run(find_program("buildah"), *roots, *words, seconds=1200)
