"""One GPU as data: peak rates, memory, and how much of each a real kernel reaches, every figure with its source.

The figures are in ``data/devices.toml``; :func:`device` looks a name or a common alias up.
"""
