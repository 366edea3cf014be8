"""The server: HTTP for an engine that runs in a process of its own. No module here imports torch.

config      the options of ``paceline serve``
line        messages to and from a worker on an event loop
client      `EngineClient`: the engine's process as requests see it; restarts it, and streams go on; made from options
texts       text to ids: tokenization and chat templates
generation  `begin`: one request, an async iterator of deltas; every endpoint that generates stands on it
http        bodies, errors and event streams
connections heads of requests: how long they may take, and be
guard       hosts, keys, sizes
acceptance  what answers say of their speculation
metrics     what requests took, and all that is counted, for Prometheus
choices, chat, completions, messages, responses, models   endpoints, and what those of OpenAI's have alike
playground  the page at ``/``
app, server  the parts put together with a table of what is posted, and run
replicas    several servers on a cluster, by Ray Serve
"""
