"""The reference page of the formats: what each layout is, and how other libraries read the same bytes.

Belongs here: measuring them, and writing the page. Does not belong here: the codecs (`orbit_runtime/quant`).
"""
