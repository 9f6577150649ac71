"""The mesh of ranks: process groups, all communication, and which parts of the parameters each rank holds."""
