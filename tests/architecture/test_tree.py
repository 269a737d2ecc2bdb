"""Every tracked text file: no hosts outside a short list, no path of one machine, no file that ignores the layout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HOSTS = {
    "127.0.0.1": "this machine",
    "localhost": "this machine",
    "0.0.0.0": "this machine",
    "[::1]": "this machine",
    "kubernetes.default.svc": "the API server, inside any cluster",
    "www.apache.org": "the licence",
    "www.w3.org": "XML namespaces of SVG and HTML",
    "arxiv.org": "papers that the maths cites",
    "keepachangelog.com": "the change log's format",
    "semver.org": "the version numbers' meaning",
    "json-schema.org": "the schema's dialect",
    "huggingface.co": "the hub that `hf://` names",
    "github.com": "projects that the documentation names",
}
"""Host: why a file may name it. Names reserved for examples (`example.com`, `.example`, `.test`) need no row."""

# Written in pieces, so that this file passes its own search.
MACHINE_PATH = re.compile(r"(?<![\w.~}/$-])/(?:(?:root|work)\b|(?:Users|tmp|home(?!/linuxbrew))/[a-z])")
URL_HOST = re.compile(r"\b(?:https?|ftp|git|ssh)://(?:[^/@\s]+@)?(\[[0-9a-f:]+\]|[A-Za-z0-9.-]+)")
TEXT = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".in",
    ".sh",
    ".yaml",
    ".yml",
    ".json",
    ".jsonl",
    ".html",
    ".j2",
    ".cfg",
    ".css",
    ".js",
    "",
}


def text_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: there is no list of tracked files")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def is_allowed(host: str) -> bool:
    host = host.rstrip(".").lower()
    reserved = re.search(r"(^|\.)(example\.(com|org|net)|example|test|invalid|localhost)$", host)
    is_short_name = "." not in host and ":" not in host
    return host in HOSTS or bool(reserved) or is_short_name


def test_no_file_names_an_unlisted_host() -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            hosts = [host for host in URL_HOST.findall(line) if not is_allowed(host)]
            found += [f"{path.relative_to(ROOT)}:{number}: {host}" for host in hosts]
    assert not found, "\n".join(found)


def test_no_file_holds_a_path_of_one_machine() -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{path.relative_to(ROOT)}:{number}: {match[0]}" for match in MACHINE_PATH.finditer(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", [ROOT / "operator", ROOT / "tests"])
def test_folders_that_must_not_be_packages_are_none(path: Path) -> None:
    """`operator/__init__.py` would shadow the standard library; tests are collected with `--import-mode=importlib`."""
    assert not (path / "__init__.py").exists()


@pytest.mark.parametrize("text", ["see /" + "root/x", "(/" + "home/ann/model)", "'/" + "tmp/dev'"])
def test_the_search_finds_a_path_of_one_machine(text: str) -> None:
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize("text", ["spec/work/x", "$HOME/root/x", "https://example.com/root/x", "~/work", "/rooted"])
def test_the_search_leaves_other_paths_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)


def test_the_search_finds_an_unlisted_host() -> None:
    (host,) = URL_HOST.findall("http" + "://user@registry.somewhere.io/simple")
    assert not is_allowed(host)
    assert is_allowed("store.example.com")
