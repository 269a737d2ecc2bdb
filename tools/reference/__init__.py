"""The CRD and the pages of `docs/reference/` that are made from the code: what is made from what, and its words."""
