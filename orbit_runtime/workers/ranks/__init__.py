"""A group of ranks: started together, called together, ended together, with one verdict on what went wrong.

Belongs here: everything that knows Ray. Does not belong here: what a rank computes (its target, a dotted path).
"""
