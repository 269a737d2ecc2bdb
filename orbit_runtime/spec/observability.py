"""`spec.observability`: what a running run shows, and whom it notifies; implemented in the package `observability`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, VARIABLE_PATTERN, AsTuple, Block, Uri
from orbit_runtime.spec.rule import Rule

TrackerType = Literal["TensorBoard", "WandB", "MLflow"]
Event = Literal["Done", "Stopped", "Failed", "Gate"]
"""Ways in which a run ends, for notifications."""


class Tracker(Block):
    """A service or a folder that also receives every step's metrics. A tracker that fails never stops a run."""

    type: Annotated[TrackerType, DISPLAY, Field(examples=["TensorBoard"])]
    """The tracker's package is not installed with Orbit: `pip install 'orbit-rl[trackers]'`. Keys come from variables
    that the service itself reads, such as `WANDB_API_KEY`; on a cluster from a Secret in `placement.envFromSecrets`."""
    project: Annotated[str, DISPLAY, Field(min_length=1, max_length=128)] = "orbit"
    """Project in Weights & Biases, experiment in MLflow; the run in it has the manifest's name."""
    uri: Annotated[Uri | None, DISPLAY] = None
    """For TensorBoard a local folder, by default `tensorboard` in the run folder if that is local. For MLflow and
    Weights & Biases the server's address; if unset, their own variables decide."""


class Webhook(Block):
    """An address that is notified of the end of a run, by an HTTP POST in JSON."""

    url: Annotated[str | None, DISPLAY, Field(max_length=1024, pattern=r"^https?://")] = None
    """The address; alternatively, set `urlEnv`."""
    url_env: Annotated[
        str | None, DISPLAY, Field(max_length=256, pattern=VARIABLE_PATTERN, examples=["SLACK_WEBHOOK"])
    ] = None
    """Environment variable that holds the address, if that is a secret. On a cluster it comes from a Secret in
    `placement.envFromSecrets`."""
    events: Annotated[tuple[Event, ...], AsTuple, DISPLAY, Field(min_length=1, max_length=4)] = (
        "Done",
        "Failed",
        "Gate",
    )
    """`Stopped`: on request, to be continued. `Gate`: a measured limit stopped the run (exit codes 84 and 85)."""

    rules = (
        Rule(
            "url",
            "has(self.url) != has(self.urlEnv)",
            "a webhook has either an address or a variable that holds it",
            "write `url` or `urlEnv`, and not both",
        ),
    )


class Observability(Block):
    """Metrics and logs."""

    metrics_port: Annotated[int, DISPLAY, Field(ge=-1, le=65535)] = 0
    """Port of `/metrics`, `/status`, `/healthz` and `/readyz`: 0 takes any free port (on a cluster 9400), -1 opens
    none."""
    log_level: Annotated[Literal["Debug", "Info", "Warning", "Error"], DISPLAY] = "Info"
    """Lowest level that is logged."""
    log_format: Annotated[Literal["Auto", "Text", "JSON"], DISPLAY] = "Auto"
    """Format of progress and log: `Auto` is a live display on a terminal, JSON lines in a pod, and lines of text
    elsewhere."""
    trackers: Annotated[tuple[Tracker, ...], AsTuple, DISPLAY, Field(max_length=4)] = ()
    """Services that also receive every step's metrics."""
    notify: Annotated[tuple[Webhook, ...], AsTuple, DISPLAY, Field(max_length=8)] = ()
    """Addresses that are notified of the end of the run."""
