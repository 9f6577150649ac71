"""Manifests: what a corpus or a blend is, in one JSON document that is checked whenever it is read."""
