"""`python -m mdata` is the command `mdata`, for machines where the scripts of packages are not on the PATH.

The only module of mdata that imports the command line, and only when it is run as a program: importing it, as tools
that walk a package do, imports nothing.
"""

if __name__ == "__main__":
    from importlib import import_module

    from mdata.util.commands import command_package

    raise SystemExit(import_module(f"{command_package()}.mdata").main())
