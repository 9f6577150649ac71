"""All derived numbers of a run, and every rule between settings, ranks and data."""
