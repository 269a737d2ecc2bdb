#!/bin/sh
# Builds the programs of the cluster tests with Go, each version once, and prints a folder with a link to each of them.
# usage: tools/cluster_programs.sh [kubernetes|helm|helm3|kubeconform|coredns|versitygw|kuberay-crds|kwok|kueue|kuberay]...
# Without any, all but kwok and kuberay.
#
# The folder, for ORBIT_TEST_PROGRAMS: ${XDG_CACHE_HOME:-~/.cache}/orbit-rl/cluster-bin/{kube-apiserver,...,helm3,helm4,kwok,...}.
# What the links lead to, beside it, a folder per module and version:
#   kubernetes-v1.34.1/{kube-apiserver,kube-controller-manager,kube-scheduler,kube-proxy,kubelet,kubectl,etcd}
#   cluster-tools-SUM/{helm4,helm3,kubeconform,coredns,kwok}   versitygw-v1.8.0/versitygw
#   kueue-v0.14.5/{kueue,kueue-chart}   kuberay-v1.5.0/{kuberay-crds/*.yaml,kuberay}
set -eu

KUBERNETES=1.34.1
KUBERNETES_PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet kube-proxy"
# The modules that k8s.io/kubernetes keeps in its own repository and asks for at v0.0.0.
STAGING="api apiextensions-apiserver apimachinery apiserver cli-runtime client-go cloud-provider cluster-bootstrap
code-generator component-base component-helpers controller-manager cri-api cri-client csi-translation-lib
dynamic-resource-allocation endpointslice externaljwt kms kube-aggregator kube-controller-manager kube-proxy kube-scheduler
kubectl kubelet metrics mount-utils pod-security-admission sample-apiserver sample-cli-plugin sample-controller"
# Of the version that this Kubernetes requires and is released with. An older one cannot tell how far a watch has come, and
# every list that must be up to date then reads all objects of its kind from etcd.
ETCD_MAIN='package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
'
KUEUE=v0.14.5
KUBERAY=v1.5.0
KUBERAY_MODULE=github.com/ray-project/kuberay/ray-operator
# In one module, so that what they share, most of it Kubernetes' client, is compiled once.
TOOLS_MODULE="module orbit.local/cluster-tools

go 1.26.0

tool (
	helm.sh/helm/v3/cmd/helm
	helm.sh/helm/v4/cmd/helm
	github.com/yannh/kubeconform/cmd/kubeconform
	sigs.k8s.io/kwok/cmd/kwok
)

require (
	github.com/coredns/coredns v1.15.0
	github.com/yannh/kubeconform v0.8.0
	helm.sh/helm/v3 v3.22.0
	helm.sh/helm/v4 v4.3.1
	sigs.k8s.io/kwok v0.8.0
)
"
# CoreDNS with the plug-ins of the bed's Corefile; with all of them it brings the libraries of four clouds.
COREDNS_MAIN='package main

import (
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"

	"github.com/coredns/coredns/coremain"
)

func main() { coremain.Run() }
'

# The same for all, so that the standard library is compiled once.
export CGO_ENABLED=0

# Else what a build had written so far would stay: this shell does nothing at its end when a signal ends it.
trap 'exit 130' INT
trap 'exit 143' TERM
staging= fetching= sources=
clean_up() {
    # shellcheck disable=SC2086
    [ -z "$fetching" ] || kill $fetching 2>/dev/null || true
    for folder in "$staging" "$sources"; do [ -z "$folder" ] || rm -rf "$folder"; done
}
trap clean_up EXIT

cache=${XDG_CACHE_HOME:-$HOME/.cache}/orbit-rl
here=$(cd "$(dirname "$0")" && pwd)

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

# lay_out FOLDER GO_MOD: a module of its own, with what is built of sources that stand here.
lay_out() {
    mkdir -p "$1/programs" "$1/coredns" "$1/etcd"
    printf '%s\n' "$2" >"$1/go.mod"
    printf '%s' "$COREDNS_MAIN" >"$1/coredns/main.go"
    printf '%s' "$ETCD_MAIN" >"$1/etcd/main.go"
}

# build_module FOLDER GO_MOD LDFLAGS NAME=PACKAGE...: what of them is missing, in one build inside a module of its own, so that
# one is linked while others compile. Moved into place when whole. `./` in front of a package: the module's own.
build_module() {
    folder=$1 module=$2 ldflags=$3
    shift 3
    missing= packages=
    for item in "$@"; do
        [ -x "$folder/${item%%=*}" ] || missing="$missing $item" packages="$packages ${item#*=}"
    done
    if [ -n "$missing" ]; then
        need_go
        mkdir -p "$folder"
        staging=$(mktemp -d "$folder/build.XXXXXX")
        lay_out "$staging" "$module"
        echo "Building$packages of $(basename "$folder") with $(go version) ..." >&2
        # No -dwarf: the linker throws away (-s -w) what the compiler takes long to write.
        # shellcheck disable=SC2086
        (cd "$staging" && GOFLAGS="${GOFLAGS-} -mod=mod" \
            go build -gcflags all=-dwarf=false -ldflags "-s -w $ldflags" -o programs/ $packages) >&2
        for item in $missing; do mv "$staging/programs/${item##*/}" "$folder/${item%%=*}"; done
        rm -rf "$staging"
        staging=
    fi
    for item in "$@"; do link "${item%%=*}" "$folder/${item%%=*}"; done
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
    build_module "$cache/kubernetes-v$KUBERNETES" "$module" "-X k8s.io/component-base/version.gitVersion=v$KUBERNETES" $packages etcd=./etcd
}

