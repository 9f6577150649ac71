"""The libraries that turn text into ids, with one interface, and long texts split where no id changes."""
