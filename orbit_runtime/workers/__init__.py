"""Starting and watching processes that run code named by dotted paths.

Belongs here: the life cycle of worker processes, their pipes, and limits on calls. Does not belong here: what rewards
compute (`environments`), and anything that imports torch.
"""