# copy_files FOLDER MODULE@VERSION PATH NAME: a folder of a module's own files, that the API server or Helm must know.
copy_files() {
    if [ ! -d "$1/$4" ]; then
        need_go
        mkdir -p "$1"
        staging=$(mktemp -d "$1/build.XXXXXX")
        printf 'module orbit.local/files\n\ngo 1.24.0\n' >"$staging/go.mod"
        (cd "$staging" && go mod download -json "$2" >module.json)
        found=$(sed -n 's/^[[:space:]]*"Dir": "\(.*\)",*$/\1/p' "$staging/module.json")
        cp -R "$found/$3" "$staging/$4"
        chmod -R u+w "$staging/$4"
        mv "$staging/$4" "$1/$4"
        rm -rf "$staging"
        staging=
    fi
    link "$4" "$1/$4"
}

kueue() {
    module=$(printf 'module orbit.local/kueue\n\ngo 1.24.0\n\ntool sigs.k8s.io/kueue/cmd/kueue\n\nrequire sigs.k8s.io/kueue %s\n' "$KUEUE")
    build_module "$cache/kueue-$KUEUE" "$module" "" kueue=sigs.k8s.io/kueue/cmd/kueue
    copy_files "$cache/kueue-$KUEUE" "sigs.k8s.io/kueue@$KUEUE" charts/kueue kueue-chart
}

kuberay() {
    module=$(printf 'module orbit.local/kuberay\n\ngo 1.24.0\n\ntool %s\n\nrequire %s %s\n' "$KUBERAY_MODULE" "$KUBERAY_MODULE" "$KUBERAY")
    build_module "$cache/kuberay-$KUBERAY" "$module" "" "kuberay=$KUBERAY_MODULE"
}

kuberay_crds() {
    copy_files "$cache/kuberay-$KUBERAY" "$KUBERAY_MODULE@$KUBERAY" config/crd/bases kuberay-crds
}

# build_tools NAME=PACKAGE...: of TOOLS_MODULE.
tools_folder=$cache/cluster-tools-$(printf '%s%s' "$TOOLS_MODULE" "$COREDNS_MAIN" | cksum | cut -d' ' -f1)
build_tools() {
    build_module "$tools_folder" "$TOOLS_MODULE" "" "$@"
}

# In the background, what later builds will read, so that they need not wait for it. One that fails is told by its build.
fetch_ahead() {
    if [ -x "$cache/kubernetes-v$KUBERNETES/etcd" ] || ! go version >/dev/null 2>&1; then return; fi
    sources=$(mktemp -d)
    lay_out "$sources" "$TOOLS_MODULE"
    (cd "$sources" && exec go list -mod=mod -deps helm.sh/helm/v3/cmd/helm helm.sh/helm/v4/cmd/helm \
        github.com/yannh/kubeconform/cmd/kubeconform ./coredns >packages 2>&1) &
    fetching=$!
    "$here/versitygw.sh" --fetch >/dev/null 2>&1 &
    fetching="$fetching $!"
}

# kwok is for benchmarks/operator_scale.py alone, kuberay for tests/cluster/test_several_nodes.py where it was built.
if [ $# -eq 0 ]; then
    set -- kubernetes helm helm3 kubeconform coredns versitygw kuberay-crds kueue
    fetch_ahead
fi
tools_wanted=
for group in "$@"; do
    case $group in
    kubernetes) kubernetes ;;
    helm) tools_wanted="$tools_wanted helm4=helm.sh/helm/v4/cmd/helm" ;;
    helm3) ;;
    kubeconform) tools_wanted="$tools_wanted kubeconform=github.com/yannh/kubeconform/cmd/kubeconform" ;;
    coredns) tools_wanted="$tools_wanted coredns=./coredns" ;;
    kwok) tools_wanted="$tools_wanted kwok=sigs.k8s.io/kwok/cmd/kwok" ;;
    versitygw) link versitygw "$("$here/versitygw.sh")" ;;
    kuberay-crds) kuberay_crds ;;
    kueue) kueue ;;
    kuberay) kuberay ;;
    *) echo "error: $0: '$group' is none of: kubernetes helm helm3 kubeconform coredns versitygw kuberay-crds kwok kueue kuberay." >&2 && exit 64 ;;
    esac
done
# shellcheck disable=SC2086
[ -z "$tools_wanted" ] || build_tools $tools_wanted
# Its program is called as Helm 4's is: a build of its own.
case " $* " in *" helm3 "*) build_tools helm3=helm.sh/helm/v3/cmd/helm ;; esac
for program in containerd ctr runc buildah prometheus promtool; do
    found=$(command -v "$program" || command -v "/usr/sbin/$program" || true)
    [ -z "$found" ] || link "$program" "$found"
done
printf '%s\n' "$cache/cluster-bin"
