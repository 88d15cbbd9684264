#!/bin/bash
# what sbatch is given counts against the lines of the script that it submits
SIZE=${SIZE:-small}
for name in first; do
    sbatch --nodes=4 --job-name=${SIZE}_${name} train.sbatch 2
done
