#!/bin/sh
# Builds the programs of the cluster tests with Go, each version once, and prints a folder with a link to each of them.
# usage: tools/cluster_programs.sh [kubernetes|helm|helm3|kubeconform|coredns|kwok|versitygw|kueue]...   (none: all but kueue)
#
# The folder, for ORBIT_TEST_PROGRAMS: ${XDG_CACHE_HOME:-~/.cache}/orbit-rl/cluster-bin/{kube-apiserver,...,helm3,helm4,kwok,...}.
# What the links lead to, beside it, a folder per program and version:
#   kubernetes-v1.34.1/{kube-apiserver,kube-controller-manager,kube-scheduler,kube-proxy,kubelet,kubectl}
#   helm4-v4.3.1/helm  helm3-v3.22.0/helm   kubeconform-v0.8.0/kubeconform   coredns-v1.15.0/coredns   kwok-v0.8.0/kwok
#   versitygw-v1.8.0/versitygw   kueue-v0.14.5/kueue
set -eu

KUBERNETES=1.34.1
KUBERNETES_PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet kube-proxy"
# The modules that k8s.io/kubernetes keeps in its own repository and asks for at v0.0.0.
STAGING="api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
code-generator component-base component-helpers controller-manager cri-api cri-client csi-translation-lib
dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy kube-scheduler
kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin sample-controller"
KUEUE=v0.14.5

cache=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl
tools=$(cd "$(dirname "$0")" && pwd)

link() {
    mkdir -p "$cache/cluster-bin"
    ln -sfn "$2" "$cache/cluster-bin/$1"
}

need_go() {
    go version >/dev/null 2>&1 && return
    echo "error: the cluster tests build Kubernetes and Helm with Go, and no 'go' on PATH runs." >&2
    echo "  fix: install Go 1.24 or newer; the tests that need Python only are 'make test'." >&2
    exit 1
}

# build_module FOLDER GO_MOD LDFLAGS NAME=PACKAGE...: builds the packages inside a module of its own, each moved into place when whole.
build_module() {
    folder=$1 module=$2 ldflags=$3
    shift 3
    mkdir -p "$folder"
    staging=
    for item in "$@"; do
        binary=$folder/${item%%=*}
        if [ ! -x "$binary" ]; then
            need_go
            if [ -z "$staging" ]; then
                staging=$(mktemp -d "$folder/build.XXXXXX")
                trap 'rm -rf "$staging"' EXIT
                printf '%s\n' "$module" >"$staging/go.mod"
                (cd "$staging" && GOFLAGS="${GOFLAGS-} -mod=mod" go mod tidy) >&2
            fi
            echo "Building ${item%%=*} of $(basename "$folder") with $(go version) ..." >&2
            (cd "$staging" && go build -ldflags "-s -w $ldflags" -o "$staging/program" "${item#*=}") >&2
            mv "$staging/program" "$binary"
        fi
        link "${item%%=*}" "$binary"
    done
    if [ -n "$staging" ]; then
        rm -rf "$staging"
        trap - EXIT
    fi
}

# build_installed NAME VERSION PACKAGE PROGRAM: one program of a module that `go install` can build by its version.
build_installed() {
    folder=$cache/$1-$2
    if [ ! -x "$folder/$4" ]; then
        need_go
        mkdir -p "$folder"
        staging=$(mktemp -d "$folder/build.XXXXXX")
        trap 'rm -rf "$staging"' EXIT
        echo "Building $1 $2 with $(go version) ..." >&2
        GOBIN=$staging CGO_ENABLED=0 go install -ldflags "-s -w" "$3@$2" >&2
        mv "$staging/$4" "$folder/$4"
        rm -rf "$staging"
        trap - EXIT
    fi
    link "$1" "$folder/$4"
}

kubernetes() {
    module=$(
        printf 'module orbit.local/kubernetes\n\ngo 1.24.0\n\ntool (\n'
        for program in $KUBERNETES_PROGRAMS; do printf '\tk8s.io/kubernetes/cmd/%s\n' "$program"; done
        printf ')\n\nrequire k8s.io/kubernetes v%s\n\n' "$KUBERNETES"
        for name in $STAGING; do printf 'replace k8s.io/%s => k8s.io/%s v0.%s\n' "$name" "$name" "${KUBERNETES#*.}"; done
    )
    packages=$(for program in $KUBERNETES_PROGRAMS; do printf '%s=k8s.io/kubernetes/cmd/%s ' "$program" "$program"; done)
    # kubectl and helm parse the server's version; an unset one stops them.
    # shellcheck disable=SC2086
    build_module "$cache/kubernetes-v$KUBERNETES" "$module" "-X k8s.io/component-base/version.gitVersion=v$KUBERNETES" $packages
}

kueue() {
    module=$(printf 'module orbit.local/kueue\n\ngo 1.24.0\n\ntool sigs.k8s.io/kueue/cmd/kueue\n\nrequire sigs.k8s.io/kueue %s\n' "$KUEUE")
    build_module "$cache/kueue-$KUEUE" "$module" "" kueue=sigs.k8s.io/kueue/cmd/kueue
}

[ $# -gt 0 ] || set -- kubernetes helm kubeconform coredns kwok helm3 versitygw
for group in "$@"; do
    case $group in
    kubernetes) kubernetes ;;
    helm) build_installed helm4 v4.3.1 helm.sh/helm/v4/cmd/helm helm ;;
    helm3) build_installed helm3 v3.22.0 helm.sh/helm/v3/cmd/helm helm ;;
    kubeconform) build_installed kubeconform v0.8.0 github.com/yannh/kubeconform/cmd/kubeconform kubeconform ;;
    coredns) build_installed coredns v1.15.0 github.com/coredns/coredns coredns ;;
    kwok) build_installed kwok v0.8.0 sigs.k8s.io/kwok/cmd/kwok kwok ;;
    versitygw) link versitygw "$("$tools/versitygw.sh")" ;;
    kueue) kueue ;;
    *) echo "error: $0: '$group' is none of: kubernetes helm helm3 kubeconform coredns kwok versitygw kueue." >&2 && exit 64 ;;
    esac
done
for program in etcd containerd ctr runc buildah prometheus promtool; do
    found=$(command -v "$program" || command -v "/usr/sbin/$program" || true)
    [ -z "$found" ] || link "$program" "$found"
done
printf '%s\n' "$cache/cluster-bin"
