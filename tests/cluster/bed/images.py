"""Images of the bed, built here because none can be counted on to be pulled; each is kept by the digest of its recipe.

Belongs here: the pause image, the local base, and building the product's Dockerfile on it. Does not belong here: what
a test expects of an image.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock, Thread

from cluster.bed.node import PAUSE_IMAGE
from cluster.bed.processes import run
from cluster.bed.programs import find_program

from orbit_runtime import __version__

ROOT = Path(__file__).parents[3]
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
    buildah("bud", "--layers", "--tag", name, *options, str(context))


def save_image(name: str, archive: Path) -> None:
    """Whole or not at all."""
    staging = archive.with_suffix(".part")
    staging.unlink(missing_ok=True)
    buildah("push", name, f"docker-archive:{staging}:{name}")
    staging.rename(archive)


def buildah(*words: str) -> str:
    environment = {**os.environ, **_buildah_environment()}
    return run(find_program("buildah"), *words, environment=environment, seconds=1200)


def _buildah_environment() -> dict[str, str]:
    """Its storage is kept in the cache folder; what runs while it builds is in a chroot, not in a container."""
    settings = images_folder() / "storage.conf"
    lines = ("[storage]", 'driver = "overlay"', f'graphroot = "{images_folder() / "buildah"}"',
             'runroot = "/run/orbit-buildah"')  # fmt: skip
    staging = settings.with_suffix(f".{os.getpid()}")
    staging.write_text("\n".join(lines) + "\n")
    staging.replace(settings)
    return {"CONTAINERS_STORAGE_CONF": str(settings), "BUILDAH_ISOLATION": "chroot"}


REGISTRY = "localhost"
"""The guides' `$REGISTRY`: images are imported by name, so that none is ever pulled."""
CONTEXT = ("pyproject.toml", "README.md", "LICENSE", "orbit_runtime", "operator", "examples", "images")
"""What `.dockerignore` lets through."""
NUM_KEPT = 4
"""Archives of each image that are kept: a change that is taken back need not be built again."""
BASE_IMAGE = "localhost/orbit-test-base:3"
COMPILERS_IMAGE = "localhost/orbit-test-compilers:1"
"""What runs is compiled there too: the runtime's base."""
LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "site-packages", "__pycache__")


def build_base_image() -> None:
    """This machine's own Debian and interpreter, so that packages of its environments can be mounted into images.

    Each node takes in every byte of it with each image: what no pod needs is left out.

    It knows the certificates that this machine trusts, through which a build may reach the package index.
    """
    if buildah("images", "--quiet", "--filter", f"reference={BASE_IMAGE}").strip():
        return
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    with tempfile.TemporaryDirectory(dir=images_folder()) as name:
        root = Path(name, "root")
        run(find_program("debootstrap"), "--variant=minbase", "--include=ca-certificates",
            release["VERSION_CODENAME"].strip('"'), root, seconds=600)  # fmt: skip
        _add_python(root)
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        shutil.copy(certificates, root / certificates.relative_to("/"))
        for left_over in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
            shutil.rmtree(root / left_over)
        run("tar", "--create", "--numeric-owner", "--file", Path(name, "root.tar"), "--directory", root, ".")
        shutil.rmtree(root)
        lines = ["FROM scratch", "ADD root.tar /", f"ENV SSL_CERT_FILE={certificates} PIP_CERT={certificates}"]
        Path(name, "Containerfile").write_text("\n".join(lines) + "\n")
        build_image(Path(name), BASE_IMAGE)


