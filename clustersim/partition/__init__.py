"""What each rank holds and computes when the model itself is split: arithmetic on shapes, which knows no time."""
