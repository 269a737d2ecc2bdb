"""What a process may do and is bound by, seen from inside it: one record, whoever started the process.

Self-contained on purpose: a sandbox gets this file as its program.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import socket
import stat
import sys

LIMITS = ("CPU", "DATA", "FSIZE", "NOFILE", "CORE", "AS", "NPROC")
GET_DEATH_SIGNAL, GET_DUMPABLE, GET_SECCOMP, GET_SUBREAPER, GET_NO_NEW_PRIVS = 2, 3, 21, 37, 39
calls = 0


def probe(run=0):
    """Args: run: id of the process that asks, 0 if it cannot be told."""
    global calls
    calls += 1
    libc = ctypes.CDLL(None, use_errno=True)

    def got(number):
        found = ctypes.c_int(0)
        libc.prctl(number, ctypes.byref(found), 0, 0, 0)
        return found.value

    return {
        "environment": dict(os.environ),
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in LIMITS},
        "seccomp": libc.prctl(GET_SECCOMP, 0, 0, 0, 0) == 2,
        "no new privileges": libc.prctl(GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1,
        "dumpable": libc.prctl(GET_DUMPABLE, 0, 0, 0, 0) == 1,
        "dies with its parent": got(GET_DEATH_SIGNAL) == signal.SIGKILL,
        "reaps orphans": got(GET_SUBREAPER) == 1,
        "own group": os.getpgrp() == os.getpid(),
        "own session": os.getsid(0) == os.getpid(),
        "ignores": [each.name for each in map(signal.Signals, (1, 2, 15)) if signal.getsignal(each) == signal.SIG_IGN],
        "tells stacks": faulthandler.unregister(signal.SIGUSR2),
        "streams": [kind(each) for each in range(3)],
        "hands on": [kind(each) for each in range(3, 64) if is_inherited(each)],
        "forks": does(fork),
        "opens sockets": does(lambda: socket.socket().close()),
        "reads files": does(lambda: open("/etc/passwd").close()),
        "signals the run": does(lambda: os.kill(run, 0)) if run else None,
        "calls": calls,
    }


def fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def does(deed):
    try:
        deed()
    except OSError:
        return False
    return True


def kind(descriptor):
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return None
    names = {stat.S_IFCHR: "device", stat.S_IFIFO: "pipe", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
    return names.get(stat.S_IFMT(mode), "other")


def is_inherited(descriptor):
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def keep(path, run=0):
    """Adds what it sees to a file, one line each time."""
    with open(path, "a") as file:
        file.write(json.dumps(probe(run)) + "\n")


def score(completion, prompt, fields, path, run):
    """A reward."""
    if completion == "print":
        print("x" * (2 << 20), flush=True)
    else:
        keep(path, run)
    return 1.0


def tool(path: str, run: int) -> str:
    keep(path, run)
    return "done"


def prints() -> str:
    print("x" * (2 << 20), flush=True)
    return "done"


class Episode:
    """An environment."""

    def __init__(self, path, run):
        self.path, self.run = path, run

    @classmethod
    def prepare(cls, path, run):
        keep(path + ".template", run)

    def reset(self, prompt, fields, seed):
        keep(self.path, self.run)

    def step(self, completion):
        return None


if __name__ == "__main__":
    print(json.dumps(probe())) if len(sys.argv) < 2 else keep(sys.argv[1], int(sys.argv[2]))
