#!/bin/bash
#flux: --job-name=digits-third-try
#flux: --nodes=2
#flux: --nslots=2
#flux: --exclusive
#flux: --cores-per-slot=32
#flux: --gpus-per-slot=4
#flux: --time-limit=5400s
#flux: --output="/work/my runs/digits/job/job.out"
#flux: --dependency=afterany:fAbc1
#flux: --dependency=afterany:fAbd2
#flux: --queue=pbatch
#flux: --setattr=system.bank=m1234
#flux: --requires=mi300a

trap '' USR1
unset RIDGELINE_ENDS_AT RIDGELINE_WARN_S RIDGELINE_REQUEUE RIDGELINE_ARRAY
export RIDGELINE_ENDS_AT=$(($(date +%s) + 5400))
set -e
module load cuda
export OMP_NUM_THREADS=8
export NOTE='a "b" $c'
cd -- '/work/my runs'
exec apptainer exec --nv --bind /data '/images/torch 2.sif' python -m supervise --name 'it'"'"'s $HOME' $'two\nlines' </dev/null
