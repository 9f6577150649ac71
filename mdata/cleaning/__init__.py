"""Web text made fit for training: extracted, repaired, filtered by rules, and freed of the texts of test sets."""
