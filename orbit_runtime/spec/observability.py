"""`spec.observability`: what a running run shows, and whom it tells. Doing so is in the package `observability`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from orbit_runtime.spec.block import DISPLAY, VARIABLE_PATTERN, AsTuple, Block, Contradiction, Uri

TrackerType = Literal["TensorBoard", "WandB", "MLflow"]
Event = Literal["Done", "Stopped", "Failed", "Gate"]
"""How a run ended, for those who are told."""


class Tracker(Block):
    """A service or a folder that gets every step's numbers as well. One that fails never stops a run."""

    type: Annotated[TrackerType, DISPLAY, Field(examples=["TensorBoard"])]
    """Its package is not installed with Orbit: `pip install 'orbit-rl[trackers]'`. Keys come from variables that the
    service itself reads, such as `WANDB_API_KEY`; on a cluster from a secret of `placement.envFromSecrets`."""
    project: Annotated[str, DISPLAY, Field(min_length=1, max_length=128)] = "orbit"
    """Project of Weights & Biases, experiment of MLflow; the run has the manifest's name in it."""
    uri: Annotated[Uri | None, DISPLAY] = None
    """TensorBoard: a local folder, by default `tensorboard` in the run folder where that is local. MLflow and Weights &
    Biases: the server's address; unset, what their own variables say."""


class Webhook(Block):
    """An address that is told by HTTP POST, in JSON, how a run ended."""

    url: Annotated[str | None, DISPLAY, Field(max_length=1024, pattern=r"^https?://")] = None
    """Or else `urlEnv`."""
    url_env: Annotated[
        str | None, DISPLAY, Field(max_length=256, pattern=VARIABLE_PATTERN, examples=["SLACK_WEBHOOK"])
    ] = None
    """Environment variable that holds the address, where that is a secret. On a cluster it comes from a secret of
    `placement.envFromSecrets`."""
    events: Annotated[tuple[Event, ...], AsTuple, DISPLAY, Field(min_length=1, max_length=4)] = (
        "Done",
        "Failed",
        "Gate",
    )
    """`Stopped`: on request, to be continued. `Gate`: a measured limit stopped the run (exit codes 84 and 85)."""

    def contradictions(self) -> Iterator[Contradiction]:
        if (self.url is None) == (self.url_env is None):
            message = "a webhook has either an address or a variable that holds it"
            yield Contradiction(("url",), (("urlEnv",),), message, "write `url` or `urlEnv`, and not both")


class Observability(Block):
    """Metrics and logs."""

    metrics_port: Annotated[int, DISPLAY, Field(ge=-1, le=65535)] = 0
    """Port of `/metrics`, `/status`, `/healthz` and `/readyz`: 0 takes any free one (on a cluster 9400), -1 none."""
    log_level: Annotated[Literal["Debug", "Info", "Warning", "Error"], DISPLAY] = "Info"
    """The least important message that is logged."""
    log_format: Annotated[Literal["Auto", "Text", "JSON"], DISPLAY] = "Auto"
    """Of progress and log: `Auto` is a live display on a terminal, JSON lines in a pod, and lines of text elsewhere."""
    trackers: Annotated[tuple[Tracker, ...], AsTuple, DISPLAY, Field(max_length=4)] = ()
    """Services that get every step's numbers as well."""
    notify: Annotated[tuple[Webhook, ...], AsTuple, DISPLAY, Field(max_length=8)] = ()
    """Addresses that are told how the run ended."""
