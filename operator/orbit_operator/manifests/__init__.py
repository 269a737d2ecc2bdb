"""A run as Kubernetes objects: pure functions from the manifest to plain dictionaries, one kind per file."""
