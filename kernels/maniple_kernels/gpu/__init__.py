"""Triton kernels, one operation a file, each with its launcher. The operations' files above hold maths and references.

House rules:
- A kernel widens to float32 right after each load, and narrows once, at the store.
- What a row gets depends on that row alone: no kernel chooses an order of summation by what else is in the step.
- Launchers take tensors on the device and host integers, allocate nothing that a graph could not replay, and do not
  synchronize.
- Sizes of tiles and numbers of warps come from ``shapes.py`` alone.
"""
