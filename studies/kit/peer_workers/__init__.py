"""Programs that run inside the peers' own environments: the standard library and the peer, nothing of Paceline.

They are started by path and talk JSON lines over their standard streams (see `worker_protocol`).
"""
