"""The arithmetic of blends: exact shares, phases, and which corpus gives global sample k.

All of it is pure; only the arrays of Megatron's blends can be cached.
"""
