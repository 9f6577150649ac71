"""The report of a blend as one HTML page, and as JSON."""
