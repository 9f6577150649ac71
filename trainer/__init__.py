"""The companion trainer of mdata-mtrain: GPT over any layout of ranks, with numbers that do not depend on it."""
