"""The token of a run: it gives access to the agent and the servers of this run.

In one container the token exists only in memory: a server gets it through a pipe. The two containers of a `Split` pod
read it from a file in a volume that only they share.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orbit_runtime.errors import OutputError

TOKEN_VARIABLE = "ORBIT_TOKEN_FILE"
"""Path of the token file of a `Split` pod. If unset, the run makes a token of its own."""
PIPE_VARIABLE = "ORBIT_SGLANG_TOKEN_FD"
"""Descriptor from which a server reads its token."""
SERVE_VARIABLE, SERVICE_VARIABLE = "ORBIT_SERVE_TOKEN", "ORBIT_SERVICE_TOKEN"
"""Tokens that the clients of `orbit serve`, and the three processes of a run, present."""
UPDATE_VARIABLE = "ORBIT_SERVE_UPDATE_TOKEN"
"""Token of those clients of `orbit serve` that may change its weights."""


def new_token() -> str:
    """A token of 256 bits, as text that is valid in a header."""
    import secrets  # not at the top: every child knows the names above, and should start fast

    return secrets.token_urlsafe(32)


def shared_token(path: Path) -> str:
    """The token in this file, created by the first process to need it. Only this user may read it.

    Raises:
        OutputError: it cannot be written, or others could read it.
    """
    try:
        draft = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(new_token())
            # A link is created atomically, and never over an existing file.
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise OutputError(
                f"user {status.st_uid} owns it, with mode {stat.S_IMODE(status.st_mode):o}",
                where=str(path),
                fix="it must be this user's own, with mode 600; remove it and start again",
            )
        return path.read_text()
    except OSError as error:
        raise OutputError(
            f"the run's token cannot be kept there: {error.strerror}", where=str(path), fix=f"see {TOKEN_VARIABLE}"
        ) from None


def run_token() -> str:
    """The token of this process's run: shared with its engine's container if there is one, else its own."""
    named = os.environ.get(TOKEN_VARIABLE)
    return shared_token(Path(named)) if named else new_token()


def token_pipe(token: str) -> int:
    """A descriptor from which the token can be read once; the caller closes it."""
    reading, writing = os.pipe()
    # Far less than a pipe holds, so this does not block.
    os.write(writing, token.encode())
    os.close(writing)
    return reading


def token_from_pipe() -> str | None:
    """The token of a server that was started with one. It can be read once."""
    named = os.environ.pop(PIPE_VARIABLE, None)
    if named is None:
        return None
    with open(int(named)) as pipe:
        return pipe.read()
