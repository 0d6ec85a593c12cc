"""The operations a model is made of, one a file: maths, shapes, a plain-torch reference, and a launcher that picks.

The reference is the specification: every faster form is tested against it. Faster forms for the CPU live in ``cpu/``;
they need numba and are left out where it cannot be imported.
"""
