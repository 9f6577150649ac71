"""Arrays that take long to build, cached in a folder under a hash of everything that determines their content."""
