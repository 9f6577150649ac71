"""The slow readable twins: what the fast code must compute, each as short as it can be.

Property tests demand equality of twin and fast code; the documentation shows the twins. Nothing else
imports them.
"""
