"""Git commit, branch and repository of a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from optexport.redaction import redact


def checkout(folder: Path) -> dict[str, str]:
    """Returns the known ones of ``commit``, ``branch`` and ``repository`` of a folder.

    Without git, the commit and the branch come from the variables of GitHub and GitLab CI.
    """

    def run_git(*command: str) -> str | None:
        # In a container the folder often belongs to another user, and git then refuses to read it.
        git = ["git", "-c", "safe.directory=*", "-C", str(folder)]
        try:
            completed = subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        except OSError:
            return None
        return completed.stdout.strip() or None if completed.returncode == 0 else None

    def read_variable(*names: str) -> str | None:
        return next((os.environ[name] for name in names if os.environ.get(name)), None)

    remote = run_git("config", "--get", "remote.origin.url")
    branch = run_git("rev-parse", "--abbrev-ref", "HEAD")
    description = {
        "commit": run_git("rev-parse", "HEAD") or read_variable("GITHUB_SHA", "CI_COMMIT_SHA"),
        # CI checks out a commit and not a branch.
        "branch": (branch if branch != "HEAD" else None) or read_variable("GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"),
        "repository": redact(remote) if remote else None,
    }
    return {key: value for key, value in description.items() if value}
