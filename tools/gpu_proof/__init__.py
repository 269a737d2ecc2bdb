"""`make gpu-proof`: what only a CUDA device can show, in stages that each write their own result.

Belongs here: the stages, and running them on a machine without a network. Does not belong here: tests that
run anywhere.
"""
