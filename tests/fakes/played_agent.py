"""The agent of the engine's container with its real HTTP and processes; what it starts is `played_engine`.

Arguments: the port, and the version that it says it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from orbit_runtime.workers import server_agent

if __name__ == "__main__":
    server_agent.__version__ = sys.argv[2]
    engine = str(Path(__file__).with_name("played_engine.py"))
    agent = server_agent.Agent(lambda arguments: [sys.executable, engine, *arguments])
    uvicorn.run(server_agent.build_app(agent), host=server_agent.HOST, port=int(sys.argv[1]), log_config=None)
