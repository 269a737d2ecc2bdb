"""A real Kubernetes cluster on this machine, started and stopped by the tests.

Belongs here: starting, stopping and cleaning up etcd, the control plane, three nodes, DNS, an S3 server and images.
Does not belong here: anything about Orbit's own objects (the tests beside this folder).

`ControlPlane` alone needs no root: API server and controller manager on a loopback port, ready in about 3 s.
`Cluster` is the whole: everything in one network namespace of its own, so that ending that namespace ends every device,
address and packet filter in it. Nothing here is a fake. Two things a data centre has are left out: GPUs are a number in
the node's status, and no network policy is enforced (the bridge plug-in knows none).
"""
