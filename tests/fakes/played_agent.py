"""The agent of the engine's container with its real HTTP and processes; what it starts is `played_engine`.

Arguments: the port, the version that it says it is, the run's token, a folder for logs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from orbit_runtime.ports.server import build_server
from orbit_runtime.workers.servers import agent as server_agent

if __name__ == "__main__":
    server_agent.__version__ = sys.argv[2]
    engine = str(Path(__file__).with_name("played_engine.py"))
    token, folder = sys.argv[3:5]
    made = server_agent.Agent(Path(folder), token, lambda arguments: [sys.executable, engine, *arguments])
    app = server_agent.build_app(made, token)
    build_server(app, host=server_agent.HOST, port=int(sys.argv[1])).run()
