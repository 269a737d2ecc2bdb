"""Checkpoints and adapters as files: inspecting, converting and merging them.

Belongs here: `orbit inspect`, `orbit convert` and `orbit merge`. No torch in `inspection` and `adapter_folder`.
Does not belong here: formats (`quant`), reading headers (`model_info`), running a model other than to measure a merge.
"""
