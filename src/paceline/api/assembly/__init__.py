"""From a configuration to an engine: target, pool, drafter, budget and round, each by a function of its own.

No part keeps a reference to the object that requested it, so that another process can build its part from the same
configuration.
"""
