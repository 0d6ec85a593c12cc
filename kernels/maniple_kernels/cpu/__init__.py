"""Forms for the CPU, compiled by numba. Import only after ``backend.has_cpu_kernels()`` said yes.

Every kernel computes a row of its input by one and the same sequence of operations, however many rows there are and
however they are shared among threads: what ``--batch-invariant`` rests on.
"""
