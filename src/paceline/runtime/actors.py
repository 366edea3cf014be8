"""What Ray runs on another host: an actor around a worker. Nothing here needs torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

import ray

from .handshake import BEGIN


class WorkerActor:
    """A worker: one call for its whole work."""

    def run(self, begin: bytes, environment: Mapping[str, str]) -> int:
        """Be the worker of a `Begin`; return an exit status where that cannot be.

        Args:
            begin: a `Begin` in JSON.
            environment: what must be there before torch is imported.
        """
        os.environ.update(environment)
        from .serving import answer

        return answer(BEGIN.validate_json(begin), ray.util.get_node_ip_address())
