"""An OpenAI-compatible server over an engine: base and adapters as models, weights changed while it runs, with proof.

Belongs here: HTTP, its limits and its words; which model name is which adapter. Does not belong here: sampling
(`rollout`), the checks of a proof (`parity`), the command line (`cli`).
"""
