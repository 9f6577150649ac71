"""Text in, .bin/.idx pairs and a manifest out: the same bytes, however the work is divided or interrupted.

`run` is the entry point and the main loop, `plan` what is known before, `resume` what an interrupted run leaves,
`finished` the results that exist already.
"""
