#!/bin/sh
# Sees to the Debian packages of the cluster tests; the first call installs what is missing. Prints plainly what stands in the way.
# usage: tools/cluster_packages.sh [--check]   (--check: only whether this machine can hold a cluster)
set -eu

PACKAGES="containerd runc buildah containernetworking-plugins prometheus debootstrap conntrack iptables socat iproute2
util-linux openssl gcc libc6-dev"

fail() {
    echo "error: 'make test-cluster' cannot run here: $1" >&2
    echo "  fix: $2; the tests that need Python only are 'make test'." >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "it starts Kubernetes nodes, which need Linux" "use a Linux machine"
[ "$(id -u)" = 0 ] || fail "it starts containers and network devices, and you are not root" "run it as root, on a machine for tests"
unshare --net --mount true 2>/dev/null ||
    fail "it makes network devices and mounts, and this machine lets nobody do so" "run it in a virtual machine, not in a container"
go version >/dev/null 2>&1 || fail "it builds Kubernetes with Go, and no 'go' on PATH runs" "install Go 1.24 or newer"
[ "${1-}" != --check ] || exit 0

missing=
for package in $PACKAGES; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null || fail "these packages are missing and there is no apt-get:$missing" "use Debian 12 or newer"

echo "Installing$missing ..." >&2
export DEBIAN_FRONTEND=noninteractive
# Packages such as prometheus start a service when they are installed; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
apt-get update -q >&2
# shellcheck disable=SC2086
apt-get install -q -y --no-install-recommends $missing >&2
