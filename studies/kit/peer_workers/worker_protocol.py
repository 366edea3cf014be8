"""What every worker shares: one JSON object a line in, one a line out.

Requests (``op``) and replies:

- ``load``: ``model`` and ``draft`` (folders; the latter of a draft model or a head, or null), ``mode``, ``dtype``,
  ``threads``, ``max_model_len``, ``max_batch``, ``options`` of the mode, ``cache`` (a folder to keep things in) ->
  ``{"ok": true, "version": "...", ...}``
- ``generate``: ``prompts`` (lists of token ids), ``max_new_tokens``, ``ignore_eos`` -> ``{"ok": true, "outputs":
  [[ids]], "wall_ms": ..., "ttft_ms": [..] or null, "waits_ms": [..], "arrivals": [..], "drafted": n,
  "accepted": n}``
- ``quit``: no reply.

What goes wrong comes back as ``{"ok": false, "error": "..."}``. Standard output belongs to the protocol: what
libraries print there goes to standard error.
"""

import json
import os
import queue
import signal
import sys
import threading
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

# By its path: a peer's environment has no Paceline.
_SPEC = spec_from_file_location("arrivals", Path(__file__).parents[3] / "src/paceline/bench/arrivals.py")
arrivals: Any = module_from_spec(_SPEC)  # type: ignore[arg-type]
_SPEC.loader.exec_module(arrivals)  # type: ignore[union-attr]
Arrivals = arrivals.Arrivals


def serve(load):
    """Answer requests until ``quit`` or until the other side is gone.

    Args:
        load: takes the ``load`` request as a dict and gives an object with ``about`` (dict, goes into the reply),
            ``generate(prompts, max_new_tokens, ignore_eos) -> dict``, and ``close()`` where there is something to end.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    engine: Any = None
    try:
        while (request := requests.get())["op"] != "quit":
            try:
                if request["op"] == "load":
                    engine = load(request)
                    reply = {"ok": True, **engine.about}
                else:
                    new_tokens, ignore_eos = request["max_new_tokens"], request["ignore_eos"]
                    reply = {"ok": True, **engine.generate(request["prompts"], new_tokens, ignore_eos)}
            except Exception as error:  # the engine's own errors of all kinds: the other side decides
                traceback.print_exc()
                reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    finally:
        getattr(engine, "close", lambda: None)()


def _read(requests):
    for line in sys.stdin:
        requests.put(json.loads(line))
    # The other side is gone without a word: end at once, in the midst of an answer too, children included.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
