"""The libraries that turn text into ids, behind one interface, and the splitting of long texts."""
