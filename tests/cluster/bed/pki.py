"""Keys, certificates and tokens of a control plane.

The certificates carry key identifiers: Python from 3.13 on refuses those that the API server would make for itself.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

PLAIN_NODE = "cpu-0"
NODES = ("b200-0", "b200-1", PLAIN_NODE)
"""The last one has no GPUs: pods that say so live there while a node with GPUs is lost or drained."""
ADMIN_TOKEN = "orbit-test-admin"
NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
         "kubernetes.default.svc.cluster.local")  # fmt: skip

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
"""Made in no time, where an RSA key takes a quarter of a second of a core."""


@dataclass(frozen=True)
class Pki:
    """Files of one control plane, all in `folder`."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "apiserver.crt"

    @property
    def key(self) -> Path:
        return self.folder / "apiserver.key"

    @property
    def accounts_key(self) -> Path:
        return self.folder / "service-accounts.key"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.csv"


def build_pki(folder: Path, addresses: Sequence[str]) -> Pki:
    """Makes everything anew, for a server at these addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    pki = Pki(folder)
    authority_key = folder / "ca.key"
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", pki.accounts_key)
    _openssl(
        "req", "-x509", *NEW_KEY, "-nodes", "-days", "2", "-subj", "/CN=orbit-test-ca",
        "-keyout", authority_key, "-out", pki.authority, "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
    )  # fmt: skip
    request, extensions = folder / "apiserver.csr", folder / "extensions.cnf"
    names = [*(f"DNS:{name}" for name in NAMES), *(f"IP:{address}" for address in addresses)]
    extensions.write_text(
        f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n"
        "keyUsage=digitalSignature,keyEncipherment\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    _openssl("req", *NEW_KEY, "-nodes", "-subj", "/CN=kube-apiserver", "-keyout", pki.key, "-out", request)
    _openssl(
        "x509", "-req", "-in", request, "-CA", pki.authority, "-CAkey", authority_key, "-CAcreateserial",
        "-days", "2", "-extfile", extensions, "-out", pki.certificate,
    )  # fmt: skip
    lines = [f'{ADMIN_TOKEN},admin,admin,"system:masters"']
    lines += [f'{node_token(node)},system:node:{node},{node},"system:nodes"' for node in NODES]
    pki.tokens.write_text("\n".join(lines) + "\n")
    return pki


def node_token(node: str) -> str:
    return f"orbit-test-{node}"


def write_kubeconfig(path: Path, url: str, pki: Pki, token: str) -> Path:
    """A kubeconfig for whoever holds the token."""
    cluster = {"server": url, "certificate-authority": str(pki.authority)}
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "bed",
        "clusters": [{"name": "bed", "cluster": cluster}], "users": [{"name": "bed", "user": {"token": token}}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "bed"}}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config))
    return path


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
