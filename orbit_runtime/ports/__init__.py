"""What every port that answers HTTP has in common: who may ask, and the limits that hold before a request is read.

Belongs here: the guard and the server of all ports. Does not belong here: routes (`serve`, `services`, `observability`,
`workers.servers`).
"""
