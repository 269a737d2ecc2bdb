"""Processes beside a run's own: started, watched and ended.

Belongs here: what every child shares (`child`), code of users (`user_code`), trainer ranks (`ranks`), rollout servers
(`servers`), and the machine that all of them run on (`system`). Does not belong here: what rewards compute
(`environments`), and anything that imports torch.
"""
