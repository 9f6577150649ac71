"""Web text made fit for training: extracted, repaired, filtered by rules, and cleared of the texts of test sets."""
