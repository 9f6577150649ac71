"""Which tokens make sample k: permutations, the native order, Megatron's order, and the split into training,
validation and test.

All of it is pure: nothing here reads a file. docs/design/order.md explains the choices.
"""
