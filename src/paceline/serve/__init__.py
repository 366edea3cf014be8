"""The server: HTTP for an engine that runs in a process of its own. No module here imports torch.

config      the options of ``paceline serve``
client      `EngineClient`: the engine's process as requests see it; restarts it, and streams continue
texts       text to ids: tokenization and chat templates
generation  `begin`: one request, an async iterator of deltas; every endpoint that generates stands on it
http        bodies, errors and event streams
guard       hosts, keys, sizes
metrics     times of requests and all counters, for Prometheus
answers     `Reply`: whole and streamed answers of every endpoint; `Choices`, those of chat and completions
chat, completions, messages, responses, models   endpoints
playground  the page at ``/``
app, server  the parts put together with a table of what is posted, and run
replicas    several servers on a cluster, by Ray Serve
"""
