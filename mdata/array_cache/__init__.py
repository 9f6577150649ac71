"""Arrays that take long to build, cached in a folder under a hash of all that decides their content."""
