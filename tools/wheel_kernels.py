"""The hook of the build: a wheel carries the kernels compiled for each level of instructions.

``PACELINE_LEVELS`` names the levels, by default all of this processor's family; with an empty value the wheel carries
none, and its kernels are compiled at first use. Compiled libraries stay in the user's cache folder.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledKernels(BuildHookInterface):
    """Adds a library for each level to a wheel, whose tag then names the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what the wheel lacks; an editable install compiles at first use."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from paceline import kernels

        levels = os.environ.get("PACELINE_LEVELS", " ".join(kernels.LEVELS)).replace(",", " ").split()
        if not levels:
            return
        kernels.COMPILE_SECONDS = 3600  # several compile at once
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            libraries = list(pool.map(lambda level: kernels.built(kernels.SOURCE, level), levels))
        folder = kernels.SHIPPED.relative_to(Path(self.root) / "src")
        for library, level in zip(libraries, levels, strict=True):
            build_data["force_include"][str(library)] = str(folder / kernels._shipped_name(kernels.SOURCE, level))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
