"""An OpenAI-compatible server over an engine: base and adapters as models, with weights replaced and proven as it runs.

Belongs here: HTTP, its limits and messages; which model name stands for which adapter. Does not belong here: sampling
(`rollout`), the checks of a proof (`parity`), the command line (`cli`).
"""
