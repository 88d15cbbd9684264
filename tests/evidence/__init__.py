"""How far the predictions are from what others published: tables of runs, their readers, and what only they need.

``python -m tests.evidence`` lists the commands. Nothing here is part of the package; it needs a checkout.
"""
