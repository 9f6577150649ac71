"""Arrays that take long to build, kept in a folder and found again by what decides their content."""
