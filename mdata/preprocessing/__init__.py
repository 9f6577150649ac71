"""Text in, .bin/.idx pairs and a manifest out: the same bytes, however the work is divided or interrupted.

`run` is the entry point, `plan` what is known before, `write_loop` the long part, `resume` what an interrupted run
leaves, `finished` and `finalize` the end.
"""
