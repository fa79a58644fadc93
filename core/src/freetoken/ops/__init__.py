"""A torch reference for every op of ``vocab.ops``: the oracle of all other implementations, and what a CPU runs.

Every function is device-agnostic, computes in float32 inside and returns its input's dtype unless its op says
otherwise.
"""
