"""Starting and watching processes that run code named by dotted paths.

Belongs here: life and death of worker processes, their pipes, and what a call may cost. Does not belong here: what
rewards compute (`environments`), and anything that imports torch.
"""
