"""Blends as users write them, made manifests; opening a blend and its corpora."""
