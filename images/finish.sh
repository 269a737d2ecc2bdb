#!/bin/sh
# Last step of a layer of /opt/orbit: byte code that does not depend on when it was made, and the list of what is inside.
# usage: finish.sh [PACKAGE...]     byte code of these packages only; none: of all
set -eu
python=/opt/orbit/bin/python
packages=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p /opt/orbit/share/sbom
/opt/build/bin/pip --python $python inspect --local > /opt/orbit/share/sbom/pip-inspect.json
# The read-only root cannot keep byte code that is made later. Models of every Kubernetes API are most of the client and
# never imported by the operator: their source is enough.
[ $# -gt 0 ] || set -- .
cd "$packages"
$python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/kubernetes/(client|aio/client|dynamic|watch|stream|utils|e2e_test|test)/(models|api|apis)/' "$@"
