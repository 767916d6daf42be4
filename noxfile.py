"""Sessions beside the README's two commands: the locked versions made anew, and the suite on the newest of everything.

``nox -s lock`` writes constraints.txt; ``nox -s newest`` tells what a release upstream broke, and with which version.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import nox

LOCK = Path("constraints.txt")
TORCH = "torch==2.13.0"
"""Of the locked versions: that whose CPU build is at hand where CI runs."""
SUITE = ("pytest", "-n", "auto", "--dist", "worksteal", "-q", "-m", "")

nox.options.sessions = ["newest"]
nox.options.default_venv_backend = "venv"


@nox.session
def lock(session: nox.Session) -> None:
    """Lock the newest versions that every supported Python takes, for all platforms."""
    session.install("uv")
    chosen = Path(session.create_tmp()) / "chosen.txt"
    chosen.write_text(f"{TORCH}\n", encoding="utf-8")
    session.run(
        *("uv", "pip", "compile", "pyproject.toml", "--extra", "test", "--universal", "--python-version", "3.10"),
        *("--upgrade", "--no-header", "--no-annotate", "--quiet", "--constraints", str(chosen), "-o", str(LOCK)),
    )


@nox.session
def newest(session: nox.Session) -> None:
    """Run the whole suite, and what only this session asks, on the newest release of everything that is used."""
    if torch := os.environ.get("CI") and TORCH:  # CI stays with the CPU build, which saves it gigabytes
        session.install(torch)
    session.install("--upgrade", "--upgrade-strategy", "eager", "-e", ".[test]", *([torch] if torch else []))
    changed = _newer_than_locked(session)
    session.log("newer than the lock: %s", ", ".join(changed) or "nothing")
    if not changed and not session.posargs:
        session.skip("the locked versions are the newest")
    session.run(*SUITE, *session.posargs)


def _newer_than_locked(session: nox.Session) -> list[str]:
    """Return ``name locked -> installed`` for all that differs from the lock, or is in it no more."""
    frozen = session.run("python", "-m", "pip", "list", "--format=freeze", silent=True, log=False)
    locked: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK.read_text(encoding="utf-8"), re.MULTILINE):
        locked.setdefault(_plain(name), set()).add(version)
    changed = []
    for line in str(frozen).splitlines():
        name, _, version = line.partition("==")
        known = locked.get(_plain(name))
        if known and version.partition("+")[0] not in known:
            changed.append(f"{name} {'/'.join(sorted(known))} -> {version}")
    return changed


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
