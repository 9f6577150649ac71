"""`python -m mdata` is the command `mdata`, for machines where scripts of packages are not on the path.

The one module of mdata that knows the command line above it, and only while it is run as a program: importing it, as
tools that walk a package do, imports nothing.
"""

if __name__ == "__main__":
    from cli.mdata import main

    raise SystemExit(main())
