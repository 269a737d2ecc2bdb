"""Checkpoints and adapters as things of their own: inspected, converted to another format, merged.

Belongs here: what `orbit inspect`, `orbit convert` and `orbit merge` do. No torch in
`inspection` and `adapter_folder`.
Does not belong here: formats (`quant`), reading headers (`model_info`), running a model but to measure a merge.
"""
