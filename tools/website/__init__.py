"""The documentation site, made of the pages that are in the repository.

Belongs here: where each page stands, and what a site needs that a repository does not. Does not belong here: text.
"""
