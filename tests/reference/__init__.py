"""The slow twins: readable code with the same results as the fast code, each as short as possible.

Property tests require equality of twin and fast code; the documentation shows the twins. Only tests and fuzz targets
import them.
"""
