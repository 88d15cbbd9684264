"""A whole training instead of a step: weeks with failures, checkpoints and slow hosts, as a distribution.

Closed forms (:mod:`renewal`, :mod:`maxima`, :mod:`pools`, :mod:`sums`) answer where they are exact, and check the
simulation everywhere.
"""
