"""Text in, .bin/.idx pairs and a manifest out: the same bytes, however the work is divided or interrupted.

`run` is the entry point and the main loop, `plan` what is decided before it, `resume` continues an interrupted run,
`finished` finds results that exist already.
"""
