"""Learning while serving: the stored requests, and how a better drafter takes over between two steps.

The process that trains is `adapt.learner`; nothing here imports it.
"""
