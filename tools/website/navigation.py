"""The order of the site's pages.

Belongs here: sections and titles. Does not belong here: the pages (`docs`), where each stands (`pages`).
"""

from __future__ import annotations

from typing import Any

SECTIONS: dict[str, dict[str, str]] = {
    "Start": {
        "First reward": "index.md",
        "What Orbit is": "about.md",
        "Notebook: own reward": "notebooks/own_reward.md",
        "Troubleshooting": "troubleshooting.md",
    },
    "Python": {
        "Orbit from Python": "python/index.md",
        "Reward": "python/reward.md",
        "Environment": "python/environment.md",
        "Loss": "python/loss.md",
        "Algorithm": "python/algorithm.md",
        "Dataset": "python/dataset.md",
        "Agents": "guides/agents.md",
        "Notebook: agents": "notebooks/agents.md",
        "Names and signatures": "python/names.md",
    },
    "Training": {
        "Examples that learn": "guides/examples.md",
        "A real model on a laptop": "guides/real_model.md",
        "Settings that work": "guides/settings.md",
        "Models": "guides/models.md",
        "Models, prompts and code": "guides/inputs.md",
        "Data": "guides/data.md",
        "Rewards": "guides/rewards.md",
        "Environments": "guides/environments.md",
        "Algorithms": "guides/algorithms.md",
        "Demonstrations": "guides/sft.md",
        "Distillation": "guides/distillation.md",
        "Sampling while training": "guides/asynchrony.md",
        "Trackers and webhooks": "guides/trackers.md",
    },
    "After training": {
        "The report": "guides/report.md",
        "Measuring a model": "guides/evaluation.md",
        "Serving": "guides/serving.md",
        "Formats on disk": "guides/precision.md",
    },
    "Larger": {
        "Rollout on SGLang": "guides/sglang.md",
        "A trainer in ranks": "guides/ranks.md",
        "Three processes": "guides/three_processes.md",
        "A GPU at hand": "guides/gpu.md",
        "Storage": "guides/storage.md",
    },
    "Cluster": {
        "Install": "guides/cluster/install.md",
        "Run": "guides/cluster/run.md",
        "Operations": "guides/cluster/operations.md",
        "Upgrade": "guides/cluster/upgrade.md",
        "Access and security": "guides/cluster/security.md",
        "The chart's values": "guides/cluster/chart.md",
    },
    "Reference": {
        "Manifest": "reference/manifest.md",
        "Command line": "reference/cli.md",
        "Algorithms": "reference/algorithms.md",
        "Metrics": "reference/metrics.md",
        "Formats": "reference/formats.md",
        "What SGLang serves": "reference/sglang.md",
        "Environment variables": "reference/environment.md",
        "Status": "reference/status.md",
    },
    "Project": {
        "Architecture": "architecture.md",
        "Contributing": "contributing.md",
        "Change log": "changelog.md",
        "Decisions": "decisions/index.md",
    },
}


def placed() -> set[str]:
    """Every page that has a place of its own."""
    return {page for pages in SECTIONS.values() for page in pages.values()}


def build_navigation() -> list[dict[str, Any]]:
    """As the site's generator takes it."""
    return [{section: [{title: page} for title, page in pages.items()]} for section, pages in SECTIONS.items()]
