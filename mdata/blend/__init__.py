"""From blends as users write them to manifests; opening a blend and its corpora."""
