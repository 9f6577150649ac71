"""The companion trainer: GPT over any layout of ranks, with numbers that do not depend on the layout."""
