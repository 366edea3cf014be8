"""`.ci/run` installs what some tests need where it may, says so where it may not, and goes on either way."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKS = """echo "apt-get $*"
case "$*" in
  *install*chromium*chromium-driver*) cp "$0" {bin}/chromium; cp "$0" {bin}/chromedriver;;
  *install*g++-aarch64-linux-gnu*qemu-user*) cp "$0" {bin}/aarch64-linux-gnu-g++; cp "$0" {bin}/qemu-aarch64;;
esac"""
SKIPPED = [
    "the tests in a browser are skipped: install chromium and chromium-driver (as root: apt-get install)",
    "the tests of kernels for aarch64 are skipped: install g++-aarch64-linux-gnu and qemu-user (likewise)",
]


@pytest.mark.parametrize(
    ("user", "apt", "said"),
    [
        (0, WORKS, ["make weights", "make test"]),
        (0, "echo 'E: no network' >&2; exit 100", ["make weights", *SKIPPED, "make test"]),
        (0, None, ["make weights", *SKIPPED, "make test"]),
        (1000, WORKS, ["make weights", *SKIPPED, "make test"]),
    ],
    ids=["root", "apt-get fails", "no apt-get", "another user"],
)
def test_what_tests_need_is_installed_where_it_may_be(
    user: int, apt: str | None, said: list[str], tmp_path: Path
) -> None:
    bin = tmp_path / "bin"
    for name, body in (("make", 'echo "make $*"'), ("id", f"echo {user}"), ("apt-get", apt)):
        if body is not None:
            bin.mkdir(exist_ok=True)
            (bin / name).write_text("#!/bin/sh\n" + body.replace("{bin}", str(bin)))
            (bin / name).chmod(0o755)
    for name in ("dirname", "timeout", "cp"):
        (bin / name).symlink_to(str(shutil.which(name)))
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    done = subprocess.run([script], env={"PATH": str(bin)}, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, said, "")
    installed = [(bin / name).exists() for name in ("chromium", "qemu-aarch64")]
    assert installed == [line not in said for line in SKIPPED]
