"""The token of a run: who knows it may ask the agent and the servers of this run, and nobody else.

Belongs here: where it comes from and how it travels. Does not belong here: who asks for it.

In one container it only ever stands in memory: a server gets it by a pipe. The two containers of a `Split` pod read it
from a file in a volume that is theirs alone.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from orbit_runtime.errors import OutputError

TOKEN_VARIABLE = "ORBIT_TOKEN_FILE"
"""Where the token of a `Split` pod stands. Unset, the run makes one for itself."""
PIPE_VARIABLE = "ORBIT_SGLANG_TOKEN_FD"
"""Descriptor at which a server finds its token."""


def new_token() -> str:
    """256 bits, as text that may stand in a header."""
    return secrets.token_urlsafe(32)


def shared_token(path: Path) -> str:
    """The token in this file, made by whoever comes first. Only this user may read it.

    Raises:
        OutputError: it cannot be written, or others could read it.
    """
    try:
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(new_token())
            # A link is made whole or not at all, and not over one that is there.
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
    """Of this process's run: shared with its engine's container where there is one, else its own."""
    named = os.environ.get(TOKEN_VARIABLE)
    return shared_token(Path(named)) if named else new_token()


def token_pipe(token: str) -> int:
    """A descriptor from which the token can be read once; whoever calls closes it."""
    reading, writing = os.pipe()
    # Far less than a pipe holds: it waits for nobody.
    os.write(writing, token.encode())
    os.close(writing)
    return reading


def token_from_pipe() -> str | None:
    """In a server that was started with one. It can be read once."""
    named = os.environ.pop(PIPE_VARIABLE, None)
    if named is None:
        return None
    with open(int(named)) as pipe:
        return pipe.read()