def _add_python(root: Path) -> None:
    """The interpreter of these tests under /usr/local, with the libraries of this machine that it needs."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sys.base_prefix, "lib", version)
    target = root / "usr/local/lib" / version
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"), symlinks=True)
    (target / "site-packages").mkdir()
    program = Path(sys.base_prefix, "bin", version).resolve()
    shutil.copy(program, root / "usr/local/bin" / version)
    for link in ("python3", "python"):
        (root / "usr/local/bin" / link).symlink_to(version)
    needed = run("ldd", program, *(library / "lib-dynload").glob("*.so"))
    for line in sorted({line.strip() for line in needed.splitlines() if "=> /" in line}):
        path = Path(line.split("=> ")[1].split(" (")[0])
        if not list(root.glob(f"usr/lib/*/{path.name}")) + list(root.glob(f"lib/*/{path.name}")):
            run("strip", "--strip-unneeded", "-o", root / "usr/local/lib" / path.name, path)
    run("chroot", root, "ldconfig")
    # Pods cannot keep byte code on their read-only root: each would make that of what it imports again.
    compiling = ("-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash")
    run("chroot", root, f"/usr/local/bin/{version}", *compiling, f"/usr/local/lib/{version}")


def build_compilers_image() -> None:
    """The local base with what Triton compiles with: gcc, and this interpreter's headers."""
    if buildah("images", "--quiet", "--filter", f"reference={COMPILERS_IMAGE}").strip():
        return
    left_over = "/var/lib/apt/lists/* /var/cache/apt /usr/share/doc /usr/share/locale /usr/share/man"
    headers = Path(sysconfig.get_path("include"))
    lines = (
        f"FROM {BASE_IMAGE}",
        f"RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf {left_over}",
        f"COPY . /usr/local/include/{headers.name}",
    )
    with tempfile.NamedTemporaryFile("w", dir=images_folder(), suffix=".containerfile") as recipe:
        recipe.write("\n".join(lines) + "\n")
        recipe.flush()
        build_image(headers, COMPILERS_IMAGE, "--file", recipe.name)


TARGETS = ("operator", "runtime")
_builder = Lock()


def build_ahead() -> None:
    """In a thread, for tests that need images later: whoever asks for one that is being built waits for it."""

    def build() -> None:
        # One that cannot be built fails again, before whoever needs it.
        with suppress(Exception):
            for target in TARGETS:
                build_product_image(target)

    Thread(target=build).start()


def build_product_image(target: str) -> tuple[str, Path]:
    """`operator` or `runtime` of the product's Dockerfile on the local base; its name and its archive.

    Nothing is built where nothing that goes into an image has changed.
    """
    with _builder:
        return _build_product_image(target)


@cache
def _build_product_image(target: str) -> tuple[str, Path]:
    name = f"{REGISTRY}/orbit-{target}:{__version__}"
    archive = images_folder() / f"orbit-{target}-{digest_sources()}.tar"
    if not archive.exists():
        build_base_image()
        if target == "runtime":
            build_compilers_image()
        # As `make images` does. The time of the commit would only build more of it anew.
        bases = {"BASE_IMAGE": COMPILERS_IMAGE, "OPERATOR_BASE_IMAGE": BASE_IMAGE, "HEAVY": "mounted"}
        environment = {**os.environ, **_buildah_environment(), **bases, "SOURCE_DATE_EPOCH": "315532800"}
        run(ROOT / "tools/images.sh", "build", target, environment=environment, seconds=1200)
        save_image(name, archive)
        kept = sorted(images_folder().glob(f"orbit-{target}*.tar"), key=lambda path: path.stat().st_mtime)
        for old in kept[:-NUM_KEPT]:
            old.unlink()
    return name, archive


@cache
def digest_sources() -> str:
    """Digest of everything that a build sees: the context as `.dockerignore` leaves it, the recipe, the interpreter."""
    found = hashlib.sha256(f"{BASE_IMAGE} {COMPILERS_IMAGE} {sys.version}".encode())
    for name in ("Dockerfile", ".dockerignore", *CONTEXT):
        top = ROOT / name
        files = [top] if top.is_file() else [path for path in top.rglob("*") if path.is_file()]
        for file in sorted(file for file in files if "__pycache__" not in file.parts):
            found.update(f"{file.relative_to(ROOT)} {file.stat().st_mode:o}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]
