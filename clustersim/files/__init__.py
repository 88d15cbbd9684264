"""What people have: ``traces`` and logs to a Timeline, ``launch`` files to a scenario, and back."""
